"""The simulated clock: a SimPy environment with absolute times and a written order for simultaneous events.

Its own queue replaces SimPy's, which adds delays to now: a sum of delays is not the time that was meant, bit for bit.

Invariant: events are ordered by (time, kind, entity, sequence), so their order never depends on when they were scheduled.
Simultaneous events come in this order:

    1. arrivals: an engine that ends a step at that moment sees them
    2. timers
    3. step ends, by engine id: they free memory
    4. starts of idle engines, by engine id
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush

from simpy import Environment
from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event

_ENTITIES = 1 << 20


class Kind(IntEnum):
    """The order of simultaneous events."""

    ARRIVAL = 0
    TIMER = 1
    STEP_END = 2
    START = 3


def order_of(kind: Kind, entity: int) -> int:
    """The rank of an event among simultaneous ones: smaller comes first."""
    return kind * _ENTITIES + entity


class Clock(Environment):
    """A SimPy environment that also calls back at absolute times."""

    def __init__(self) -> None:
        super().__init__()
        self._time_s = 0.0
        self._moments: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._number = 0  # of calls set so far

    @property
    def now(self) -> float:
        return self._time_s

    def at(self, time_s: float, order: int, callback: Callable[[float], None]) -> None:
        """Call ``callback(time_s)`` at ``time_s``, not before now. ``order`` (``order_of``) ranks it among simultaneous
        events."""
        self._number += 1
        heappush(self._moments, (time_s, order, self._number, callback))

    def schedule(self, event: Event, priority: int = NORMAL, delay: float = 0.0) -> None:
        """As in SimPy. The priority of an event is its rank (``order_of``), so it comes among arrivals."""
        self.at(self._time_s + delay, priority, lambda _: _happen(event))

    def peek(self) -> float:
        return self._moments[0][0] if self._moments else float("inf")

    def step(self) -> None:
        if not self._moments:
            raise EmptySchedule
        self._time_s, _, _, callback = heappop(self._moments)
        callback(self._time_s)


def _happen(event: Event) -> None:
    """A SimPy event happens. Raises the exception of a failed event unless a callback has defused it."""
    callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # it has happened
    for callback in callbacks:
        callback(event)
    if not (event.ok or event.defused):
        raise event.value  # type: ignore[misc]  # the value of what failed is an exception
