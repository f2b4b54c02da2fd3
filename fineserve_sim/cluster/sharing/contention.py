"""Engines that share a GPU slow one another down.

Each GPU has a law (``fineserve_sim.latency.sharing``). It takes the demands of the batches there, and tells how many times
longer each engine's step lasts than alone. A demand belongs to a batch composition; it changes when a request joins, leaves or
changes phase, or when the engine idles. An engine over several GPUs keeps the pace that it has on its slowest one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fineserve_sim.latency.sharing import IDLE, Demand, SharingLaw


@dataclass(slots=True, eq=False)
class _SharedGpu:
    """A GPU with its law. By engine, ``seen`` is the demand as the law sees it, and ``paces`` are the slowdowns that
    follow."""

    law: SharingLaw
    seen: dict[int, Any] = field(default_factory=dict)
    paces: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Place:
    """The GPUs of an engine, the part of the SMs that it may take there, and the other engines on any of its GPUs, by id."""

    gpus: tuple[_SharedGpu, ...]
    sm_share: float
    neighbours: tuple[int, ...] = ()

    def slowdown(self, engine: int) -> float:
        gpus = self.gpus
        return gpus[0].paces[engine] if len(gpus) == 1 else max(gpu.paces[engine] for gpu in gpus)


class Contention:
    """The ``slowdowns`` and the GPUs (``gpus_of``) of the present engines, by engine; ``on`` gives the engines of a GPU.
    ``laws`` by GPU."""

    def __init__(self, laws: Mapping[int, SharingLaw]) -> None:
        self._gpus = {gpu: _SharedGpu(law) for gpu, law in laws.items()}
        self._places: dict[int, _Place] = {}
        self.gpus_of: dict[int, tuple[int, ...]] = {}
        self.slowdowns: dict[int, float] = {}

    def on(self, gpu: int) -> Collection[int]:
        return self._gpus[gpu].seen.keys()

    def join(self, engine: int, gpus: tuple[int, ...], sm_share: float = 1.0) -> None:
        """An idle engine comes to these GPUs, to take at most this part of the SMs. Ids only ever grow. The cost grows with
        the engines on these GPUs, not with all GPUs."""
        self.gpus_of[engine] = gpus
        place = self._places[engine] = _Place(tuple(self._gpus[gpu] for gpu in gpus), sm_share)
        self.set_demand(engine, IDLE)
        self._meet_neighbours([engine])
        self._meet_neighbours(place.neighbours)

    def leave(self, engine: int) -> None:
        """An idle engine goes."""
        place = self._places.pop(engine)
        for gpu in place.gpus:
            del gpu.seen[engine], gpu.paces[engine]
        del self.gpus_of[engine], self.slowdowns[engine]
        self._meet_neighbours(place.neighbours)

    def contended(self, engine: int) -> bool:
        """Whether the engine's pace may ever differ from its pace alone on the whole GPU."""
        place = self._places[engine]
        return bool(place.neighbours) or place.sm_share < 1.0

    def _meet_neighbours(self, engines: Iterable[int]) -> None:
        for engine in engines:
            place = self._places[engine]
            place.neighbours = tuple(sorted({other for gpu in place.gpus for other in gpu.seen} - {engine}))

    def set_demand(self, engine: int, need: Demand) -> list[int]:
        """An engine's batch composition changed. Returns the other engines whose slowdown changed with it, by id."""
        place, news = self._places[engine], False
        for gpu in place.gpus:
            seen = gpu.law.seen(need, place.sm_share)
            if seen != gpu.seen.get(engine):
                gpu.seen[engine], news = seen, True
                gpu.paces = dict(zip(gpu.seen, gpu.law.paces(tuple(gpu.seen.values()))))  # noqa: B905 - half the time
        if not news:
            return []
        slowdowns, changed = self.slowdowns, []
        slowdowns[engine] = place.slowdown(engine)
        for other in place.neighbours:
            slowdown = self._places[other].slowdown(other)
            if slowdown != slowdowns[other]:
                slowdowns[other] = slowdown
                changed.append(other)
        return changed
