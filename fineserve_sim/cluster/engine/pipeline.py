"""An engine whose batches go through the stages of a pipeline.

Each stage is an instance with a contiguous range of layers, each lane one batch in flight. A batch is formed when its
first stage begins it, and leaves stage s at ``max(stage free, arrival from stage s - 1) + its time``; between stages its
activations cross a link. The time of a stage is the device time of the whole model on its GPUs times its share of layers, plus
the host's overhead; a host floor shrinks in the same proportion.

KV memory is counted in blocks of the whole model. A block takes bytes on every instance in proportion to its layers, so the
tightest instance bounds the engine.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

from fineserve_sim.cluster.engine.base import BatchSums, EngineHost, Seat
from fineserve_sim.cluster.engine.batcher import Batcher
from fineserve_sim.cluster.engine.sequence import Lane, PromptChunk, Queue, SequenceState
from fineserve_sim.cluster.engine.tp_group import TpGroup, Turn
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.groups.microbatch import Chunk, ChunkCost, LookaheadMode, Microbatch, lookahead, tokens_of
from fineserve_sim.policy.interfaces import EngineLoad

ACTIVATION, KV, WEIGHTS = 0, 1, 2
"""Priorities on links when transfers are coordinated."""


class Lookahead(NamedTuple):
    """KunServe's lookahead (section 4.3): prompt chunks in parts of about ``min_tokens`` tokens or more, of equal ``cost``,
    planned over all that waits and fits in memory.

    The plan is handed out part by part, a part a batch, by request and tokens; memory is taken when a batch is formed, and the
    plan is made anew when that fails. With little work the token count decides, as the paper does outside of bursts.
    """

    min_tokens: int
    cost: ChunkCost
    mode: LookaheadMode


class Batch(NamedTuple):
    """A lane's batch of so many tokens on its way, with its seconds in each stage."""

    lane: Lane
    tokens: int
    stage_s: tuple[float, ...]


