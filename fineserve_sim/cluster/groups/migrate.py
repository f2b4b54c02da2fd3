"""Live migration between instances (Llumnix): copy while decoding, then a short stop for the rest.

The destination reserves the blocks when the copy starts. When all that was there has been copied, the sequence leaves
its batch, the tokens decoded meanwhile follow, and it goes on at the destination; only then its source gives the memory
back. A move ends early when the sequence finishes or loses its KV first, or the destination cannot hold what was added.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from fineserve_sim.cluster.groups.group import Group
from fineserve_sim.cluster.groups.passes import KV
from fineserve_sim.cluster.groups.queue import Lane
from fineserve_sim.cluster.groups.sequences import Sequence
from fineserve_sim.policy.groups.migration import Migrate


@dataclass(slots=True)
class _Move:
    sequence: Sequence
    source: Group
    destination: Group
    copied_tokens: int
    reserved_blocks: int


class Migrations:
    """Moves under way; a group takes part in one at a time. ``moved`` counts those that succeeded."""

    def __init__(self, groups: dict[int, Group]) -> None:
        self._groups = groups
        self._moves: dict[Sequence, _Move] = {}
        self.moved = 0

    @property
    def busy(self) -> set[int]:
        """Groups that send or receive."""
        return {group.id for move in self._moves.values() for group in (move.source, move.destination)}

    def start(self, command: Migrate) -> None:
        source, destination = self._groups[command.source], self._groups[command.destination]
        (lane,) = source.lanes
        sequence = next(member for member in lane.decodes if member.index == command.request)
        if not destination.take(sequence.blocks):
            return
        destination.reserved_blocks += sequence.blocks
        move = _Move(sequence, source, destination, lane.decodes.cached_tokens_of(sequence), sequence.blocks)
        self._moves[sequence] = move
        self._copy(move, move.copied_tokens, partial(self._copied, move))

    def _copied(self, move: _Move, _: float) -> None:
        (lane,) = move.source.lanes
        if not move.source.alive or not move.destination.alive or move.sequence not in lane.decodes:
            self._give_up(move)
            return
        lane.leaving.append(move.sequence)
        move.source.wake()

    def leave(self, lane: Lane, sequence: Sequence) -> None:
        """Between two steps of the source: the sequence stops there."""
        move = self._moves[sequence]
        if sequence not in lane.decodes or not move.destination.alive:
            self._give_up(move)
            return
        more = sequence.blocks - move.reserved_blocks
        if more > 0 and not move.destination.take(more):
            self._give_up(move)
            return
        move.destination.reserved_blocks += max(0, more)
        move.reserved_blocks = max(sequence.blocks, move.reserved_blocks)
        lane.decodes.remove(sequence)
        move.source.stalled[sequence] = None
        self._copy(move, max(0, sequence.cached_tokens - move.copied_tokens), partial(self._handed_over, move))

    def _handed_over(self, move: _Move, _: float) -> None:
        sequence, source, destination = move.sequence, move.source, move.destination
        if not source.alive:
            self._give_up(move)  # lost with its instance; it has been queued again
            return
        if not destination.alive:
            self._give_up(move)
            source.adopt(sequence)
            return
        del self._moves[sequence]
        del source.stalled[sequence]
        source.give_back(sequence.blocks)
        destination.reserved_blocks -= move.reserved_blocks
        sequence.blocks = move.reserved_blocks
        destination.adopt(sequence)
        source.wake()
        self.moved += 1

    def _give_up(self, move: _Move) -> None:
        del self._moves[move.sequence]
        if move.destination.alive:
            move.destination.reserved_blocks -= move.reserved_blocks
            move.destination.give_back(move.reserved_blocks)
            move.destination.wake()

    def _copy(self, move: _Move, tokens: int, done: partial[None]) -> None:
        sizes = move.source.settings.sizes
        link = move.source.instances[0].link_to(move.destination.instances[0])
        link.send(round(tokens * sizes.layers * sizes.token_layer_bytes), KV, None, done)
