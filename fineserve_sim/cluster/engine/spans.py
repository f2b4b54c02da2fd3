"""The executor of an engine whose batch runs at once on the GPUs of one instance, alone or beside neighbours.

**Spans.** While the batch only decodes and nothing else happens, consecutive iterations are alike. They are planned as one
span with one event at its end. ``_ends`` are the end times of its iterations, summed in the same order as one by one.
The boundaries inside a span are *settled* when the host looks (``settle``): tokens counted, KV blocks taken, in the order
of their times. An event that could change the next iteration *cuts* the span after the iteration in flight: an arrival, a
neighbour's new composition, memory that becomes scarce or free. Planning starts again there.

**Wakeups.** A neighbour's new composition moves the ends of all spans on its GPU, and most ends move again before they come.
So the clock's queue holds no event for each of them, only one for the first. When an event is over, the first end of all gets
an event if it comes before the one that is set. An event whose span has come to end later calls no engine; it looks for the
first end again.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import partial
from typing import Final

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.engine.loop import NEVER, Engine, Executor
from fineserve_sim.cluster.engine.sequence import Growth, Lane
from fineserve_sim.latency.sharing import IDLE

MAX_SPAN: Final = 4096
"""Longest span in iterations: bounds the arrays of an engine whose neighbours never speak."""

SHARED_SPAN: Final = 32
"""Longest span on a shared GPU after a neighbour changed the pace: it may soon do so again, and the end times must then be
computed anew. Twice as long for each span that goes undisturbed, up to ``LONGEST_SHARED_SPAN``, whose times are kept."""
LONGEST_SHARED_SPAN: Final = 256


class Spans(Executor):
    """``end_s`` is the end of the present span. ``promised_blocks`` is at least the number of blocks that its remaining
    boundaries will take."""

    def __init__(self, engine: Engine, wakeups: Wakeups, *, shares_gpu: bool) -> None:
        super().__init__(engine)
        self.kv = engine.kv
        self.wakeups = wakeups
        self.start_order = order_of(Kind.START, engine.index)
        self.end_s = NEVER
        self.promised_blocks = 0
        self._host, self._step, (self._lane,) = engine.host, engine.step, engine.lanes
        self._decodes = self._lane.decodes
        self._shares_gpu = shares_gpu
        self._each_step = engine.settings.contention == "step"
        self._reach = SHARED_SPAN if shares_gpu else MAX_SPAN  # the longest span now
        self._ends: list[float] = []
        self._alone_s: list[float] = []  # what each iteration of a span would take without neighbours
        self._settled = 0
        self._launched_s = -NEVER
        wakeups.join(self)

    def start(self, now: float) -> None:
        lane, engine = self._lane, self.engine
        if not (lane.launched or lane.asked or engine.stopping or engine.gone):
            lane.asked = True
            self._schedule_start(now)

    def replan(self, now: float) -> None:
        if self._lane.launched:
            self._host.settle_now(self.engine, now)
            self.cut()
        else:
            self.start(now)

    def rescale(self, now: float, slowdown: float) -> None:
        """The contention changes: the rest of the iteration in flight takes proportionally longer or shorter, and so do the
        iterations behind it. The span's earlier boundaries must be settled."""
        if self._lane.launched:
            ends, settled = self._ends, self._settled
            since_s = max(now, self._launched_s)
            end_s = since_s + (ends[settled] - since_s) * (slowdown / self.engine.slowdown)
            ends[settled] = end_s
            behind = self._alone_s[settled + 1 : len(ends)]
            ends[settled + 1 :] = [end_s := end_s + alone_s * slowdown for alone_s in behind]
            self._schedule_end()
            self._reach = SHARED_SPAN
        self.engine.slowdown = slowdown

    def cut(self) -> None:
        """End the span after the iteration in flight. Its earlier boundaries must be settled."""
        if len(self._ends) > self._settled + 1:
            del self._ends[self._settled + 1 :]
            self.promised_blocks = 0
            self._schedule_end()
            if self._shares_gpu:
                self._reach = SHARED_SPAN

    def pass_boundaries(self, now: float, order: int) -> list[Growth]:
        """Pass the boundaries inside the span that come before (``now``, ``order``): every decode has a token more at each.
        Returns where new blocks are due; the domain takes them. There must be a boundary left in the span."""
        return self._decodes.pass_boundaries(self._advance_to(now, order), self.engine.index)

    def count_boundaries(self, now: float, order: int) -> int:
        """As ``pass_boundaries``, where blocks are counted: how many are due in all."""
        boundaries = len(self._advance_to(now, order))
        blocks = self._decodes.blocks_ahead(boundaries)
        self._decodes.advance(boundaries)
        return blocks

    def _advance_to(self, now: float, order: int) -> list[float]:
        """Settle the boundaries inside the span that come before (``now``, ``order``). Returns their times."""
        ends, before = self._ends, self._settled
        last = len(ends) - 1
        find = bisect_right if self.order < order else bisect_left
        self._settled = settled = find(ends, now, before, last)
        self.next_boundary_s = ends[settled] if settled < last else NEVER
        return ends[before:settled]

    def recount_promise(self) -> None:
        """Lower ``promised_blocks`` to the blocks that the remaining boundaries of the present span will take."""
        ahead = len(self._ends) - 1 - self._settled
        self.promised_blocks = self._decodes.blocks_ahead(ahead) if ahead > 0 else 0

    def stop(self, now: float) -> None:
        self._lane.asked = False
        super().stop(now)

    def leave(self) -> None:
        self.wakeups.leave(self)
        self._lane.asked = self._lane.launched = False
        self.end_s = self.next_boundary_s = NEVER

    def on_start(self, now: float) -> None:
        """The start that was asked for comes, unless the engine was taken away."""
        if self._lane.asked:
            self._host.settle(self.engine, now, self.start_order)
            self.engine.turn(self._lane, now)

    def on_step_end(self, now: float) -> None:
        """The span ends, at ``end_s``."""
        self._host.settle(self.engine, now, self.order)
        self._end_span(now)

    def _end_span(self, now: float) -> None:
        """The last iteration of the span ends; all boundaries inside it must be settled."""
        if len(self._ends) == self._reach < LONGEST_SHARED_SPAN:
            self._reach *= 2
        self.end_s = self.next_boundary_s = NEVER
        engine = self.engine
        if self._host.logs:
            self._host.computed(engine, self._lane, self._launched_s, now, self._settled + 1, 0)
        if engine.complete(self._lane, now):
            self._host.memory_freed(engine, now)
        if engine.stopping:
            self._host.stopped(engine, now)
        else:
            engine.turn(self._lane, now)

    def launch(self, lane: Lane, now: float) -> None:
        engine, host = self.engine, self._host
        new_pace = self._shares_gpu and (engine.composition_changed or self._each_step)
        engine.composition_changed = False
        alone_s = 0.0
        if new_pace or lane.chunks:
            # Compiled, a call with *batch is slow.
            decodes, context, tokens, pairs, behind, sampled = engine.batch_of(lane)
            if new_pace:
                need = self._step.demand(decodes, context, tokens, pairs, behind, sampled)
                alone_s = need.step_s
                host.set_demand(engine, now, need)
            else:
                alone_s = self._step.step_s(decodes, context, tokens, pairs, behind, sampled)
        self._settled = 0
        self.promised_blocks = 0
        if self.kv.timed:
            now += self.kv.exposed_s()
        self._launched_s = now
        self._ends = [now + alone_s * engine.slowdown] if lane.chunks else self._span_ends(now)
        lane.launched = True
        self._schedule_end()
        if engine.consults or host.attentive:
            host.launched(engine, lane, now, sure=len(self._ends) > 1)

    def _span_ends(self, now: float) -> list[float]:
        """End times of as many decode iterations as may go as one span."""
        engine, host, decodes = self.engine, self._host, self._decodes
        most, ask_again_s = 1, host.ask_again_s(engine)
        if host.merging and ask_again_s > -NEVER and not (engine.preempted or engine.one_step or engine.swapped):
            most = min(decodes.steps_to_finish(), self._reach)
            if most > 1:
                most = host.steps_that_fit(engine, decodes, most)
        ends, self._alone_s = self._step.decode_span_s(
            now, decodes.size, decodes.attended_tokens, most, engine.slowdown
        )
        if ends[-1] > ask_again_s:
            del ends[bisect_left(ends, ask_again_s) + 1 :]
        return ends

    def _schedule_start(self, now: float) -> None:
        self.wakeups.start(self, now)

    def _schedule_end(self) -> None:
        """The span has got another end."""
        self.end_s = self._ends[-1]
        self.next_boundary_s = self._ends[self._settled] if len(self._ends) > self._settled + 1 else NEVER
        self.wakeups.moved()

    def rest(self, lane: Lane, now: float) -> None:
        """Idle, or stalled for memory."""
        engine, host = self.engine, self._host
        host.touch(engine)
        if engine.composition_changed:
            engine.composition_changed = False
            if self._shares_gpu:
                host.set_demand(engine, now, IDLE)
        if engine.stalled or engine.swapped:
            return  # memory or KV is on its way
        if lane.has_work:
            host.stalled(engine, now)
        else:
            host.rested(engine, now)


