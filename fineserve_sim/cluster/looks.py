"""How busy each GPU is and what keeps requests waiting on it, from looks spread evenly over time (``samples.py``).

All looks up to the last arrival count:

* how often some engine computed there (a pipeline that computes does so on all its stages);
* how much of the GPU's compute units and memory bandwidth the steps in flight needed: their shares alone on the GPU, over the
  slowdown of each engine;
* how often requests waited for an engine there;
* how often such an engine was short of KV memory or of slots. It is short of memory when the mean prompt of its model does not
  fit beside a block for each running request.

``StepTimes`` divides the engines' time into parts, from the steps in flight at the same moments.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

from fineserve_traces import Totals

from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.host import Cluster
from fineserve_sim.cluster.scenario import GpuUse
from fineserve_sim.latency import Batch, StepModel
from fineserve_sim.latency.accounting import time_shares
from fineserve_sim.latency.cost import Source
from fineserve_sim.policy.interfaces import Placement

_COUNTED = [each.name for each in fields(GpuUse)[1:]]


class Looks(NamedTuple):
    """The last time at which a run is looked at, and the mean prompt of each model in tokens, which tells whether memory is
    short."""

    until_s: float
    prompt_tokens: Mapping[str, float]


def looks_at(found: Totals, models: Sequence[str]) -> Looks:
    """The looks at a run of requests to these models; ``found`` has the totals of the requests."""
    counted = zip(models, found.prompt_tokens, found.requests, strict=True)
    return Looks(found.last_s, {name: float(tokens / requests) for name, tokens, requests in counted if requests})


class GpuUses:
    """Looks at the engines of ``cluster``; engines that stay are numbered as the instances of ``placement``. ``sums`` are over
    the ``looks``, by GPU."""

    def __init__(self, cluster: Cluster, placement: Placement, looks: Looks) -> None:
        self._cluster = cluster
        self._instances = placement.instances
        self._looks = looks
        self.looks = 0
        self.until_s = looks.until_s
        self.sums: dict[int, GpuUse] = {}

    def sample(self, times: Sequence[float]) -> None:
        """Look at every engine at each of the times that is not too late; all of them look alike. Engines must be settled up to
        the first."""
        looks = sum(now <= self.until_s for now in times)
        if not looks:
            return
        self.looks += looks
        seen: dict[int, GpuUse] = {}
        for engine in self._cluster.engines.values():
            waits = engine.waiting or self._cluster.controller.bound_to(engine.index)
            found = {"busy": engine.busy, "waiting": waits}
            if waits:
                state, prompt_tokens = engine.state(), self._looks.prompt_tokens.get(engine.model, 0.0)
                left_tokens = state.free_kv_tokens - engine.kv.block_tokens * engine.running
                found |= {"kv_short": left_tokens < prompt_tokens, "slots_short": state.free_slots <= 0}
            if not any(found.values()):
                continue
            compute, bandwidth = (share / engine.slowdown for share in _shares(engine)) if engine.busy else (0.0, 0.0)
            known = self._cluster.contention.gpus_of.get(engine.index)
            for gpu in known or [gpu for column in engine.columns for gpu in self._instances[column].gpus]:
                use = seen.setdefault(gpu, GpuUse(gpu))
                use.compute += compute
                use.bandwidth += bandwidth
                for name in (name for name, so in found.items() if so):
                    setattr(use, name, 1.0)
        for gpu, use in seen.items():
            whole = self.sums.setdefault(gpu, GpuUse(gpu))
            for name in _COUNTED:
                setattr(whole, name, getattr(whole, name) + looks * getattr(use, name))


def fractions(sums: Mapping[int, GpuUse], looks: int) -> tuple[GpuUse, ...]:
    """One entry a GPU on which anything was seen, by id, of sums over so many ``looks``."""
    return tuple(GpuUse(gpu, *(getattr(use, name) / looks for name in _COUNTED)) for gpu, use in sorted(sums.items()))


def _shares(engine: Engine) -> tuple[float, float]:
    """Compute and bandwidth shares of the engine's batches in flight; for a pipeline, the mean over its stages."""
    found = [engine.step.demand(*engine.batch_of(lane))[:2] for lane in engine.lanes if lane.launched]
    stages = len(engine.columns)
    return sum(compute for compute, _ in found) / stages, sum(bandwidth for _, bandwidth in found) / stages


Note = tuple[int, int, Batch]
"""A step in flight: the number of the sample, the engine and its batch."""


class StepTimes:
    """``notes``: the steps in flight of the engines that are there, at each ``sample``; ``steps``: the engines' step times.
    With ``most_notes``, so many notes are reduced to their shares and forgotten; ``weighed`` counts the forgotten notes."""

    def __init__(self, engines: Callable[[], Iterable[Engine]]) -> None:
        self._engines = engines
        self._samples = 0
        self._forgotten: dict[str, dict[Source, float]] = {}
        self.most_notes = 0
        self.weighed = 0
        self.notes: list[Note] = []
        self.steps: dict[int, StepModel] = {}

    def sample(self, alike: int = 1) -> None:
        """Note the step that each engine is in. So many samples as ``alike`` are the same; of several no engine is in a step.
        Engines must be settled up to the first."""
        for engine in self._engines():
            for lane in engine.lanes:
                if lane.launched:
                    self.notes.append((self._samples, engine.index, Batch(*engine.batch_of(lane))))
                    self.steps[engine.index] = engine.step
        self._samples += alike
        if self.most_notes and len(self.notes) >= self.most_notes:
            self._forgotten = self.shares()
            self.weighed += len(self.notes)
            self.notes.clear()
            self.steps.clear()

    def shares(self) -> dict[str, dict[Source, float]]:
        """Fractions of the time of all notes, including the forgotten ones; empty where nothing is noted."""
        own = shares_of(self.notes, self.steps)
        return _pooled((self.weighed, self._forgotten), (len(self.notes), own)) if self.weighed else own


def shares_of(notes: Sequence[Note], steps: Mapping[int, StepModel]) -> dict[str, dict[Source, float]]:
    """Fractions of the noted time by part of a step and source, summing to 1; empty where nothing is noted."""
    batches_of: dict[StepModel, list[Batch]] = defaultdict(list)
    for _, engine, batch in notes:
        batches_of[steps[engine]].append(batch)
    return _pooled(*((len(batches), time_shares(step, batches)) for step, batches in batches_of.items()))


def _pooled(*lots: tuple[int, Mapping[str, Mapping[Source, float]]]) -> dict[str, dict[Source, float]]:
    """The shares over several lots of notes together; each lot is a number of notes and their shares."""
    notes = sum(number for number, _ in lots)
    total: dict[str, dict[Source, float]] = defaultdict(lambda: defaultdict(float))
    for number, shares in lots:
        for part, sources in shares.items():
            for source, share in sources.items():
                total[part][source] += number / notes * share
    return {part: dict(shares) for part, shares in total.items()}
