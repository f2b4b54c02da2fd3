"""The controller: the one owner of waiting requests. It turns events into commands.

A driver (the simulator or the runtime) reports events with their time, and carries out the commands in their order. The
controller has no clock and does no I/O, so both drivers run the same code.

    RequestArrived   route to one instance of the model, in proportion to target rates; add to its local scheduler
    EngineStepped    ask the local scheduler which requests start: Dispatch or Drop each

An engine keeps vLLM's own first-come-first-served queue behind that. Invariant: a waiting request is bound to exactly one
engine, and waits in exactly one scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from heapq import heapify, heapreplace
from typing import Any, NamedTuple

from fineserve_sim.policy.commands import Command, Dispatch, Drop, Reject
from fineserve_sim.policy.events import EngineStepped, Event, RequestAborted, RequestArrived, RequestReturned
from fineserve_sim.policy.interfaces import EngineState, LocalScheduler, Request


class Turns:
    """Weighted round robin by the quota method (Balinski and Young 1975) among members 0, 1, ... with these rates (any unit).

    Among the members that are not ahead of their share, the one that falls behind it first has the next turn. After h
    turns, a member with the fraction q of all rates has had between floor(h q) and ceil(h q) of them. Ties go to the first
    member. Members without a rate have no share beside others; among themselves they have equal turns.

    A turn among all members costs O(log members), amortised; among some, a step for each. Raises ValueError for a negative
    rate.
    """

    __slots__ = ("_heap", "_rate", "_rates", "_sent", "_total")

    def __init__(self, rates: Sequence[float]) -> None:
        if min(rates, default=0.0) < 0:
            raise ValueError(f"the rates must not be negative: {list(rates)}")
        self._rates = tuple(rates) if any(rates) else (1.0,) * len(rates)
        self._rate = sum(self._rates)
        self._sent = [0] * len(self._rates)
        self._total = 0
        # (when its next turn is due, member); an entry whose member had a turn since is put right at the top.
        self._heap = [(1 / rate, member) for member, rate in enumerate(self._rates) if rate]
        heapify(self._heap)

    def next(self) -> int:
        """The member that has the next turn."""
        heap, sent, rates = self._heap, self._sent, self._rates
        due, best = heap[0]
        while due != (now_due := (sent[best] + 1) / rates[best]):
            heapreplace(heap, (now_due, best))
            due, best = heap[0]
        if sent[best] >= (self._total + 1) / self._rate * rates[best]:
            return self.next_among(range(len(rates)))
        sent[best] += 1
        self._total += 1
        return best

    def next_among(self, members: Sequence[int]) -> int:
        """The member that has the next turn if only these can take it."""
        sent, rates = self._sent, self._rates
        members = [member for member in members if rates[member]] or members
        if not rates[members[0]]:
            rates = (1.0,) * len(rates)
        rate = sum([rates[member] for member in members])
        quota = (1 + sum(sent[member] for member in members)) / rate
        behind = [member for member in members if sent[member] < quota * rates[member]]
        best = min(behind or members, key=lambda member: (sent[member] + 1) / rates[member])
        sent[best] += 1
        self._total += self._rates[best] > 0  # turns of members without a share are in nobody's quota
        return best


@dataclass(slots=True)
class Route:
    """One instance as the router sees it: its engine, target rate and longest sequence."""

    engine: int
    rate_per_s: float
    max_tokens: int


class _Routes(NamedTuple):
    """The instances of a model, the turns among them, and the sequence length that each of them can hold."""

    instances: tuple[Route, ...]
    turns: Turns
    shortest_tokens: int


@dataclass(slots=True)
class _Queue:
    """A local scheduler, and how many requests wait in it for all the engines that it serves."""

    scheduler: LocalScheduler
    length: int = 0


def check_state(engine: int, state: Enum | None, possible: Sequence[Enum], given: int) -> None:
    """Raise ValueError for an event that cannot be.

    The engine never existed (ids below ``given`` did), or it is in none of the ``possible`` states, if any are named. An
    engine without a ``state`` is gone.
    """
    if (state is None and not 0 <= engine < given) or (state and possible and state not in possible):
        raise ValueError(f"engine {engine} is {state.name.lower() if state else 'unknown'}: that cannot be")


class Controller:
    """Routes requests, asks local schedulers, and remembers which engine each waiting request is bound to.

    ``routes`` maps each model to its instances, which never change; ``FleetController`` has engines that come and go.
    ``schedulers`` maps the engines that one scheduler serves to it. Where the scheduler is None, requests go to the engine's
    own queue at once. ``stays`` says why other events cannot be.
    """

    stays = "the engines of this controller are always resident"
    needs_loads: bool = False
    """Whether the driver reports changed loads (``Loads``) before each request."""

    next_tick_s: float = float("inf")
    """When the driver reports the state of everything (``Tick``)."""

    def __init__(
        self,
        routes: Mapping[str, Sequence[Route]],
        schedulers: Mapping[tuple[int, ...], LocalScheduler | None] = {},
    ) -> None:
        self._now = 0.0
        self._handlers: dict[type, Callable[[Any], list[Command]]] = {
            EngineStepped: self._schedule,
            RequestArrived: self._arrive,
            RequestReturned: self._arrive,
            RequestAborted: self._abort,
        }
        self._routes: dict[str, _Routes] = {}
        # By engine; the engines of one scope have one object. Invariant: its length is the number of its bound requests.
        self._queues: dict[int, _Queue] = {}
        # Waiting requests twice: the engine of each, and the requests of each engine. Invariant: both say the same.
        self._bound: dict[int, int] = {}
        self._requests: dict[int, dict[int, Request]] = {}
        for model, instances in routes.items():
            self._lead(model, instances)
        for scope, scheduler in schedulers.items():
            self._open(scope, scheduler)

    def handle(self, now: float, event: Event) -> list[Command]:
        """The commands that ``event`` causes at time ``now`` (seconds), in the order in which to carry them out.

        Raises ValueError for an event that cannot be.
        """
        self._now = now
        handler = self._handlers.get(type(event))
        if handler is None:
            raise ValueError(f"{type(event).__name__} at {now} s: {self.stays}")
        return handler(event)

    def waiting(self, engine: int) -> int:
        """The number of requests in the scheduler that serves ``engine``; 0 for an engine that no route leads to."""
        queue = self._queues.get(engine)
        return queue.length if queue else 0

    def bound_to(self, engine: int) -> int:
        """The number of waiting requests that are bound to ``engine`` itself. Its scheduler may serve other engines, too."""
        return len(self._requests.get(engine, ()))

    def engine_of(self, request_id: int) -> int | None:
        """The engine that a request waits for; None once it was dispatched, dropped or never came."""
        return self._bound.get(request_id)

    def unchanged_until(self, now: float, engine: int, engines: Mapping[int, EngineState]) -> float:
        """See ``LocalScheduler.unchanged_until``; infinity when no request waits."""
        scheduler = self._queues[engine].scheduler
        return scheduler.unchanged_until(now, engines) if len(scheduler) else float("inf")

    def _arrive(self, event: RequestArrived | RequestReturned) -> list[Command]:
        request = self._expected(event)
        route = self.route(request.model, request.prompt_tokens)
        if route is not None:
            return self._deliver(request, route.engine)
        limits = [route.max_tokens for route in self._routes[request.model].instances]
        if not limits:
            return [Reject(request.id, f"no instance of {request.model} is placed", unplaced=True)]
        return [Reject(request.id, f"prompt of {request.prompt_tokens} tokens, at most {max(0, max(limits) - 1)}")]

    def _expected(self, event: RequestArrived | RequestReturned) -> Request:
        """Its request, of a known model, that does not wait yet."""
        request = event.request
        if request.model not in self._routes or request.id in self._bound:
            raise ValueError(f"request {request.id} waits already, or its model {request.model} is not there")
        return request

    def route(self, model: str, prompt_tokens: int) -> Route | None:
        """The next instance in turn that can hold the prompt and a token; turns are in proportion to target rates."""
        routes, turns, shortest_tokens = self._routes[model]
        if prompt_tokens < shortest_tokens:
            return routes[turns.next()] if len(routes) > 1 else routes[0]
        able = [number for number, route in enumerate(routes) if prompt_tokens < route.max_tokens]
        return routes[turns.next_among(able)] if able else None

    def _lead(self, model: str, routes: Sequence[Route], turns: Turns | None = None) -> None:
        """Requests of the model go to these instances from now on, in turns that begin anew unless they are given."""
        if turns is None:
            turns = Turns([route.rate_per_s for route in routes])
        self._routes[model] = _Routes(tuple(routes), turns, min((route.max_tokens for route in routes), default=0))

    def _open(self, scope: Sequence[int], scheduler: LocalScheduler | None) -> None:
        """Requests for these engines wait in the scheduler from now on."""
        if scheduler is not None:
            self._queues |= dict.fromkeys(scope, _Queue(scheduler))

    def _deliver(self, request: Request, engine: int) -> list[Command]:
        """The request goes to the engine's scheduler, or on to the engine where there is none."""
        queue = self._queues.get(engine)
        if queue is None:
            return [Dispatch(request.id, engine)]
        self._bound[request.id] = engine
        self._requests.setdefault(engine, {})[request.id] = request
        queue.length += 1
        queue.scheduler.add(request, engine)
        return []

    def _schedule(self, event: EngineStepped) -> list[Command]:
        if event.engine not in self._queues:
            raise ValueError(f"engine {event.engine} stepped, but no scheduler serves it")
        admission = self._queues[event.engine].scheduler.schedule(self._now, event.engines)
        commands: list[Command] = []
        for request in admission.dropped:
            self._unbind(request.id)
            commands.append(Drop(request.id, "deadline out of reach"))
        commands.extend(Dispatch(request.id, self._unbind(request.id)) for request in admission.admitted)
        return commands

    def _unbind(self, request_id: int) -> int:
        engine = self._bound.pop(request_id)
        del self._requests[engine][request_id]
        self._queues[engine].length -= 1
        return engine

    def _abort(self, event: RequestAborted) -> list[Command]:
        if event.request_id in self._bound:
            self._queues[self._unbind(event.request_id)].scheduler.remove(event.request_id)
        return []
