"""An engine whose batches go through the stages of a pipeline.

Each stage is an instance with a contiguous range of layers, each lane one batch in flight. A batch is formed when its
first stage begins it, and leaves stage s at ``max(stage free, arrival from stage s - 1) + its time``; between stages its
activations cross a link. The time of a stage is the device time of the whole model times its share of layers, plus the
host's overhead; a host floor shrinks in the same proportion.

KV memory is counted in blocks of the whole model. A block takes bytes on every instance in proportion to its layers, so the
tightest instance bounds the engine.
"""

from __future__ import annotations

from typing import NamedTuple

from fineserve_sim.cluster.engine.base import BatchSums, EngineHost
from fineserve_sim.cluster.engine.batcher import Batcher
from fineserve_sim.cluster.engine.lookahead import Lookahead
from fineserve_sim.cluster.engine.queue import Lane, PromptChunk
from fineserve_sim.cluster.engine.seat import Seat
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.engine.tp_group import TpGroup
from fineserve_sim.policy.interfaces import EngineLoad

ACTIVATION, KV, WEIGHTS = 0, 1, 2
"""Priorities on links when transfers are coordinated."""


class PipelineEngine(Batcher):
    """``stages`` in order with their ``layout`` of layers. ``busy_s`` and ``working_s`` (stage seconds computed and seconds
    passed, both while requests wait) tell the bubbles."""

    def __init__(
        self,
        seat: Seat,
        host: EngineHost,
        stages: tuple[TpGroup, ...],
        layout: tuple[range, ...],
        *,
        shared_queue: bool,
        lookahead: Lookahead | None,
    ) -> None:
        super().__init__(seat, host, lanes=len(stages), shared_queue=shared_queue)
        self.stages = stages
        self.layout = layout
        self.busy_s = 0.0
        self.working_s = 0.0
        self._shared_queue = shared_queue
        self._pipelined = True
        self._lookahead = lookahead
        self.columns = tuple(stage.id for stage in stages)
        self.column = self.columns[0]
        self._pending = False
        self._computed_s = self._since_s = 0.0

    @property
    def busy(self) -> bool:
        return any(lane.launched for lane in self.lanes)

    def load(self, *, shortest: bool = False) -> EngineLoad:
        load = super().load(shortest=shortest)
        kept_bytes = [(pool.held_blocks - load.used_blocks) * pool.block_bytes for pool in self.kv.pools]
        held_bytes = [stage.kv.used_bytes - kept for stage, kept in zip(self.stages, kept_bytes, strict=True)]
        return load._replace(fullest_bytes=max(held_bytes))

    @property
    def starting(self) -> bool:
        return any(lane.asked for lane in self.lanes)

    def _in_flight(self, lane: Lane) -> bool:
        return lane.launched

    def start(self, now: float) -> None:
        """Idle lanes with work ask for a turn."""
        if self.stopping or self.gone:
            return
        for lane in self.lanes:
            if not lane.asked and lane.has_work:
                lane.asked = True
                self.stages[0].request(Pass(self, lane))

    def replan(self, now: float) -> None:
        self.start(now)

    def cut(self) -> None:
        """Iterations are planned one by one."""

    def rescale(self, now: float, slowdown: float) -> None:
        raise AssertionError(f"engine {self.index}: a pipeline has its GPUs to itself")

    # --- one batch -------------------------------------------------------------------------------------------------

    def launch(self, lane: Lane, now: float) -> Batch | None:
        """The lane's next batch, or None: nothing can run."""
        lane.asked = False
        if self.stopping or self.gone:
            return None
        self._form(lane, now)
        if not lane.decodes.size and not lane.chunks:
            self._unblock(lane, now)
        if not lane.decodes.size and not lane.chunks:
            self._host.touch(self)
            if not self.has_work:
                self._host.rested(self, now)
            return None
        lane.asked = lane.launched = True
        self._account(now)
        self._host.launched(self, lane, now, sure=True)
        sums = self.batch_of(lane)
        return Batch(lane, sums[0] + sums[2], self.stage_s(sums))

    def stage_s(self, sums: BatchSums) -> tuple[float, ...]:
        """Seconds of a batch in each stage: every stage has the host time of a step, the rest is split by layers."""
        whole_s = self.step.step_s(*sums)
        if len(self.layout) == 1:
            return (whole_s,)  # the same bits as on one instance without stages
        overhead_s = self.step.overhead_s
        layers = self.stages[0].sizes.layers
        return tuple(overhead_s + (whole_s - overhead_s) * len(own) / layers for own in self.layout)

    def _account(self, now: float) -> None:
        """Take up the time since the last batch began, if requests waited then."""
        computed_s = sum([stage.busy_s for stage in self.stages])
        if self._pending:
            self.busy_s += computed_s - self._computed_s
            self.working_s += now - self._since_s
        self._pending = self.waiting > 0
        self._computed_s, self._since_s = computed_s, now

    def computed(self, stage: int, batch: Batch, now: float) -> None:
        """A batch has been computed in one of the stages."""
        if self._host.logs:
            self._host.computed(self, batch.lane, now - batch.stage_s[stage], now, stage)

    def _prompt_chunks(self, lane: Lane) -> list[PromptChunk]:
        if self._lookahead is None:
            return super()._prompt_chunks(lane)
        planned = self._lookahead.form(lane.queue, self)
        return super()._prompt_chunks(lane) if planned is None else planned

    def _forget_plan(self) -> None:
        if self._lookahead is not None:
            self._lookahead.forget()

    def _to_decode(self, lane: Lane, sequence: SequenceState) -> None:
        (min(self.lanes, key=lambda lane: lane.size) if self._shared_queue else lane).join_next(sequence)

    def _unblock(self, lane: Lane, now: float) -> None:
        """Partial prefills that hold the memory between them, and nothing under way that would free some: the latest
        gives way. In an engine that closes even the last one does, for others compete for the memory."""
        least = 1 if self.closing else 2
        while not lane.chunks and self._stuck and len(self.partial_prefills()) >= least:
            self.preempt_latest_prefill(now)
            self._preempted = False
            queue = lane.queue
            lane.chunks = self._prompt_chunks(lane) if queue.waiting or queue.prefilling else []

    @property
    def _stuck(self) -> bool:
        return not (self.busy or self.stalled or any(lane.size for lane in self.lanes))

    def finish(self, lane: Lane, now: float) -> None:
        """A batch has left the last stage."""
        lane.asked = lane.launched = False
        freed = self._complete(lane, 1, now)
        if not self.stopping:
            self.start(now)
            if freed:
                self._host.memory_freed(self, now)
        elif not self.busy:
            self._host.stopped(self, now)


