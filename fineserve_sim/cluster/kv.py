"""KV memory as one engine uses it: the same number of blocks on every GPU of its TP group, all or nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fineserve_sim.cluster.sequence import SequenceState
from fineserve_sim.policy.interfaces import KVManager


class EngineKV:
    """The view of one engine (``owner``) on the KV managers of its GPUs.

    A sequence holds one list of block ids a rank: co-location may differ from GPU to GPU of a TP group, and so may the ids.
    """

    def __init__(self, owner: int, managers: Sequence[KVManager], block_tokens: int) -> None:
        self._owner = owner
        self._managers = tuple(managers)
        self._block_tokens = block_tokens
        self._only = self._managers[0] if len(self._managers) == 1 else None

    def free_tokens(self) -> int:
        """Tokens that the engine's memory could still take now."""
        return min(manager.free_blocks(self._owner) for manager in self._managers) * self._block_tokens

    def capacity_tokens(self) -> int:
        """Tokens that fit when every other engine holds nothing."""
        return min(manager.capacity_blocks(self._owner) for manager in self._managers) * self._block_tokens

    def used_bytes(self) -> int:
        """Bytes held by this engine, over all ranks."""
        return sum(manager.used_bytes(self._owner) for manager in self._managers)

    def grow(self, sequence: SequenceState, tokens: int) -> bool:
        """Give ``sequence`` the blocks that hold ``tokens`` tokens in all. False, and nothing taken, when they do not fit."""
        needed = -(-tokens // self._block_tokens) - sequence.blocks_held
        if needed <= 0:
            return True
        taken = self._take(needed)
        if taken is None:
            return False
        if sequence.blocks:
            for held, ids in zip(sequence.blocks, taken, strict=True):
                held.extend(ids)
        else:
            sequence.blocks = taken
        sequence.blocks_held += needed
        return True

    def grow_each(self, sequences: Collection[SequenceState]) -> bool:
        """Give each of ``sequences`` one block. False, and nothing taken, when they do not all fit."""
        if self._only is not None:  # the common case, without detours
            ids = self._only.alloc(self._owner, len(sequences))
            if ids is None:
                return False
            for sequence, block in zip(sequences, ids, strict=True):
                sequence.blocks[0].append(block)
                sequence.blocks_held += 1
            return True
        taken = self._take(len(sequences))
        if taken is None:
            return False
        for rank, ids in enumerate(taken):
            for sequence, block in zip(sequences, ids, strict=True):
                sequence.blocks[rank].append(block)
        for sequence in sequences:
            sequence.blocks_held += 1
        return True

    def release(self, sequence: SequenceState) -> None:
        for manager, held in zip(self._managers, sequence.blocks, strict=bool(sequence.blocks)):
            manager.free(self._owner, held)
        sequence.blocks = []
        sequence.blocks_held = 0

    def _take(self, blocks: int) -> list[list[int]] | None:
        if self._only is not None:
            ids = self._only.alloc(self._owner, blocks)
            return None if ids is None else [ids]
        taken: list[list[int]] = []
        for manager in self._managers:
            ids = manager.alloc(self._owner, blocks)
            if ids is None:
                for previous, given in zip(self._managers, taken, strict=False):
                    previous.free(self._owner, given)
                return None
            taken.append(ids)
        return taken
