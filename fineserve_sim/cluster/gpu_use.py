"""How busy each GPU is and what keeps requests waiting on it, from looks spread evenly over time (``samples.py``).

Of all looks up to the last arrival: how often some engine computed there (all stages of a pipeline that computes), how much of
the GPU's compute units and memory bandwidth the steps in flight needed (their solo shares, over the slowdown of each engine),
how often requests waited for an engine there, and how often such an engine had no KV memory for the mean prompt of its model
beside a block for each running request, or no free slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from fineserve_traces import Totals

from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.pipeline import PipelineEngine
from fineserve_sim.cluster.engine.spans import SpanEngine
from fineserve_sim.cluster.host import Cluster
from fineserve_sim.cluster.scenario import GpuUse
from fineserve_sim.policy.interfaces import EngineState, Placement


class Looks(NamedTuple):
    """Until when a run is looked at, and the mean prompt of each model in tokens, by which memory is short."""

    until_s: float
    prompt_tokens: Mapping[str, float]


def looks_at(found: Totals, models: Sequence[str]) -> Looks:
    """Those at a run of requests to these models, of which ``found`` was found."""
    means = {
        name: float(found.prompt_tokens[at] / found.requests[at])
        for at, name in enumerate(models)
        if found.requests[at]
    }
    return Looks(found.last_s, means)


class GpuUses:
    """Looks at the engines of ``cluster``; those that stay are numbered as the instances of ``placement``. ``sums`` are over
    the ``looks``, by GPU."""

    def __init__(self, cluster: Cluster, placement: Placement, looks: Looks) -> None:
        self._cluster = cluster
        self._instances = placement.instances
        self._looks = looks
        self.looks = 0
        self.sums: dict[int, GpuUse] = {}

    def sample(self, now: float) -> None:
        """Look at every engine, unless it is too late to. They must be settled up to this moment."""
        if now > self._looks.until_s:
            return
        self.looks += 1
        shares: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        waiting: set[int] = set()
        short: dict[str, set[int]] = {"kv_short": set(), "slots_short": set()}
        for engine in self._cluster.engines.values():
            gpus = self._gpus_of(engine)
            if engine.busy:
                compute, bandwidth = (share / engine.slowdown for share in _shares(engine))
                for gpu in gpus:
                    shares[gpu] = (shares[gpu][0] + compute, shares[gpu][1] + bandwidth)
            if engine.waiting or self._cluster.controller.bound_to(engine.index):
                waiting.update(gpus)
                state = engine.state()
                if self._lacks_kv(engine, state):
                    short["kv_short"].update(gpus)
                if state.free_slots <= 0:
                    short["slots_short"].update(gpus)
        self._count(shares, {"waiting": waiting, **short})

    def _count(self, shares: Mapping[int, tuple[float, float]], seen: Mapping[str, set[int]]) -> None:
        for gpu, (compute, bandwidth) in shares.items():
            use = self._of(gpu)
            use.busy += 1
            use.compute += compute
            use.bandwidth += bandwidth
        for name, gpus in seen.items():
            for gpu in gpus:
                setattr(self._of(gpu), name, getattr(self._of(gpu), name) + 1)

    def _of(self, gpu: int) -> GpuUse:
        return self.sums.setdefault(gpu, GpuUse(gpu))

    def _gpus_of(self, engine: Engine) -> tuple[int, ...]:
        known = self._cluster.contention.gpus_of.get(engine.index)
        return known or tuple(gpu for column in engine.columns for gpu in self._instances[column].gpus)

    def _lacks_kv(self, engine: Engine, state: EngineState) -> bool:
        left = state.free_kv_tokens - engine.kv.block_tokens * engine.running
        return left < self._looks.prompt_tokens.get(engine.model, 0.0)


def fractions(sums: Mapping[int, GpuUse], looks: int) -> tuple[GpuUse, ...]:
    """One entry a GPU on which anything was seen, by id, of sums over so many ``looks``."""
    return tuple(
        GpuUse(gpu, *(getattr(use, each.name) / looks for each in fields(GpuUse)[1:]))
        for gpu, use in sorted(sums.items())
    )


def _shares(engine: Engine) -> tuple[float, float]:
    """Compute and bandwidth shares of what the engine has in flight, a stage's worth of them for a pipeline."""
    if isinstance(engine, SpanEngine):
        return engine.step.demand(*engine.batch())[:2]
    assert isinstance(engine, PipelineEngine)
    found = [engine.step.demand(*engine.batch_of(lane))[:2] for lane in engine.lanes if lane.launched]
    stages = len(engine.stages)
    return sum(compute for compute, _ in found) / stages, sum(bandwidth for _, bandwidth in found) / stages
