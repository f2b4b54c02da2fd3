"""Which engine gets a new request: round robin, least loaded by KV demand, or Llumnix's freeness; and which running ones move.

KV demand counts what running requests hold and what queued ones will ask for: all of them, or the head of the queue
alone (``queued``).

    load     = (used + queued) / capacity                       the smallest wins
    freeness = (capacity - used - queued) / max(1, running)     the largest wins (Llumnix)

A dispatcher is offered engines, again when their load is another, and they are withdrawn when they take no more requests.

Llumnix's live migration moves the shortest running request of the fullest instance to the freest one. At each look the
instances with the lowest and the highest freeness are paired, then the next two, as long as the one is under ``out_blocks``
and the other above ``in_blocks``. The destination reserves memory when the move starts, the source gives its own back when it
ends: in a spike over the whole cluster there is nothing to gain.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from typing import Literal

from fineserve_sim.policy.commands import Migrate
from fineserve_sim.policy.interfaces import EngineLoad

Queued = Literal["all", "head"]
Rank = tuple[float, ...]


class Phase(Enum):
    """``LOADING``: its weights are on their way. ``SERVING``: takes requests. ``CHANGING``: stops to be regrouped.
    ``RESTORING``: serves while missing layers come back. ``DRAINING``: ends its requests, its instances already serve for
    themselves."""

    LOADING = auto()
    SERVING = auto()
    CHANGING = auto()
    RESTORING = auto()
    DRAINING = auto()


@dataclass(slots=True)
class GroupEngine:
    """An engine over ``instances`` by number, several as a pipeline in the order of its stages; ``load`` as last told."""

    id: int
    instances: tuple[int, ...]
    phase: Phase
    load: EngineLoad

    @property
    def takes_requests(self) -> bool:
        return self.phase is Phase.SERVING or self.phase is Phase.RESTORING


class RoundRobin:
    """One after the other, as a plain load balancer in front of independent engines does."""

    needs_loads = False

    def __init__(self) -> None:
        self._last = -1
        self._engines: list[int] = []  # ascending

    def offer(self, engine: GroupEngine) -> None:
        if engine.id not in self._engines:
            insort(self._engines, engine.id)

    def withdraw(self, engine: int) -> None:
        if engine in self._engines:
            self._engines.remove(engine)

    def choose(self) -> int | None:
        if not self._engines:
            return None
        after = bisect_right(self._engines, self._last)
        self._last = self._engines[after % len(self._engines)]
        return self._last


class Ranked:
    """The candidate of the lowest ``rank``; the lowest id among equals. Entries of a heap whose rank has changed are passed
    over when they come to the top: a choice costs O(log n) for each load told since the last one."""

    needs_loads = True

    def __init__(self, rank: Callable[[GroupEngine, Queued], Rank], queued: Queued = "all") -> None:
        self._rank, self._queued = rank, queued
        self._heap: list[tuple[Rank, int]] = []
        self._ranks: dict[int, Rank] = {}

    def offer(self, engine: GroupEngine) -> None:
        rank = self._rank(engine, self._queued)
        if self._ranks.get(engine.id) != rank:
            self._ranks[engine.id] = rank
            heappush(self._heap, (rank, engine.id))

    def withdraw(self, engine: int) -> None:
        self._ranks.pop(engine, None)

    def choose(self) -> int | None:
        heap = self._heap
        while heap and self._ranks.get(heap[0][1]) != heap[0][0]:
            heappop(heap)
        return heap[0][1] if heap else None


def least_loaded(engine: GroupEngine, queued: Queued) -> Rank:
    """The smallest KV demand relative to capacity."""
    load = engine.load
    return ((load.used_blocks + _queued_blocks(load, queued)) / max(1, load.capacity_blocks),)


def least_queued(engine: GroupEngine, queued: Queued) -> Rank:
    """The fewest queued blocks an instance, among the engines whose memory has room for their queue (all engines if none has).

    No system of the papers: it tells what KunServe loses by a dispatcher that sees memory and not the prefills that wait.
    """
    load = engine.load
    wanted = _queued_blocks(load, queued)
    roomless = load.used_blocks + wanted >= load.capacity_blocks
    return roomless, wanted / len(engine.instances), load.used_blocks / max(1, load.capacity_blocks)


def most_free(engine: GroupEngine, queued: Queued) -> Rank:
    """Llumnix: the largest freeness."""
    return (-freeness(engine.load, queued),)


def freeness(load: EngineLoad, queued: Queued = "head") -> float:
    """Free blocks a running request, in KV blocks; negative when the queue wants more than there is."""
    return (load.free_blocks - _queued_blocks(load, queued)) / (load.running or 1)


def _queued_blocks(load: EngineLoad, queued: Queued) -> int:
    return load.queued_blocks if queued == "all" else load.head_blocks


_RANKS = {"least_loaded": least_loaded, "least_queued": least_queued, "freeness": most_free}

DispatchPolicy = RoundRobin | Ranked
"""``needs_loads``: whether the choice depends on them. ``choose`` names the engine for the next request, or None."""


def dispatcher(policy: str, **options: Queued) -> DispatchPolicy:
    """By its name and options in a system's file."""
    return RoundRobin() if policy == "round_robin" else Ranked(_RANKS[policy], **options)


@dataclass(frozen=True, slots=True)
class LlumnixMigration:
    """``out_blocks`` and ``in_blocks`` are freeness thresholds in KV blocks a running request; a pair must straddle both."""

    out_blocks: float = 3.0
    in_blocks: float = 3.0

    def __post_init__(self) -> None:
        if self.in_blocks < self.out_blocks:
            limits = f"in_blocks {self.in_blocks:g} is below out_blocks {self.out_blocks:g}"
            raise ValueError(f"{limits}; requests would move in circles")

    def tick(self, engines: Iterable[GroupEngine]) -> list[Migrate]:
        """The moves to start now. ``engines`` are those without a move under way."""
        serving = [engine for engine in engines if engine.phase is Phase.SERVING]
        ranked = sorted(serving, key=lambda engine: (freeness(engine.load), engine.id))
        moves = []
        for source, destination in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if freeness(source.load) >= self.out_blocks or freeness(destination.load) <= self.in_blocks:
                break
            shortest = source.load.shortest
            if shortest is not None and source.load.shortest_blocks <= destination.load.free_blocks:
                moves.append(Migrate(shortest, source.id, destination.id))
        return moves
