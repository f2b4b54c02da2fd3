"""What the engines' time is made of, from the steps in flight at equal distances in time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.spans import SpanEngine
from fineserve_sim.latency import Batch, StepModel
from fineserve_sim.latency.accounting import time_shares
from fineserve_sim.latency.cost import Source


class StepTimes:
    """Batches in flight of the engines that are there, noted at each ``sample``."""

    def __init__(self, engines: Callable[[], Iterable[Engine]]) -> None:
        self._engines = engines
        self._batches: dict[StepModel, list[Batch]] = defaultdict(list)

    @property
    def samples(self) -> int:
        """Steps noted."""
        return sum(map(len, self._batches.values()))

    def sample(self) -> None:
        """Note the step that each engine is in. Engines must be settled up to this moment."""
        for engine in self._engines():
            if engine.busy and isinstance(engine, SpanEngine):
                self._batches[engine.step].append(Batch(*engine.batch()))

    def shares(self) -> dict[str, dict[Source, float]]:
        """Fractions of the noted time by part of a step and source, summing to 1; empty before the first step."""
        total: dict[str, dict[Source, float]] = defaultdict(lambda: defaultdict(float))
        for step, batches in self._batches.items():
            weight = len(batches) / self.samples
            for part, shares in time_shares(step, batches).items():
                for source, share in shares.items():
                    total[part][source] += weight * share
        return {part: dict(shares) for part, shares in total.items()}