class Wakeups:
    """The events of some engines. Engines that move one another's ends should share one object. The grouping changes no
    result."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._spans: list[Spans] = []  # by id
        self._set: list[tuple[float, Spans]] = []  # the step ends in the clock's queue, the next one last
        self._calling = False

    def join(self, spans: Spans) -> None:
        """Add an engine, whose id is higher than all earlier ones."""
        self._spans.append(spans)

    def leave(self, spans: Spans) -> None:
        """An idle engine goes."""
        self._spans.remove(spans)

    def start(self, spans: Spans, now: float) -> None:
        """Call ``spans.on_start`` at this moment, after everything else that happens in it."""
        self._clock.at(now, spans.start_order, partial(self._start, spans))

    def moved(self) -> None:
        """A span has got another end."""
        if not self._calling:  # else more of them may move
            self._set_next()

    def _start(self, spans: Spans, now: float) -> None:
        self._calling = True
        spans.on_start(now)
        self._calling = False
        self._set_next()

    def _on_step_end(self, _: float) -> None:
        end_s, spans = self._set.pop()
        if spans.end_s == end_s:
            self._calling = True
            spans.on_step_end(end_s)
            self._calling = False
        self._set_next()

    def _set_next(self) -> None:
        """See to it that an event comes at the first end of a span."""
        first, first_s = None, NEVER
        for spans in self._spans:
            if spans.end_s < first_s:
                first, first_s = spans, spans.end_s
        if first is None:
            return
        if self._set:
            set_s, waits = self._set[-1]
            if set_s < first_s or (set_s == first_s and waits.order <= first.order):
                return
        self._set.append((first_s, first))
        self._clock.at(first_s, first.order, self._on_step_end)
