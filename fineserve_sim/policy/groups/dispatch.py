"""Dispatch of new requests to the engines of one model, and Llumnix's migration of running ones.

Both rank engines by their KV demand in blocks. Running requests hold ``used`` blocks; queued ones will ask for more.

    load     = (used + queued) / capacity or instances      the smallest wins
    freeness = (capacity - used - queued) / max(1, running) the largest wins (Llumnix)

``queued`` counts all queued requests, or the head of the queue alone: the papers leave it open.

A group controller offers an engine to the dispatcher whenever its load changes. It withdraws an engine that takes no
more requests.

Live migration moves the shortest running request of the fullest instance to the freest one. Each look pairs the
instances of lowest and highest freeness, then the next two. It stops at a pair that does not straddle ``out_blocks``
and ``in_blocks``. The destination reserves memory when the move starts; the source frees its own when the move ends. So
a spike over the whole cluster leaves nothing to gain.
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
Per = Literal["capacity", "instance"]
Rank = tuple[float, ...]


class Phase(Enum):
    """The life of an engine.

    * ``LOADING``: its weights are on their way.
    * ``SERVING``: it takes requests.
    * ``CHANGING``: it stops, to merge with others.
    * ``RESTORING``: it takes requests while missing layers come back.
    * ``DRAINING``: it ends its requests, while its instances already serve alone.
    """

    LOADING = auto()
    SERVING = auto()
    CHANGING = auto()
    RESTORING = auto()
    DRAINING = auto()


@dataclass(slots=True)
class GroupEngine:
    """An engine over one instance or more, which then are the stages of a pipeline, in order.

    ``load`` is the last reported load, plus the requests dispatched since. ``holds_tokens`` are the tokens that its memory can
    hold.
    """

    id: int
    instances: tuple[int, ...]
    phase: Phase
    load: EngineLoad
    holds_tokens: int

    @property
    def takes_requests(self) -> bool:
        return self.phase is Phase.SERVING or self.phase is Phase.RESTORING

    def promised(self, tokens: int, block_tokens: int) -> EngineLoad:
        """Its load with one more prompt of so many tokens in its queue."""
        blocks = -(-tokens // block_tokens) + 1
        queued_blocks, head_blocks = self.load.queued_blocks + blocks, self.load.head_blocks or blocks
        return self.load._replace(queued_blocks=queued_blocks, head_blocks=head_blocks)


class RoundRobin:
    """Engines in turn, as a plain load balancer in front of independent engines does."""

    needs_loads = False

    def __init__(self) -> None:
        self._last = -1  # the engine chosen last; the next one is the first above it
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
    """The engine of lowest rank; the lowest id among equals.

    A choice costs O(log n) for each load told since the last choice.
    """

    needs_loads = True

    def __init__(self, rank: Callable[[GroupEngine, Queued], Rank], queued: Queued = "all") -> None:
        self._rank, self._queued = rank, queued
        # Ranks that changed stay in the heap until they come to the top: an entry counts if ``_ranks`` agrees with it.
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


def least_loaded_instance(engine: GroupEngine, queued: Queued) -> Rank:
    """The smallest KV demand an instance, however much memory a drop has given it."""
    return ((engine.load.used_blocks + _queued_blocks(engine.load, queued)) / len(engine.instances),)


def least_queued(engine: GroupEngine, queued: Queued) -> Rank:
    """The fewest queued blocks an instance, among the engines whose memory has room for their queue (all engines if none has).

    No paper has it. It shows what KunServe loses by a dispatcher that sees memory and not the prefills that wait.
    """
    load = engine.load
    wanted = _queued_blocks(load, queued)
    roomless = load.used_blocks + wanted >= load.capacity_blocks
    return roomless, wanted / len(engine.instances), load.used_blocks / max(1, load.capacity_blocks)


def most_free(engine: GroupEngine, queued: Queued) -> Rank:
    """Llumnix: the largest freeness."""
    return (-freeness(engine.load, queued),)


def freeness(load: EngineLoad, queued: Queued = "head") -> float:
    """Free KV blocks a running request; negative when the queue wants more than there is."""
    return (load.free_blocks - _queued_blocks(load, queued)) / (load.running or 1)


def _queued_blocks(load: EngineLoad, queued: Queued) -> int:
    return load.queued_blocks if queued == "all" else load.head_blocks


_RANKS = {"least_loaded": least_loaded, "least_queued": least_queued, "freeness": most_free}

DispatchPolicy = RoundRobin | Ranked
"""``needs_loads``: whether the choice depends on loads. ``choose`` names the engine for the next request, or None."""


def dispatcher(policy: str, *, queued: Queued = "all", per: Per = "instance") -> DispatchPolicy:
    """The dispatch policy of this name, with the options of a system's file."""
    if policy == "round_robin":
        return RoundRobin()
    by_instance = policy == "least_loaded" and per == "instance"
    return Ranked(least_loaded_instance if by_instance else _RANKS[policy], queued)


@dataclass(frozen=True, slots=True)
class LlumnixMigration:
    """Moves requests from an instance below ``out_blocks`` to one above ``in_blocks``.

    Both are thresholds of freeness, in free KV blocks a running request.
    """

    out_blocks: float = 3.0
    in_blocks: float = 3.0

    def __post_init__(self) -> None:
        if self.in_blocks < self.out_blocks:
            limits = f"in_blocks {self.in_blocks:g} is below out_blocks {self.out_blocks:g}"
            raise ValueError(f"{limits}; requests would move in circles")

    def tick(self, engines: Iterable[GroupEngine]) -> list[Migrate]:
        """The moves to start now, among ``engines`` that have no move under way."""
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
