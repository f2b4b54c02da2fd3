"""The step-time model against a linear truth, an independent solver, and the laws that schedulers rely on."""

from __future__ import annotations

import numpy as np
import pytest
from fineserve_runtime.step_times import MeasuredStep, StepTimes
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

ROWS = st.lists(
    st.builds(
        MeasuredStep,
        st.integers(0, 2048),
        st.integers(0, 64),
        st.floats(1e-4, 1.0),
    ),
    min_size=1,
    max_size=30,
)


def test_a_linear_engine_is_learnt() -> None:
    rows = [MeasuredStep(p, d, 0.002 + 1e-5 * p + 1e-4 * d) for p in (1, 10, 100, 500) for d in (0, 3, 9)]
    times = StepTimes(512, rows)
    assert times.fit() == pytest.approx((0.002, 1e-5, 1e-4))
    assert times(1000, 12) == pytest.approx(2 * (0.002 + 500e-5 + 12e-4))
    assert times(500, 12) + times.step_s(1, 12) == pytest.approx(times(501, 12))
    assert times(0, 5) == 0.0


def test_decodes_that_fill_every_step_leave_a_prompt_no_time_at_which_it_ends() -> None:
    times = StepTimes(8, [MeasuredStep(4, 4, 0.01)])
    assert times(1, 8) == times(1, 9) == float("inf") and times(0, 8) == 0.0


def test_the_latest_steps_weigh_most() -> None:
    times = StepTimes(512, [MeasuredStep(100, 0, 0.01)])
    for _ in range(2000):
        times.observe(MeasuredStep(100, 0, 0.03))
    assert times.step_s(100, 0) == pytest.approx(0.03, rel=1e-3)


@given(ROWS)
def test_the_fit_is_the_non_negative_least_squares_optimum(rows: list[MeasuredStep]) -> None:
    """Where that says that only decodes take time: the optimum without decodes."""
    found = np.array(StepTimes(512, rows).fit())
    weight = np.sqrt([(1 - 1 / 256) ** (len(rows) - 1 - i) for i in range(len(rows))])
    matrix = weight[:, None] * np.array([[1.0, row.prefill_tokens, row.decodes] for row in rows])
    right = weight * np.array([row.duration_s for row in rows])
    best, error = nnls(matrix, right)
    if not best[:2].any():
        error = nnls(matrix[:, :2], right)[1]
    assert (found >= 0).all() and found[:2].any()
    assert np.linalg.norm(matrix @ found - right) <= error * (1 + 1e-6) + 1e-5


def test_noise_does_not_make_prompts_free() -> None:
    """Least squares of these two steps say that decodes alone take time."""
    times = StepTimes(64, [MeasuredStep(8, 2, 0.001), MeasuredStep(8, 3, 0.002)])
    assert times(64, 0) > 0


@given(ROWS, st.integers(1, 600), st.integers(0, 5000), st.integers(0, 100))
def test_more_tokens_never_take_less(rows: list[MeasuredStep], budget: int, tokens: int, decoding: int) -> None:
    times = StepTimes(budget, rows)
    assert 0 <= times(tokens, decoding) <= times(tokens + 1, decoding)
    assert times(1, 0) > 0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one measured step"):
        StepTimes(512, [])
    with pytest.raises(ValueError, match="token_budget is 0"):
        StepTimes(0, [MeasuredStep(1, 0, 1.0)])
    with pytest.raises(ValueError, match="positive time"):
        StepTimes(512, [MeasuredStep(1, 0, 0.0)])
