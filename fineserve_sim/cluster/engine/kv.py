"""KV memory as one engine uses it: the same number of blocks in every memory that it needs, all or nothing.

An engine needs a memory on each GPU of its TP group, or on each of its stages. Where engines share a memory, blocks have
names: which of them one engine holds decides what the others can get, and a sequence keeps its ids. Blocks of a private pool
are interchangeable, so they are only counted, and what a sequence holds follows from its cached tokens. Where prefixes are
cached, a block of a private pool has a name as well, the same in every memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from itertools import count, islice

from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.policy.interfaces import KVManager, keeps_prefixes, takes_time
from fineserve_sim.policy.memory.paged import BlockPool, PoolShare
from fineserve_sim.policy.memory.prefix import SharedBlocks, block_keys


class EngineKV(ABC):
    """The view of one engine on the memories that it needs.

    ``private``: no other engine takes blocks of them; ``timed``: blocks can take host time (``exposed_s``).
    """

    private = True
    timed = False

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens

    @abstractmethod
    def free_blocks(self) -> int:
        """Blocks that the engine could get now."""

    @abstractmethod
    def capacity_blocks(self) -> int:
        """Blocks that fit when every other engine holds nothing."""

    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes held by this engine, over all memories."""

    def used_blocks(self) -> int:
        """Blocks that its sequences hold, and those that nobody else could get."""
        return self.capacity_blocks() - self.free_blocks()

    def memory_bytes(self, number: int) -> int:
        """Bytes held in one of its memories."""
        raise AssertionError("a shared memory has its own ledger")

    def kept_bytes(self, number: int) -> int:
        """Those of them that are kept for sequences to come."""
        return 0

    def forget(self) -> None:  # noqa: B027 - most keep nothing
        """Give up all that is kept for sequences to come, and keep nothing more: the memory goes to somebody else."""

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
        return 0.0

    def reuse(self, sequence: SequenceState) -> int:
        """Give ``sequence``, which holds nothing, the cached blocks of its prefix. Returns the tokens in them, fewer than it
        must prefill."""
        return 0

    def keep(self, sequence: SequenceState) -> None:
        """Its prefill is done: let others have its full blocks, where sequences that run share them."""
        return

    def hold(self, sequence: SequenceState) -> bool:
        """Give a sequence that comes from elsewhere the blocks of all that it has cached, or nothing."""
        sequence.blocks = ()
        tokens, sequence.cached_tokens = sequence.cached_tokens, 0
        fits = self.grow(sequence, tokens)
        sequence.cached_tokens = tokens
        return fits

    @abstractmethod
    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        """Give ``sequence``, which does not decode, the blocks that hold ``tokens`` tokens in all. False, and nothing taken,
        when they do not fit."""

    @abstractmethod
    def grow_each(self, sequences: Collection[SequenceState]) -> bool:
        """Give each of ``sequences`` one block. False, and nothing taken, when they do not all fit."""

    @abstractmethod
    def release(self, sequence: SequenceState, *, computed: bool = True) -> None:
        """Take back all blocks of a sequence that does not decode (any more). Without ``computed`` its cached tokens were still
        under way, so nothing of them is kept for others."""

    def _keys(self, sequence: SequenceState, tokens: int) -> tuple[int, ...]:
        """The keys of the full blocks among its first ``tokens`` tokens, as far as its prefix is known."""
        prefix = sequence.prefix
        if prefix is None:
            return ()
        return block_keys(prefix.ids, prefix.id_tokens, self.block_tokens, min(tokens, prefix.known_tokens))


