"""One engine: continuous batching at iteration granularity, as vLLM does it (systems.md 1.3).

An iteration gives every decode one token, then fills the token budget with prompt chunks, oldest first. Memory is paged;
when a decode finds no block, the latest-arrived running request is preempted and recomputed later.

**Spans.** While the batch only decodes and nothing else happens, consecutive iterations are alike: they are planned as one
span with one event at its end. ``_ends`` are the end times of its iterations, summed in the same order as one by one.
The boundaries inside a span are *settled* when somebody looks (``settle``): tokens counted, KV blocks taken, in the order
of their times. Whatever could change the next iteration (an arrival, a neighbour's new composition, memory that becomes scarce
or free) *cuts* the span after the iteration in flight, and planning starts again there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.kv import EngineKV
from fineserve_sim.cluster.scenario import EngineSettings
from fineserve_sim.cluster.sequence import DecodeSet, SequenceState
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.interfaces import EngineState
from fineserve_sim.policy.memory.preemption import arrival_order, preemption_victim

if TYPE_CHECKING:
    from fineserve_sim.cluster.cluster import Cluster
    from fineserve_sim.cluster.wakeups import Wakeups

MAX_SPAN = 4096
"""Longest span in iterations: bounds the arrays of an engine whose neighbours never speak."""

SHARED_SPAN = 24
"""Longest span on a shared GPU: a neighbour will soon change the pace, and the end times must be computed again."""


NEVER = float("inf")

Growth = tuple[float, int, Collection[SequenceState]]
"""At this time, sequences of the engine with this id take a block each."""


class Engine:
    """The batch of one model instance and its place in time.

    ``max_tokens`` bounds prompt and output of a sequence together; ``slowdown`` is the present contention factor;
    ``end_s`` is the end of the present span, ``next_boundary_s`` the next boundary to settle inside it; ``promised_blocks`` is
    at least what those ahead in it will take. ``wakeups`` call ``on_start`` and ``on_step_end``.
    """

    def __init__(
        self,
        index: int,
        step: StepModel,
        kv: EngineKV,
        max_tokens: int,
        shares_gpu: bool,
        settings: EngineSettings,
        wakeups: Wakeups,
        cluster: Cluster,
    ) -> None:
        self.index = index
        self.kv = kv
        self.max_tokens = max_tokens
        self.slowdown = 1.0
        self._iterations = 0
        self.waiting: deque[SequenceState] = deque()
        self.composition_changed = False
        self.promised_blocks = 0
        self.end_s = self.next_boundary_s = NEVER
        self._shares_gpu = shares_gpu
        self.step = step
        self._settings = settings
        self.wakeups = wakeups
        self._cluster = cluster
        self._decodes = DecodeSet(settings.block_tokens)
        self.prefilling: list[SequenceState] = []
        self._backlog_tokens = 0
        self._chunks: list[tuple[SequenceState, int]] = []
        self._ends: list[float] = []
        self._alone_s: list[float] = []  # what each iteration of a span would take without neighbours
        self._settled = 0
        self.starting = False
        self._preempting = False
        self._launched_s = -NEVER
        self.order = order_of(Kind.STEP_END, index)
        self.start_order = order_of(Kind.START, index)
        wakeups.join(self)

    # --- what others see -------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """An iteration is in flight."""
        return bool(self._ends)

    @property
    def iterations(self) -> int:
        """Iterations done, up to the last settled boundary."""
        return self._iterations + (self._settled if self._ends else 0)

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self._decodes.size + len(self.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self._decodes.size or self.prefilling or self.waiting)

    def state(self) -> EngineState:
        """What a scheduler sees. Requests that were dispatched and have not started yet count as running."""
        promised = self.running + len(self.waiting)
        return EngineState(
            running=promised,
            decoding=self._decodes.size,
            prefill_tokens=self._backlog_tokens,
            free_slots=max(0, self._settings.max_sequences - promised),
            free_kv_tokens=self.kv.free_tokens(),
            slowdown=self.slowdown,
        )

    # --- what others do --------------------------------------------------------------------------------------------

    def accept(self, sequence: SequenceState) -> None:
        """A dispatched request joins the engine's queue; it starts at the next iteration. It ends at ``max_tokens`` at the
        latest, as vLLM's requests do at max_model_len."""
        sequence.output_tokens = min(sequence.output_tokens, self.max_tokens - sequence.prompt_tokens)
        self.waiting.append(sequence)
        self._backlog_tokens += sequence.target_tokens

    def start(self, now: float) -> None:
        """If idle, plan an iteration at this moment, after everything else that happens in it."""
        if not self._ends and not self.starting:
            self.starting = True
            self._schedule_start(now)

    def rescale(self, now: float, slowdown: float) -> None:
        """The contention changes: what is left of the iteration in flight takes proportionally longer or shorter, and so do
        those behind it. The span's earlier boundaries must be settled."""
        if self._ends:
            end_s = self._ends[self._settled]
            since_s = max(now, self._launched_s)
            end_s = since_s + (end_s - since_s) * (slowdown / self.slowdown)
            behind = self._alone_s[self._settled + 1 : len(self._ends)]
            self._ends[self._settled :] = accumulate([alone_s * slowdown for alone_s in behind], initial=end_s)
            self._schedule_end()
        self.slowdown = slowdown

    def cut(self) -> None:
        """End the span after the iteration in flight. Its earlier boundaries must be settled."""
        if len(self._ends) > self._settled + 1:
            del self._ends[self._settled + 1 :]
            self.promised_blocks = 0
            self._schedule_end()

    def pass_boundaries(self, now: float, order: int) -> Sequence[Growth]:
        """Pass the boundaries inside the span that come before (``now``, ``order``): every decode has a token more at each.
        Returns where new blocks are due; the domain takes them. There must be a boundary left in the span."""
        settled = self._settled
        return self._decodes.pass_boundaries(self._ends[settled : self._advance_to(now, order)], self.index)

    def count_boundaries(self, now: float, order: int) -> int:
        """As ``pass_boundaries``, where blocks are counted: how many are due in all."""
        settled = self._settled
        boundaries = self._advance_to(now, order) - settled
        blocks = self._decodes.blocks_ahead(boundaries)
        self._decodes.advance(boundaries)
        return blocks

    def _advance_to(self, now: float, order: int) -> int:
        """Settle the boundaries that come before (``now``, ``order``). Returns how many iterations of the span are done."""
        ends = self._ends
        last = len(ends) - 1
        find = bisect_right if self.order < order else bisect_left
        self._settled = settled = find(ends, now, self._settled, last)
        self.next_boundary_s = ends[settled] if settled < last else NEVER
        return settled

    def latest_prefill_arrival(self) -> tuple[float, int]:
        """Arrival and index of the partial prefill that arrived last; there must be one."""
        return arrival_order(preemption_victim(self.prefilling))

    def preempt_latest_prefill(self) -> None:
        """Give up that prefill: its memory unblocks others."""
        self._preempt(preemption_victim(self.prefilling))

    def abandon(self) -> list[SequenceState]:
        """Give up everything at once: the engine is taken away. Returns its requests, oldest first, which hold no memory any
        more. Boundaries must be settled."""
        for sequence in [*self._decodes, *self.prefilling]:
            self._preempt(sequence)
        lost = sorted(self.waiting, key=arrival_order)
        self.waiting.clear()
        self._backlog_tokens = 0
        self._chunks, self._ends = [], []
        self.end_s = self.next_boundary_s = NEVER
        self.starting = False
        return lost

    def recount_promise(self) -> None:
        """Lower ``promised_blocks`` to what the boundaries still ahead in the present span will take."""
        ahead = len(self._ends) - 1 - self._settled
        self.promised_blocks = self._decodes.blocks_ahead(ahead) if ahead > 0 else 0

    # --- events ----------------------------------------------------------------------------------------------------

    def on_start(self, now: float) -> None:
        """The start that was asked for comes."""
        if not self.starting:
            return  # the engine was taken away
        if not self._ends:
            self._cluster.settle(self, now, self.start_order)
        self._begin(now)

    def _begin(self, now: float) -> None:
        self.starting = False
        if not self._ends:
            self._plan(now)

    def on_step_end(self, now: float) -> None:
        """The span ends, at ``end_s``."""
        self._cluster.settle(self, now, self.order)
        self._end_span(now)

    def _end_span(self, now: float) -> None:
        """The last iteration of the span ends; all boundaries inside it must be settled."""
        self._ends = []
        self.end_s = self.next_boundary_s = NEVER
        self._cluster.computed(self, self._launched_s, now)
        self._complete(now)
        self._plan(now)

    # --- one iteration ---------------------------------------------------------------------------------------------

    def _plan(self, now: float) -> None:
        """Form the next batch and put it in flight, or fall idle."""
        self._cluster.consult(self, now)
        self._preempting = False
        self._grow_decodes(now)
        self._chunks = self._fill_budget() if self.waiting or self.prefilling else []
        if self._decodes.size or self._chunks:
            self._launch(now)
        else:
            self._rest(now)

    def _grow_decodes(self, now: float) -> None:
        """A KV slot for each decode's next token, preempting the latest-arrived running request while there is none."""
        growing = self._decodes.needing_block()
        if not growing or self.kv.grow_each(growing):
            return
        while growing and not self.kv.grow_each(growing):
            self._preempt(preemption_victim((*self._decodes, *self.prefilling)))
        self._cluster.memory_freed(self, now)

    def _fill_budget(self) -> list[tuple[SequenceState, int]]:
        """Prompt chunks for this iteration: what the budget leaves beside the decodes, partial prefills first."""
        left = self._settings.token_budget - self._decodes.size
        chunks: list[tuple[SequenceState, int]] = []
        for sequence in self.prefilling:
            chunk = min(left, sequence.target_tokens - sequence.cached_tokens)
            if chunk <= 0 or not self.kv.grow(sequence, sequence.cached_tokens + chunk):
                return chunks
            chunks.append((sequence, chunk))
            left -= chunk
        while left > 0 and self.waiting and not self._preempting and self.running < self._settings.max_sequences:
            sequence = self.waiting[0]
            # A preempted request comes back only when all of it fits; else two of them could evict each other for ever.
            if sequence.preempted and self.kv.free_tokens() < self._return_tokens(sequence):
                break
            if sequence.prefix is not None:
                self._reuse_prefix(sequence)
            chunk = min(left, sequence.target_tokens - sequence.cached_tokens)
            if not self.kv.grow(sequence, sequence.cached_tokens + chunk):
                self._forget_prefix(sequence)
                break
            self.prefilling.append(self.waiting.popleft())
            self.composition_changed = True
            chunks.append((sequence, chunk))
            left -= chunk
        return chunks

    def _reuse_prefix(self, sequence: SequenceState) -> None:
        """Its prefill begins behind what is cached of its prefix."""
        sequence.cached_tokens = self.kv.reuse(sequence)
        self._backlog_tokens -= sequence.cached_tokens

    def _forget_prefix(self, sequence: SequenceState) -> None:
        """It cannot start yet: cached blocks are no use to it, and may be to others."""
        if sequence.cached_tokens:
            self._backlog_tokens += sequence.cached_tokens
            self.kv.release(sequence)
            sequence.cached_tokens = 0

    def _return_tokens(self, sequence: SequenceState) -> int:
        """Free memory that brings a preempted request back: all that it must recompute, and a block to go on with."""
        return min(sequence.target_tokens + self._settings.block_tokens, self.kv.capacity_tokens())

    def _launch(self, now: float) -> None:
        new_pace = self._shares_gpu and (self.composition_changed or self._settings.contention == "step")
        self.composition_changed = False
        alone_s = 0.0
        if new_pace or self._chunks:
            batch = self.batch()
            alone_s = self.step.step_s(*batch)
            if new_pace:
                self._cluster.set_shares(self, now, *self.step.shares(*batch, alone_s))
        self._settled = 0
        self.promised_blocks = 0
        if self.kv.timed:
            now += self.kv.exposed_s()
        self._launched_s = now
        self._ends = [now + alone_s * self.slowdown] if self._chunks else self._span_ends(now)
        self._schedule_end()
        self._cluster.launched(self, sure=len(self._ends) > 1)

    def _span_ends(self, now: float) -> list[float]:
        """End times of as many decode iterations as may go as one span."""
        if not self._cluster.merging or self._preempting or self._cluster.must_ask(self):
            return self._ends_of(now, 1)
        most = min(self._decodes.steps_to_finish(), SHARED_SPAN if self._shares_gpu else MAX_SPAN)
        ends = self._ends_of(now, most if most == 1 else self._cluster.steps_that_fit(self, self._decodes, most))
        ask_again_s = self._cluster.ask_again_s(self)
        if ends[-1] > ask_again_s:
            del ends[bisect_left(ends, ask_again_s) + 1 :]
        return ends

    def _ends_of(self, now: float, steps: int) -> list[float]:
        decodes = self._decodes
        span = (now, decodes.size, decodes.context_tokens, steps, self.slowdown)
        if not self._shares_gpu:
            return self.step.decode_ends_s(*span)
        ends, self._alone_s = self.step.decode_span_s(*span)
        return ends

    def batch(self) -> tuple[int, int, int, int, int, int]:
        """The running sums that the latency model asks for (see ``StepModel.step_s``)."""
        decodes = self._decodes.size
        tokens = pairs = context = ending = 0
        for sequence, chunk in self._chunks:
            prefix = sequence.cached_tokens
            tokens += chunk
            pairs += chunk * prefix + chunk * (chunk + 1) // 2
            context += prefix
            ending += prefix + chunk == sequence.target_tokens
        return decodes, self._decodes.context_tokens, tokens, pairs, context, decodes + ending

    def _schedule_start(self, now: float) -> None:
        self.wakeups.start(self, now)

    def _schedule_end(self) -> None:
        """The span has got another end."""
        self.end_s = self._ends[-1]
        self.next_boundary_s = self._ends[self._settled] if len(self._ends) > self._settled + 1 else NEVER
        self.wakeups.moved()

    def in_flight(self) -> tuple[int, int, int]:
        """Iterations of the span, and decodes and prompt tokens of its last one."""
        return self._settled + 1, self._decodes.size, sum(chunk for _, chunk in self._chunks)

    def _rest(self, now: float) -> None:
        """Nothing to run: idle, or stalled for memory."""
        if self.composition_changed:
            self.composition_changed = False
            if self._shares_gpu:
                self._cluster.set_shares(self, now, 0.0, 0.0)
        if self.has_work:
            self._cluster.stalled(self, now)
        else:
            self._cluster.rested(self, now)

    def _complete(self, now: float) -> None:
        """The iteration ends at ``now``: tokens come out, sequences finish or go on to decode."""
        self._decodes.advance()
        self._iterations += self._settled + 1
        finished = self._decodes.pop_finished()
        if self._chunks:
            self._cluster.progressed(self)
        for sequence, chunk in self._chunks:
            self._backlog_tokens -= chunk
            sequence.cached_tokens += chunk
            if sequence.cached_tokens == sequence.target_tokens:
                self._emit_first(sequence, now, finished)
        if finished:
            self._retire(finished, now)
            self.composition_changed = True
            self._cluster.memory_freed(self, now)

    def _retire(self, finished: list[SequenceState], now: float) -> None:
        for sequence in finished:
            self.kv.release(sequence)
            self._cluster.finished(sequence, now)

    def _emit_first(self, sequence: SequenceState, now: float, finished: list[SequenceState]) -> None:
        """A prefill is done: it yields a token (the first one, or the next after a recomputation)."""
        self.prefilling.remove(sequence)
        self.composition_changed = True
        if sequence.prefix is not None:
            self.kv.keep(sequence)
        sequence.generated_tokens += 1
        self._cluster.emitted(sequence, now)
        if sequence.generated_tokens == sequence.output_tokens:
            finished.append(sequence)
        else:
            self._decodes.join(sequence)

    def _preempt(self, sequence: SequenceState) -> None:
        """Recompute later: free the blocks, go to the front of the queue with the generated tokens as part of the prompt."""
        if sequence in self._decodes:
            self._decodes.preempt(sequence)
            self._backlog_tokens += sequence.target_tokens
        else:
            self.prefilling.remove(sequence)
            self._backlog_tokens += sequence.cached_tokens
        self.kv.release(sequence)
        sequence.cached_tokens = 0
        sequence.preempted = True
        self.waiting.appendleft(sequence)
        self.composition_changed = True
        self._preempting = True
        self._cluster.preempted(self, sequence)