class Batch(NamedTuple):
    """A lane's batch of so many tokens on its way, with its seconds in each stage."""

    lane: Lane
    tokens: int
    stage_s: tuple[float, ...]


class Pass:
    """A turn of a batch in one stage; in the first stage it is formed when its turn comes."""

    __slots__ = ("_batch", "_engine", "_lane", "_stage")

    def __init__(self, engine: PipelineEngine, lane: Lane, stage: int = 0, batch: Batch | None = None) -> None:
        self._engine, self._lane, self._stage, self._batch = engine, lane, stage, batch

    def begin(self, now: float) -> float | None:
        engine = self._engine
        if engine.gone:
            return None
        if self._batch is None:
            self._batch = engine.launch(self._lane, now)
        if self._batch is None:
            return None
        return self._batch.stage_s[self._stage]

    def end(self, now: float) -> None:
        engine, batch = self._engine, self._batch
        assert batch is not None
        if engine.gone:
            return
        engine.computed(self._stage, batch, now)
        after = self._stage + 1
        if after == len(engine.stages):
            engine.finish(self._lane, now)
            return
        here, there = engine.stages[self._stage], engine.stages[after]
        follow = Pass(engine, self._lane, after, batch)
        message_bytes = batch.tokens * here.sizes.hidden_bytes
        here.link_to(there).send(message_bytes, ACTIVATION, None, lambda _: there.request(follow))
