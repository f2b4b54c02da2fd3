"""Prefix caching: blocks that several sequences of an engine share, and what finished ones leave for later.

Every block has a reference count: one for each sequence that holds it, and one for the radix tree while a record of a finished
sequence names it. A block at count zero is free. Only full blocks are shared: two sequences that both wrote into the rest of
a partly filled one would spoil each other's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fineserve_sim.policy.memory.radix import RadixTree


def block_keys(prefix_ids: Sequence[int], id_tokens: int, block_tokens: int, tokens: int) -> tuple[int, ...]:
    """The keys of the full blocks among the first ``tokens`` tokens of a sequence.

    ``prefix_ids`` identify its prefixes, one id for each ``id_tokens`` tokens: equal ids mean equal tokens from the first one
    up to there. A block's key is the first id that covers all of it, so that equal keys never lie.
    """
    known = min(tokens, len(prefix_ids) * id_tokens)
    blocks = known // block_tokens
    return tuple(prefix_ids[-(-(block + 1) * block_tokens // id_tokens) - 1] for block in range(blocks))


class SharedBlocks:
    """Reference counts of one engine's blocks, and its radix tree of records.

    ``evictable`` counts the blocks that only the tree still holds.
    """

    def __init__(self) -> None:
        self._references: dict[int, int] = {}
        self._recorded: set[int] = set()
        self._tree: RadixTree[int, int] = RadixTree()
        self.evictable = 0

    def __len__(self) -> int:
        """Blocks that somebody holds, the tree included."""
        return len(self._references)

    def references(self, block: int) -> int:
        """How many hold ``block``; 0 for a free one."""
        return self._references.get(block, 0)

    def add(self, blocks: Iterable[int]) -> None:
        """New blocks, each held by one sequence."""
        for block in blocks:
            self._references[block] = 1

    def drop(self, blocks: Sequence[int]) -> list[int]:
        """A sequence lets go of ``blocks``; returns those that nobody holds any more.

        Raises ValueError for a block that no sequence holds, or one named twice; then nothing is let go.
        """
        for block in blocks:
            if self._references.get(block, 0) - (block in self._recorded) < 1:
                raise ValueError(f"block {block} is held by no sequence and cannot be freed")
        if len(set(blocks)) < len(blocks):
            raise ValueError("a block is named twice in one call")
        return [block for block in blocks if self._release(block)]

    def match(self, keys: Sequence[int]) -> list[int]:
        """The blocks of the longest recorded prefix, now held by one sequence more. Nothing is copied or taken."""
        blocks = self._tree.match(keys)
        for block in blocks:
            self.evictable -= self._references[block] == 1
            self._references[block] += 1
        return blocks

    def record(self, keys: Sequence[int], blocks: Sequence[int]) -> None:
        """Keep the full blocks of a sequence, one a key, after it lets go of them. Where a prefix is recorded already, the
        recorded blocks stay and those of the sequence are not kept."""
        shared = self._tree.insert(keys, blocks[: len(keys)])
        for block in blocks[shared : len(keys)]:
            self._recorded.add(block)
            self._references[block] += 1

    def evict(self, count: int) -> list[int]:
        """Forget records, least recently used first, until ``count`` blocks are free; returns them, fewer if there are
        none left that only the tree holds."""
        gone = self._tree.evict(count, lambda block: self._references[block] == 1)
        for block in gone:
            self._recorded.discard(block)
            del self._references[block]
        self.evictable -= len(gone)
        return gone

    def _release(self, block: int) -> bool:
        """One holder less; whether it was the last."""
        left = self._references[block] - 1
        if left == 0:
            del self._references[block]
            return True
        self._references[block] = left
        if left == 1 and block in self._recorded:
            self.evictable += 1
            self._tree.offer(block)
        return False

    def check(self) -> None:
        """Raise AssertionError if counts and tree contradict each other."""
        self._tree.check()
        recorded = self._tree.values()
        assert len(set(recorded)) == len(recorded) and set(recorded) == self._recorded, (
            "a block is recorded twice, or lost"
        )
        assert all(count > 0 for count in self._references.values()), "a free block is counted"
        assert self._recorded <= self._references.keys(), "a recorded block is held by nobody"
        alone = sum(self._references[block] == 1 for block in recorded)
        assert self.evictable == alone, f"{alone} blocks are evictable, {self.evictable} are counted"
