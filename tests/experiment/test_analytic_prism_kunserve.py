"""Evaluators of Prism's and KunServe's claims, against values worked out here."""

from __future__ import annotations

import pytest

from fineserve_sim.experiment.analytic import evaluators

GIB = 2**30
ALL = evaluators()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("KS_2_token", 48 * 8 * 128 * 2 * 2 / 1024),
        ("KS_4_1_7layer", 100 * 6 / 7),
        ("KS_6_freed", 1),
        ("KS_9_imbalance", True),
        ("KS_eq4", True),
        ("KS_3_ppcomm", 1 / 96),
        ("PR_9_order", True),
        ("PR_alg1_bound", True),
        ("PR_alg1_tp", True),
        ("PR_alg2_optimal", True),
    ],
)
def test_values_worked_out_by_hand(name: str, expected: float | bool) -> None:
    assert ALL[name]().value == pytest.approx(expected)


def test_weights_over_memory() -> None:
    """14.77, 72.7, 253 and 405.9 billion parameters of two bytes over 80, 320, 640 and 1280 GiB."""
    parameters = (14.77e9, 72.71e9, 253e9, 405.85e9)
    expected = [100 * 2 * count / (gpus * 80 * GIB) for count, gpus in zip(parameters, (1, 4, 8, 16), strict=True)]
    assert ALL["KS_T1"]().value == pytest.approx(expected, rel=0.001)


def test_smallest_groups_first_is_not_always_best() -> None:
    """Six instances that must free four copies: 2, 2, 2 merge to 4, 2, where 3, 3 would do."""
    found = ALL["KS_6_greedy"]()
    assert found.value is False and "6 instances and 4 copies: 4 instead of 3" in found.detail


def test_a_stall_spread_over_a_response() -> None:
    """(72 GiB - 27.5 GiB) / 2 at 25 GB/s."""
    assert ALL["KS_4_2_tpot"]().value == pytest.approx(1000 * (72 - 27.51) * GIB / 2 / 25e9 / 200, rel=0.001)


def test_lengths_are_those_of_the_sketches() -> None:
    assert ALL["KS_data"]().value == pytest.approx((1428, 435, 10041, 471), rel=0.02)


def test_activation_follows_from_sizes_and_rates() -> None:
    assert ALL["PR_9_small"]().value == pytest.approx(16.06 / 22.7 + 0.02, rel=0.001)
    assert ALL["PR_9_14b"]().value == pytest.approx(
        (29.54 / 22.7 + 0.02, 29.54 / 4.2 + 0.02, (29.54 / 4.2 + 0.02) / (29.54 / 22.7 + 0.02)), rel=0.001
    )
    low, high = ALL["PR_9_range"]().value  # type: ignore[misc]
    assert low == pytest.approx((141.1 / 8 / 4.2 + 0.02) / (141.1 / 94 + 0.02), rel=0.001)
    assert high == pytest.approx((29.54 / 4.2 + 0.02) / (29.54 / 22.7 + 0.02), rel=0.001)


def test_generated_traces_show_what_they_are_made_from() -> None:
    """Prism, section 3.1: the statistics that fix the generators, in a drawn trace."""
    assert ALL["PR_1a_tail"]().value < 100
    share, periods = ALL["PR_1_idle_count"]().value  # type: ignore[misc]
    assert share > 60 and periods > 1000
    assert ALL["PR_1b_fluct"]().value > 5
    assert ALL["PR_2a_share"]().value == pytest.approx((60, 25), abs=2)
    every, arena = ALL["PR_2b_idle"]().value  # type: ignore[misc]
    assert every > 30 and arena > 80
    median, most, idle = ALL["PR_2c_idle_rate"]().value  # type: ignore[misc]
    assert median == pytest.approx(40, rel=0.1) and most > 100 and idle >= 27
    provider_cv, arena_cv = ALL["PR_2d_cv"]().value  # type: ignore[misc]
    assert provider_cv > 1 and arena_cv > 0.5
