"""The simulated clock: a SimPy environment with absolute times and a written order for simultaneous events.

Events are ordered by (time, priority, sequence). A priority is a kind and an entity, so that the order of simultaneous events
never depends on when they were scheduled: arrivals come first (an engine that ends a step at that moment sees them), then
timers, then step ends by engine id (they free memory), then idle engines start by engine id. Times are absolute: SimPy's own
queue adds a delay to now, and a sum of delays is not the time that was meant, bit for bit. So the clock has a queue of its own,
which takes what SimPy schedules, too.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from itertools import count

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
        self._numbers = count()

    @property
    def now(self) -> float:
        return self._time_s

    def at(self, time_s: float, order: int, callback: Callable[[float], None]) -> None:
        """Call ``callback(time_s)`` then (not before now), among simultaneous events by ``order`` (``order_of``)."""
        heappush(self._moments, (time_s, order, next(self._numbers), callback))

    def schedule(self, event: Event, priority: int = NORMAL, delay: float = 0.0) -> None:
        """As in SimPy; its priorities are those of arrivals."""
        self.at(self._time_s + delay, priority, lambda _: _happen(event))

    def peek(self) -> float:
        return self._moments[0][0] if self._moments else float("inf")

    def step(self) -> None:
        if not self._moments:
            raise EmptySchedule
        self._time_s, _, _, callback = heappop(self._moments)
        callback(self._time_s)


def _happen(event: Event) -> None:
    """A SimPy event comes. Raises what made it fail, unless somebody dealt with that."""
    callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]  # it has happened
    for callback in callbacks:
        callback(event)
    if not (event.ok or event.defused):
        raise event.value  # type: ignore[misc]  # the value of what failed is an exception
