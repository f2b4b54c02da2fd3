"""A prefix cache in host memory: which KV blocks it keeps.

Blocks go by their place in the sequence and their key (``prefix.block_keys``), as in the GPU's cache above it. All blocks that
the GPU's cache records are written here, as vLLM's offloading does it. The least recently used go first, the end of a prefix
before its beginning. A block on its way, in or out, stays. A prefix for which there is no room is written as far as there is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

Place = tuple[int, int]
"""A block's place in its sequence, and its key."""


@dataclass(slots=True)
class _Block:
    written: bool = False
    readers: int = 0


class HostCache:
    """Room for ``capacity_blocks`` blocks."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 0:
            raise ValueError(f"a host cache of {capacity_blocks} blocks; it must have 0 or more")
        self.capacity_blocks = capacity_blocks
        self._blocks: OrderedDict[Place, _Block] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        """Blocks that are here or on their way here."""
        return len(self._blocks)

    def match(self, keys: Sequence[int], first: int) -> int:
        """How many blocks of a sequence with these keys are here, one behind the other from place ``first`` on."""
        found = 0
        for place in range(first, len(keys)):
            block = self._blocks.get((place, keys[place]))
            if block is None or not block.written:
                break
            found += 1
        return found

    def read(self, keys: Sequence[int], first: int) -> None:
        """The blocks from place ``first`` to the end of ``keys`` are copied out: they stay until ``let_go``."""
        self._use(keys)
        for place in range(first, len(keys)):
            self._blocks[place, keys[place]].readers += 1

    def let_go(self, keys: Sequence[int], first: int) -> None:
        """The copies that ``read`` began are over."""
        for place in range(first, len(keys)):
            self._blocks[place, keys[place]].readers -= 1

    def write(self, keys: Sequence[int]) -> list[Place]:
        """Keep the blocks of a sequence with these keys. Returns the blocks that must be copied here; they count once they are
        ``written``."""
        self._use(keys)
        missing = [place for place in enumerate(keys) if place not in self._blocks]
        own = set(enumerate(keys))
        room = self.capacity_blocks - len(self._blocks)
        gone = [place for place in self._idle(len(missing) - room) if place not in own]
        for place in gone:
            del self._blocks[place]
        new = missing[: room + len(gone)]
        self._blocks.update((place, _Block()) for place in new)
        self._use(keys)
        return new

    def written(self, places: Sequence[Place]) -> None:
        """The copies of these blocks are here."""
        for place in places:
            self._blocks[place].written = True

    def _idle(self, number: int) -> list[Place]:
        """The first blocks that would go, at most ``number``."""
        found: list[Place] = []
        for place, block in self._blocks.items():
            if len(found) >= number:
                break
            if block.written and not block.readers:
                found.append(place)
        return found

    def _use(self, keys: Sequence[int]) -> None:
        """The blocks of a sequence are used now, its beginning last."""
        for place in reversed([*enumerate(keys)]):
            if place in self._blocks:
                self._blocks.move_to_end(place)

    def check(self) -> None:
        """Raise AssertionError if the cache is over its capacity or contradicts itself."""
        assert len(self._blocks) <= self.capacity_blocks, f"{len(self._blocks)} of {self.capacity_blocks} blocks"
        assert all(block.readers >= 0 for block in self._blocks.values()), "a block has fewer than no readers"
        assert all(block.written for block in self._blocks.values() if block.readers), (
            "a block is read before it is here"
        )
