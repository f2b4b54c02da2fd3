"""What a group does when a decode finds no KV block: recompute a sequence later, or swap it to host memory (InferCept).

Recompute frees the memory at once; the sequence that arrived last goes back to the front of the queue (vLLM).

Swapping overlaps with computing: copies go over PCIe while other sequences run, so in a step of t seconds at most rate
times t bytes leave, and as many come back. To have blocks in time it looks two steps ahead. Blocks are free once their
copy is done; a decode that finds none pauses. Swapped sequences come back first come first served, before anything new
is admitted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

from fineserve_sim.cluster.groups.queue import Lane
from fineserve_sim.cluster.groups.sequences import Sequence, by_arrival
from fineserve_sim.cluster.links import Done, Link

if TYPE_CHECKING:
    from fineserve_sim.cluster.groups.group import Group

PIECE_BLOCKS = 64
"""Blocks that are copied, and freed, as one."""


class Relief(Protocol):
    @property
    def admits(self) -> bool:
        """Whether new sequences may start."""
        ...

    @property
    def held(self) -> int:
        """Sequences that are away from the lanes."""
        ...

    @property
    def extra_blocks(self) -> int:
        """Blocks in use that no sequence counts as its own."""
        ...

    def members(self) -> list[Sequence]:
        """The sequences that are away from the lanes."""
        ...

    def before(self, group: Group, lane: Lane, now: float) -> None:
        """A microbatch is about to be formed."""
        ...

    def relieve(self, group: Group, lane: Lane, needy: Sequence, now: float) -> None:
        """There is no block for ``needy``: afterwards there is one, or ``needy`` does not decode in ``lane`` any more,
        or another sequence less holds memory."""
        ...


class Recompute:
    """The latest sequence of the lane gives way."""

    admits = True
    held = 0
    extra_blocks = 0

    def members(self) -> list[Sequence]:
        return []

    def before(self, group: Group, lane: Lane, now: float) -> None:
        """Nothing to prepare."""

    def relieve(self, group: Group, lane: Lane, needy: Sequence, now: float) -> None:
        group.preempt(lane.latest() or needy, lane, now)


class Swap:
    """Swap space in host memory, without limit. For a group of one instance, thus one lane."""

    def __init__(self, to_host: Link, from_host: Link) -> None:
        self._to_host, self._from_host = to_host, from_host
        self._swapped: list[Sequence] = []
        self._leaving: dict[Sequence, None] = {}
        self._returning: dict[Sequence, None] = {}
        self._paused: list[Sequence] = []
        self.extra_blocks = 0

    @property
    def admits(self) -> bool:
        return not (self._swapped or self._leaving or self._paused)

    @property
    def held(self) -> int:
        return len(self._swapped) + len(self._leaving) + len(self._returning) + len(self._paused)

    def members(self) -> list[Sequence]:
        return [*self._swapped, *self._leaving, *self._returning, *self._paused]

    def before(self, group: Group, lane: Lane, now: float) -> None:
        for sequence in self._paused:
            lane.decodes.join(sequence)
        self._paused.clear()
        ahead = len(lane.decodes.needing_block()) + len(lane.decodes.needing_block(1))
        while group.free_blocks + self._outgoing_blocks() < ahead and lane.decodes.size > 1:
            self._swap_out(group, lane, max(lane.decodes, key=by_arrival))
        self._swap_in(group, lane)

    def relieve(self, group: Group, lane: Lane, needy: Sequence, now: float) -> None:
        if not self._leaving:
            latest = max(lane.decodes, key=by_arrival)
            begun = [sequence for sequence in lane.queue.prefilling if not sequence.in_flight and sequence.blocks]
            if latest is needy and lane.decodes.size == 1 and begun:
                group.preempt(max(begun, key=by_arrival), lane, now)  # nobody else to swap
                return
            self._swap_out(group, lane, latest)
        if needy in lane.decodes:
            lane.decodes.remove(needy)
            self._paused.append(needy)

    def _outgoing_blocks(self) -> int:
        return sum(sequence.blocks for sequence in self._leaving)

    def _swap_out(self, group: Group, lane: Lane, sequence: Sequence) -> None:
        lane.decodes.remove(sequence)
        self._leaving[sequence] = None
        for start in range(0, sequence.blocks, PIECE_BLOCKS):
            piece = min(PIECE_BLOCKS, sequence.blocks - start)
            self._copy(self._to_host, group, piece, partial(self._on_out, group, sequence, piece))

    def _on_out(self, group: Group, sequence: Sequence, piece: int, _: float) -> None:
        group.give_back(piece)
        sequence.blocks -= piece
        sequence.host_blocks += piece
        if not sequence.blocks:
            del self._leaving[sequence]
            self._swapped.append(sequence)
            self._swapped.sort(key=by_arrival)
        group.wake()

    def _swap_in(self, group: Group, lane: Lane) -> None:
        """Start copies back while there is room for the sequence and a block for everybody, and the link is free."""
        while self._swapped and not self._leaving and not self._from_host.queued_bytes:
            sequence = self._swapped[0]
            others = lane.decodes.size + len(lane.queue.prefilling)
            if group.free_blocks < sequence.host_blocks + 1 + others or not group.take(sequence.host_blocks):
                return
            self._swapped.pop(0)
            self._returning[sequence] = None
            self.extra_blocks += sequence.host_blocks
            self._copy(self._from_host, group, sequence.host_blocks, partial(self._on_in, group, sequence))

    def _on_in(self, group: Group, sequence: Sequence, _: float) -> None:
        del self._returning[sequence]
        self.extra_blocks -= sequence.host_blocks
        sequence.blocks, sequence.host_blocks = sequence.host_blocks, 0
        group.adopt(sequence)

    def _copy(self, link: Link, group: Group, blocks: int, done: Done) -> None:
        link.send(blocks * group.settings.sizes.block_bytes, 0, None, done)
