"""Engines whose KV memory is one: what one takes, the others no longer have.

Inside a span an engine takes blocks at its iteration boundaries without an event. Two facts keep that exact. Boundaries
are settled in the order of their times over all engines of the domain, before anyone looks at the memory. And a span is
only as long as its blocks are sure: those of all spans together fit, whatever the order. An engine with pools of its
own is a domain by itself: nobody else looks at its memory, and counting its blocks is enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from typing import Protocol

from fineserve_sim.cluster.engine import Engine, Growth
from fineserve_sim.cluster.kv import CountedBlocks
from fineserve_sim.cluster.lone_engine import LoneEngine
from fineserve_sim.cluster.sequence import DecodeSet, SequenceState
from fineserve_sim.policy.interfaces import KVMemory, TimedKVManager


class MemoryDomain(Protocol):
    """Engines whose KV memory is one."""

    engines: tuple[Engine, ...]

    def settle(self, now: float, order: int) -> None:
        """Pass every boundary before (``now``, ``order``) and take its blocks, in the order of time, then engine."""
        ...

    def steps_that_fit(self, engine: Engine, decodes: DecodeSet, most: int) -> int:
        """The longest span, 1 to ``most`` iterations, whose blocks are sure beside the spans of the others. The engine is
        promised them."""
        ...

    def promises_hold(self, taker: Engine) -> bool:
        """What the other engines' spans will take still fits after ``taker`` took blocks outside a span."""
        ...

    def check(self) -> None: ...


class PrivateDomain:
    """One engine over private pools."""

    def __init__(self, engine: Engine, memories: Sequence[KVMemory]) -> None:
        assert isinstance(engine.kv, CountedBlocks)
        self.engines: tuple[Engine, ...] = (engine,)
        self._engine = engine
        self._kv = engine.kv
        self._memories = tuple(memories)

    def settle(self, now: float, order: int) -> None:
        engine = self._engine
        if isinstance(engine, LoneEngine):
            engine.catch_up(now, order)
        elif engine.next_boundary_s <= now and not self._kv.take(engine.count_boundaries(now, order)):
            raise AssertionError(f"engine {engine.index}: no memory inside a span")

    def steps_that_fit(self, engine: Engine, decodes: DecodeSet, most: int) -> int:
        free = self._kv.free_blocks()
        if decodes.blocks_ahead(most - 1) <= free:
            return most
        return max(1, bisect_left(range(1, most + 1), True, key=lambda steps: decodes.blocks_ahead(steps - 1) > free))

    def promises_hold(self, taker: Engine) -> bool:
        return True

    def check(self) -> None:
        for memory in self._memories:
            memory.check()


class SharedDomain:
    """A connected set of engines over shared memories."""

    def __init__(self, engines: Sequence[Engine], memories: Sequence[KVMemory]) -> None:
        self.engines = tuple(engines)
        self._kv = {engine.index: engine.kv for engine in self.engines}
        self._memories = tuple(memories)
        self._clocks = tuple(memory for memory in memories if isinstance(memory, TimedKVManager))

    def settle(self, now: float, order: int) -> None:
        for clock in self._clocks:
            clock.advance(now)
        growths: list[Growth] = []
        for engine in self.engines:
            if engine.next_boundary_s <= now:
                growths += engine.pass_boundaries(now, order)
        if len(growths) > 1:
            growths = _in_turn(growths)
        for _, index, sequences in growths:
            self._grow(index, sequences)

    def _grow(self, index: int, sequences: Collection[SequenceState]) -> None:
        if not self._kv[index].grow_each(sequences):
            raise AssertionError(f"engine {index}: no memory inside a span")

    def steps_that_fit(self, engine: Engine, decodes: DecodeSet, most: int) -> int:
        engine.promised_blocks = decodes.blocks_ahead(most - 1)
        if self._promises_fit():
            return most

        def too_long(steps: int) -> bool:
            engine.promised_blocks = decodes.blocks_ahead(steps - 1)
            return not self._promises_fit()

        self._recount(engine)
        steps = max(1, bisect_left(range(1, most + 1), True, key=too_long))
        engine.promised_blocks = decodes.blocks_ahead(steps - 1)
        return steps

    def promises_hold(self, taker: Engine) -> bool:
        if self._promises_fit():
            return True
        self._recount(taker)
        return self._promises_fit()

    def check(self) -> None:
        for memory in self._memories:
            memory.check()

    def _recount(self, engine: Engine) -> None:
        for other in self.engines:
            if other is not engine:
                other.recount_promise()

    def _promises_fit(self) -> bool:
        demands = {engine.index: engine.promised_blocks for engine in self.engines}
        for memory in self._memories:  # noqa: SIM110 - half the time of a generator
            if not memory.fits(demands):
                return False
        return True


def domains_of(
    engines: Sequence[Engine], gpus_of: Sequence[tuple[int, ...]], memories: Mapping[int, KVMemory]
) -> list[MemoryDomain]:
    """Engines that share a memory, directly or through a TP group, form one domain; private pools keep them apart.

    ``gpus_of`` are the GPUs of each engine, ``memories`` the KV memory of each GPU.
    """
    domains: list[MemoryDomain] = []
    groups: list[tuple[set[int], list[Engine]]] = []
    for engine, own in zip(engines, gpus_of, strict=True):
        if isinstance(engine.kv, CountedBlocks):
            domains.append(PrivateDomain(engine, [memories[gpu] for gpu in own]))
            continue
        gpus, members = set(own), [engine]
        for group in [group for group in groups if group[0] & gpus]:
            groups.remove(group)
            gpus |= group[0]
            members += group[1]
        groups.append((gpus, members))
    for gpus, members in groups:
        members.sort(key=lambda engine: engine.index)
        domains.append(SharedDomain(members, [memories[gpu] for gpu in sorted(gpus)]))
    return domains


def _in_turn(growths: list[Growth]) -> list[Growth]:
    """By time, then engine; one engine's growths in a row come to one."""
    growths.sort(key=itemgetter(0, 1))
    turns: list[Growth] = []
    last = -1
    together: list[SequenceState] = []
    for end_s, index, sequences in growths:
        if index == last:
            together += sequences
        else:
            last, together = index, [*sequences]
            turns.append((end_s, index, together))
    return turns
