"""The executor of an engine that nothing disturbs: alone on its GPUs, with pools of its own, and no scheduler to ask.

Such an engine depends on its own requests only, and no other engine depends on it. So its starts and step ends need no place
in the clock's queue. It is enough to go through them when the host looks (``catch_up``), each request at its time. The moment
of the look is known then, so one span reaches up to it, through the ends of sequences. Times, memory and their order are as in
``Spans``.
"""

from __future__ import annotations

from collections import deque

from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.loop import NEVER, Engine
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.engine.spans import Spans, Wakeups


class Lone(Spans):
    """``_inbox``: requests with the time and order at which the engine accepts them."""

    def __init__(self, engine: Engine, wakeups: Wakeups) -> None:
        super().__init__(engine, wakeups, shares_gpu=False)
        assert isinstance(engine.kv, CountedBlocks)
        engine.consults = False
        self._blocks = engine.kv
        self._inbox: deque[tuple[float, int, SequenceState]] = deque()
        self._start_s = self._until_s = NEVER

    def post(self, now: float, order: int, sequence: SequenceState) -> None:
        """A dispatched request: the engine accepts it at (``now``, ``order``), when the host looks."""
        self._inbox.append((now, order, sequence))

    def catch_up(self, now: float, order: int) -> None:
        """Do everything that comes before (``now``, ``order``)."""
        while self._inbox:
            arrival_s, arrival_order, sequence = self._inbox[0]
            if arrival_s > now or (arrival_s == now and arrival_order >= order):
                break
            self._inbox.popleft()
            self._run_until(arrival_s, arrival_order)
            self.engine.accept(sequence)
            if self._lane.launched:
                self.cut()
            else:
                self.start(arrival_s)
        self._run_until(now, order)

    def _run_until(self, now: float, order: int) -> None:
        self._until_s = now
        lane = self._lane
        while True:
            if lane.asked:
                if self._start_s > now or (self._start_s == now and self.start_order >= order):
                    break
                self.engine.turn(lane, self._start_s)
            elif lane.launched:
                end_s = self._ends[-1]
                if end_s > now or (end_s == now and self.order >= order):
                    break
                if self.next_boundary_s <= end_s:
                    self._pass_boundaries(end_s, self.order)
                self._end_span(end_s)
            else:
                break
            self.events += 1
        if self.next_boundary_s <= now:
            self._pass_boundaries(now, order)

    def _pass_boundaries(self, now: float, order: int) -> None:
        """Pass the boundaries inside the span that come before (``now``, ``order``), where sequences may end too."""
        decodes, passed = self._decodes, self._advance_to(now, order)
        done = 0
        while done < len(passed):
            boundaries = min(len(passed) - done, decodes.steps_to_finish())
            done += boundaries
            blocks = decodes.blocks_ahead(boundaries - 1)
            finished = decodes.advance(boundaries)
            if not self._blocks.take(blocks + len(decodes.needing_block())):
                raise AssertionError(f"engine {self.engine.index}: no memory inside a span")
            if finished:
                self.engine.retire(finished, passed[done - 1])

    def _span_ends(self, now: float) -> list[float]:
        """End times up to the moment that the host looks at, where memory is sure; else as in ``Spans``."""
        engine = self.engine
        if not (engine.wants_memory or engine.preempted):
            start_s = now
            ends: list[float] = []
            for steps, decodes, context_tokens in self._decodes.phases():
                ends += self._step.decode_ends_s(
                    start_s, decodes, context_tokens, steps, engine.slowdown, self._until_s
                )
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
