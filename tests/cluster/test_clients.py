"""Closed loops: a client sends its next request when the last one is answered, in every kind of cluster."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fineserve_evidence.validate.engines import EngineRun, Instance, Requests
from fleetkit import PRISM, fleet
from groupkit import cluster
from simkit import gpus, logged, pinned, served, solo, step_model, system, trace_of, with_kv_blocks

from fineserve_sim.cluster import Clients, EngineSettings, Fate, RunResult, Scenario, ScenarioError, simulate
from fineserve_sim.cluster.compose.memory import fixed_bytes, geometry, usable_bytes
from fineserve_sim.systems import load_systems

SETTINGS = EngineSettings(token_budget=256, max_sequences=16)
LENGTHS = [(0.0, 40 + 37 * i % 200, 20 + 13 * i % 90) for i in range(30)]


def shared(memory: str = "kv_slab", scheduler: str = "fcfs", clients: tuple[int, int] = (6, 3)) -> Scenario:
    """Two models on one GPU whose KV memory is scarce."""
    models = served("a"), served("b", slo_s=0.5)
    rows = [(0.0, prompt, output, i % 2) for i, (_, prompt, output) in enumerate(LENGTHS * 2)]
    return Scenario(
        system(pinned({"a": [[0]], "b": [[0]]}), scheduler, memory),
        models,
        gpus(1),
        trace_of(rows, ["a", "b"]),
        with_kv_blocks(models, 60, SETTINGS),
        sample_s=0.05,
        check=True,
        clients=Clients(clients, (0.0, 0.0), 40),
    )


def grouped(name: str) -> Scenario:
    return cluster(name, LENGTHS, instances=4, blocks=40, clients=Clients((9,), (0.01,), 30))


def moving() -> Scenario:
    """Three models of which two fit, each with two clients that think."""
    rows = [(0.0, prompt, output, i % 3) for i, (_, prompt, output) in enumerate(LENGTHS * 3)]
    return fleet(rows, PRISM, models=3, hosted=2, clients=Clients((2, 2, 2), (0.0, 1.0, 7.0), 45))


EVERY_KIND = {
    "slab": shared(),
    "adaptive": shared(scheduler="adaptive"),
    "moore_hodgson": shared("private", "moore_hodgson"),
    "alone": solo(LENGTHS, SETTINGS, clients=Clients((4,), (0.0,), 30)),
    "fleet": moving(),
    **{name: grouped(name) for name in ("vllm-dp", "vllm-pp", "kunserve", "llumnix")},
}


@pytest.mark.parametrize("scenario", EVERY_KIND.values(), ids=EVERY_KIND)
def test_a_client_waits_for_its_answer_and_sends_at_once(scenario: Scenario) -> None:
    result = simulate(scenario)
    assert result.sent is not None and scenario.clients is not None
    assert len(result.sent) == len(result.finish_s) == scenario.clients.requests
    assert (result.fate != Fate.UNFINISHED).all()
    ends_s = {name: log_ends(scenario)[name] for name in scenario.trace.models}
    for model, name in enumerate(result.sent.models):
        came_s = result.sent.arrival_s[result.sent.model == model]
        begun = min(scenario.clients.of[model], len(came_s))
        assert (came_s[:begun] == 0.0).all()
        answers_s = np.sort(ends_s[name])[: len(came_s) - begun] + scenario.clients.think_s[model]
        assert np.array_equal(came_s[begun:], answers_s)


def log_ends(scenario: Scenario) -> dict[str, np.ndarray]:
    """When each model's requests ended, those that were refused included."""
    run = logged(scenario)
    sent = run.result.sent
    assert sent is not None
    ends_s = run.result.finish_s.copy()
    for line in run.commands:
        if line["command"] in ("Drop", "Reject"):
            ends_s[line["request_id"]] = line["time_s"]
    return {name: ends_s[sent.model == model] for model, name in enumerate(sent.models)}


@pytest.mark.parametrize("scenario", EVERY_KIND.values(), ids=EVERY_KIND)
def test_merged_iterations_give_the_same_bits(scenario: Scenario) -> None:
    merged, plain = simulate(scenario), simulate(replace(scenario, exact_steps=True))
    for name in ("first_token_s", "finish_s", "fate", "preemptions", "engine"):
        assert np.array_equal(getattr(merged, name), getattr(plain, name), equal_nan=name.endswith("_s")), name
    assert rows_of(merged) == rows_of(plain)
    assert merged.gpu_use == plain.gpu_use


def rows_of(result: RunResult) -> list[tuple[float, int, int, int]]:
    sent = result.sent
    assert sent is not None
    columns = (sent.arrival_s, sent.model, sent.prompt_tokens, sent.output_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_each_model_sends_its_rows_in_their_order() -> None:
    scenario = shared()
    sent = simulate(scenario).sent
    assert sent is not None
    for model in (0, 1):
        asked = scenario.whole_trace.prompt_tokens[scenario.whole_trace.model == model]
        came = sent.prompt_tokens[sent.model == model]
        assert np.array_equal(came, asked[: len(came)])


def test_a_client_without_a_next_request_stops() -> None:
    scenario = replace(shared(), clients=Clients((2, 9), (0.0, 0.0), 60))
    sent = simulate(scenario).sent
    assert sent is not None and (sent.model == 0).sum() == (sent.model == 1).sum() == 30


def test_one_engine_does_as_the_closed_loops_of_the_evidence() -> None:
    """Two implementations of the loop around the same engine: that of the measured sets, and this one."""
    model = served()
    scenario = solo(LENGTHS, SETTINGS, m=model, clients=Clients((4,), (0.0,), len(LENGTHS)))
    result, trace = simulate(scenario), scenario.whole_trace
    kv_bytes = usable_bytes(scenario.gpus[0], SETTINGS) - fixed_bytes(model, SETTINGS)
    instance = Instance(0, 0, step_model(model), kv_bytes, geometry(model, SETTINGS).block_bytes)
    requests = Requests(trace.model.astype(np.int64), trace.prompt_tokens, trace.output_tokens)
    times = EngineRun([instance], requests, SETTINGS).closed_loop(4)
    assert result.sent is not None
    assert np.array_equal(result.sent.arrival_s, times.arrival_s)
    assert np.array_equal(result.first_token_s, times.first_token_s)
    assert np.array_equal(result.finish_s, times.finish_s)


def test_clients_that_nobody_answers_end_the_run() -> None:
    """No engine may ever come: a fleet whose models fit nowhere rejects, and every client goes on until all are sent."""
    rows = [(0.0, 9000, 10, 0) for _ in range(12)]
    result = simulate(fleet(rows, PRISM, kv_tokens=128, clients=Clients((2,), (0.5,), 12)))
    assert result.sent is not None and (result.fate == Fate.REJECTED).all()
    assert result.sent.arrival_s.max() == 2.5  # twelve requests of two clients that think half a second


def test_a_bound_that_knows_all_arrivals_is_refused_by_name() -> None:
    scenario = replace(shared(), system=load_systems()["clairvoyant"])
    with pytest.raises(ScenarioError, match="clairvoyant needs to know all arrivals"):
        simulate(scenario)
