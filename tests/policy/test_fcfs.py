"""FCFS lets everybody through, in order of arrival."""

import math

import pytest

from fineserve_sim.policy.interfaces import EngineState, LocalScheduler, Request
from fineserve_sim.policy.scheduling.fcfs import FcfsScheduler

FULL = {0: EngineState(running=9, decoding=9, prefill_tokens=500, free_slots=0, free_kv_tokens=0, slowdown=2.0)}


def request(id: int, arrival_s: float) -> Request:
    return Request(id, "m", arrival_s, 100)


def test_admits_all_in_order_of_arrival_then_id_whatever_the_engine_looks_like() -> None:
    scheduler: LocalScheduler = FcfsScheduler()
    for id, arrival_s in [(3, 1.0), (1, 2.0), (2, 1.0)]:
        scheduler.add(request(id, arrival_s), engine=0)
    answer = scheduler.schedule(5.0, FULL)
    assert [r.id for r in answer.admitted] == [2, 3, 1]
    assert answer.dropped == []
    assert len(scheduler) == 0
    assert scheduler.schedule(5.0, FULL).admitted == []


def test_a_removed_request_is_not_admitted() -> None:
    scheduler = FcfsScheduler()
    scheduler.add(request(1, 0.0), engine=0)
    scheduler.add(request(2, 0.0), engine=0)
    assert scheduler.remove(1)
    assert not scheduler.remove(1)
    assert [r.id for r in scheduler.schedule(0.0, FULL).admitted] == [2]


def test_only_an_arrival_changes_the_answer() -> None:
    scheduler = FcfsScheduler()
    assert scheduler.unchanged_until(1.0, FULL) == math.inf
    scheduler.add(request(1, 1.0), engine=0)
    assert scheduler.unchanged_until(1.0, FULL) <= math.nextafter(1.0, math.inf)


def test_a_request_cannot_wait_twice() -> None:
    scheduler = FcfsScheduler()
    scheduler.add(request(1, 0.0), engine=0)
    with pytest.raises(ValueError, match="request 1 is added twice"):
        scheduler.add(request(1, 0.0), engine=0)
