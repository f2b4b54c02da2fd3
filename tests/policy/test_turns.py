"""Weighted round robin: the heap against looking at everybody, and everybody's share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.controller import Turns

RATES = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.0, 2.0, 3.7]), min_size=1, max_size=6)


@given(rates=RATES, among=st.lists(st.sets(st.integers(0, 5)), max_size=60))
def test_next_is_next_among_all_whoever_had_turns_before(rates: list[float], among: list[set[int]]) -> None:
    quick, slow = Turns(rates), Turns(rates)
    everybody = range(len(rates))
    for some in among:
        members = sorted(member for member in some if member < len(rates))
        if members:
            assert quick.next_among(members) == slow.next_among(members)
        assert quick.next() == slow.next_among(everybody)


@given(rates=RATES, requests=st.integers(1, 200))
def test_nobody_is_ever_a_whole_request_off_its_share(rates: list[float], requests: int) -> None:
    turns = Turns(rates)
    had = [0] * len(rates)
    for number in range(1, requests + 1):
        had[turns.next()] += 1
        for count, rate in zip(had, rates if any(rates) else [1.0] * len(rates), strict=True):
            share = number * rate / (sum(rates) or len(rates))
            assert math.floor(share - 1e-9) <= count <= math.ceil(share + 1e-9)


def test_without_rates_all_have_equal_turns() -> None:
    turns = Turns([0.0, 0.0, 0.0])
    assert [turns.next() for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_who_has_no_rate_has_a_turn_where_nobody_has_one() -> None:
    turns = Turns([0.0, 2.0, 0.0])
    assert [turns.next() for _ in range(3)] == [1, 1, 1]
    assert [turns.next_among([0, 2]) for _ in range(4)] == [0, 2, 0, 2]
    assert turns.next_among([0, 1]) == 1
    assert turns.next() == 1


def test_a_negative_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="rates must not be negative"):
        Turns([1.0, -0.5])
