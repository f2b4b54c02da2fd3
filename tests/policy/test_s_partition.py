"""Static partition of KV memory: proportions, minima, and that nothing is handed out twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.memory.paged import Share, split_bytes


def test_parts_follow_weights() -> None:
    """2/s of 100-byte tokens against 6/s of 50-byte ones: 200 to 300."""
    shares = {0: Share(2.0 * 100, 10), 1: Share(6.0 * 50, 10)}
    assert split_bytes(1000, shares) == {0: 400, 1: 600}


def test_equal_weights_are_equal_parts() -> None:
    assert split_bytes(900, {engine: Share(1.0, 0) for engine in (3, 5, 9)}) == {3: 300, 5: 300, 9: 300}


def test_everybody_gets_one_long_request_and_the_others_divide_the_rest() -> None:
    """By weight 0.1 % to engine 0, which needs 100; 900 are left for 2 to 1."""
    assert split_bytes(1000, {0: Share(1, 100), 1: Share(666, 100), 2: Share(333, 100)}) == {0: 100, 1: 600, 2: 300}


def test_raising_one_may_leave_too_little_for_another() -> None:
    """Engine 1 has its 300 of 1000 until engine 0 takes 500: 250 of 500 are not enough."""
    shares = {0: Share(2, 500), 1: Share(4, 300), 2: Share(4, 0)}
    assert split_bytes(1000, shares) == {0: 500, 1: 300, 2: 200}


def test_a_pool_below_all_minima_is_divided_by_them() -> None:
    assert split_bytes(100, {0: Share(9, 300), 1: Share(1, 100)}) == {0: 75, 1: 25}


def test_nobody_arriving_anywhere_is_equal() -> None:
    assert split_bytes(100, {0: Share(0, 0), 1: Share(0, 0)}) == {0: 50, 1: 50}


@given(
    st.integers(0, 2**40),
    st.dictionaries(
        st.integers(0, 9), st.builds(Share, st.floats(0, 1e6), st.integers(0, 2**38)), min_size=1, max_size=6
    ),
)
def test_the_pool_is_divided_up_to_rounding(pool_bytes: int, shares: dict[int, Share]) -> None:
    parts = split_bytes(pool_bytes, shares)
    assert parts.keys() == shares.keys()
    assert pool_bytes - sum(parts.values()) <= len(shares)
    assert sum(parts.values()) <= pool_bytes
    if sum(share.least_bytes for share in shares.values()) <= pool_bytes:
        assert all(parts[owner] >= share.least_bytes for owner, share in shares.items())
    above = [owner for owner, share in shares.items() if parts[owner] > share.least_bytes]
    for one in above:
        for other in above:  # who is above the minimum stands in proportion
            left, right = parts[one] * shares[other].weight, parts[other] * shares[one].weight
            assert left == pytest.approx(right, rel=1e-6, abs=2 * max(shares[one].weight, shares[other].weight) + 1e-9)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        split_bytes(10, {0: Share(-1.0, 0)})
