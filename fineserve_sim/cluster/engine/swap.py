"""A tier of KV in host memory (InferCept): when KV memory runs out, sequences are swapped there rather than recomputed.

Swapping overlaps with computing. Copies cross the host link while other sequences run, so in a step of t seconds at most rate
times t bytes leave, and as many come back. The tier looks two steps ahead, to have blocks in time. Blocks are free once their
copy is done; a decode that finds none pauses. Swapped sequences come back first come first served, before anything new starts.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.links import Link
from fineserve_sim.cluster.engine.loop import Engine, Tier
from fineserve_sim.cluster.engine.sequence import Lane, SequenceState
from fineserve_sim.policy.memory.preemption import arrival_order, preemption_victim

PIECE_BLOCKS = 64
"""Blocks that are copied, and freed, as one."""


class HostTier(Tier):
    """Swap space without limit, for counted blocks of ``block_bytes`` over all GPUs of the engine.

    A sequence in ``engine.swapped`` is in one of four states: leaving, ``_away`` (oldest first), on its way back, or
    ``_paused`` (it needs one more block, and keeps its others).
    """

    boundaries_ahead = 2

    def __init__(self, engine: Engine, to_host: Link, from_host: Link, block_bytes: int) -> None:
        super().__init__(engine)
        assert isinstance(engine.kv, CountedBlocks)
        self._blocks = engine.kv
        self._to_host, self._from_host, self._block_bytes = to_host, from_host, block_bytes
        self._leaving_blocks = 0
        self._away: list[SequenceState] = []
        self._paused: list[SequenceState] = []

    @property
    def moving(self) -> bool:
        return bool(self._leaving_blocks or self._away or self._paused)

    def lose(self) -> None:
        engine = self._engine
        self._blocks.give(sum(engine.swapped.values()))
        for sequence in engine.swapped:
            sequence.cached_tokens = 0
            engine.stalled[sequence] = None
        engine.swapped.clear()

    def exchange(self, lane: Lane) -> None:
        """Paused sequences go on. Then decodes leave until the blocks of the next two steps are sure, or others come back."""
        for sequence in self._paused:
            del self._engine.swapped[sequence]
            lane.decodes.join(sequence)
        self._paused.clear()
        ahead = len(lane.decodes.needing_block()) + len(lane.decodes.needing_block(1))
        while self._blocks.free_blocks() + self._leaving_blocks < ahead and lane.decodes.size > 1:
            self._swap_out(lane, preemption_victim(lane.decodes))
        self._swap_in(lane)

    def make_room(self, lane: Lane, growing: Collection[SequenceState], now: float) -> None:
        for sequence in sorted(growing, key=arrival_order):
            while sequence in lane.decodes and not self._blocks.take(1):
                self._relieve(lane, sequence, now)

    def _relieve(self, lane: Lane, needy: SequenceState, now: float) -> None:
        """There is no block for ``needy``: the latest decode is swapped out, and ``needy`` pauses until blocks are free."""
        if not self._leaving_blocks:
            latest = preemption_victim(lane.decodes)
            begun = lane.queue.prefilling
            if latest is needy and lane.decodes.size == 1 and begun:
                self._engine.preempt(preemption_victim(begun), lane, now)  # no other decode to swap
                return
            self._swap_out(lane, latest)
        if needy in lane.decodes:
            lane.decodes.remove(needy)
            self._paused.append(needy)
            self._engine.swapped[needy] = self._blocks.blocks_for(needy.cached_tokens)

    def _swap_out(self, lane: Lane, sequence: SequenceState) -> None:
        lane.decodes.remove(sequence)
        blocks = self._engine.swapped[sequence] = self._blocks.blocks_for(sequence.cached_tokens)
        self._leaving_blocks += blocks
        for start in range(0, blocks, PIECE_BLOCKS):
            piece = min(PIECE_BLOCKS, blocks - start)
            self._to_host.send(piece * self._block_bytes, 0, None, partial(self._on_out, sequence, piece))

    def _on_out(self, sequence: SequenceState, piece: int, now: float) -> None:
        engine = self._engine
        if sequence not in engine.swapped:
            return  # lost with its engine
        self._blocks.give(piece)
        self._leaving_blocks -= piece
        engine.swapped[sequence] -= piece
        if not engine.swapped[sequence]:
            self._away.append(sequence)
            self._away.sort(key=arrival_order)
        engine.host.memory_freed(engine, now)
        engine.executor.replan(now)

    def _swap_in(self, lane: Lane) -> None:
        """Start copies back while the link is free, and while there is room for the sequence and a block for each other one."""
        while self._away and not self._leaving_blocks and not self._from_host.queued_bytes:
            sequence = self._away[0]
            blocks = self._blocks.blocks_for(sequence.cached_tokens)
            others = lane.decodes.size + len(lane.queue.prefilling)
            if self._blocks.free_blocks() < blocks + 1 + others or not self._blocks.take(blocks):
                return
            self._engine.swapped[self._away.pop(0)] = blocks
            self._from_host.send(blocks * self._block_bytes, 0, None, partial(self._on_in, sequence))

    def _on_in(self, sequence: SequenceState, now: float) -> None:
        if self._engine.swapped.pop(sequence, None) is not None:
            self._engine.adopt(sequence, now)
