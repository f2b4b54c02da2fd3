"""Engines that share one KV memory: a block that one engine takes is gone for the others.

Inside a span an engine takes blocks at its iteration boundaries without an event. Two facts keep that exact. Boundaries
are settled in the order of their times over all engines of the domain, before anything reads the memory. And a span is
only as long as its blocks are sure: the blocks of all spans together fit, in any order. An engine with pools of its
own is a domain by itself: no other engine looks at its memory, and counting its blocks is enough.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Hashable, Mapping, Sequence
from operator import itemgetter

from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.lone import Lone
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import Decodes, Growth
from fineserve_sim.cluster.engine.spans import Spans
from fineserve_sim.policy.interfaces import takes_time
from fineserve_sim.policy.memory.paged import GpuMemory, PrivatePools


class MemoryDomain:
    """A connected set of engines over shared memories. Pipelines over the same instances are one domain, too: they plan
    batches one by one, so nothing is promised to them, and the instances check their bytes."""

    def __init__(self, engines: Sequence[Engine], memories: Sequence[GpuMemory] = ()) -> None:
        self.engines = tuple(engines)
        self._memories = tuple(memories)
        self._spans = {engine.index: engine.executor for engine in engines if isinstance(engine.executor, Spans)}
        self._in_turn = tuple(spans for _, spans in sorted(self._spans.items()))
        self._managers = tuple(memory for memory in memories if not isinstance(memory, PrivatePools))
        self._clocks = tuple(memory for memory in self._managers if takes_time(memory))

    def settle(self, now: float, order: int) -> None:
        """Pass every boundary before (``now``, ``order``) and take its blocks, in the order of time, then engine."""
        for clock in self._clocks:
            clock.advance(now)
        growths: list[Growth] = []
        for spans in self._in_turn:
            if spans.next_boundary_s <= now:
                growths += spans.pass_boundaries(now, order)
        if growths:
            if growths[0][1] != growths[-1][1]:
                growths.sort(key=itemgetter(0))  # they are in the order of engines, and stay so within a moment
            self._grow(growths)

    def _grow(self, growths: list[Growth]) -> None:
        """Take the blocks of growths in their order; consecutive ones of one engine together."""
        place, end = 0, len(growths)
        while place < end:
            _, index, sequences = growths[place]
            place += 1
            if place < end and growths[place][1] == index:
                several = [*sequences]
                while place < end and growths[place][1] == index:
                    several += growths[place][2]
                    place += 1
                sequences = several
            if not self._spans[index].kv.grow_each(sequences):
                raise AssertionError(f"engine {index}: no memory inside a span")

    def steps_that_fit(self, engine: Engine, decodes: Decodes, most: int) -> int:
        """The longest span, 1 to ``most`` iterations, whose blocks are sure beside the spans of the others. The engine is
        promised them."""

        spans = self._spans[engine.index]

        def too_long(steps: int) -> bool:
            spans.promised_blocks = decodes.blocks_ahead(steps - 1)
            return not self._promises_fit()

        if too_long(most):
            self._recount(spans)
            most = 1 + bisect_left(range(2, most + 1), True, key=too_long)
            spans.promised_blocks = decodes.blocks_ahead(most - 1)
        return most

    def promises_hold(self, taker: Engine) -> bool:
        """Whether the blocks promised to the other engines' spans still fit after ``taker`` took blocks outside a span."""
        if self._promises_fit():
            return True
        self._recount(self._spans[taker.index])
        return self._promises_fit()

    def _recount(self, taker: Spans) -> None:
        for other in self._spans.values():
            if other is not taker:
                other.recount_promise()

    def _promises_fit(self) -> bool:
        demands = {index: spans.promised_blocks for index, spans in self._spans.items()}
        return all([memory.fits(demands) for memory in self._managers])  # noqa: C419 - half the time of a generator

    def check(self) -> None:
        for memory in self._memories:
            memory.check()


class PrivateDomain(MemoryDomain):
    """One engine over private pools, whose blocks no other engine counts on."""

    def __init__(self, engine: Engine, memories: Sequence[GpuMemory]) -> None:
        super().__init__((engine,), memories)
        executor = engine.executor
        assert isinstance(executor, Spans)
        self._alone, self._lone = executor, executor if isinstance(executor, Lone) else None
        self._margin = 0 if engine.tier is None else engine.tier.boundaries_ahead

    def settle(self, now: float, order: int) -> None:
        alone = self._alone
        if self._lone is not None:
            self._lone.catch_up(now, order)
        elif alone.next_boundary_s <= now:
            if not isinstance(alone.kv, CountedBlocks):
                self._grow(alone.pass_boundaries(now, order))
            elif not alone.kv.take(alone.count_boundaries(now, order)):
                raise AssertionError(f"engine {alone.engine.index}: no memory inside a span")

    def steps_that_fit(self, engine: Engine, decodes: Decodes, most: int) -> int:
        free, margin = engine.kv.free_blocks(), self._margin

        def too_long(steps: int) -> bool:
            return decodes.blocks_ahead(steps - 1 + margin) > free

        return 1 + bisect_left(range(2, most + 1), True, key=too_long) if too_long(most) else most

    def promises_hold(self, taker: Engine) -> bool:
        return True


def domains_of(
    engines: Sequence[Engine], gpus_of: Sequence[tuple[int, ...]], memories: Mapping[int, GpuMemory]
) -> list[MemoryDomain]:
    """Engines that share a memory, directly or through a TP group, form one domain; private pools keep them apart.

    ``gpus_of`` are the GPUs of each engine, ``memories`` the KV memory of each GPU.
    """
    domains: list[MemoryDomain] = []
    sharing: dict[int, tuple[int, ...]] = {}  # by the place of an engine, its GPUs
    for place, (engine, own) in enumerate(zip(engines, gpus_of, strict=True)):
        if isinstance(memories[own[0]], PrivatePools):
            own_memories = [memories[gpu] for gpu in own]
            steps_apart = isinstance(engine.executor, Spans)  # else nothing is promised to it
            domains.append(
                PrivateDomain(engine, own_memories) if steps_apart else MemoryDomain((engine,), own_memories)
            )
        else:
            sharing[place] = own
    for members in connected(sharing):
        gpus = sorted({gpu for place in members for gpu in sharing[place]})
        domains.append(MemoryDomain([engines[place] for place in members], [memories[gpu] for gpu in gpus]))
    return domains


def connected(parts: Mapping[int, Collection[Hashable]]) -> list[tuple[int, ...]]:
    """Members, by number, that have a part in common, directly or through others; groups in the order of their first ones."""
    group_of: dict[Hashable, list[int]] = {}  # by part; those of one group have one list
    for member, own in parts.items():
        members = [member]
        for other in {id(group_of[part]): group_of[part] for part in own if part in group_of}.values():
            members += other
        for part in (part for other in members for part in parts[other]):
            group_of[part] = members
    return sorted(tuple(sorted(members)) for members in {id(own): own for own in group_of.values()}.values())
