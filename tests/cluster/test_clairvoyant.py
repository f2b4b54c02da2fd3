"""The clairvoyant bound: no scheduler, memory or placement serves more requests in time; and it is not idle talk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simkit import gpus, pinned, served, solo, step_model, system, trace_of, with_kv_blocks

from fineserve_sim.cluster import EngineSettings, Fate, RunResult, Scenario, ScenarioError, simulate
from fineserve_sim.cluster.clairvoyant import least_step_s, least_token_s
from fineserve_sim.cluster.compose.policies import build_schedulers
from fineserve_sim.systems import load_systems
from fineserve_sim.systems.spec import ClairvoyantSpec

SCHEDULERS = ["fcfs", "adaptive", "moore_hodgson", {"policy": "moore_hodgson", "late": "drop"}]
ROWS = st.lists(
    st.tuples(st.integers(0, 40).map(lambda n: n / 100), st.integers(1, 6000), st.integers(1, 40), st.integers(0, 1)),
    min_size=1,
    max_size=30,
)


def on_time(scenario: Scenario, result: RunResult) -> int:
    """Requests that finished and met the TTFT limit of their model, as ``ttft_attainment`` counts them."""
    slo_s = {model.id: model.ttft_slo_s for model in scenario.models}
    limits = np.array([slo_s[scenario.trace.models[model]] for model in scenario.trace.model])
    ttft_s = result.first_token_s - scenario.trace.arrival_s
    return int(((result.fate == Fate.FINISHED) & (ttft_s <= limits)).sum())


def bound(scenario: Scenario, **options: str) -> int:
    axes = scenario.system.model_dump(exclude_none=True)
    axes["scheduler"] = {"policy": "clairvoyant", **options}
    return on_time(scenario, simulate(replace(scenario, system=type(scenario.system).model_validate(axes))))


@settings(max_examples=60)
@given(ROWS, st.sampled_from([0.01, 0.03, 0.1]), st.sampled_from([64, 512, 2048]), st.sampled_from([40, 2000]))
def test_no_scheduler_on_one_engine_is_better(
    rows: list[tuple[float, int, int, int]], slo_s: float, token_budget: int, blocks: int
) -> None:
    m = served(slo_s=slo_s)
    engine = with_kv_blocks([m], blocks, EngineSettings(token_budget=token_budget, max_sequences=8))
    scenarios = [solo(sorted(row[:3] for row in rows), engine, m=m, scheduler=each) for each in SCHEDULERS]  # type: ignore[arg-type]
    most = bound(scenarios[0])
    assert all(on_time(scenario, simulate(scenario)) <= most for scenario in scenarios)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    ROWS,
    st.sampled_from(SCHEDULERS),
    st.sampled_from(["kv_slab", "private", "kvcached"]),
    st.sampled_from([{"a": [[0]], "b": [[0]]}, {"a": [[0], [1]], "b": [[1]]}, {"a": [[0], [1]], "b": [[0], [1]]}]),
    st.sampled_from(["composition", "step"]),
)
def test_no_cluster_is_better(
    rows: list[tuple[float, int, int, int]],
    scheduler: str,
    memory: str,
    groups: dict[str, list[list[int]]],
    contention: str,
) -> None:
    models = (served("a", slo_s=0.02), served("b", fmt="fp8", slo_s=0.05))
    engine = EngineSettings(memory_utilization=0.2, contention=contention)  # type: ignore[arg-type]
    spec = system(pinned(groups), scheduler, memory)
    scenario = Scenario(spec, models, gpus(2), trace_of(sorted(rows), "ab"), engine)
    reached = on_time(scenario, simulate(scenario))
    assert reached <= bound(scenario, engines="placed") <= bound(scenario)


def test_in_overload_it_is_close_to_what_a_good_scheduler_reaches() -> None:
    """Twice what an engine can prefill: half of the requests are in time, and FineServe's scheduler comes near."""
    m, prompt = served(name="llama-3.1-8b", slo_s=0.5), 1024
    token_s = least_token_s(step_model(m), 2048)
    rows = [(index * prompt * token_s / 2, prompt, 2) for index in range(400)]
    most = bound(solo(rows, m=m))
    reached = on_time(solo(rows, m=m), simulate(solo(rows, m=m, scheduler="adaptive")))
    assert 0.5 <= most / 400 < 0.56
    assert 0.8 * most < reached <= most
    assert on_time(solo(rows, m=m), simulate(solo(rows, m=m))) < 0.3 * most


def test_a_step_cannot_be_beaten() -> None:
    step = step_model(served(name="llama-3.1-8b"))
    for prompts, tokens in ((1, 64), (1, 2048), (8, 256), (64, 32)):
        took_s = step.step_s(0, 0, prompts * tokens, prompts * tokens * (tokens + 1) // 2, 0, prompts)
        assert took_s > max(least_step_s(step), prompts * tokens * least_token_s(step, 2048))


def test_every_request_ends_once_and_the_hopeless_are_dropped() -> None:
    m = served(slo_s=0.005)
    scenario = solo([(0.0, 30, 5), (0.0, 100_000, 5), (0.0, 200_000, 5), (1.0, 30, 1)], m=m, scheduler="clairvoyant")
    result = simulate(scenario)
    assert [Fate(fate).name for fate in result.fate] == ["FINISHED", "DROPPED", "REJECTED", "FINISHED"]
    assert result.first_token_s[3] == result.finish_s[3] == result.end_s
    assert result.finish_s[0] > result.first_token_s[0] + 4 * least_step_s(step_model(m))


def test_it_takes_no_axis_that_it_cannot_bound() -> None:
    caching = solo([(0.0, 30, 5)], scheduler="clairvoyant", memory={"policy": "private", "prefix_cache": True})
    with pytest.raises(ScenarioError, match="takes no residency and no prefix cache"):
        simulate(caching)
    with pytest.raises(ScenarioError, match="takes no residency"):
        axes = caching.system.model_dump(exclude_none=True) | {
            "residency": {"policy": "prism"},
            "memory": {"policy": "kvcached"},
        }
        simulate(replace(caching, system=type(caching.system).model_validate(axes)))


def test_no_engine_can_be_scheduled_by_it() -> None:
    from fineserve_sim.cluster.simulation import prepare

    with pytest.raises(ValueError, match="a bound, not a scheduler"):
        prepare(solo([(0.0, 30, 5)], scheduler="clairvoyant"))
    assert build_schedulers(ClairvoyantSpec(), []) == {}


@pytest.mark.parametrize("name", ["fineserve", "prism*", "static*", "muxserve", "prism", "s-partition", "qlm"])
def test_no_system_of_the_papers_is_better(name: str) -> None:
    """Other placements, and models that come and go: the bound holds for any of them."""
    rng = np.random.default_rng(7)
    models = (served("a", slo_s=0.015), served("b", fmt="fp8", slo_s=0.03))
    arrivals = np.sort(rng.uniform(0, 0.3, 120)).tolist()
    rows = [(at, int(rng.integers(100, 4000)), int(rng.integers(1, 30)), int(rng.integers(2))) for at in arrivals]
    engine = EngineSettings(memory_utilization=0.3)
    scenario = Scenario(load_systems()[name], models, gpus(1), trace_of(rows, "ab"), engine)
    everybody = replace(scenario, system=load_systems()["clairvoyant"])
    most = on_time(everybody, simulate(everybody))
    assert on_time(scenario, simulate(scenario)) <= most < len(rows)
