"""Engines that share a GPU slow one another down.

Processor sharing (systems.md 1.3): with compute shares ``uc`` and bandwidth shares ``um`` of the busy engines' solo
iterations, everybody on the GPU runs ``max(1, sum uc, sum um)`` times slower. A share belongs to a batch composition; it
changes when a request joins, leaves or changes phase, or when the engine idles. An engine over several GPUs keeps the pace of
its slowest one.
"""

from __future__ import annotations

from collections.abc import Sequence


class Contention:
    """Shares of every engine, and the slowdowns that follow. ``gpus_of[e]`` are the GPUs of engine ``e``."""

    def __init__(self, gpus_of: Sequence[tuple[int, ...]]) -> None:
        self._gpus_of: dict[int, tuple[int, ...]] = {}
        self._engines_on: dict[int, list[int]] = {}
        self._compute: dict[int, float] = {}
        self._bandwidth: dict[int, float] = {}
        self._of_gpu: dict[int, float] = {}
        self.slowdowns: dict[int, float] = {}
        self.neighbours: dict[int, tuple[int, ...]] = {}
        for engine, gpus in enumerate(gpus_of):
            self._settle_on(engine, gpus)
        for engine in self._gpus_of:
            self._meet_neighbours(engine)

    def gpus_of(self, engine: int) -> tuple[int, ...]:
        """The GPUs of an engine that is here; none of another."""
        return self._gpus_of.get(engine, ())

    def join(self, engine: int, gpus: tuple[int, ...]) -> None:
        """An idle engine comes to these GPUs. Ids only ever grow. Costs what is there, not all GPUs."""
        self._settle_on(engine, gpus)
        self._meet_neighbours(engine)
        for other in self.neighbours[engine]:
            self._meet_neighbours(other)

    def leave(self, engine: int) -> None:
        """An idle engine goes."""
        for gpu in self._gpus_of.pop(engine):
            self._engines_on[gpu].remove(engine)
        del self._compute[engine], self._bandwidth[engine], self.slowdowns[engine]
        for other in self.neighbours.pop(engine):
            self._meet_neighbours(other)

    def _settle_on(self, engine: int, gpus: tuple[int, ...]) -> None:
        self._gpus_of[engine] = gpus
        self._compute[engine] = self._bandwidth[engine] = 0.0
        for gpu in gpus:
            self._engines_on.setdefault(gpu, []).append(engine)
            self._of_gpu.setdefault(gpu, 1.0)
        self.slowdowns[engine] = self._slowdown(engine)

    def _meet_neighbours(self, engine: int) -> None:
        here = {other for gpu in self._gpus_of[engine] for other in self._engines_on[gpu]}
        self.neighbours[engine] = tuple(sorted(here - {engine}))

    def set_shares(self, engine: int, compute: float, bandwidth: float) -> list[int]:
        """An engine's batch composition changed. Returns the other engines whose slowdown changed with it, by id."""
        self._compute[engine] = compute
        self._bandwidth[engine] = bandwidth
        for gpu in self._gpus_of[engine]:
            self._of_gpu[gpu] = self._gpu_slowdown(gpu)
        self.slowdowns[engine] = self._slowdown(engine)
        changed = []
        for other in self.neighbours[engine]:
            slowdown = self._slowdown(other)
            if slowdown != self.slowdowns[other]:
                self.slowdowns[other] = slowdown
                changed.append(other)
        return changed

    def _slowdown(self, engine: int) -> float:
        gpus = self._gpus_of[engine]
        return self._of_gpu[gpus[0]] if len(gpus) == 1 else max(self._of_gpu[gpu] for gpu in gpus)

    def _gpu_slowdown(self, gpu: int) -> float:
        # Summed anew in the order of ids: a running sum would drift, and depend on the order of its updates.
        compute = bandwidth = 0.0
        for engine in self._engines_on[gpu]:
            compute += self._compute[engine]
            bandwidth += self._bandwidth[engine]
        return max(1.0, compute, bandwidth)
