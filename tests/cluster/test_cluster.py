"""Whole clusters: conservation, determinism, what policies may not see, stalls, and scenarios that cannot run."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simkit import (
    Logged,
    assert_lawful,
    assert_memory_returned,
    fixed_bytes,
    geometry,
    gpus,
    logged,
    pinned,
    served,
    solo,
    step_model,
    system,
    trace_of,
    with_kv_blocks,
    with_usable_bytes,
)

from fineserve_sim.cluster import EngineSettings, Fate, Scenario, ScenarioError, simulate
from fineserve_sim.cluster.compose.policies import EngineFactsheet, build_schedulers
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.events import EngineStepped, RequestArrived
from fineserve_sim.policy.interfaces import EngineState, Request
from fineserve_sim.policy.memory.paged import PrivatePools
from fineserve_sim.policy.memory.slab import KVSlabManager
from fineserve_sim.systems import load_systems

SCHEDULERS = ["fcfs", "adaptive", {"policy": "moore_hodgson", "late": "drop"}]
MEMORIES = ["kv_slab", {"policy": "private", "split": "equal"}]
A, B = served("a", "llama-3.2-1b", "fp16", slo_s=0.2), served("b", "llama-3.2-1b", "fp8", slo_s=0.2)


def crowded(scheduler: object = "fcfs", memory: object = "kv_slab", *, requests: int = 60, seed: int = 0) -> Scenario:
    """Two models on one GPU, with memory for a handful of the requests that come in bursts."""
    rng = np.random.default_rng(seed)
    engine = with_kv_blocks([A, B], 60, EngineSettings(token_budget=128, max_sequences=8))
    rows = [
        (float(rng.integers(0, 20)) * 0.05, int(rng.integers(1, 200)), int(rng.integers(1, 150)), int(rng.integers(2)))
        for _ in range(requests)
    ]
    rows[0] = (0.0, 5000, 5, 0)  # too long for this memory
    rows[1] = (10.0, 20, 5, 1)  # when all others have long ended
    spec = system(pinned({"a": [[0]], "b": [[0]]}), scheduler, memory)  # type: ignore[arg-type]
    return Scenario(spec, (A, B), gpus(1), trace_of(sorted(rows, key=lambda row: row[0]), "ab"), engine, sample_s=0.05)


# --- laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", MEMORIES, ids=["slab", "private"])
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["fcfs", "adaptive", "moore_hodgson"])
def test_requests_and_bytes_are_conserved(scheduler: object, memory: object) -> None:
    scenario = crowded(scheduler, memory)
    for exact_steps in (False, True):
        run = logged(scenario, check=True, exact_steps=exact_steps)
        assert_lawful(scenario, run)
        assert_memory_returned(scenario, run.result)
        fates = Counter(run.result.fate.tolist())
        assert fates[Fate.REJECTED] == 1 and fates[Fate.FINISHED] > 20 and fates[Fate.UNFINISHED] == 0
        assert run.result.preemptions.sum() > 0 or scheduler != "fcfs"
        assert fates[Fate.DROPPED] > 0 or scheduler == "fcfs"


def test_a_private_pool_has_every_byte_in_use_or_free() -> None:
    run = simulate(crowded(memory=MEMORIES[1]))
    held = run.timeline.kv_used_bytes.sum(axis=1) + run.timeline.gpu_free_bytes[:, 0]
    assert len(set(held.tolist())) == 1
    assert 0 <= run.kv_capacity_bytes[0] - held[0] < 2 * geometry(A, EngineSettings()).block_bytes


@pytest.mark.pure_python
@pytest.mark.parametrize(("manager", "memory"), [(KVSlabManager, MEMORIES[0]), (PrivatePools, MEMORIES[1])])
def test_the_debug_flag_verifies_the_memory_at_every_step(
    manager: type, memory: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Counter[str] = Counter()
    original = manager.check  # type: ignore[attr-defined]

    def check(self: object) -> None:
        calls["check"] += 1
        original(self)

    monkeypatch.setattr(manager, "check", check)
    scenario = crowded(memory=memory, requests=20)
    simulate(scenario)
    assert not calls
    result = simulate(replace(scenario, check=True, exact_steps=True))
    assert calls["check"] >= result.iterations > 100


@settings(max_examples=40)
@given(
    st.sampled_from(["fineserve", "prism*", "static*", "dedicated"]),
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.integers(0, 50).map(lambda n: n / 50), st.integers(1, 3000), st.integers(1, 60), st.integers(0, 1)
        ),
        min_size=1,
        max_size=30,
    ),
    st.floats(0.0, 2.0),
)
def test_laws_of_the_systems_of_the_papers(
    name: str, number: int, rows: list[tuple[float, int, int, int]], drain_s: float
) -> None:
    trace = trace_of(sorted(rows, key=lambda row: row[0]), "ab")
    engine = EngineSettings(memory_utilization=0.1)
    scenario = Scenario(load_systems()[name], (A, B), gpus(number), trace, engine, drain_s=drain_s)
    assert_lawful(scenario, logged(scenario))


# --- determinism -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fineserve", "prism*", "static*", "dedicated"])
def test_the_same_scenario_gives_the_same_bytes(name: str) -> None:
    scenario = replace(crowded(), system=load_systems()[name], gpus=gpus(2))
    scenario = replace(scenario, engine=replace(scenario.engine, memory_utilization=0.1))
    first, second = logged(scenario), logged(scenario)
    assert json.dumps(first.log) == json.dumps(second.log)
    for field in ("first_token_s", "finish_s", "fate", "preemptions", "engine"):
        assert getattr(first.result, field).tobytes() == getattr(second.result, field).tobytes()
    for field in ("time_s", "waiting", "running", "kv_used_bytes", "gpu_stranded_bytes", "gpu_free_bytes"):
        assert getattr(first.result.timeline, field).tobytes() == getattr(second.result.timeline, field).tobytes()
    assert (first.result.iterations, first.result.events) == (second.result.iterations, second.result.events)


def test_watching_a_run_does_not_change_it() -> None:
    scenario = crowded("adaptive")
    bare = simulate(replace(scenario, sample_s=0))
    watched = logged(replace(scenario, sample_s=0.003, check=True)).result
    assert bare.finish_s.tobytes() == watched.finish_s.tobytes()
    assert bare.fate.tobytes() == watched.fate.tobytes()


# --- the oracle --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact_steps", [False, True], ids=["merged", "plain"])
@pytest.mark.parametrize("memory", MEMORIES, ids=["slab", "private"])
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["fcfs", "adaptive", "moore_hodgson"])
def test_no_decision_depends_on_the_output_of_an_unfinished_request(
    scheduler: object, memory: object, exact_steps: bool
) -> None:
    scenario = replace(crowded(scheduler, memory), exact_steps=exact_steps)
    first = logged(scenario)
    moments = np.quantile([line["now_s"] for line in first.log], [0.1, 0.3, 0.5, 0.7, 0.9])
    for moment_s in moments.tolist():
        open_requests = ~(first.result.finish_s <= moment_s)
        longer = np.where(open_requests, scenario.trace.output_tokens + 37, scenario.trace.output_tokens)
        second = logged(replace(scenario, trace=replace(scenario.trace, output_tokens=longer)))
        assert (~(second.result.finish_s <= moment_s) == open_requests).all()
        assert until(second, moment_s) == until(first, moment_s)
        assert not np.array_equal(second.result.finish_s, first.result.finish_s, equal_nan=True)


def until(run: Logged, moment_s: float) -> list[dict[str, Any]]:
    return [line for line in run.log if line["now_s"] <= moment_s]


# --- memory that several engines wait for ------------------------------------------------------------------------------


def test_partial_prefills_that_block_one_another_resolve() -> None:
    """Two prompts of nearly the whole memory, prefilled side by side: one of them must give way and come back."""
    a, b = served("a"), served("b")
    engine = with_kv_blocks([a, b], 10, EngineSettings(token_budget=64))
    spec = system(pinned({"a": [[0]], "b": [[0]]}), "fcfs", "kv_slab")
    scenario = Scenario(spec, (a, b), gpus(1), trace_of([(0.0, 140, 2, 0), (0.0, 140, 2, 1)], "ab"), engine)
    for exact_steps in (False, True):
        run = logged(scenario, check=True, exact_steps=exact_steps)
        assert_lawful(scenario, run)
        assert run.result.fate.tolist() == [Fate.FINISHED, Fate.FINISHED]
        assert run.result.preemptions.tolist() == [0, 1]  # the one that came last
        assert run.result.first_token_s[1] > run.result.finish_s[0]


@pytest.mark.parametrize("large", [1, 2])
def test_shares_by_footprint_hold_their_engines_and_no_more_than_the_gpu(large: int) -> None:
    """Footprints are weights here, and the small model's fixed bytes are a larger part of its share than the others'. A share
    below its engine would leave the small model without KV memory and sell that of the others twice."""
    models = (served("a", "llama-3.2-1b"), *(served(id, "llama-3.1-8b") for id in "bc"[:large]))
    spec = system(pinned({m.id: [[0]] for m in models}), "fcfs", {"policy": "private", "split": "footprint"})
    engine = with_usable_bytes(fixed_bytes(models, EngineSettings()) + 2**28, EngineSettings())
    trace = trace_of([(0.0, 10, 5, index) for index in range(len(models))], [m.id for m in models])
    run = simulate(Scenario(spec, models, gpus(1), trace, engine, sample_s=0.01))
    assert run.fate.tolist() == [Fate.FINISHED] * len(models)
    assert 2**28 - len(models) <= run.kv_capacity_bytes[0] <= 2**28


# --- scenarios that cannot run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tp", "named"),
    [("llama-3.1-70b", 1, "big"), ("llama-3.1-8b", 4, "big")],
    ids=["weights too large", "too few GPUs"],
)
def test_a_model_that_fits_nowhere_is_named_in_one_line(name: str, tp: int, named: str) -> None:
    big = served("big", name, tp=tp)
    scenario = Scenario(load_systems()["fineserve"], (big,), gpus(2), trace_of([(0.0, 10, 5)], ["big"]))
    with pytest.raises(ScenarioError, match=named) as caught:
        simulate(scenario)
    assert "\n" not in str(caught.value)


def test_a_wrong_pin_is_a_scenario_error() -> None:
    with pytest.raises(ScenarioError, match="GPUs \\(5,\\)") as caught:
        simulate(replace(solo([(0.0, 10, 5)]), system=system(pinned({"m": [[5]]}))))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("max_sequences", [1, 2, 4])
def test_the_profile_of_a_small_batch_limit_can_be_taken(max_sequences: int) -> None:
    """The sweep behind the marginal memory efficiency must not depend on pools that the batch limit cannot fill."""
    scenario = replace(
        solo([(0.0, 10, 5)], EngineSettings(max_sequences=max_sequences)), system=load_systems()["fineserve"]
    )
    assert simulate(scenario).fate.tolist() == [Fate.FINISHED]


# --- replay ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=["fcfs", "adaptive", "moore_hodgson"])
def test_a_recorded_log_replayed_through_a_fresh_controller_gives_the_same_commands(scheduler: object) -> None:
    scenario = crowded(scheduler)
    lines = [json.loads(json.dumps(line)) for line in logged(scenario).log]
    controller = controller_of(scenario)
    replayed: list[dict[str, Any]] = []
    for line in lines:
        if "event" in line:
            commands = controller.handle(line["now_s"], event_of(line))
            replayed += [{"now_s": line["now_s"], "command": type(c).__name__, **c._asdict()} for c in commands]
    assert replayed == [line for line in lines if "command" in line]
    assert {line["command"] for line in replayed} >= {"Dispatch", "Reject"}


def event_of(line: dict[str, Any]) -> RequestArrived | EngineStepped:
    if line["event"] == "RequestArrived":
        return RequestArrived(Request(**line["request"]))
    return EngineStepped(line["engine"], {int(e): EngineState(**state) for e, state in line["engines"].items()})


def _prefill_s(step: StepModel, budget: int, tokens: int, decoding: int, pairs: int) -> float:
    return step.prefill_s(tokens, decoding, budget, pairs)


def controller_of(scenario: Scenario) -> Controller:
    """The controller of ``crowded`` with a slab, put together from its parts: 60 of A's blocks or 120 of B's."""
    tokens, sheets = {"a": 60 * 16, "b": 120 * 16}, []
    for index, m in enumerate(scenario.models):
        step, budget = step_model(m), scenario.engine.token_budget
        sheets.append(
            EngineFactsheet(
                engine=index,
                gpu=0,
                slo_s=m.ttft_slo_s,
                prefill=partial(_prefill_s, step, budget),
                prefill_tokens_per_s=budget / step.prefill_s(budget, 0, budget),
                kv_capacity_tokens=tokens[m.id],
                block_tokens=scenario.engine.block_tokens,
                shares_memory=True,
            )
        )
    schedulers = build_schedulers(scenario.system.scheduler, sheets)
    return Controller({m.id: [Route(i, 1.0, tokens[m.id])] for i, m in enumerate(scenario.models)}, schedulers)