class PipelineEngine(Batcher):
    """``stages`` in order with their ``layout`` of layers, and the ``steps`` of the whole model on the GPUs of each. ``busy_s``
    and ``working_s`` (stage seconds computed and seconds passed, both while requests wait) tell the bubbles."""

    def __init__(
        self,
        seat: Seat,
        host: EngineHost,
        stages: tuple[TpGroup, ...],
        layout: tuple[range, ...],
        steps: tuple[StepModel, ...],
        *,
        shared_queue: bool,
        lookahead: Lookahead | None,
    ) -> None:
        super().__init__(seat, host, lanes=len(stages), shared_queue=shared_queue)
        self.stages = stages
        self.layout = layout
        self._steps = steps
        self._paces = tuple(dict.fromkeys(steps))
        self.busy_s = 0.0
        self.working_s = 0.0
        self._lookahead = lookahead
        self._plan: deque[Microbatch] = deque()
        self.columns = tuple(stage.id for stage in stages)
        self._pending: tuple[float, float] | None = None  # seconds computed and time when the last batch began

    def load(self, *, shortest: bool = False) -> EngineLoad:
        load = super().load(shortest=shortest)
        kept_bytes = [(pool.held_blocks - load.used_blocks) * pool.block_bytes for pool in self.kv.pools]
        held_bytes = [stage.kv.used_bytes - kept for stage, kept in zip(self.stages, kept_bytes, strict=True)]
        return load._replace(fullest_bytes=max(held_bytes))

    def start(self, now: float) -> None:
        """Idle lanes with work ask for a turn."""
        if self.stopping or self.gone:
            return
        for lane in self.lanes:
            if not (lane.asked or lane.launched) and lane.has_work:
                lane.asked = True
                self.stages[0].request(partial(self._launch, lane))

    def _launch(self, lane: Lane, now: float) -> Turn | None:
        """The lane's turn in the first stage: its next batch is formed, unless nothing can run."""
        lane.asked = False
        if self.stopping or self.gone:
            return None
        self._form(lane, now)
        self._unblock(lane, now)
        if not lane.decodes.size and not lane.chunks:
            self._host.touch(self)
            if not self.has_work:
                self._host.rested(self, now)
            return None
        lane.launched = True
        self._account(now)
        self._host.launched(self, lane, now, sure=True)
        sums = self.batch_of(lane)
        return self._compute(Batch(lane, sums[0] + sums[2], self._stage_s(sums)), 0, now)

    def _compute(self, batch: Batch, stage: int, now: float) -> Turn | None:
        """The turn of a batch in one of the stages."""
        return None if self.gone else (batch.stage_s[stage], partial(self._computed, batch, stage))

    def _computed(self, batch: Batch, stage: int, now: float) -> None:
        if self.gone:
            return
        if self._host.logs:
            self._host.computed(self, batch.lane, now - batch.stage_s[stage], now, 1, stage)
        after = stage + 1
        if after == len(self.stages):
            self._finish(batch.lane, now)
            return
        here, there = self.stages[stage], self.stages[after]
        message_bytes = batch.tokens * here.sizes.hidden_bytes
        follow = partial(self._compute, batch, after)
        here.link_to(there).send(message_bytes, ACTIVATION, None, lambda _: there.request(follow))

    def _finish(self, lane: Lane, now: float) -> None:
        """A batch has left the last stage."""
        freed = self._complete(lane, now)
        if not self.stopping:
            self.start(now)
            if freed:
                self._host.memory_freed(self, now)
        elif not self.busy:
            self._host.stopped(self, now)

    def _stage_s(self, sums: BatchSums) -> tuple[float, ...]:
        """Seconds of a batch in each stage: every stage has the host time of a step, the rest is split by layers."""
        if len(self.layout) == 1:
            return (self.step.step_s(*sums),)  # the same bits as on one instance without stages
        whole_s = {step: step.step_s(*sums) for step in self._paces}
        layers = self.stages[0].sizes.layers
        return tuple(
            step.overhead_s + (whole_s[step] - step.overhead_s) * len(own) / layers
            for step, own in zip(self._steps, self.layout, strict=True)
        )

    def _account(self, now: float) -> None:
        """Take up the time since the last batch began, if requests waited then."""
        computed_s = sum([stage.busy_s for stage in self.stages])
        if self._pending is not None:
            self.busy_s += computed_s - self._pending[0]
            self.working_s += now - self._pending[1]
        self._pending = (computed_s, now) if self.waiting else None

    def _prompt_chunks(self, lane: Lane) -> list[PromptChunk]:
        if self._lookahead is None:
            return super()._prompt_chunks(lane)
        if not self._plan:
            work = self._work(lane.queue)
            if tokens_of(work) < 2 * self._lookahead.min_tokens:
                return super()._prompt_chunks(lane)
            self._plan.extend(lookahead(work, *self._lookahead))
        return self._planned_chunks(self._plan.popleft(), lane)

    def _work(self, queue: Queue) -> list[Chunk]:
        """All prefills that go on or could start now, as far as memory goes."""
        work = []
        free_tokens = self.kv.free_tokens()
        for sequence in (*queue.prefilling, *queue.waiting):
            remaining = sequence.target_tokens - sequence.cached_tokens
            free_tokens -= remaining
            if free_tokens < 0:
                break
            if remaining:
                work.append(Chunk(sequence.index, sequence.cached_tokens, remaining))
        return work

    def _planned_chunks(self, part: Microbatch, lane: Lane) -> list[PromptChunk]:
        chunks: list[PromptChunk] = []
        queue = lane.queue
        prefilling = {sequence.index: sequence for sequence in queue.prefilling}
        for planned in part:
            chunk = None
            if sequence := prefilling.get(planned.request):
                if sequence.cached_tokens == planned.prefix:
                    chunk = self._take_chunk(sequence, planned.tokens)
            elif queue.waiting and queue.waiting[0].index == planned.request and self._may_start(lane):
                chunk = self._begin_prefill(queue, planned.tokens)
            if chunk is None:
                self._forget_plan()
                break
            chunks.append(chunk)
        return chunks

    def _forget_plan(self) -> None:
        self._plan.clear()

    def _to_decode(self, lane: Lane, sequence: SequenceState) -> None:
        (min(self.lanes, key=lambda lane: lane.size) if len(self.queues) == 1 else lane).joining.append(sequence)

    def _unblock(self, lane: Lane, now: float) -> None:
        """Partial prefills that hold the memory between them, and nothing under way that would free some: the latest
        gives way. In an engine that closes even the last one does, for others compete for the memory."""
        least = 1 if self.closing else 2
        while not (lane.chunks or self.busy or self.stalled or any(other.size for other in self.lanes)):
            if len(self.partial_prefills()) < least:
                return
            self.preempt_latest_prefill(now)
            self._preempted = False
            queue = lane.queue
            lane.chunks = self._prompt_chunks(lane) if queue.waiting or queue.prefilling else []
