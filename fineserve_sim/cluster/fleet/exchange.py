"""The part of the KV that has to move when engines merge and layers change hands.

Sequences of one prefix share its blocks in the merged engine. An instance needs one copy of its layers of such a block, so they
go there once. Layers that an engine on the instance had before, for any sequence, need not go.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from fineserve_sim.cluster.engine.sequence import SequenceState

Layers = Mapping[int, range]
"""The layers of each instance."""


class Exchange:
    """Tokens that have to travel for the ``moving`` sequences, which hold their blocks of ``block_tokens`` in the merged
    engine.

    ``started``: the instances that each comes from. ``held``: the layers that these had. Call ``tokens`` in the order in which
    sequences travel, then ``followers``."""

    def __init__(
        self,
        moving: Sequence[SequenceState],
        started: Mapping[SequenceState, tuple[int, ...]],
        held: Layers,
        block_tokens: int,
    ) -> None:
        holders = Counter(block for sequence in moving for block in _blocks(sequence))
        self._shared = {
            sequence: [block for block in _blocks(sequence) if holders[block] > 1]
            for sequence in moving
            if sequence.blocks
        }
        self._block_tokens = block_tokens
        self._there: dict[tuple[int, int], int] = defaultdict(int)  # by instance and block, the layers there, as bits
        self._carriers: dict[tuple[int, int], list[SequenceState]] = defaultdict(list)
        self._batches: dict[tuple[int, SequenceState], list[list[SequenceState]]] = defaultdict(list)
        for sequence, blocks in self._shared.items():
            for instance in started[sequence]:
                for block in blocks:
                    self._there[instance, block] |= _bits(held[instance])

    def tokens(self, sequence: SequenceState, receiver: int, layers: range) -> float:
        """Tokens of the sequence whose KV in these layers has to go to an instance. A token of which the instance has some
        layers counts in part. The returned tokens count as sent."""
        shared, wanted = self._shared.get(sequence, ()), _bits(layers)
        tokens = float(sequence.cached_tokens - len(shared) * self._block_tokens)
        for block in shared:
            missing = wanted & ~self._there[receiver, block]
            if missing:
                self._there[receiver, block] |= missing
                self._carriers[receiver, block].append(sequence)
                tokens += self._block_tokens * missing.bit_count() / len(layers)
        return tokens

    def sent(self, receiver: int, batch: list[SequenceState]) -> None:
        """These sequences travel together to an instance."""
        for sequence in batch:
            self._batches[receiver, sequence].append(batch)

    def followers(self) -> Iterator[tuple[list[SequenceState], SequenceState]]:
        """Each batch with one more sequence that waits for it: a block of that sequence comes with another one. Put the
        sequence into the batch before you ask for the next."""
        by_block: dict[int, list[SequenceState]] = defaultdict(list)
        for sequence, blocks in self._shared.items():
            for block in blocks:
                by_block[block].append(sequence)
        for (receiver, block), carriers in self._carriers.items():
            for carrier in carriers:
                for batch in self._batches[receiver, carrier]:
                    yield from ((batch, sequence) for sequence in by_block[block] if sequence not in batch)


def _blocks(sequence: SequenceState) -> Sequence[int]:
    """Its blocks by name, the same in every memory. Counted blocks have no names, and sequences never share them."""
    return sequence.blocks[0] if sequence.blocks else ()


def _bits(layers: range) -> int:
    return (1 << layers.stop) - (1 << layers.start) if layers else 0
