"""The largest set of requests on time, against brute force, Moore-Hodgson and hand-worked examples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fineserve_sim.cluster.clairvoyant import Foreseen, most_on_time
from fineserve_sim.policy.scheduling.moore_hodgson import moore_hodgson


def in_time(requests: Sequence[Foreseen]) -> bool:
    free_s = 0.0
    for request in requests:
        free_s = max(free_s, request.arrival_s) + request.prefill_s
        if free_s > request.deadline_s:
            return False
    return True


def served(requests: Sequence[Foreseen]) -> int:
    return sum(end_s is not None for end_s in most_on_time(requests))


SMALL = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(1, 6)), min_size=1, max_size=9)


def foreseen(rows: list[tuple[int, int, int]]) -> list[Foreseen]:
    """Whole seconds, so that sums are exact; deadlines are made to come in the order of arrivals."""
    arrivals = sorted(row[0] for row in rows)
    deadlines = sorted(arrival + row[1] for arrival, row in zip(arrivals, rows, strict=True))
    return [Foreseen(a, d, row[2]) for a, d, row in zip(arrivals, deadlines, rows, strict=True)]


@settings(max_examples=400)
@given(SMALL)
def test_no_subset_on_time_is_larger(rows: list[tuple[int, int, int]]) -> None:
    requests = foreseen(rows)
    most = max(k for k in range(len(requests) + 1) if any(in_time(some) for some in combinations(requests, k)))
    assert served(requests) == most


@given(SMALL)
def test_those_served_follow_one_another_from_their_arrival_to_before_their_deadline(
    rows: list[tuple[int, int, int]],
) -> None:
    requests = foreseen(rows)
    free_s = 0.0
    for request, end_s in zip(requests, most_on_time(requests), strict=True):
        if end_s is not None:
            assert max(free_s, request.arrival_s) + request.prefill_s == end_s <= request.deadline_s
            free_s = end_s


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=40))
def test_with_everybody_there_it_is_moore_hodgson(jobs: list[tuple[int, int]]) -> None:
    jobs.sort()
    requests = [Foreseen(0.0, deadline_s, duration_s) for deadline_s, duration_s in jobs]
    assert served(requests) == len(moore_hodgson(jobs, 0.0).on_time)


def test_the_longest_is_not_always_the_one_to_put_aside() -> None:
    """Without the 4 s request the machine would idle from 1 to 3; without the 3 s one the last is on time."""
    requests = [Foreseen(0, 6, 4), Foreseen(3, 8, 3), Foreseen(4, 8, 3)]
    assert most_on_time(requests) == [4, 7, None]
    gap = [Foreseen(0, 10, 4), Foreseen(4, 10, 3), Foreseen(4, 10, 3), Foreseen(4, 11, 3)]
    assert most_on_time(gap) == [4, 7, 10, None]
    long_waits = [Foreseen(0, 9, 9), Foreseen(1, 10, 2), Foreseen(2, 11, 2)]
    assert most_on_time(long_waits) == [None, 3, 5]


def test_the_order_is_demanded() -> None:
    with pytest.raises(ValueError, match="request 1 has an earlier arrival or deadline"):
        most_on_time([Foreseen(0, 5, 1), Foreseen(1, 4, 1)])
    assert most_on_time([]) == []
