"""KV memory as one engine uses it: the same number of blocks in every memory that it needs, all or nothing.

An engine needs a memory on each GPU of its TP group, or on each of its stages. There are three cases.

* Engines share the memory (``EngineKV``). Blocks have names, since the blocks that one engine holds decide which blocks others
  can get. A sequence keeps its block ids.
* The engine has a private pool (``CountedBlocks``). Its blocks are interchangeable, so they are only counted. The number of a
  sequence's blocks follows from its cached tokens.
* The engine has a private pool and caches prefixes (``PrefixBlocks``). A block has a name again, the same in every memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import count, islice, takewhile

from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.policy.interfaces import KVManager, keeps_prefixes, takes_time
from fineserve_sim.policy.memory.paged import PagedPool
from fineserve_sim.policy.memory.prefix import SharedBlocks, block_keys


class EngineKV:
    """The view of one engine on the memories that it needs. Here other engines share them, and they know it by its ``owner``
    id.

    A sequence holds one list of block ids a rank: co-location may differ from GPU to GPU of a TP group, and so may the ids.
    ``timed``: blocks can take host time (``exposed_s``). ``pools`` are private, one a memory; there are none in a shared
    memory.
    """

    pools: tuple[PagedPool, ...] = ()

    def __init__(self, block_tokens: int, managers: Sequence[KVManager] = (), owner: int = -1) -> None:
        self.block_tokens = block_tokens
        self._owner = owner
        self._managers = tuple(managers)
        self._clocks = tuple(manager for manager in managers if takes_time(manager))
        self._caches = tuple(manager for manager in managers if keeps_prefixes(manager))
        self.timed = bool(self._clocks)

    def free_blocks(self) -> int:
        """Blocks that the engine could get now."""
        return min(manager.free_blocks(self._owner) for manager in self._managers)

    def capacity_blocks(self) -> int:
        """Blocks that fit when every other engine holds nothing."""
        return min(manager.capacity_blocks(self._owner) for manager in self._managers)

    def used_bytes(self) -> int:
        """Bytes held by this engine, over all memories."""
        return sum(manager.used_bytes(self._owner) for manager in self._managers)

    def used_blocks(self) -> int:
        """Blocks that its sequences hold or that no other engine could get, without those kept for sequences to come."""
        return self.capacity_blocks() - self.free_blocks()

    def forget(self) -> None:
        """Give up all that is kept for sequences to come, and keep nothing more: the memory gets another use."""

    def free_tokens(self) -> int:
        """Tokens that the engine's memory could still take now."""
        return self.free_blocks() * self.block_tokens

    def capacity_tokens(self) -> int:
        """Tokens that fit when every other engine holds nothing."""
        return self.capacity_blocks() * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def exposed_s(self) -> float:
        """Seconds from now until the engine's blocks can be used."""
        return max((clock.exposed_s(self._owner) for clock in self._clocks), default=0.0)

    def reuse(self, sequence: SequenceState) -> int:
        """Give ``sequence``, which holds nothing, the cached blocks of its prefix. Returns the tokens in them. They are fewer
        than it must prefill."""
        keys = self._keys(sequence, sequence.target_tokens - 1)  # one token must be computed to yield the next
        if not (keys and self._caches):
            return 0
        found = [cache.match(self._owner, keys) for cache in self._caches]
        blocks = min(map(len, found))
        for cache, ids in zip(self._caches, found, strict=True):
            cache.free(self._owner, ids[blocks:])
        if blocks:
            sequence.blocks = [ids[:blocks] for ids in found]
        return blocks * self.block_tokens

    def keep(self, sequence: SequenceState) -> None:
        """The prefill of ``sequence`` is done: others may use its full blocks, where running sequences share blocks."""

    def hold(self, sequence: SequenceState, came: dict[tuple[int, int], int]) -> bool:
        """Give a sequence that comes from elsewhere the blocks of all its cached tokens, or none. It must hold none.

        Where prefixes are cached, several sequences come at the same time and share blocks. ``came`` has the blocks of the
        sequences before, by place and key; the sequence adds its own. Their KV is still under way, so none is kept."""
        return self.grow(sequence, sequence.cached_tokens)

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        """Give ``sequence``, which does not decode, the blocks that hold ``tokens`` tokens in all. False, and nothing taken,
        when they do not fit."""
        named = self._name(-(-tokens // self.block_tokens) - (len(sequence.blocks[0]) if sequence.blocks else 0))
        if named is None:
            return False
        if sequence.blocks:
            for held, more in zip(sequence.blocks, named, strict=True):
                held.extend(more)
        else:
            sequence.blocks = named
        return True

    def grow_each(self, sequences: Collection[SequenceState]) -> bool:
        """Give each of ``sequences`` one block. False, and nothing taken, when they do not all fit."""
        if len(self._managers) == 1:  # the common case, without detours
            ids = self._managers[0].alloc(self._owner, len(sequences))
            if ids is None:
                return False
            for sequence, block in zip(sequences, ids):  # noqa: B905 - compiled, a loop without objects
                sequence.blocks[0].append(block)
            return True
        named = self._name(len(sequences))
        if named is None:
            return False
        for number, blocks in enumerate(named):
            for sequence, block in zip(sequences, blocks, strict=True):
                sequence.blocks[number].append(block)
        return True

    def release(self, sequence: SequenceState, *, computed: bool = True) -> None:
        """Take back all blocks of a sequence that does not decode (any more). If it is not ``computed``, the KV of its cached
        tokens was still under way, so no block is kept for others."""
        if not sequence.blocks:
            return
        if computed and self._caches and (keys := self._keys(sequence, sequence.cached_tokens)):
            for cache, held in zip(self._caches, sequence.blocks, strict=True):
                cache.record(self._owner, keys, held)
        for manager, held in zip(self._managers, sequence.blocks, strict=True):
            manager.free(self._owner, held)
        sequence.blocks = ()

    def _name(self, blocks: int) -> list[list[int]] | None:
        """So many new blocks of every memory; None, and nothing taken, when they do not fit."""
        if not blocks:
            return [[] for _ in self._managers]
        if len(self._managers) == 1:
            ids = self._managers[0].alloc(self._owner, blocks)
            return None if ids is None else [ids]
        if blocks > self.free_blocks():  # asked first: what one rank must give back again may have cost it time
            return None
        taken = [manager.alloc(self._owner, blocks) for manager in self._managers]
        return [ids for ids in taken if ids is not None]

    def _keys(self, sequence: SequenceState, tokens: int) -> tuple[int, ...]:
        """The keys of the full blocks among its first ``tokens`` tokens, as far as its prefix is known."""
        prefix = sequence.prefix
        if prefix is None:
            return ()
        return block_keys(prefix.ids, prefix.id_tokens, self.block_tokens, min(tokens, prefix.known_tokens))


class PooledBlocks(EngineKV):
    """Blocks of private pools, one a memory. ``take`` takes so many of every memory, or none."""

    take: Callable[[int], bool]

    def __init__(self, pools: Sequence[PagedPool], block_tokens: int) -> None:
        super().__init__(block_tokens)
        self.pools = tuple(pools)
        self.take = self.pools[0].take if len(self.pools) == 1 else self._take_each

    def free_blocks(self) -> int:
        return self.pools[0].free_blocks if len(self.pools) == 1 else min([pool.free_blocks for pool in self.pools])

    def capacity_blocks(self) -> int:
        return min(pool.capacity_blocks for pool in self.pools)

    def used_bytes(self) -> int:
        return sum(pool.used_bytes for pool in self.pools)

    def used_blocks(self) -> int:
        return self.pools[0].held_blocks

    def _take_each(self, blocks: int) -> bool:
        return blocks <= self.free_blocks() and all(pool.take(blocks) for pool in self.pools)

    def give(self, blocks: int) -> None:
        """Give so many blocks back to every memory."""
        for pool in self.pools:
            pool.give(blocks)


class CountedBlocks(PooledBlocks):
    """Blocks without names: nothing is cached for others."""

    def hold(self, sequence: SequenceState, came: dict[tuple[int, int], int]) -> bool:
        return self.take(self.blocks_for(sequence.cached_tokens))

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        return self.take(-(-tokens // self.block_tokens) + (-sequence.cached_tokens // self.block_tokens))

    def grow_each(self, sequences: Collection[SequenceState]) -> bool:
        return self.take(len(sequences))

    def release(self, sequence: SequenceState, *, computed: bool = True) -> None:
        self.give(-(-sequence.cached_tokens // self.block_tokens))


class PrefixBlocks(PooledBlocks):
    """Named blocks of an engine that caches prefixes as vLLM does. Sequences share computed blocks. A finished sequence leaves
    its blocks for others with the same prefix, until another sequence needs the memory."""

    def __init__(self, pools: Sequence[PagedPool], block_tokens: int) -> None:
        super().__init__(pools, block_tokens)
        self._blocks = SharedBlocks()
        self._names = count()
        self._keeps = True

    def free_blocks(self) -> int:
        return super().free_blocks() + self._blocks.evictable

    def used_blocks(self) -> int:
        return super().used_blocks() - self._blocks.evictable

    def forget(self) -> None:
        self._keeps = False
        self.give(len(self._blocks.evict(self._blocks.evictable)))

    def reuse(self, sequence: SequenceState) -> int:
        keys = self._keys(sequence, sequence.target_tokens - 1)  # one token must be computed to yield the next
        found = self._blocks.match(keys) if keys else []
        if found:
            sequence.blocks = [found]
        return len(found) * self.block_tokens

    def keep(self, sequence: SequenceState) -> None:
        if self._keeps and (keys := self._keys(sequence, sequence.cached_tokens)):
            self._blocks.record(keys, sequence.blocks[0])

    def hold(self, sequence: SequenceState, came: dict[tuple[int, int], int]) -> bool:
        places = [*enumerate(self._keys(sequence, sequence.cached_tokens))]
        shared = [came[place] for place in takewhile(came.__contains__, places)]
        self._blocks.share(shared)
        sequence.blocks = [shared]
        fits = self.grow(sequence, sequence.cached_tokens)
        if fits:
            came.update(zip(places, sequence.blocks[0], strict=False))
        else:
            self.release(sequence, computed=False)
        return fits

    def release(self, sequence: SequenceState, *, computed: bool = True) -> None:
        if not sequence.blocks:
            return
        if computed:
            self.keep(sequence)
        self.give(len(self._blocks.drop(sequence.blocks[0])))
        sequence.blocks = ()
        if not self._keeps:
            self.forget()

    def _name(self, blocks: int) -> list[list[int]] | None:
        """Records are given up if need be."""
        missing = blocks - super().free_blocks()
        if missing > self._blocks.evictable:
            return None
        if missing > 0:
            self.give(len(self._blocks.evict(missing)))
        self.take(blocks)
        names = list(islice(self._names, blocks))
        self._blocks.add(names)
        return [names]
