"""What a run's step times are made of, and which step model its settings choose."""

from __future__ import annotations

from dataclasses import replace

import pytest
from simkit import H100, Gpu, served, solo, step_model

from fineserve_sim.catalog import gpu
from fineserve_sim.cluster import EngineSettings, RunResult, simulate
from fineserve_sim.cluster.compose.profiling import step_model as profiled

ROWS = [(0.1 * i, 300, 200) for i in range(20)]


def measured(run: RunResult) -> float:
    return sum(shares.get("measured", 0.0) for shares in run.step_times.values())


def test_the_steps_of_a_run_are_sampled_and_taken_apart() -> None:
    run = simulate(solo(ROWS, m=served(name="llama-3.1-8b"), sample_s=0.01))
    assert run.step_samples > 100
    assert sum(sum(shares.values()) for shares in run.step_times.values()) == pytest.approx(1.0)
    assert measured(run) > 0.7
    assert simulate(solo(ROWS, sample_s=0)).step_samples == 0


def test_samples_of_merged_steps_are_those_of_single_ones() -> None:
    scenario = solo(ROWS, sample_s=0.05)
    merged, plain = (simulate(replace(scenario, exact_steps=exact)) for exact in (False, True))
    assert merged.step_times == plain.step_times and merged.step_samples == plain.step_samples


def test_rooflines_measure_nothing_and_change_the_times() -> None:
    tables, roofline = (simulate(solo(ROWS, EngineSettings(latency=name))) for name in ("tables", "roofline"))
    assert measured(tables) > 0 == measured(roofline)
    assert tables.end_s != roofline.end_s


def test_a_gpu_without_tables_is_simulated_by_rooflines() -> None:
    scenario = solo(ROWS)
    h800 = (Gpu(id=0, node=0, spec=gpu("h800")),)
    assert measured(simulate(replace(scenario, gpus=h800))) == 0
    batch = (4, 4000, 0, 0, 0, 4)
    both = [profiled(served(), h800[0].spec, EngineSettings(latency=name)) for name in ("tables", "roofline")]  # type: ignore[arg-type]
    assert both[0].step_s(*batch) == both[1].step_s(*batch)
    assert step_model(served()).step_s(*batch) != profiled(served(), H100, EngineSettings(latency="roofline")).step_s(
        *batch
    )
