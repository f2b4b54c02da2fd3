"""What the engines' time is made of, from the steps in flight at samples spread evenly over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.latency import Batch, StepModel
from fineserve_sim.latency.accounting import time_shares
from fineserve_sim.latency.cost import Source

Note = tuple[int, int, Batch]
"""A step in flight: the number of the sample, the engine and its batch."""


class StepTimes:
    """``notes``: the steps in flight of the engines that are there, at each ``sample``; ``steps``: the engines' step times.
    With ``most_notes`` they are weighed whenever there are so many, and forgotten; ``weighed`` counts those."""

    def __init__(self, engines: Callable[[], Iterable[Engine]]) -> None:
        self._engines = engines
        self._samples = 0
        self._forgotten: dict[str, dict[Source, float]] = {}
        self.most_notes = 0
        self.weighed = 0
        self.notes: list[Note] = []
        self.steps: dict[int, StepModel] = {}

    def sample(self) -> None:
        """Note the step that each engine is in. Engines must be settled up to this moment."""
        for engine in self._engines():
            for lane in engine.lanes:
                if lane.launched:
                    self.notes.append((self._samples, engine.index, Batch(*engine.batch_of(lane))))
                    self.steps[engine.index] = engine.step
        self._samples += 1
        if self.most_notes and len(self.notes) >= self.most_notes:
            self._forgotten = self.shares()
            self.weighed += len(self.notes)
            self.notes.clear()
            self.steps.clear()

    def shares(self) -> dict[str, dict[Source, float]]:
        """Fractions of the time of all notes, those that are forgotten included; empty where nothing is noted."""
        own = shares_of(self.notes, self.steps)
        return _pooled((self.weighed, self._forgotten), (len(self.notes), own)) if self.weighed else own


def shares_of(notes: Sequence[Note], steps: Mapping[int, StepModel]) -> dict[str, dict[Source, float]]:
    """Fractions of the noted time by part of a step and source, summing to 1; empty where nothing is noted."""
    batches_of: dict[StepModel, list[Batch]] = defaultdict(list)
    for _, engine, batch in notes:
        batches_of[steps[engine]].append(batch)
    total: dict[str, dict[Source, float]] = defaultdict(lambda: defaultdict(float))
    for step, batches in batches_of.items():
        weight = len(batches) / len(notes)
        for part, shares in time_shares(step, batches).items():
            for source, share in shares.items():
                total[part][source] += weight * share
    return {part: dict(shares) for part, shares in total.items()}


def _pooled(*lots: tuple[int, Mapping[str, Mapping[Source, float]]]) -> dict[str, dict[Source, float]]:
    """Shares of several lots of so many notes as those of all."""
    notes = sum(number for number, _ in lots)
    total: dict[str, dict[Source, float]] = defaultdict(lambda: defaultdict(float))
    for number, shares in lots:
        for part, sources in shares.items():
            for source, share in sources.items():
                total[part][source] += share * number / notes
    return {part: dict(shares) for part, shares in total.items()}
