"""An engine that nobody disturbs goes through its events when somebody looks: the same results as one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simkit import Row, gpus, pinned, served, simulate, solo, system, trace_of, with_kv_blocks

from fineserve_sim.cluster import EngineSettings, Fate, RunResult, Scenario, simulate_step_by_step
from fineserve_sim.cluster.compose import models
from fineserve_sim.cluster.compose.memory import build_manager
from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.simulation import prepare


def assert_same(merged: RunResult, plain: RunResult) -> None:
    for name in ("first_token_s", "finish_s", "fate", "preemptions", "engine"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(plain, name), err_msg=name)
    for name in ("time_s", "waiting", "running", "kv_used_bytes", "gpu_free_bytes"):
        np.testing.assert_array_equal(getattr(merged.timeline, name), getattr(plain.timeline, name), err_msg=name)
    assert (merged.iterations, merged.end_s) == (plain.iterations, plain.end_s)


def test_a_sequence_that_grows_and_ends_within_one_span_gives_back_no_more_than_it_took() -> None:
    scenario = solo([(0.0, 16, 400), (0.0, 16, 401), (60.0, 16, 2)], sample_s=0)
    assert_same(simulate(scenario), simulate_step_by_step(scenario))


def test_its_events_are_counted() -> None:
    """Two requests far apart: for each an arrival, a start, the end of its prompt, and one span to its end."""
    assert simulate(solo([(0.0, 64, 300), (60.0, 64, 300)], sample_s=0)).events == 8


def test_the_run_ends_with_the_last_token_although_nobody_looks() -> None:
    result = simulate(solo([(0.0, 64, 300)], sample_s=0))
    assert result.end_s == result.finish_s[0]


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 900), st.integers(1, 500)), min_size=1, max_size=25),
    blocks=st.sampled_from([64, 100, 100_000]),
    sample_s=st.sampled_from([0.0, 0.25, 1.0]),
    drain_s=st.sampled_from([0.5, 3600.0]),
    replicas=st.integers(1, 2),
)
def test_merged_equals_plain(
    rows: list[tuple[int, int, int]], blocks: int, sample_s: float, drain_s: float, replicas: int
) -> None:
    model = served()
    arrivals: list[Row] = sorted((time / 8, prompt, output) for time, prompt, output in rows)
    spec = system(pinned({"m": [[gpu] for gpu in range(replicas)]}))
    settings = EngineSettings(token_budget=256, max_sequences=8)
    settings = with_kv_blocks([model], blocks, settings) if blocks < 1000 else settings
    scenario = Scenario(spec, (model,), gpus(replicas), trace_of(arrivals), settings, sample_s, drain_s, check=True)
    assert_same(simulate(scenario), simulate(replace(scenario, exact_steps=True)))


@pytest.mark.parametrize("blocks", [40, 1000])
def test_a_request_too_long_for_the_memory_is_turned_away(blocks: int) -> None:
    model = served()
    scenario = solo([(0.0, 900, 20)], with_kv_blocks([model], blocks, EngineSettings()), m=model)
    fate = Fate.REJECTED if blocks * 16 <= 900 else Fate.FINISHED
    assert simulate(scenario).fate[0] == fate


@pytest.mark.parametrize("scheduler", ["fcfs", "adaptive"])
def test_a_slab_memory_that_nobody_shares_is_counted_with_the_same_results(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block fills a slab and no other engine is there: which blocks a sequence holds changes nothing."""
    settings = with_kv_blocks([served()], 100, EngineSettings(token_budget=256, max_sequences=8))
    rows: list[Row] = [(number / 16, 100 + 37 * number % 600, 20 + 53 * number % 300) for number in range(60)]
    scenario = solo(rows, settings, scheduler=scheduler, memory={"policy": "kv_slab", "slab_cap_bytes": 1}, check=True)
    assert isinstance(prepare(scenario).parts.cluster.engines[0].kv, CountedBlocks)
    counted = simulate(scenario)
    monkeypatch.setattr(
        models, "build_manager", lambda spec, usable, tenants, loners, virtual: build_manager(spec, usable, tenants)
    )
    named = simulate(scenario)
    assert counted.preemptions.sum() > 0
    assert counted.kv_capacity_bytes == named.kv_capacity_bytes
    assert_same(counted, named)
