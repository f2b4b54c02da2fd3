"""KV memory runs out, and sequences are swapped to host memory (InferCept) rather than recomputed.

Swapping overlaps with computing: copies go over PCIe while other sequences run, so in a step of t seconds at most rate
times t bytes leave, and as many come back. To have blocks in time it looks two steps ahead. Blocks are free once their
copy is done; a decode that finds none pauses. Swapped sequences come back first come first served, before anything new
is admitted.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.links import Link
from fineserve_sim.cluster.engine.queue import Lane
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.policy.memory.preemption import arrival_order, preemption_victim

PIECE_BLOCKS = 64
"""Blocks that are copied, and freed, as one."""


class Swap:
    """A ``Relief``: swap space in host memory, without limit, for an engine of one lane and counted blocks of ``block_bytes``
    over all GPUs of the engine."""

    boundaries_ahead = 2

    def __init__(self, to_host: Link, from_host: Link, kv: CountedBlocks, block_bytes: int) -> None:
        self._to_host, self._from_host = to_host, from_host
        self._kv, self._block_bytes = kv, block_bytes
        self._swapped: list[SequenceState] = []
        self._leaving: dict[SequenceState, int] = {}  # blocks that are still here
        self._returning: dict[SequenceState, int] = {}
        self._paused: list[SequenceState] = []

    @property
    def admits(self) -> bool:
        return not (self._swapped or self._leaving or self._paused)

    @property
    def held(self) -> int:
        return len(self._swapped) + len(self._leaving) + len(self._returning) + len(self._paused)

    def members(self) -> list[SequenceState]:
        return [*self._swapped, *self._leaving, *self._returning, *self._paused]

    def used_blocks(self) -> int:
        paused = sum(self._kv.blocks_for(sequence.cached_tokens) for sequence in self._paused)
        return paused + sum(self._leaving.values()) + sum(self._returning.values())

    def abandon(self) -> list[SequenceState]:
        lost = self.members()
        self._kv.give(self.used_blocks())
        for members in (self._swapped, self._leaving, self._returning, self._paused):
            members.clear()
        return lost

    def before(self, engine: Engine, lane: Lane, now: float) -> None:
        for sequence in self._paused:
            lane.decodes.join(sequence)
        self._paused.clear()
        ahead = len(lane.decodes.needing_block()) + len(lane.decodes.needing_block(1))
        while self._kv.free_blocks() + sum(self._leaving.values()) < ahead and lane.decodes.size > 1:
            self._swap_out(engine, lane, lane.latest_decode())
        self._swap_in(engine, lane)

    def make_room(self, engine: Engine, lane: Lane, growing: Collection[SequenceState], now: float) -> None:
        for sequence in sorted(growing, key=arrival_order):
            while sequence in lane.decodes and not self._kv.take(1):
                self._relieve(engine, lane, sequence, now)

    def _relieve(self, engine: Engine, lane: Lane, needy: SequenceState, now: float) -> None:
        """There is no block for ``needy``: somebody is swapped out, and it pauses until blocks are free."""
        if not self._leaving:
            latest = lane.latest_decode()
            begun = lane.queue.prefilling
            if latest is needy and lane.decodes.size == 1 and begun:
                engine.preempt(preemption_victim(begun), lane, now)  # nobody else to swap
                return
            self._swap_out(engine, lane, latest)
        if needy in lane.decodes:
            lane.decodes.remove(needy)
            self._paused.append(needy)

    def _swap_out(self, engine: Engine, lane: Lane, sequence: SequenceState) -> None:
        lane.decodes.remove(sequence)
        blocks = self._leaving[sequence] = self._kv.blocks_for(sequence.cached_tokens)
        for start in range(0, blocks, PIECE_BLOCKS):
            piece = min(PIECE_BLOCKS, blocks - start)
            self._to_host.send(piece * self._block_bytes, 0, None, partial(self._on_out, engine, sequence, piece))

    def _on_out(self, engine: Engine, sequence: SequenceState, piece: int, now: float) -> None:
        if sequence not in self._leaving:
            return  # lost with its engine
        self._kv.give(piece)
        self._leaving[sequence] -= piece
        if not self._leaving[sequence]:
            del self._leaving[sequence]
            self._swapped.append(sequence)
            self._swapped.sort(key=arrival_order)
        engine.freed(now)

    def _swap_in(self, engine: Engine, lane: Lane) -> None:
        """Start copies back while there is room for the sequence and a block for everybody, and the link is free."""
        while self._swapped and not self._leaving and not self._from_host.queued_bytes:
            sequence = self._swapped[0]
            blocks = self._kv.blocks_for(sequence.cached_tokens)
            others = lane.decodes.size + len(lane.queue.prefilling)
            if self._kv.free_blocks() < blocks + 1 + others or not self._kv.take(blocks):
                return
            self._returning[self._swapped.pop(0)] = blocks
            self._from_host.send(blocks * self._block_bytes, 0, None, partial(self._on_in, engine, sequence))

    def _on_in(self, engine: Engine, sequence: SequenceState, now: float) -> None:
        if self._returning.pop(sequence, None) is not None:
            engine.adopt(sequence, now)
