"""Pipeline time: the worked example, the bound of eq. (4), and the recurrence against a step-by-step run of the stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.experiment.reproduce.papers.kunserve.formulas import finish_times_s, lockstep_bound_s

times = st.lists(st.integers(1, 20).map(float), min_size=1, max_size=8)


def two_stages(cost_s: list[float]) -> list[list[float]]:
    return [[cost, cost] for cost in cost_s]


def test_worked_example() -> None:
    assert finish_times_s(two_stages([5, 1, 5]))[-1][-1] == 16
    assert lockstep_bound_s([5, 1, 5]) == 20


@given(times)
def test_eq_4_bounds_the_asynchronous_pipeline_and_equal_times_reach_it(cost_s: list[float]) -> None:
    assert finish_times_s(two_stages(cost_s))[-1][-1] <= lockstep_bound_s(cost_s)
    equal = [cost_s[0]] * len(cost_s)
    assert finish_times_s(two_stages(equal))[-1][-1] == lockstep_bound_s(equal) == cost_s[0] * (len(cost_s) + 1)


@given(st.integers(1, 4), st.data(), st.sampled_from([0.0, 1.0, 3.0]))
def test_against_stages_that_take_what_has_arrived(stages: int, data: st.DataObject, transfer_s: float) -> None:
    row = st.lists(st.integers(1, 9).map(float), min_size=stages, max_size=stages)
    stage_s = data.draw(st.lists(row, min_size=1, max_size=6))
    ready = [0.0] * len(stage_s)
    for stage in range(stages):
        free = 0.0
        for batch in range(len(stage_s)):
            free = max(free, ready[batch]) + stage_s[batch][stage]
            ready[batch] = free + transfer_s
    assert finish_times_s(stage_s, transfer_s)[-1][-1] == pytest.approx(ready[-1] - transfer_s)


def test_no_work_takes_no_time() -> None:
    assert lockstep_bound_s([]) == 0.0
    assert finish_times_s([]) == []
