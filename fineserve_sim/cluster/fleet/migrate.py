"""Live migration between instances (Llumnix): copy while decoding, then a short stop for the rest.

The destination reserves a slot and the blocks when the copy starts. When all that was there has been copied, the sequence
leaves its batch, the tokens decoded meanwhile follow, and it goes on at the destination; only then its source gives the memory
back. A move ends early when the sequence finishes or loses its KV first, or the destination cannot hold what was added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.pipeline import KV
from fineserve_sim.cluster.engine.queue import Lane
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.fleet.regroup import Home
from fineserve_sim.cluster.host import TIMER
from fineserve_sim.policy.commands import Migrate
from fineserve_sim.policy.events import MigrationEnded


@dataclass(slots=True)
class _Move:
    sequence: SequenceState
    source: Engine
    destination: Engine
    copied_tokens: int
    reserved_blocks: int


class Migrations:
    """Moves under way, of engines of one lane and counted blocks. ``moved`` counts those that succeeded."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._moves: dict[SequenceState, _Move] = {}
        self.moved = 0

    def start(self, command: Migrate, now: float) -> None:
        engines = self._home.cluster.engines
        source, destination = engines[command.source], engines[command.destination]
        (lane,) = source.lanes
        sequence = next(member for member in lane.decodes if member.index == command.request_id)
        blocks = source.blocks_of(lane, sequence)
        if destination.free_slots < 1 or not self._reserve(destination, blocks, now):
            self._home.cluster.hear(now, MigrationEnded(command.request_id))
            return
        move = _Move(sequence, source, destination, lane.decodes.cached_tokens_of(sequence), blocks)
        self._moves[sequence] = move
        destination.coming += 1
        self._copy(move, move.copied_tokens, self._copied)

    def _copied(self, move: _Move, now: float) -> None:
        (lane,) = move.source.lanes
        if move.sequence not in lane.decodes:
            self._end(move, now)
            return
        self._home.cluster.settle_now(move.source, now)
        lane.leave_next(move.sequence)
        move.source.replan(now)

    def leave(self, engine: Engine, lane: Lane, sequence: SequenceState, now: float) -> None:
        """Between two steps of the source: the sequence stops there."""
        move = self._moves.get(sequence)
        if move is None:
            return  # the destination failed
        if sequence not in lane.decodes:
            self._end(move, now)
            return
        blocks = engine.blocks_of(lane, sequence)
        more = blocks - move.reserved_blocks
        if more > 0 and not self._reserve(move.destination, more, now):
            self._end(move, now)
            return
        move.reserved_blocks = max(blocks, move.reserved_blocks)
        lane.decodes.remove(sequence)
        engine.stalled[sequence] = None
        self._copy(move, max(0, sequence.cached_tokens - move.copied_tokens), self._handed_over)

    def _handed_over(self, move: _Move, now: float) -> None:
        sequence, source, destination = move.sequence, move.source, move.destination
        del self._moves[sequence]
        destination.coming -= 1
        del source.stalled[sequence]
        source.kv.release(sequence)
        self._home.cluster.touch(source)
        self._release(destination, move.reserved_blocks)
        held = destination.kv.hold(sequence, {})
        assert held, f"engine {destination.index} lost blocks that it had reserved"
        self._home.cluster.settle_now(destination, now)
        destination.adopt(sequence, now)
        source.replan(now)
        self.moved += 1
        self._home.cluster.hear(now, MigrationEnded(sequence.index))

    def forget(self, engine: Engine, now: float) -> None:
        """An engine is lost: what moves from it is lost with it, what moves to it goes on where it is."""
        for move in list(self._moves.values()):
            if move.source is engine:
                self._end(move, now)
            elif move.destination is engine:
                self._end(move, now)
                if move.sequence in move.source.stalled:
                    move.source.adopt(move.sequence, now)

    def _end(self, move: _Move, now: float) -> None:
        """The request does not move."""
        del self._moves[move.sequence]
        move.destination.coming -= 1
        self._release(move.destination, move.reserved_blocks)
        move.destination.replan(now)
        self._home.cluster.hear(now, MigrationEnded(move.sequence.index))

    def _reserve(self, engine: Engine, blocks: int, now: float) -> bool:
        """Hold so many blocks, which the span of the engine may have counted on."""
        assert isinstance(engine.kv, CountedBlocks)
        self._home.cluster.settle_now(engine, now)
        taken = engine.kv.take(blocks)
        engine.reserved_blocks += blocks * taken
        engine.cut()
        self._home.cluster.touch(engine)
        return taken

    def _release(self, engine: Engine, blocks: int) -> None:
        assert isinstance(engine.kv, CountedBlocks)
        engine.kv.give(blocks)
        engine.reserved_blocks -= blocks
        self._home.cluster.touch(engine)

    def _copy(self, move: _Move, tokens: int, then: Callable[[_Move, float], None]) -> None:
        (source,), (destination,) = self._home.stages_of(move.source), self._home.stages_of(move.destination)
        sizes = source.sizes
        bytes = round(tokens * sizes.layers * sizes.token_layer_bytes)
        source.link_to(destination).send(bytes, KV, None, partial(self._arrived, move, then))

    def _arrived(self, move: _Move, then: Callable[[_Move, float], None], now: float) -> None:
        if self._moves.get(move.sequence) is move:  # else its source or destination is lost
            self._home.cluster.order = TIMER
            then(move, now)
