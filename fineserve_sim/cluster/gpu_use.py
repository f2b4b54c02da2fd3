"""How busy each GPU is and what keeps requests waiting on it, from looks at equal distances in time.

Of all looks up to the last arrival: how often some engine computed there (all stages of a pipeline that computes), how
much of the GPU's compute units and memory bandwidth the steps in flight needed (their solo shares, over the slowdown of engines
that share the GPU), how often requests waited for an engine there, and how often such an engine had no KV memory for the mean
prompt of its model beside a block for each running request, or no free slot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.pipeline import PipelineEngine
from fineserve_sim.cluster.engine.spans import SpanEngine
from fineserve_sim.cluster.host import Cluster
from fineserve_sim.cluster.scenario import GpuUse
from fineserve_sim.policy.interfaces import EngineState, Placement


class GpuUses:
    """Looks at the engines of ``cluster``; those that stay are numbered as the instances of ``placement``."""

    def __init__(self, cluster: Cluster, placement: Placement, trace: Trace) -> None:
        self._cluster = cluster
        self._instances = placement.instances
        self._prompt_tokens = mean_prompts(trace)
        self._looks = 0
        self._sums: dict[int, GpuUse] = {}

    def sample(self) -> None:
        """Look at every engine. They must be settled up to this moment."""
        self._looks += 1
        shares: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        waiting: set[int] = set()
        short: dict[str, set[int]] = {"kv_short": set(), "slots_short": set()}
        for engine in self._cluster.engines.values():
            gpus = self._gpus_of(engine)
            if engine.busy:
                compute, bandwidth = _shares(engine)
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
            slowdown = max(1.0, compute, bandwidth)
            use.busy += 1
            use.compute += compute / slowdown
            use.bandwidth += bandwidth / slowdown
        for name, gpus in seen.items():
            for gpu in gpus:
                setattr(self._of(gpu), name, getattr(self._of(gpu), name) + 1)

    def _of(self, gpu: int) -> GpuUse:
        return self._sums.setdefault(gpu, GpuUse(gpu))

    def _gpus_of(self, engine: Engine) -> tuple[int, ...]:
        known = self._cluster.contention.gpus_of(engine.index)
        return known or tuple(gpu for column in engine.columns for gpu in self._instances[column].gpus)

    def _lacks_kv(self, engine: Engine, state: EngineState) -> bool:
        left = state.free_kv_tokens - engine.kv.block_tokens * engine.running
        return left < self._prompt_tokens.get(engine.model, 0.0)

    def fractions(self) -> tuple[GpuUse, ...]:
        """One entry a GPU on which anything was seen, by id."""
        return tuple(
            GpuUse(gpu, *(getattr(use, each.name) / self._looks for each in fields(GpuUse)[1:]))
            for gpu, use in sorted(self._sums.items())
        )


def _shares(engine: Engine) -> tuple[float, float]:
    """Compute and bandwidth shares of what the engine has in flight, a stage's worth of them for a pipeline."""
    if isinstance(engine, SpanEngine):
        return engine.step.shares(*engine.batch())
    assert isinstance(engine, PipelineEngine)
    found = [engine.step.shares(*engine.batch_of(lane)) for lane in engine.lanes if lane.launched]
    stages = len(engine.stages)
    return sum(compute for compute, _ in found) / stages, sum(bandwidth for _, bandwidth in found) / stages


def mean_prompts(trace: Trace) -> dict[str, float]:
    """Mean prompt tokens of each model that has requests."""
    counts = np.bincount(trace.model, minlength=len(trace.models))
    tokens = np.bincount(trace.model, weights=trace.prompt_tokens, minlength=len(trace.models))
    return {name: float(tokens[at] / counts[at]) for at, name in enumerate(trace.models) if counts[at]}
