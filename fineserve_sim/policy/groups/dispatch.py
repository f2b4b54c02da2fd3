"""Which engine gets a new request: round robin, least loaded by KV demand, or Llumnix's freeness.

KV demand counts what running requests hold and what queued ones will ask for: all of them, or the head of the queue
alone (``queued``).

    load     = (used + queued) / capacity                       the smallest wins
    freeness = (capacity - used - queued) / max(1, running)     the largest wins (Llumnix)

A dispatcher ranks its candidates as their loads are told, so that a choice costs what changed, not the size of the cluster.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from heapq import heappop, heappush
from typing import Literal, Protocol

from fineserve_sim.policy.interfaces import EngineLoad

Queued = Literal["all", "head"]
Rank = tuple[float, ...]


class DispatchPolicy(Protocol):
    """``needs_loads``: whether the choice depends on them."""

    needs_loads: bool

    def offer(self, engine: int, instances: int, load: EngineLoad) -> None:
        """The engine, over so many instances, may be chosen; again: its load is another now."""
        ...

    def withdraw(self, engine: int) -> None:
        """It may not (any more)."""
        ...

    def choose(self) -> int | None:
        """The engine for the next request; None when there is none to choose."""
        ...


class RoundRobin:
    """One after the other, as a plain load balancer in front of independent engines does."""

    needs_loads = False

    def __init__(self) -> None:
        self._last = -1
        self._engines: list[int] = []  # ascending

    def offer(self, engine: int, instances: int, load: EngineLoad) -> None:
        if engine not in self._engines:
            insort(self._engines, engine)

    def withdraw(self, engine: int) -> None:
        if engine in self._engines:
            self._engines.remove(engine)

    def choose(self) -> int | None:
        if not self._engines:
            return None
        after = bisect_right(self._engines, self._last)
        self._last = self._engines[after if after < len(self._engines) else 0]
        return self._last


class _Ranked(ABC):
    """The candidate of the lowest rank; the lowest id among equals. Entries of a heap whose rank has changed are passed over
    when they come to the top: a choice costs O(log n) for each load told since the last one."""

    needs_loads = True

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, int]] = []
        self._ranks: dict[int, Rank] = {}

    @abstractmethod
    def rank(self, instances: int, load: EngineLoad) -> Rank: ...

    def offer(self, engine: int, instances: int, load: EngineLoad) -> None:
        rank = self.rank(instances, load)
        if self._ranks.get(engine) != rank:
            self._ranks[engine] = rank
            heappush(self._heap, (rank, engine))

    def withdraw(self, engine: int) -> None:
        self._ranks.pop(engine, None)

    def choose(self) -> int | None:
        heap = self._heap
        while heap and self._ranks.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][1] if heap else None


class LeastLoaded(_Ranked):
    """The smallest KV demand relative to capacity."""

    def __init__(self, queued: Queued = "all") -> None:
        super().__init__()
        self._queued = queued

    def rank(self, instances: int, load: EngineLoad) -> Rank:
        return ((load.used_blocks + queued_blocks(load, self._queued)) / max(1, load.capacity_blocks),)


class LeastQueued(_Ranked):
    """The fewest queued blocks an instance, among the engines whose memory has room for their queue (all engines if none
    has).

    No system of the papers: it tells what KunServe loses by a dispatcher that sees memory and not the prefills that
    wait.
    """

    def rank(self, instances: int, load: EngineLoad) -> Rank:
        roomless = load.used_blocks + load.queued_blocks >= load.capacity_blocks
        return roomless, load.queued_blocks / instances, load.used_blocks / max(1, load.capacity_blocks)


class MostFree(_Ranked):
    """Llumnix: the largest freeness."""

    def __init__(self, queued: Queued = "head") -> None:
        super().__init__()
        self._queued = queued

    def rank(self, instances: int, load: EngineLoad) -> Rank:
        return (-freeness(load, self._queued),)


def queued_blocks(load: EngineLoad, queued: Queued) -> int:
    return load.queued_blocks if queued == "all" else load.head_blocks


def freeness(load: EngineLoad, queued: Queued = "head") -> float:
    """Free blocks a running request, in KV blocks; negative when the queue wants more than there is."""
    return (load.free_blocks - queued_blocks(load, queued)) / (load.running or 1)
