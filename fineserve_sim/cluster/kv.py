"""KV memory as one engine uses it: the same number of blocks on every GPU of its TP group, all or nothing.

Where engines share a memory, blocks have names: which of them one engine holds decides what the others can get, and a
sequence keeps its ids. Blocks of a private pool are interchangeable, so they are only counted, and what a sequence
holds follows from its cached tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from fineserve_sim.cluster.sequence import SequenceState
from fineserve_sim.policy.interfaces import KVManager, KVMemory, PrefixKVManager, TimedKVManager
from fineserve_sim.policy.memory.paged import PrivatePools
from fineserve_sim.policy.memory.prefix import block_keys


class EngineKV(ABC):
    """The view of one engine (``owner``) on the KV memories of its GPUs, one a rank."""

    timed = False
    """Whether blocks can take host time (``exposed_s``)."""

    def __init__(self, owner: int, memories: Sequence[KVMemory], block_tokens: int) -> None:
        self._owner = owner
        self._memories = tuple(memories)
        self._block_tokens = block_tokens

    def free_blocks(self) -> int:
        """Blocks that the engine could get now."""
        return min(memory.free_blocks(self._owner) for memory in self._memories)

    def free_tokens(self) -> int:
        """Tokens that the engine's memory could still take now."""
        return self.free_blocks() * self._block_tokens

    def capacity_tokens(self) -> int:
        """Tokens that fit when every other engine holds nothing."""
        return min(memory.capacity_blocks(self._owner) for memory in self._memories) * self._block_tokens

    def used_bytes(self) -> int:
        """Bytes held by this engine, over all ranks."""
        return sum(memory.used_bytes(self._owner) for memory in self._memories)

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

    @abstractmethod
    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        """Give ``sequence``, which does not decode, the blocks that hold ``tokens`` tokens in all. False, and nothing taken,
        when they do not fit."""

    @abstractmethod
    def grow_each(self, sequences: Collection[SequenceState]) -> bool:
        """Give each of ``sequences`` one block. False, and nothing taken, when they do not all fit."""

    @abstractmethod
    def release(self, sequence: SequenceState) -> None:
        """Take back all blocks of a sequence that does not decode (any more)."""


class CountedBlocks(EngineKV):
    """Blocks of private pools."""

    def __init__(self, owner: int, memories: Sequence[PrivatePools], block_tokens: int) -> None:
        super().__init__(owner, memories, block_tokens)
        self._pools = tuple(memory.pool(owner) for memory in memories)
        # Every rank holds as many blocks: the one with the fewest in all has the fewest left.
        self._tightest = min(self._pools, key=lambda pool: pool.capacity_blocks)

    def free_blocks(self) -> int:
        return self._tightest.free_blocks

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        return self.take(-(-tokens // self._block_tokens) + (-sequence.cached_tokens // self._block_tokens))

    def grow_each(self, sequences: Collection[SequenceState]) -> bool:
        return self.take(len(sequences))

    def release(self, sequence: SequenceState) -> None:
        blocks = -(-sequence.cached_tokens // self._block_tokens)
        for pool in self._pools:
            pool.give(blocks)

    def take(self, blocks: int) -> bool:
        """Take so many blocks of every rank, or none."""
        if blocks > self._tightest.free_blocks:
            return False
        for pool in self._pools:
            pool.take(blocks)
        return True


class NamedBlocks(EngineKV):
    """Blocks of shared memories. A sequence holds one list of block ids a rank: co-location may differ from GPU to GPU of a TP
    group, and so may the ids."""

    def __init__(self, owner: int, managers: Sequence[KVManager], block_tokens: int) -> None:
        super().__init__(owner, managers, block_tokens)
        self._managers = tuple(managers)
        self._only = self._managers[0] if len(self._managers) == 1 else None
        self._clocks = tuple(manager for manager in managers if isinstance(manager, TimedKVManager))
        self._caches = tuple(manager for manager in managers if isinstance(manager, PrefixKVManager))
        self.timed = bool(self._clocks)

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
        return blocks * self._block_tokens

    def keep(self, sequence: SequenceState) -> None:
        if all(cache.shares_running for cache in self._caches):
            self._record(sequence)

    def _record(self, sequence: SequenceState) -> None:
        """Keep the full blocks of what it has cached, as far as its prefix is known."""
        if keys := self._keys(sequence, sequence.cached_tokens):
            for cache, held in zip(self._caches, sequence.blocks, strict=True):
                cache.record(self._owner, keys, held)

    def _keys(self, sequence: SequenceState, tokens: int) -> tuple[int, ...]:
        """The keys of the full blocks among its first ``tokens`` tokens, as far as its prefix is known."""
        prefix = sequence.prefix
        if prefix is None:
            return ()
        return block_keys(prefix.ids, prefix.id_tokens, self._block_tokens, min(tokens, prefix.known_tokens))

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        held = len(sequence.blocks[0]) if sequence.blocks else 0
        needed = -(-tokens // self._block_tokens) - held
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

    def release(self, sequence: SequenceState) -> None:
        if sequence.blocks:
            self._record(sequence)
        for manager, held in zip(self._managers, sequence.blocks, strict=bool(sequence.blocks)):
            manager.free(self._owner, held)
        sequence.blocks = []

    def _take(self, blocks: int) -> list[list[int]] | None:
        if self._only is not None:
            ids = self._only.alloc(self._owner, blocks)
            return None if ids is None else [ids]
        if blocks > self.free_blocks():  # asked first: what one rank must give back again may have cost it time
            return None
        taken = [manager.alloc(self._owner, blocks) for manager in self._managers]
        return [ids for ids in taken if ids is not None]


GpuMemory = KVManager | PrivatePools


def engine_kv(owner: int, memories: Sequence[GpuMemory], block_tokens: int) -> EngineKV:
    """The view of engine ``owner`` on the memories of its GPUs, which are all of one kind."""
    pools = [memory for memory in memories if isinstance(memory, PrivatePools)]
    if pools:
        return CountedBlocks(owner, pools, block_tokens)
    return NamedBlocks(owner, [memory for memory in memories if not isinstance(memory, PrivatePools)], block_tokens)
