"""A set of slabs of which the lowest ids are found fast: a bit a slab, in words of 60.

The slab manager gives the lowest free slab first, and so leaves few holes. Adding, removing and finding the lowest cost a few
operations on a word. At worst a search passes all words.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WORD: Final = 60
"""Slabs of a word of a set: machine integers where this is compiled."""


class SlabSet:
    """Some of the slabs 0 to ``slabs`` - 1; at first ``members``."""

    def __init__(self, slabs: int, members: range = range(0)) -> None:
        bits = (1 << members.stop) - (1 << members.start)
        self._words = [bits >> first & (1 << WORD) - 1 for first in range(0, slabs + 1, WORD)]
        self._first = 0  # the words before it are empty
        self.size = len(members)

    def add(self, slab_id: int) -> None:
        word = slab_id // WORD
        self._words[word] = self._words[word] | 1 << slab_id % WORD
        self.size += 1
        self._first = min(self._first, word)

    def add_all(self, slab_ids: Sequence[int]) -> None:
        """Add slabs, a word at a time where they follow one another."""
        words, word, bits = self._words, self._first, 0
        for slab_id in slab_ids:
            if slab_id // WORD != word:
                words[word] = words[word] | bits
                word, bits = slab_id // WORD, 0
                self._first = min(self._first, word)
            bits |= 1 << slab_id % WORD
        words[word] = words[word] | bits
        self.size += len(slab_ids)

    def remove(self, slab_id: int) -> None:
        word = slab_id // WORD
        self._words[word] = self._words[word] ^ 1 << slab_id % WORD
        self.size -= 1

    def pop(self) -> int:
        """Remove and return the lowest slab. There must be one."""
        words, word = self._words, self._first
        while not words[word]:
            word += 1
        bits = words[word]
        words[word] = bits & (bits - 1)
        self._first = word
        self.size -= 1
        return word * WORD + lowest_bit(bits)

    def take(self, count: int) -> list[int]:
        """Remove and return the ``count`` lowest slabs. There must be as many."""
        taken: list[int] = []
        self.size -= count
        words, word = self._words, self._first
        while len(taken) < count:
            while not words[word]:
                word += 1
            bits = words[word]
            while bits and len(taken) < count:
                taken.append(word * WORD + lowest_bit(bits))
                bits &= bits - 1
            words[word] = bits
        self._first = word
        return taken

    def ids(self) -> list[int]:
        """All of them, in order."""
        if not any(self._words):
            return []  # most sets are empty, and a check asks hundreds of them
        return [
            word * WORD + place for word, bits in enumerate(self._words) for place in range(WORD) if bits >> place & 1
        ]


def lowest_bit(bits: int) -> int:
    """The place of the lowest bit that is set; there must be one."""
    return (bits & -bits).bit_length() - 1
