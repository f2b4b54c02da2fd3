"""How busy GPUs were and what kept requests waiting: fractions that follow the load, the same for merged iterations."""

from __future__ import annotations

from dataclasses import astuple, replace

import numpy as np
import pytest
from fineserve_traces import totals
from simkit import gpus, pinned, served, solo, system, trace_of, with_kv_blocks

from fineserve_sim.cluster import GpuUse, RunResult, Scenario, simulate
from fineserve_sim.cluster.looks import looks_at

CROWDED = [(0.02 * i, 300, 200) for i in range(100)]


def use_of(run: RunResult) -> GpuUse:
    (use,) = run.gpu_use
    return use


def test_a_gpu_that_decodes_all_the_time_is_busy_and_needs_bandwidth() -> None:
    use = use_of(simulate(solo(CROWDED, sample_s=0.01)))
    assert use.gpu == 0 and use.busy > 0.95
    assert 0 < use.compute < use.bandwidth <= 1.0
    assert use.kv_short == use.slots_short == 0


def test_a_gpu_with_little_to_do_is_idle() -> None:
    use = use_of(simulate(solo([(10.0 * i, 100, 10) for i in range(5)], sample_s=0.01)))
    assert 0 < use.busy < 0.05 and use.waiting < 0.01
    assert simulate(solo(CROWDED, sample_s=0)).gpu_use == ()


def test_what_keeps_requests_waiting_is_told_apart() -> None:
    m = served()
    tight = use_of(simulate(solo(CROWDED, with_kv_blocks([m], 60), m=m, sample_s=0.01)))
    assert tight.waiting > 0.5 and tight.kv_short > 0.9 * tight.waiting
    few = use_of(simulate(solo(CROWDED, replace(solo(CROWDED).engine, max_sequences=4), sample_s=0.01)))
    assert few.waiting > 0.5 and few.slots_short > 0.9 * few.waiting and few.kv_short == 0


def test_a_model_over_two_gpus_counts_on_both_and_the_idle_one_on_none() -> None:
    big, small = replace(served(), id="big", tp=2), replace(served(), id="small")
    spec = system(pinned({"big": [(0, 1)], "small": [(2,)]}))
    trace = trace_of([(0.05 * i, 300, 50, 0) for i in range(40)], ["big", "small"])
    run = simulate(Scenario(spec, (big, small), gpus(3), trace, sample_s=0.02))
    assert [use.gpu for use in run.gpu_use] == [0, 1]
    assert astuple(run.gpu_use[0])[1:] == astuple(run.gpu_use[1])[1:]


@pytest.mark.parametrize("scheduler", ["fcfs", "adaptive", "moore_hodgson"])
def test_merged_iterations_give_the_same_numbers(scheduler: str) -> None:
    m = served()
    scenario = solo(CROWDED, with_kv_blocks([m], 200), m=m, scheduler=scheduler, sample_s=0.05)
    merged, plain = (simulate(replace(scenario, exact_steps=exact)) for exact in (False, True))
    assert merged.gpu_use == plain.gpu_use


def test_mean_prompts_are_those_of_the_models_with_requests() -> None:
    trace = trace_of([(0.0, 100, 1, 1), (1.0, 300, 1, 1)], ["quiet", "loud"])
    found = looks_at(totals(trace), trace.models).prompt_tokens
    assert found == {"loud": 200.0} and np.isfinite(found["loud"])