class CountedBlocks(EngineKV):
    """Blocks of pools that no other engine draws from."""

    def __init__(self, pools: Sequence[BlockPool], block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._pools = tuple(pools)
        # Every rank holds as many blocks: the one with the fewest in all has the fewest left.
        self._tightest = min(self._pools, key=lambda pool: pool.capacity_blocks)

    def free_blocks(self) -> int:
        return self._tightest.free_blocks

    def capacity_blocks(self) -> int:
        return self._tightest.capacity_blocks

    def used_bytes(self) -> int:
        return sum(pool.used_bytes for pool in self._pools)

    def memory_bytes(self, number: int) -> int:
        return self._pools[number].used_bytes

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        return self.take(-(-tokens // self.block_tokens) + (-sequence.cached_tokens // self.block_tokens))

    def grow_each(self, sequences: Collection[SequenceState]) -> bool:
        return self.take(len(sequences))

    def release(self, sequence: SequenceState, *, computed: bool = True) -> None:
        self.give(-(-sequence.cached_tokens // self.block_tokens))

    def take(self, blocks: int) -> bool:
        """Take so many blocks of every memory, or none."""
        if blocks > self._tightest.free_blocks:
            return False
        for pool in self._pools:
            pool.take(blocks)
        return True

    def give(self, blocks: int) -> None:
        """Give so many blocks back to every memory."""
        for pool in self._pools:
            pool.give(blocks)


class StageBlocks(CountedBlocks):
    """Blocks of pools whose size changes, or that others draw from too: those of an engine whose layers come and go."""

    private = False

    def __init__(self, pools: Sequence[PoolShare], block_tokens: int) -> None:
        super().__init__(pools, block_tokens)
        self._shares = tuple(pools)

    def used_blocks(self) -> int:
        return self._shares[0].held_blocks

    def free_blocks(self) -> int:
        if len(self._shares) == 1:
            return self._shares[0].free_blocks
        return min(pool.free_blocks for pool in self._shares)

    def capacity_blocks(self) -> int:
        return min(pool.capacity_blocks for pool in self._shares)

    def take(self, blocks: int) -> bool:
        if len(self._shares) == 1:
            return self._shares[0].take(blocks)
        return blocks <= self.free_blocks() and all(pool.take(blocks) for pool in self._shares)


class PrefixBlocks(EngineKV):
    """Named blocks of an engine that keeps what finished sequences leave for others with the same prefix, as vLLM does:
    computed blocks are shared, and stay until somebody needs them."""

    def __init__(self, counted: CountedBlocks) -> None:
        super().__init__(counted.block_tokens)
        self.private = counted.private
        self._counted = counted
        self._blocks = SharedBlocks()
        self._names = count()
        self._keeps = True

    def free_blocks(self) -> int:
        return self._counted.free_blocks() + self._blocks.evictable

    def capacity_blocks(self) -> int:
        return self._counted.capacity_blocks()

    def used_bytes(self) -> int:
        return self._counted.used_bytes()

    def used_blocks(self) -> int:
        return self._counted.used_blocks() - self._blocks.evictable

    def reuse(self, sequence: SequenceState) -> int:
        keys = self._keys(sequence, sequence.target_tokens - 1)  # one token must be computed to yield the next
        found = self._blocks.match(keys) if keys else []
        if found:
            sequence.blocks = [found]
        return len(found) * self.block_tokens

    def keep(self, sequence: SequenceState) -> None:
        if self._keeps and (keys := self._keys(sequence, sequence.cached_tokens)):
            self._blocks.record(keys, sequence.blocks[0])

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        held = len(sequence.blocks[0]) if sequence.blocks else 0
        names = self._name(self.blocks_for(tokens) - held)
        if names is None:
            return False
        sequence.blocks = [[*sequence.blocks[0], *names] if held else names]
        return True

    def grow_each(self, sequences: Collection[SequenceState]) -> bool:
        names = self._name(len(sequences))
        if names is None:
            return False
        for sequence, name in zip(sequences, names, strict=True):
            sequence.blocks[0].append(name)
        return True

    def release(self, sequence: SequenceState, *, computed: bool = True) -> None:
        if not sequence.blocks:
            return
        if computed:
            self.keep(sequence)
        self._counted.give(len(self._blocks.drop(sequence.blocks[0])))
        sequence.blocks = ()
        if not self._keeps:
            self.forget()

    def memory_bytes(self, number: int) -> int:
        return self._counted.memory_bytes(number)

    def kept_bytes(self, number: int) -> int:
        kept = self._blocks.evictable
        return kept and self.memory_bytes(number) // self._counted.used_blocks() * kept

    def forget(self) -> None:
        self._keeps = False
        self._counted.give(len(self._blocks.evict(self._blocks.evictable)))

    def _name(self, blocks: int) -> list[int] | None:
        """So many new blocks, records given up if need be; None, and nothing taken, when they do not fit."""
        missing = blocks - self._counted.free_blocks()
        if missing > self._blocks.evictable:
            return None
        if missing > 0:
            self._counted.give(len(self._blocks.evict(missing)))
        if blocks > 0:
            self._counted.take(blocks)
        names = list(islice(self._names, max(0, blocks)))
        self._blocks.add(names)
        return names


class NamedBlocks(EngineKV):
    """Blocks of shared memories. A sequence holds one list of block ids a rank: co-location may differ from GPU to GPU of a TP
    group, and so may the ids."""

    private = False

    def __init__(self, owner: int, managers: Sequence[KVManager], block_tokens: int) -> None:
        super().__init__(block_tokens)
        self._owner = owner
        self._managers = tuple(managers)
        self._only = self._managers[0] if len(self._managers) == 1 else None
        self._clocks = tuple(manager for manager in managers if takes_time(manager))
        self._caches = tuple(manager for manager in managers if keeps_prefixes(manager))
        self.timed = bool(self._clocks)

    def free_blocks(self) -> int:
        return min(manager.free_blocks(self._owner) for manager in self._managers)

    def capacity_blocks(self) -> int:
        return min(manager.capacity_blocks(self._owner) for manager in self._managers)

    def used_bytes(self) -> int:
        return sum(manager.used_bytes(self._owner) for manager in self._managers)

    def exposed_s(self) -> float:
        return max((clock.exposed_s(self._owner) for clock in self._clocks), default=0.0)

    def reuse(self, sequence: SequenceState) -> int:
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

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        held = len(sequence.blocks[0]) if sequence.blocks else 0
        needed = -(-tokens // self.block_tokens) - held
        if needed <= 0:
            return True
        taken = self._take(needed)
        if taken is None:
            return False
        if sequence.blocks:
            for ids, more in zip(sequence.blocks, taken, strict=True):
                ids.extend(more)
        else:
            sequence.blocks = taken
        return True

    def grow_each(self, sequences: Collection[SequenceState]) -> bool:
        if self._only is not None:  # the common case, without detours
            ids = self._only.alloc(self._owner, len(sequences))
            if ids is None:
                return False
            for sequence, block in zip(sequences, ids, strict=True):
                sequence.blocks[0].append(block)
            return True
        taken = self._take(len(sequences))
        if taken is None:
            return False
        for rank, ids in enumerate(taken):
            for sequence, block in zip(sequences, ids, strict=True):
                sequence.blocks[rank].append(block)
        return True

    def release(self, sequence: SequenceState, *, computed: bool = True) -> None:
        if sequence.blocks and computed and self._caches and (keys := self._keys(sequence, sequence.cached_tokens)):
            for cache, held in zip(self._caches, sequence.blocks, strict=True):
                cache.record(self._owner, keys, held)
        for manager, held in zip(self._managers, sequence.blocks, strict=bool(sequence.blocks)):
            manager.free(self._owner, held)
        sequence.blocks = ()

    def _take(self, blocks: int) -> list[list[int]] | None:
        if self._only is not None:
            ids = self._only.alloc(self._owner, blocks)
            return None if ids is None else [ids]
        if blocks > self.free_blocks():  # asked first: what one rank must give back again may have cost it time
            return None
        taken = [manager.alloc(self._owner, blocks) for manager in self._managers]
        return [ids for ids in taken if ids is not None]
