"""Events are ordered by (time, kind, entity), whatever the order in which they were scheduled."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simkit import solo, step_model
from simpy.events import Event

import fineserve_sim
from fineserve_sim.cluster import simulate
from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.samples import sample_time_s


def test_kinds_are_ordered_as_documented() -> None:
    assert sorted(Kind) == [Kind.ARRIVAL, Kind.TIMER, Kind.STEP_END, Kind.START]
    assert order_of(Kind.ARRIVAL, 1000) < order_of(Kind.TIMER, 0) < order_of(Kind.STEP_END, 0)
    assert order_of(Kind.STEP_END, 3) < order_of(Kind.STEP_END, 4) < order_of(Kind.START, 0)


events = st.tuples(st.sampled_from([0.1, 0.3, 0.1 + 0.2]), st.sampled_from(list(Kind)), st.integers(0, 3))


@given(st.lists(events, max_size=20))
def test_events_come_in_the_order_of_time_kind_and_entity(plan: list[tuple[float, Kind, int]]) -> None:
    clock, seen = Clock(), []
    for time_s, kind, entity in plan:
        clock.at(time_s, order_of(kind, entity), lambda _, key=(time_s, kind, entity): seen.append((clock.now, key)))
    clock.run()
    assert [key for _, key in seen] == sorted(plan)
    assert all(now == key[0] for now, key in seen)  # bit for bit: 0.1 + 0.2 is not 0.3


def test_an_event_scheduled_now_still_waits_for_its_rank() -> None:
    clock, seen = Clock(), []

    def arrival(_: object) -> None:
        clock.at(1.0, order_of(Kind.START, 0), lambda _: seen.append("start"))
        clock.at(1.0, order_of(Kind.TIMER, 0), lambda _: seen.append("timer"))

    clock.at(1.0, order_of(Kind.STEP_END, 0), lambda _: seen.append("step end"))
    clock.at(1.0, order_of(Kind.ARRIVAL, 0), arrival)
    clock.run()
    assert seen == ["timer", "step end", "start"]


def test_equal_ranks_keep_the_order_of_scheduling() -> None:
    for order in permutations(range(4)):
        clock, seen = Clock(), []
        for name in order:
            clock.at(1.0, order_of(Kind.START, 7), lambda _, name=name, seen=seen: seen.append(name))
        clock.run()
        assert seen == list(order)


def test_processes_of_simpy_run_beside_moments() -> None:
    clock, seen = Clock(), []

    def process() -> Iterator[Event]:
        for _ in range(2):
            yield clock.timeout(0.1)
            seen.append(("process", clock.now))
        raise KeyError("lost")

    clock.at(0.15, order_of(Kind.TIMER, 0), lambda now: seen.append(("moment", now)))
    running = clock.process(process())
    with pytest.raises(KeyError, match="lost"):
        clock.run(until=running)
    assert seen == [("process", 0.1), ("moment", 0.15), ("process", 0.2)]
    clock.at(3.0, order_of(Kind.ARRIVAL, 0), lambda now: seen.append(("moment", now)))
    clock.run(until=2.0)
    assert (clock.now, clock.peek(), len(seen)) == (2.0, 3.0, 3)


def test_no_module_reaches_into_simpy() -> None:
    private = re.compile(r"\._(queue|now|eid|ok|value|defused|active_proc)\b")
    root = Path(fineserve_sim.__file__).parent
    users = [path for path in root.rglob("*.py") if "simpy" in (text := path.read_text()) and private.search(text)]
    assert users == []


def test_an_engine_that_ends_a_step_sees_the_request_that_arrives_at_that_moment() -> None:
    step_s = step_model_prefill_s(100)
    together = simulate(solo([(0.0, 100, 5), (step_s, 100, 1)], sample_s=0))
    later = simulate(solo([(0.0, 100, 5), (np.nextafter(step_s, 1), 100, 1)], sample_s=0))
    step = step_model(solo([(0.0, 1, 1)]).models[0])
    joint_s = step.step_s(1, 100, 100, 5050, 0, 2)
    assert together.first_token_s[1] == pytest.approx(step_s + joint_s, rel=1e-12)
    assert later.first_token_s[1] > step_s + joint_s + 1e-4  # a decode iteration was in flight


def test_a_sample_sees_the_arrivals_of_its_moment_and_not_yet_their_start() -> None:
    at_s = sample_time_s(1, 0.02)
    run = simulate(solo([(0.0, 100, 50), (at_s, 100, 1), (at_s, 100, 1)], sample_s=0.02))
    assert run.timeline.time_s[:2].tolist() == [0.0, at_s]
    assert run.timeline.waiting[:2, 0].tolist() == [1, 2]
    assert run.timeline.running[:2, 0].tolist() == [0, 1]


def step_model_prefill_s(tokens: int) -> float:
    """One prompt in one iteration on the engine of ``solo``."""
    return step_model(solo([(0.0, 1, 1)]).models[0]).step_s(0, 0, tokens, tokens * (tokens + 1) // 2, 0, 1)
