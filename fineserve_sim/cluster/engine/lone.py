"""An engine that nobody disturbs: alone on its GPUs, with pools of its own, and no scheduler that holds requests back.

What it does depends on its own requests only, and nobody depends on it. So its starts and step ends need no place in the
clock's queue: it is enough to go through them when somebody looks (``catch_up``), each request at its time. And as the
moment of the look is known then, one span reaches up to it, through the ends of sequences. Times, memory and their
order are those of ``SpanEngine``.
"""

from __future__ import annotations

from collections import deque

from fineserve_sim.cluster.engine.base import NEVER, EngineHost, Seat
from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.engine.spans import SpanEngine, Wakeups


class LoneEngine(SpanEngine):
    """``events`` counts the starts and span ends that did not go through the clock."""

    company = False

    def __init__(self, seat: Seat, host: EngineHost, wakeups: Wakeups) -> None:
        super().__init__(seat, host, wakeups, shares_gpu=False)
        assert isinstance(seat.kv, CountedBlocks)
        self.events = 0
        self._blocks = seat.kv
        self._inbox: deque[tuple[float, int, SequenceState]] = deque()
        self._start_s = self._until_s = NEVER

    def post(self, now: float, order: int, sequence: SequenceState) -> None:
        """A dispatched request: it is accepted at (``now``, ``order``), when somebody looks."""
        self._inbox.append((now, order, sequence))

    def catch_up(self, now: float, order: int) -> None:
        """Do everything that comes before (``now``, ``order``)."""
        while self._inbox and self._inbox[0][:2] < (now, order):
            arrival_s, arrival_order, sequence = self._inbox.popleft()
            self._run_until(arrival_s, arrival_order)
            self.accept(sequence)
            if self._lane.launched:
                self.cut()
            else:
                self.start(arrival_s)
        self._run_until(now, order)

    def _run_until(self, now: float, order: int) -> None:
        self._until_s = now
        lane = self._lane
        while True:
            if lane.asked and (self._start_s, self.start_order) < (now, order):
                self._plan(self._start_s)
            elif lane.launched and (self._ends[-1], self.order) < (now, order):
                end_s = self._ends[-1]
                self._pass_boundaries(end_s, self.order)
                self._end_span(end_s)
            else:
                break
            self.events += 1
        self._pass_boundaries(now, order)

    def _pass_boundaries(self, now: float, order: int) -> None:
        """Pass the boundaries inside the span that come before (``now``, ``order``), where sequences may end too."""
        if self.next_boundary_s > now:
            return
        decodes, passed = self._decodes, self._advance_to(now, order)
        done = 0
        while done < len(passed):
            boundaries = min(len(passed) - done, decodes.steps_to_finish())
            done += boundaries
            blocks = decodes.blocks_ahead(boundaries - 1)
            finished = decodes.advance(boundaries)
            if not self._blocks.take(blocks + len(decodes.needing_block())):
                raise AssertionError(f"engine {self.index}: no memory inside a span")
            self._retire(finished, passed[done - 1])

    def _span_ends(self, now: float) -> list[float]:
        """Where memory is sure, those of the iterations up to the moment that somebody looks at."""
        if not (self.wants_memory or self._preempted):
            start_s = now
            ends: list[float] = []
            for steps, decodes, context_tokens in self._decodes.phases():
                ends += self.step.decode_ends_s(start_s, decodes, context_tokens, steps, self.slowdown, self._until_s)
                start_s = ends[-1]
                if start_s > self._until_s:
                    break
            if self._decodes.blocks_ahead(len(ends) - 1) <= self._blocks.free_blocks():
                return ends
        return super()._span_ends(now)

    def _schedule_start(self, now: float) -> None:
        self._start_s = now

    def _schedule_end(self) -> None:
        self.next_boundary_s = self._ends[self._settled] if len(self._ends) > self._settled + 1 else NEVER
