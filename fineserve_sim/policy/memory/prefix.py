"""Prefix caching: blocks that several sequences of an engine share, and blocks that finished ones leave for later.

Every block has a reference count: one for each sequence that holds it, and one more while it is recorded as the last of a
prefix. A block at count zero is free. Only full blocks are shared: two sequences that both wrote into the rest of a partly
filled one would spoil each other's tokens.

A block's place in its sequence and its key say which prefix it ends, so records need no tree. A prefix is found block by
block, up to the first that is not recorded. The least recently used block goes first, and the end of a prefix before its
beginning. Records that no sequence holds wait for eviction in a heap, each with one entry. A use makes the entry too old, and
a sequence may hold the block again. Both show when the entry reaches the top. So an eviction costs O(log records) a block,
amortised over uses; all else costs a step a block, and O(log records) for a block that no sequence holds any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush, heapreplace
from itertools import takewhile


def block_keys(prefix_ids: Sequence[int], id_tokens: int, block_tokens: int, tokens: int) -> tuple[int, ...]:
    """The keys of the full blocks among the first ``tokens`` tokens of a sequence.

    ``prefix_ids`` identify its prefixes, one id for each ``id_tokens`` tokens. Equal ids mean equal tokens from the first one
    up to there, as far as both sequences are known. A block's key is the first id that covers all of it, so that equal keys at
    one place never lie.
    """
    known = min(tokens, len(prefix_ids) * id_tokens)
    blocks = known // block_tokens
    return tuple(prefix_ids[-(-(block + 1) * block_tokens // id_tokens) - 1] for block in range(blocks))


class SharedBlocks:
    """Reference counts of one engine's blocks, and its records of prefixes.

    ``evictable`` counts the blocks that are recorded, and held by no sequence.
    """

    def __init__(self) -> None:
        self._references: dict[int, int] = {}
        self._recorded: list[dict[int, int]] = []  # blocks by place in their sequence, then key
        self._end_of: dict[int, tuple[int, int]] = {}  # by recorded block, its place and key
        self._used: dict[int, int] = {}  # by recorded block, the tick of its last use
        self._tick = 0
        self._runs: list[tuple[tuple[int, int], list[int]]] = []  # a heap: the rank of the run's last block, run
        self._in_runs: set[int] = set()
        self.evictable = 0

    def __len__(self) -> int:
        """Blocks in use, records included."""
        return len(self._references)

    def references(self, block: int) -> int:
        """The number of references to ``block``; 0 for a free one."""
        return self._references.get(block, 0)

    def add(self, blocks: Iterable[int]) -> None:
        """New blocks, each held by one sequence."""
        self._references.update(dict.fromkeys(blocks, 1))

    def share(self, blocks: Iterable[int]) -> None:
        """One sequence more holds these blocks, which others hold."""
        for block in blocks:
            self._references[block] += 1

    def drop(self, blocks: Sequence[int]) -> list[int]:
        """A sequence lets go of ``blocks``; returns the blocks that no sequence or record holds any more.

        Raises ValueError for a block that no sequence holds, or one named twice; then nothing is let go.
        """
        references, end_of = self._references, self._end_of
        for block in blocks:
            if references.get(block, 0) - (block in end_of) < 1:
                raise ValueError(f"block {block} is held by no sequence and cannot be freed")
        if len(set(blocks)) < len(blocks):
            raise ValueError("a block is named twice in one call")
        free: list[int] = []
        run: list[int] = []
        for block in blocks:
            left = references[block] = references[block] - 1
            if left == 0:
                del references[block]
                free.append(block)
            elif left == 1 and block in end_of:
                self.evictable += 1
                if block not in self._in_runs:
                    run.append(block)
        if run:
            self._in_runs.update(run)
            heappush(self._runs, (self._rank(run[-1]), run))
        return free

    def found(self, keys: Sequence[int]) -> int:
        """How many blocks ``match`` would give."""
        return sum(1 for _ in takewhile(lambda pair: pair[1] in pair[0], zip(self._recorded, keys, strict=False)))

    def match(self, keys: Sequence[int]) -> list[int]:
        """The blocks of the longest recorded prefix, now held by one sequence more. Nothing is copied or taken."""
        blocks, references = self._use(keys), self._references
        for block in blocks:
            self.evictable -= references[block] == 1
            references[block] += 1
        return blocks

    def record(self, keys: Sequence[int], blocks: Sequence[int]) -> None:
        """Keep the full blocks of a sequence, one a key, after it lets go of them. Where a prefix is recorded already, the
        recorded blocks stay and the sequence's blocks are not kept."""
        self._recorded += ({} for _ in range(len(keys) - len(self._recorded)))
        for place in range(len(self._use(keys)), len(keys)):
            block = self._recorded[place].setdefault(keys[place], blocks[place])
            self._used[block] = self._tick
            if block not in self._end_of:
                self._end_of[block] = place, keys[place]
                self._references[block] += 1

    def evict(self, number: int) -> list[int]:
        """Forget records, least recently used first, until ``number`` blocks are free. Returns them, fewer if sequences hold
        all other recorded blocks."""
        gone: list[int] = []
        while len(gone) < number and self._runs:
            rank, run = self._runs[0]
            if self._references[run[-1]] > 1:
                self._in_runs.remove(run.pop())  # until it is let go again
            elif self._rank(run[-1]) == rank:
                gone.append(run.pop())
            if run:
                heapreplace(self._runs, (self._rank(run[-1]), run))
            else:
                heappop(self._runs)
        for block in gone:
            place, key = self._end_of.pop(block)
            del self._recorded[place][key], self._used[block], self._references[block]
        self._in_runs.difference_update(gone)
        self.evictable -= len(gone)
        return gone

    def _use(self, keys: Sequence[int]) -> list[int]:
        """The blocks of the longest recorded prefix, used now."""
        blocks = []
        for recorded, key in zip(self._recorded, keys, strict=False):
            if (block := recorded.get(key)) is None:
                break
            blocks.append(block)
        self._tick += 1
        self._used.update(dict.fromkeys(blocks, self._tick))
        return blocks

    def _rank(self, block: int) -> tuple[int, int]:
        """The rank of a record; the lowest goes first."""
        return self._used[block], -self._end_of[block][0]

    def check(self) -> None:
        """Raise AssertionError if counts and records contradict each other."""
        ends = {block: (place, key) for place, here in enumerate(self._recorded) for key, block in here.items()}
        assert ends == self._end_of and len(ends) == sum(map(len, self._recorded)), "a block is recorded twice, or lost"
        assert ends.keys() == self._used.keys() <= self._references.keys(), "a recorded block is held by nobody"
        assert all(count > 0 for count in self._references.values()), "a free block is counted"
        alone = {block for block in ends if self._references[block] == 1}
        assert alone <= self._in_runs == {block for _, run in self._runs for block in run}, "a lost record"
        assert self.evictable == len(alone), f"{len(alone)} blocks are evictable, {self.evictable} are counted"
