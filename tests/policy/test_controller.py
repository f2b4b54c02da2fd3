"""The controller turns events into commands: routing, refusal, scheduling, aborts, and replay of a recorded log."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.commands import Command, Dispatch, Drop, Reject
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.events import EngineStepped, Event, RequestAborted, RequestArrived
from fineserve_sim.policy.interfaces import Admission, EngineFacts, EngineState, LocalScheduler, Request
from fineserve_sim.policy.scheduling.adaptive import AdaptiveBatching
from fineserve_sim.policy.scheduling.moore_hodgson import MooreHodgson

IDLE = EngineState(running=0, decoding=0, prefill_tokens=0, free_slots=8, free_kv_tokens=10_000, slowdown=1.0)


class FirstComeFirstServed:
    """Admits all waiting requests in the order of (arrival, id). Its scope may hold any number of engines."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, engine: int) -> None:
        """Raises ValueError if the request waits already."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is added twice: it waits already")
        self._waiting[request.id] = request

    def remove(self, request_id: int) -> bool:
        return self._waiting.pop(request_id, None) is not None

    def schedule(self, now: float, engines: Mapping[int, EngineState]) -> Admission:
        admitted = sorted(self._waiting.values(), key=lambda request: (request.arrival_s, request.id))
        self._waiting.clear()
        return Admission(admitted=admitted)

    def unchanged_until(self, now: float, engines: Mapping[int, EngineState]) -> float:
        return math.nextafter(now, math.inf) if self._waiting else math.inf


def arrived(id: int, model: str = "m", arrival_s: float = 0.0, prompt_tokens: int = 10) -> RequestArrived:
    return RequestArrived(Request(id, model, arrival_s, prompt_tokens))


def stepped(engine: int, state: EngineState = IDLE) -> EngineStepped:
    return EngineStepped(engine, {engine: state})


def fcfs(rates: list[float], max_tokens: int = 1000) -> Controller:
    """Engines of one model, each with a scheduler of its own."""
    routes = [Route(engine, rate, max_tokens) for engine, rate in enumerate(rates)]
    return Controller({"m": routes}, {(route.engine,): FirstComeFirstServed() for route in routes})


def sent(rates: list[float], requests: int) -> list[Counter[int]]:
    """How many requests each engine got, after each request."""
    controller = fcfs(rates)
    counts: Counter[int] = Counter()
    history = []
    for id in range(requests):
        assert controller.handle(0.0, arrived(id)) == []
        engine = controller.engine_of(id)
        assert engine is not None
        counts[engine] += 1
        history.append(counts.copy())
    return history


def assert_within_one(rates: list[float], requests: int) -> None:
    for total, counts in enumerate(sent(rates, requests), start=1):
        for engine, rate in enumerate(rates):
            assert abs(counts[engine] - total * rate / sum(rates)) < 1 + 1e-9


@given(st.integers(1, 6), st.floats(0.1, 100))
def test_equal_replicas_take_turns(replicas: int, rate: float) -> None:
    assert_within_one([rate] * replicas, 5 * replicas)


def test_ties_go_to_the_lowest_engine() -> None:
    controller = fcfs([1.0, 1.0, 1.0])
    for id in range(6):
        controller.handle(0.0, arrived(id))
    assert [controller.engine_of(id) for id in range(6)] == [0, 1, 2, 0, 1, 2]


@given(st.floats(0.1, 100), st.floats(0.1, 100))
def test_two_replicas_get_their_shares(first: float, second: float) -> None:
    assert_within_one([first, second], 60)


@given(st.lists(st.integers(1, 20).map(float), min_size=3, max_size=6))
def test_any_replicas_get_their_shares(rates: list[float]) -> None:
    assert_within_one(rates, 60)


def test_a_replica_with_three_times_the_rate_gets_three_of_four_requests() -> None:
    assert sent([3.0, 1.0], 100)[-1] == {0: 75, 1: 25}


def test_a_model_without_instances_is_refused_in_one_line() -> None:
    (reject,) = Controller({"m": []}).handle(0.0, arrived(7))
    assert isinstance(reject, Reject) and reject.request_id == 7
    assert "m" in reject.reason and "\n" not in reject.reason


def test_a_prompt_without_room_for_a_token_is_refused() -> None:
    controller = fcfs([1.0], max_tokens=100)
    (reject,) = controller.handle(0.0, arrived(1, prompt_tokens=100))
    assert isinstance(reject, Reject) and "100" in reject.reason and "99" in reject.reason
    assert controller.handle(0.0, arrived(2, prompt_tokens=99)) == []
    assert controller.engine_of(1) is None and controller.waiting(0) == 1


def test_a_refused_request_takes_nobodys_turn() -> None:
    controller = fcfs([1.0, 1.0], max_tokens=100)
    for id, prompt_tokens in enumerate([10, 500, 10, 10]):
        controller.handle(0.0, arrived(id, prompt_tokens=prompt_tokens))
    assert [controller.engine_of(id) for id in range(4)] == [0, None, 1, 0]


def test_a_prompt_goes_to_the_replica_that_can_hold_it() -> None:
    """A request is refused only when no engine could ever serve it (``Reject``)."""
    schedulers = {(engine,): FirstComeFirstServed() for engine in range(2)}
    controller = Controller({"m": [Route(0, 1.0, 100), Route(1, 1.0, 1000)]}, schedulers)
    for id in range(3):
        assert controller.handle(0.0, arrived(id, prompt_tokens=500)) == []
        assert controller.engine_of(id) == 1
    assert isinstance(controller.handle(0.0, arrived(3, prompt_tokens=1000))[0], Reject)


@pytest.mark.pure_python
def test_dispatches_come_in_the_schedulers_order_after_its_drops() -> None:
    class Fixed(FirstComeFirstServed):
        def schedule(self, now: float, engines: Mapping[int, EngineState]) -> Admission:
            waiting = super().schedule(now, engines).admitted
            return Admission(admitted=[waiting[2], waiting[0]], dropped=[waiting[3], waiting[1]])

    controller = Controller({"m": [Route(5, 1.0, 1000)]}, {(5,): Fixed()})
    for id in range(4):
        controller.handle(0.0, arrived(id))
    commands = controller.handle(1.0, stepped(5))
    assert [(type(command), command.request_id) for command in commands] == [
        (Drop, 3),
        (Drop, 1),
        (Dispatch, 2),
        (Dispatch, 0),
    ]
    assert all(command.engine == 5 for command in commands if isinstance(command, Dispatch))
    assert controller.bound_to(5) == 0 and controller.engine_of(0) is None


def test_an_aborted_request_is_not_dispatched() -> None:
    controller = fcfs([1.0])
    controller.handle(0.0, arrived(1))
    controller.handle(0.0, arrived(2))
    assert controller.handle(0.5, RequestAborted(1)) == []
    assert controller.waiting(0) == controller.bound_to(0) == 1
    assert controller.handle(1.0, stepped(0)) == [Dispatch(2, 0)]


@pytest.mark.parametrize("when", ["never came", "dispatched", "aborted"])
def test_an_abort_of_a_request_that_does_not_wait_is_harmless(when: str) -> None:
    controller = fcfs([1.0])
    if when != "never came":
        controller.handle(0.0, arrived(1))
        controller.handle(0.0, stepped(0) if when == "dispatched" else RequestAborted(1))
    assert controller.handle(1.0, RequestAborted(1)) == []
    assert controller.handle(1.0, stepped(0)) == []


def test_one_scheduler_may_serve_several_engines() -> None:
    routes = {"a": [Route(0, 1.0, 100)], "b": [Route(1, 1.0, 100)]}
    controller = Controller(routes, {(0, 1): FirstComeFirstServed()})
    controller.handle(0.0, arrived(1, "a"))
    controller.handle(0.0, arrived(2, "b"))
    assert controller.waiting(0) == controller.waiting(1) == 2
    assert controller.bound_to(0) == controller.bound_to(1) == 1
    commands = controller.handle(0.0, EngineStepped(1, {0: IDLE, 1: IDLE}))
    assert commands == [Dispatch(1, 0), Dispatch(2, 1)]


def test_nobody_waiting_means_no_moment_to_ask() -> None:
    controller = fcfs([1.0])
    assert controller.unchanged_until(3.0, 0, {0: IDLE}) == float("inf")
    controller.handle(3.0, arrived(1))
    assert controller.unchanged_until(3.0, 0, {0: IDLE}) <= 3.0 + 1e-12


# --- replay ------------------------------------------------------------------------------------------------------------


def adaptive() -> LocalScheduler:
    return AdaptiveBatching(0.5, lambda tokens, decoding, pairs: tokens / 1000 * (1 + decoding / 10))


def new_controller(kind: str) -> Controller:
    if kind == "moore_hodgson":
        facts = EngineFacts(prefill_tokens_per_s=1000.0, slo_s=0.5, kv_capacity_tokens=10_000)
        schedulers: dict[tuple[int, ...], LocalScheduler] = {(0, 1): MooreHodgson({0: facts, 1: facts}, late="drop")}
    else:
        schedulers = {(e,): adaptive() if kind == "adaptive" else FirstComeFirstServed() for e in range(2)}
    return Controller({"m": [Route(e, 1.0 + e, 800) for e in range(2)]}, schedulers)


def event_as_json(now: float, event: Event) -> str:
    if isinstance(event, RequestArrived):
        fields: dict[str, Any] = {"request": event.request._asdict()}
    elif isinstance(event, EngineStepped):
        fields = {"engine": event.engine, "engines": {e: state._asdict() for e, state in event.engines.items()}}
    else:
        fields = {"request_id": event.request_id}
    return json.dumps({"now_s": now, "event": type(event).__name__, **fields})


def event_from_json(line: str) -> tuple[float, Event]:
    fields = json.loads(line)
    now, kind = fields["now_s"], fields["event"]
    if kind == "RequestArrived":
        return now, RequestArrived(Request(**fields["request"]))
    if kind == "EngineStepped":
        return now, EngineStepped(
            fields["engine"], {int(e): EngineState(**state) for e, state in fields["engines"].items()}
        )
    return now, RequestAborted(fields["request_id"])


states = st.builds(
    EngineState,
    running=st.integers(0, 5),
    decoding=st.integers(0, 5),
    prefill_tokens=st.sampled_from([0, 0, 100]),
    free_slots=st.integers(0, 5),
    free_kv_tokens=st.integers(0, 2000),
    slowdown=st.floats(1, 3),
)
gaps = st.floats(0, 0.3)
happenings = st.lists(
    st.one_of(
        st.tuples(gaps, st.just("arrive"), st.integers(1, 900)),
        st.tuples(gaps, st.just("step"), st.tuples(st.integers(0, 1), states, states)),
        st.tuples(gaps, st.just("abort"), st.integers(0, 20)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("kind", ["fcfs", "adaptive", "moore_hodgson"])
@given(script=happenings)
def test_a_log_replayed_through_a_fresh_controller_gives_the_same_commands(
    kind: str, script: list[tuple[float, str, Any]]
) -> None:
    controller, now, requests = new_controller(kind), 0.0, 0
    log: list[str] = []
    answers: list[list[Command]] = []
    ended: Counter[int] = Counter()
    for gap, name, value in script:
        now += gap
        if name == "arrive":
            event: Event = arrived(requests, arrival_s=now, prompt_tokens=value)
            requests += 1
        elif name == "abort":
            event = RequestAborted(value)
        else:
            engine, *pair = value
            both = dict(enumerate(pair))
            event = EngineStepped(engine, both if kind == "moore_hodgson" else {engine: both[engine]})
        log.append(event_as_json(now, event))
        answers.append(controller.handle(now, event))
        ended.update(command.request_id for command in answers[-1])
    assert max(ended.values(), default=0) <= 1
    assert len(ended) + controller.bound_to(0) + controller.bound_to(1) <= requests
    fresh = new_controller(kind)
    assert [fresh.handle(*event_from_json(line)) for line in log] == answers
