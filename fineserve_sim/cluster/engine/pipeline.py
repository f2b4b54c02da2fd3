"""The executor of an engine whose batches go through the stages of a pipeline.

Each stage is an instance with a contiguous range of layers; each lane is one batch in flight. The engine forms a batch when
its first stage begins it. The batch leaves stage s at ``max(stage free, arrival from stage s - 1) + its time``. Between stages
its activations cross a link. A stage takes its share of layers of the whole model's device time on its GPUs, and the host's
overhead on top, all of it. A host floor shrinks in the same proportion.

KV memory is counted in blocks of the whole model. A block takes bytes on every instance in proportion to its layers, so the
tightest instance bounds the engine.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from fineserve_sim.cluster.engine.links import ACTIVATION
from fineserve_sim.cluster.engine.loop import Engine, Executor
from fineserve_sim.cluster.engine.sequence import Lane
from fineserve_sim.cluster.engine.state import BatchSums
from fineserve_sim.cluster.engine.tp_group import TpGroup, Turn
from fineserve_sim.latency import StepModel


class Batch(NamedTuple):
    """A lane's batch of so many tokens on its way, with its seconds in each stage."""

    lane: Lane
    tokens: int
    stage_s: tuple[float, ...]


class Pipeline(Executor):
    """``stages`` in order with their ``layout`` of layers, and the ``steps`` of the whole model on the GPUs of each.

    ``busy_s`` and ``working_s`` (stage seconds computed and seconds passed, both while requests wait) tell the bubbles.
    """

    def __init__(
        self, engine: Engine, stages: tuple[TpGroup, ...], layout: tuple[range, ...], steps: tuple[StepModel, ...]
    ) -> None:
        super().__init__(engine)
        engine.stages, engine.layout = stages, layout
        engine.columns = tuple(stage.id for stage in stages)
        engine.consults = False
        self.stages, self._steps, self._paces = stages, steps, tuple(dict.fromkeys(steps))
        self.busy_s = self.working_s = 0.0
        self._pending: tuple[float, float] | None = None  # seconds computed and time when the last batch began

    def start(self, now: float) -> None:
        engine = self.engine
        if engine.stopping or engine.gone:
            return
        for lane in engine.lanes:
            if not (lane.asked or lane.launched) and lane.has_work:
                lane.asked = True
                self.stages[0].request(partial(self._begin, lane))

    def _begin(self, lane: Lane, now: float) -> Turn | None:
        """The lane's turn in the first stage, unless there is nothing to compute."""
        engine = self.engine
        lane.asked = False
        if not (engine.stopping or engine.gone):
            engine.turn(lane, now)
        if not lane.launched:
            return None
        sums = engine.batch_of(lane)
        return self._compute(Batch(lane, sums[0] + sums[2], self._stage_s(sums)), 0, now)

    def launch(self, lane: Lane, now: float) -> None:
        lane.launched = True
        self._account(now)
        self.engine.host.launched(self.engine, lane, now, sure=True)

    def rest(self, lane: Lane, now: float) -> None:
        """Partial prefills may hold the memory between them: then the latest ones give way until the lane can go on."""
        engine = self.engine
        self._unblock(lane, now)
        if lane.chunks:
            self.launch(lane, now)
            return
        engine.host.touch(engine)
        if not engine.has_work:
            engine.host.rested(engine, now)

    def _unblock(self, lane: Lane, now: float) -> None:
        """Preempt partial prefills while nothing under way would free memory. In an engine that closes even the last partial
        prefill gives way, since other engines compete for the memory."""
        engine = self.engine
        least = 1 if engine.closing else 2
        while not (lane.chunks or engine.busy or engine.stalled or any(other.size for other in engine.lanes)):
            if len(engine.partial_prefills()) < least:
                return
            engine.preempt_latest_prefill(now)
            engine.preempted = False
            lane.chunks = engine.batching.prompt_chunks(lane)

    def _compute(self, batch: Batch, stage: int, now: float) -> Turn | None:
        """The turn of a batch in one of the stages."""
        return None if self.engine.gone else (batch.stage_s[stage], partial(self._computed, batch, stage))

    def _computed(self, batch: Batch, stage: int, now: float) -> None:
        engine = self.engine
        if engine.gone:
            return
        if engine.host.logs:
            engine.host.computed(engine, batch.lane, now - batch.stage_s[stage], now, 1, stage)
        after = stage + 1
        if after == len(self.stages):
            self._finish(batch.lane, now)
            return
        here, there = self.stages[stage], self.stages[after]
        message_bytes = batch.tokens * here.sizes.hidden_bytes
        follow = partial(self._compute, batch, after)
        link = engine.host.links.between(here.gpus, there.gpus)
        link.send(message_bytes, ACTIVATION, None, lambda _: there.request(follow))

    def _finish(self, lane: Lane, now: float) -> None:
        """A batch has left the last stage."""
        engine = self.engine
        freed = engine.complete(lane, now)
        if not engine.stopping:
            self.start(now)
            if freed:
                engine.host.memory_freed(engine, now)
        elif not engine.busy:
            engine.host.stopped(engine, now)

    def _stage_s(self, sums: BatchSums) -> tuple[float, ...]:
        """Seconds of a batch in each stage: every stage has the host time of a step, the rest is split by layers."""
        if len(self.stages) == 1:
            return (self.engine.step.step_s(*sums),)  # the same bits as on one instance without stages
        whole_s = {step: step.step_s(*sums) for step in self._paces}
        layers = self.stages[0].sizes.layers
        return tuple(
            step.stage_host_s + (whole_s[step] - step.stage_host_s) * len(own) / layers
            for step, own in zip(self._steps, self.engine.layout, strict=True)
        )

    def _account(self, now: float) -> None:
        """Take up the time since the last batch began, if requests waited then."""
        computed_s = sum([stage.busy_s for stage in self.stages])
        if self._pending is not None:
            self.busy_s += computed_s - self._pending[0]
            self.working_s += now - self._pending[1]
        self._pending = (computed_s, now) if self.engine.waiting else None
