"""Room kept for outputs: the ratio by hand, its bounds, and who is retracted first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.memory.reserve import (
    DECAY_STEPS,
    FIRST_RATIO,
    LEAST_RATIO,
    LONGEST_RESERVE_TOKENS,
    OutputReserve,
    Running,
    retraction_order,
    wanted_tokens,
)


def test_the_ratio_falls_from_0_7_to_0_098_in_600_steps() -> None:
    reserve = OutputReserve()
    assert reserve.ratio(0) == 0.7
    assert reserve.ratio(300) == pytest.approx((0.7 + 0.098) / 2)
    assert reserve.ratio(600) == pytest.approx(0.098)
    assert reserve.ratio(10_000) == pytest.approx(0.098)


def test_it_jumps_to_what_outputs_suggest_and_falls_again() -> None:
    """By hand: 5 of 100 and 3 of 50 tokens are done, 20 more each are expected: 48 of 150, and one."""
    reserve = OutputReserve()
    reserve.jump(400, [Running(5, 100, 10, 0), Running(3, 50, 10, 1)])
    assert reserve.ratio(400) == pytest.approx(48 / 151)
    assert reserve.ratio(500) == pytest.approx(48 / 151 - 100 * (0.7 - 0.098) / 600)
    assert reserve.ratio(10_000) == pytest.approx(0.098)
    reserve.jump(10_000, [Running(990, 1000, 10, 0)])
    assert reserve.ratio(10_000) == 1.0


def test_a_jump_below_the_least_lasts_for_one_step() -> None:
    reserve = OutputReserve()
    reserve.jump(7, [Running(0, 4000, 10, 0)])
    assert reserve.ratio(7) == pytest.approx(20 / 4001)
    assert reserve.ratio(8) == pytest.approx(LEAST_RATIO)


def test_a_step_with_prompts_does_not_lower_it_and_idleness_starts_anew() -> None:
    reserve, plain = OutputReserve(), OutputReserve()
    reserve.hold(10)
    assert reserve.ratio(10) == reserve.ratio(11) == plain.ratio(10)
    assert reserve.ratio(12) == pytest.approx(plain.ratio(11))
    reserve.start_anew(50)
    assert reserve.ratio(50) == FIRST_RATIO


def test_no_request_asks_for_more_than_4096_tokens_to_come() -> None:
    assert wanted_tokens(100, 10**6) == 100 + LONGEST_RESERVE_TOKENS
    assert wanted_tokens(100, 7) == 107
    assert OutputReserve().kept_tokens([10**6, 10], 0) == pytest.approx(0.7 * (LONGEST_RESERVE_TOKENS + 10))


def test_the_fewest_tokens_give_way_first_then_the_longest_prompt() -> None:
    old, long, short = Running(9, 50, 10, 0), Running(2, 50, 30, 1), Running(2, 50, 20, 2)
    assert retraction_order([old, short, long]) == [long, short, old]


steps = st.lists(st.integers(0, 2 * DECAY_STEPS), min_size=2, max_size=6).map(sorted)
acts = st.sampled_from(["look", "hold", "jump", "anew"])


@given(steps, st.lists(acts, min_size=6, max_size=6), st.integers(0, 60), st.integers(60, 200))
def test_between_jumps_it_only_falls_and_is_never_beyond_1(
    at: list[int], what: list[str], done: int, most: int
) -> None:
    reserve, before = OutputReserve(), FIRST_RATIO
    for step, act in zip(at, what, strict=False):
        ratio = reserve.ratio(step)
        assert 0 <= ratio <= max(before, LEAST_RATIO) <= 1
        if act == "hold":
            reserve.hold(step)
        elif act == "jump":
            reserve.jump(step, [Running(done, most, 5, 0)])
        elif act == "anew":
            reserve.start_anew(step)
        before = max(ratio, reserve.ratio(step))
