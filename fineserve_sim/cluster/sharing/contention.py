"""Engines that share a GPU slow one another down.

Each GPU has a law (``fineserve_sim.latency.sharing``): from what the batches of its engines need, how many times longer each
one's step lasts than alone. A demand belongs to a batch composition; it changes when a request joins, leaves or changes phase,
or when the engine idles. An engine over several GPUs keeps the pace that it has on its slowest one.
"""

from __future__ import annotations

from collections.abc import Mapping

from fineserve_sim.latency.sharing import IDLE, Demand, SharingLaw


class Contention:
    """``demands`` by GPU and engine, as the GPU's law sees them, and the ``slowdowns`` that follow by engine, of those that are
    here. ``laws`` by GPU."""

    def __init__(self, laws: Mapping[int, SharingLaw]) -> None:
        self._laws = laws
        self._sm_share: dict[int, float] = {}
        self.demands: dict[int, dict[int, Demand]] = {gpu: {} for gpu in laws}
        self._paces: dict[int, dict[int, float]] = {gpu: {} for gpu in laws}
        self.gpus_of: dict[int, tuple[int, ...]] = {}
        self.slowdowns: dict[int, float] = {}
        self._neighbours: dict[int, tuple[int, ...]] = {}

    def join(self, engine: int, gpus: tuple[int, ...], sm_share: float = 1.0) -> None:
        """An idle engine comes to these GPUs, to take at most this part of the SMs. Ids only ever grow. Costs what is there,
        not all GPUs."""
        self.gpus_of[engine], self._sm_share[engine] = gpus, sm_share
        self._neighbours[engine] = ()
        self.set_demand(engine, IDLE)
        self._meet_neighbours(engine)
        for other in self._neighbours[engine]:
            self._meet_neighbours(other)

    def leave(self, engine: int) -> None:
        """An idle engine goes."""
        for gpu in self.gpus_of.pop(engine):
            del self.demands[gpu][engine], self._paces[gpu][engine]
        del self._sm_share[engine], self.slowdowns[engine]
        for other in self._neighbours.pop(engine):
            self._meet_neighbours(other)

    def contended(self, engine: int) -> bool:
        """Whether its pace may ever differ from that alone on the whole GPU."""
        return bool(self._neighbours[engine]) or self._sm_share[engine] < 1.0

    def _meet_neighbours(self, engine: int) -> None:
        here = {other for gpu in self.gpus_of[engine] for other in self.demands[gpu]}
        self._neighbours[engine] = tuple(sorted(here - {engine}))

    def set_demand(self, engine: int, need: Demand) -> list[int]:
        """An engine's batch composition changed. Returns the other engines whose slowdown changed with it, by id."""
        sm_share, news = self._sm_share[engine], False
        for gpu in self.gpus_of[engine]:
            law, here = self._laws[gpu], self.demands[gpu]
            seen = law.seen(need, sm_share)
            if seen != here.get(engine):
                here[engine], news = seen, True
                self._paces[gpu] = dict(zip(here, law.paces(tuple(here.values()))))  # noqa: B905 - half the time
        if not news:
            return []
        self.slowdowns[engine] = self._slowdown(engine)
        changed = []
        for other in self._neighbours[engine]:
            slowdown = self._slowdown(other)
            if slowdown != self.slowdowns[other]:
                self.slowdowns[other] = slowdown
                changed.append(other)
        return changed

    def _slowdown(self, engine: int) -> float:
        gpus = self.gpus_of[engine]
        return self._paces[gpus[0]][engine] if len(gpus) == 1 else max(self._paces[gpu][engine] for gpu in gpus)
