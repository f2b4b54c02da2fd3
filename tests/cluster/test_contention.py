"""Engines on one GPU slow one another down by the law of its sharing, worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
from simkit import Row, gpus, pinned, served, solo, step_model, system, trace_of

from fineserve_sim.cluster import EngineSettings, RunResult, Scenario, simulate
from fineserve_sim.cluster.sharing.contention import Contention
from fineserve_sim.latency.sharing import IDLE, LAWS, Demand

A, B = served("a", "llama-3.1-8b"), served("b", "llama-3.1-8b")
STEP = step_model(A)


def on_one_gpu(rows: list[Row], sharing: str = "fluid", settings: EngineSettings | None = None) -> RunResult:
    spec = system(pinned({"a": [[0]], "b": [[0]]}), memory={"policy": "private", "split": "equal"}, sharing=sharing)
    trace = trace_of(rows, "ab")
    return simulate(Scenario(spec, (A, B), gpus(1), trace, settings or EngineSettings(), sample_s=0))


def prefill(tokens: int) -> tuple[int, int, int, int, int, int]:
    return 0, 0, tokens, tokens * (tokens + 1) // 2, 0, 1


def paces(sharing: str, *batches: tuple[int, int, int, int, int, int]) -> list[float]:
    law = LAWS[sharing]
    return list(law.paces(tuple(law.seen(STEP.demand(*batch), 1.0) for batch in batches)))


@pytest.mark.parametrize("sharing", LAWS)
def test_two_identical_decodes_are_slower_by_the_law(sharing: str) -> None:
    run = on_one_gpu([(0.0, 64, 100, 0), (0.0, 64, 100, 1)], sharing)
    alone = simulate(solo([(0.0, 64, 100)], m=A, sample_s=0))
    slowdown = paces(sharing, (1, 64, 0, 0, 0, 1), (1, 64, 0, 0, 0, 1))[0]
    assert slowdown > 1.4
    together_s = run.finish_s - run.first_token_s
    assert together_s == pytest.approx((alone.finish_s[0] - alone.first_token_s[0]) * slowdown, rel=1e-9)
    both = paces(sharing, prefill(64), prefill(64))[0]
    assert run.first_token_s == pytest.approx(STEP.step_s(*prefill(64)) * both, rel=1e-12)


def test_the_ways_of_sharing_part() -> None:
    """Two decodes that a fluid would hardly slow down: kernels that run side by side wait a little, contexts that take turns
    wait for all that is resident."""
    rows: list[Row] = [(0.0, 64, 100, 0), (0.0, 64, 100, 1)]
    end_s = {sharing: on_one_gpu(rows, sharing).finish_s[0] for sharing in LAWS}
    assert end_s["fluid"] < end_s["time_slice"]
    assert end_s["mps"] < end_s["time_slice"]


def test_shares_that_sum_to_less_than_one_cost_a_fluid_nothing() -> None:
    """Two decodes of a small model leave the GPU idle for a part of each step; a third one is too many."""
    small = [served(id, "llama-3.2-1b") for id in "abc"]
    batch = (1, 64, 0, 0, 0, 1)
    compute, bandwidth, *_ = step_model(small[0]).demand(*batch)
    assert 1 / 3 < max(compute, bandwidth) < 1 / 2
    finish_s = {}
    for number in (1, 2, 3):
        models = tuple(small[:number])
        spec = system(
            pinned({m.id: [[0]] for m in models}), memory={"policy": "private", "split": "equal"}, sharing="fluid"
        )
        rows = [(0.1 * i, 1, 400, i) for i in range(number)]  # apart, so that the prefills do not meet
        scenario = Scenario(spec, models, gpus(1), trace_of(rows, [m.id for m in models]), sample_s=0)
        run = simulate(scenario)
        finish_s[number] = run.finish_s[0]
    assert finish_s[2] == finish_s[1] < finish_s[3]


@pytest.mark.parametrize("sharing", LAWS)
def test_a_neighbour_that_arrives_stretches_what_is_left_of_the_step(sharing: str) -> None:
    """a prefills alone from 0. b starts at t1; both run slower until a ends; then b has the GPU to itself."""
    long, short = prefill(1500), prefill(1000)
    alone_a, alone_b = STEP.step_s(*long), STEP.step_s(*short)
    slower_a, slower_b = paces(sharing, long, short)
    start_b = alone_a / 2
    run = on_one_gpu([(0.0, 1500, 1, 0), (start_b, 1000, 1, 1)], sharing)
    end_a = start_b + (alone_a - start_b) * slower_a
    end_b = end_a + alone_b - (end_a - start_b) / slower_b
    assert slower_a > 1.2 and start_b < end_a < end_b
    assert run.finish_s.tolist() == pytest.approx([end_a, end_b], rel=1e-12)


@pytest.mark.parametrize("sharing", LAWS)
def test_a_neighbour_that_leaves_gives_its_pace_back_in_the_middle_of_a_span(sharing: str) -> None:
    """b decodes for long; a prefills once meanwhile: b loses exactly the seconds by which its work was stretched."""
    alone = simulate(solo([(0.0, 64, 60)], m=B, sample_s=0)).finish_s[0]
    run = on_one_gpu([(0.0, 64, 60, 1), (0.1, 1000, 1, 0)], sharing)
    slower_b, slower_a = paces(sharing, (1, 64, 0, 0, 0, 1), prefill(1000))
    stretched_s = STEP.step_s(*prefill(1000)) * slower_a
    assert run.finish_s[1] == pytest.approx(0.1 + stretched_s, rel=1e-12)
    assert run.finish_s[0] == pytest.approx(alone + stretched_s * (1 - 1 / slower_b), rel=1e-12)


def test_engines_on_different_gpus_do_not_interact() -> None:
    spec = system(pinned({"a": [[0]], "b": [[1]]}))
    both = simulate(Scenario(spec, (A, B), gpus(2), trace_of([(0.0, 900, 50, 0), (0.0, 300, 80, 1)], "ab"), sample_s=0))
    assert both.finish_s[0] == simulate(solo([(0.0, 900, 50)], m=A, sample_s=0)).finish_s[0]
    assert both.finish_s[1] == simulate(solo([(0.0, 300, 80)], m=B, sample_s=0)).finish_s[0]


def test_a_tp_group_keeps_the_pace_of_its_slowest_gpu() -> None:
    contention = Contention(dict.fromkeys(range(3), LAWS["fluid"]))
    for engine, gpus_of in enumerate(((0, 1), (1,), (2,))):
        contention.join(engine, gpus_of)
    assert contention.set_demand(0, Demand(0.5, 0.25)) == []
    assert contention.set_demand(1, Demand(0.75, 0.25)) == [0]
    assert contention.slowdowns == {0: 1.25, 1: 1.25, 2: 1.0}
    assert contention.set_demand(2, Demand(1.0, 1.0)) == []
    assert contention.set_demand(1, IDLE) == [0]
    assert contention.slowdowns == {0: 1.0, 1: 1.0, 2: 1.0}


def test_shares_of_every_step_differ_a_little_from_shares_of_the_composition() -> None:
    rows: list[Row] = [(0.0, 64, 1500, 0), (0.0, 64, 1500, 1)]
    by_composition = on_one_gpu(rows)
    by_step = on_one_gpu(rows, settings=EngineSettings(contention="step"))
    difference = np.abs(by_step.finish_s / by_composition.finish_s - 1)
    assert (difference > 0).all() and (difference < 0.02).all()
    alone = simulate(solo([(0.0, 64, 1500)], EngineSettings(contention="step"), m=A, sample_s=0))
    assert alone.finish_s[0] == simulate(solo([(0.0, 64, 1500)], m=A, sample_s=0)).finish_s[0]
