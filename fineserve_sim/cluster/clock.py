"""The simulated clock: SimPy's event loop with absolute times and a written order for simultaneous events.

Events are ordered by (time, priority, sequence). A priority is a kind and an entity, so that the order of simultaneous events
never depends on when they were scheduled: arrivals come first (an engine that ends a step at that moment sees them), then
timers, then step ends by engine id (they free memory), then idle engines start by engine id. Times are absolute: SimPy's own
``timeout`` adds a delay to now, and a sum of delays is not the time that was meant, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappush
from typing import Any

from simpy import Environment
from simpy.events import Event

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


class _Moment(Event):
    """An event that will happen at its time, with one callback."""

    def __init__(self, clock: Clock, callback: Callable[[Event], None]) -> None:
        self.env = clock
        self.callbacks = [callback]
        self._ok = True
        self._value = None


class Clock(Environment):
    """A SimPy environment that also schedules callbacks at absolute times."""

    def at(self, time_s: float, order: int, callback: Callable[[Event], None]) -> Event:
        """Call ``callback(event)`` at ``time_s`` (not before now), among simultaneous events by ``order`` (``order_of``).
        Returns the event, so that a caller can tell the one it still waits for from one it gave up."""
        event = _Moment(self, callback)
        queue: list[Any] = self._queue
        heappush(queue, (time_s, order, next(self._eid), event))
        return event
