"""What wakes the engines of a GPU: the starts they ask for, and the ends of their spans.

A neighbour's new composition moves the ends of all spans on its GPU, and most ends move again before they come. So the clock's
queue holds no event for each of them, only one for the first: when an event is over, the first end of all gets an event if it
comes before the one that is set. An event whose span has come to end later calls nobody; the first end is looked for again.
"""

from __future__ import annotations

from simpy.events import Event

from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.engine.base import NEVER
from fineserve_sim.cluster.engine.spans import SpanEngine


class Wakeups:
    """The events of some engines. Which engines share one object changes no result, but those should that
    move one another's ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._engines: list[SpanEngine] = []  # by id
        self._set: list[tuple[float, SpanEngine]] = []  # the step ends in the clock's queue, the next one last
        self._calling = False

    def join(self, engine: SpanEngine) -> None:
        """An engine with a higher id than those before."""
        self._engines.append(engine)

    def leave(self, engine: SpanEngine) -> None:
        """An idle engine goes."""
        self._engines.remove(engine)

    def start(self, engine: SpanEngine, now: float) -> None:
        """Call ``engine.on_start`` at this moment, after everything else that happens in it."""
        self._clock.at(now, engine.start_order, lambda _: self._start(engine, now))

    def moved(self) -> None:
        """A span has got another end."""
        if not self._calling:  # else more of them may move
            self._set_next()

    def _start(self, engine: SpanEngine, now: float) -> None:
        self._calling = True
        engine.on_start(now)
        self._calling = False
        self._set_next()

    def _on_step_end(self, _: Event) -> None:
        end_s, engine = self._set.pop()
        if engine.end_s == end_s:
            self._calling = True
            engine.on_step_end(end_s)
            self._calling = False
        self._set_next()

    def _set_next(self) -> None:
        """See to it that an event comes at the first end of a span."""
        first, first_s = None, NEVER
        for engine in self._engines:
            if engine.end_s < first_s:
                first, first_s = engine, engine.end_s
        if first is None:
            return
        if self._set:
            set_s, waits = self._set[-1]
            if set_s < first_s or (set_s == first_s and waits.order <= first.order):
                return
        self._set.append((first_s, first))
        self._clock.at(first_s, first.order, self._on_step_end)
