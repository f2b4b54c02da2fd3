"""Requests that go on at another instance with their KV.

Live migration (Llumnix): copy while decoding, then a short stop for the rest.

The destination reserves a slot and the blocks when the copy starts. When the KV of that moment has been copied, the sequence
leaves its batch. The tokens decoded meanwhile follow, and it goes on at the destination. Only then its source gives the memory
back. A move ends early when the sequence finishes or loses its KV first, or the destination cannot hold the added tokens.

Engines that only prefill hand over their prefilled sequences. Such a sequence stands still, and waits at its source until the
destination has a slot and blocks. Sequences that wait for the same engine go first come first served, behind its preempted
ones.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.links import KV
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import Lane, SequenceState
from fineserve_sim.cluster.host import TIMER, Cluster, Fleet
from fineserve_sim.cluster.scenario import Left
from fineserve_sim.policy.commands import Migrate
from fineserve_sim.policy.events import MigrationEnded, PrefillEnded


@dataclass(slots=True)
class _Move:
    sequence: SequenceState
    source: Engine
    destination: Engine
    copied_tokens: int
    reserved_blocks: int


class Home(NamedTuple):
    """The GPUs of an engine, and the KV bytes of a token over all of them."""

    gpus: tuple[int, ...]
    token_bytes: float


class Migrations:
    """Carries out ``Migrate`` between engines of one lane and counted blocks. ``moved`` counts the moves that succeeded.
    ``home_of`` an engine. ``setup_s``: seconds that handing a sequence over takes beside its bytes."""

    def __init__(self, cluster: Cluster, home_of: Callable[[Engine], Home], setup_s: float = 0.0) -> None:
        self._cluster, self._home_of, self._setup_s = cluster, home_of, setup_s
        self._moves: dict[SequenceState, _Move] = {}
        self._due: dict[int, deque[_Move]] = defaultdict(deque)  # handed over, by the engine that has no room yet
        self.moved = 0
        cluster.leaves = self._leave
        cluster.prefilled = self._prefilled
        cluster.actions[Migrate] = self._start

    def _start(self, command: Migrate, now: float) -> None:
        engines = self._cluster.engines
        source, destination = engines[command.source], engines[command.destination]
        if source.hands_over:
            self._hand_over(command.request_id, source, destination, now)
            return
        (lane,) = source.lanes
        sequence = next(member for member in lane.decodes if member.index == command.request_id)
        move = _Move(sequence, source, destination, lane.decodes.cached_tokens_of(sequence), 0)
        if destination.free_slots < 1 or not self._reserve(move, source.blocks_of(lane, sequence), now):
            self._cluster.hear(now, MigrationEnded(command.request_id))
            return
        self._moves[sequence] = move
        destination.coming += 1
        self._copy(move, move.copied_tokens, self._copied)

    def _prefilled(self, engine: Engine, sequence: SequenceState, now: float) -> None:
        """A prefill has ended: the sequence stands still, and the controller says where it goes on."""
        engine.stalled[sequence] = None
        if not engine.yields and sequence.prefilled:
            blocks = engine.kv.blocks_for(sequence.cached_tokens)
            sequence.cached_tokens -= 1
            assert isinstance(engine.kv, CountedBlocks)
            engine.kv.give(blocks - engine.kv.blocks_for(sequence.cached_tokens))
        self._cluster.touch(engine)
        self._cluster.hear(now, PrefillEnded(sequence.index, engine.index, sequence.cached_tokens))

    def _hand_over(self, request: int, source: Engine, destination: Engine, now: float) -> None:
        sequence = next(member for member in source.stalled if member.index == request)
        move = self._moves[sequence] = _Move(sequence, source, destination, 0, 0)
        self._due[destination.index].append(move)
        destination.awaited_blocks += self._blocks(move)
        self._cluster.touch(destination)
        self.take_in(destination, now)

    def take_in(self, engine: Engine, now: float) -> None:
        """Start the copies of sequences that were to go to this engine, as far as it has room now."""
        due = self._due.get(engine.index)
        while due and not engine.waiting and engine.free_slots > 0 and self._reserve(due[0], self._blocks(due[0]), now):
            move = due.popleft()
            engine.awaited_blocks -= self._blocks(move)
            engine.coming += 1
            self._cluster.touch(engine)
            self._copy(move, move.sequence.cached_tokens, self._set_up if self._setup_s else self._handed_over)

    def _set_up(self, move: _Move, now: float) -> None:
        """The bytes have arrived: hand the sequence over after ``setup_s`` more."""

        def ready(now: float) -> None:
            if self._moves.get(move.sequence) is move:
                self._handed_over(move, now)

        self._cluster.at(now + self._setup_s, TIMER, ready)

    def _blocks(self, move: _Move) -> int:
        """Blocks for a sequence that is handed over: one at least, for the token that it computes next."""
        return max(1, move.destination.kv.blocks_for(move.sequence.cached_tokens))

    def _copied(self, move: _Move, now: float) -> None:
        (lane,) = move.source.lanes
        if move.sequence not in lane.decodes:
            self._end(move, now)
            return
        self._cluster.settle_now(move.source, now)
        lane.leaving.append(move.sequence)
        move.source.executor.replan(now)

    def _leave(self, engine: Engine, lane: Lane, sequence: SequenceState, now: float) -> None:
        """Between two steps of the source: the sequence stops there."""
        move = self._moves.get(sequence)
        if move is None:
            return  # the destination failed
        if sequence not in lane.decodes or not self._reserve(move, engine.blocks_of(lane, sequence), now):
            self._end(move, now)
            return
        lane.decodes.remove(sequence)
        engine.stalled[sequence] = None
        self._copy(move, max(0, sequence.cached_tokens - move.copied_tokens), self._handed_over)

    def _handed_over(self, move: _Move, now: float) -> None:
        sequence, source, destination = move.sequence, move.source, move.destination
        self._release(move)
        del source.stalled[sequence]
        source.kv.release(sequence)
        self._cluster.touch(source)
        held = destination.kv.hold(sequence, {})
        assert held, f"engine {destination.index} lost blocks that it had reserved"
        self._cluster.settle_now(destination, now)
        outcomes, tokens = self._cluster.outcomes, sequence.generated_tokens
        outcomes.move(sequence.index, destination.index, now, tokens, Left.MIGRATED)
        destination.adopt(sequence, now)
        source.executor.replan(now)
        self.moved += 1
        self._cluster.hear(now, MigrationEnded(sequence.index))

    def forget(self, engine: Engine, now: float) -> list[tuple[Engine, SequenceState]]:
        """An engine is lost. Sequences that move from it are lost with it; sequences that move to it go on at their source.
        Returns the sequences that cannot, since they were handed over, each with its source."""
        left = []
        for move in list(self._moves.values()):
            if engine in (move.source, move.destination):
                self._end(move, now)
                if move.source is not engine and move.sequence in move.source.stalled:
                    if move.source.hands_over:
                        left.append((move.source, move.sequence))
                    else:
                        move.source.adopt(move.sequence, now)
        return left

    def _end(self, move: _Move, now: float) -> None:
        """The request does not move."""
        self._release(move)
        move.destination.executor.replan(now)
        self._cluster.hear(now, MigrationEnded(move.sequence.index))

    def _reserve(self, move: _Move, blocks: int, now: float) -> bool:
        """Hold so many blocks in all at the destination, whose span may have counted on them."""
        engine, more = move.destination, blocks - move.reserved_blocks
        if more <= 0:
            return True
        assert isinstance(engine.kv, CountedBlocks)
        self._cluster.settle_now(engine, now)
        taken = engine.kv.take(more)
        if taken:
            engine.reserved_blocks += more
            move.reserved_blocks = blocks
        engine.executor.cut()
        self._cluster.touch(engine)
        return taken

    def _release(self, move: _Move) -> None:
        """The move is over: the destination reserves nothing for it any more."""
        engine = move.destination
        assert isinstance(engine.kv, CountedBlocks)
        del self._moves[move.sequence]
        if move in (due := self._due[engine.index]):
            due.remove(move)
            engine.awaited_blocks -= self._blocks(move)
        else:
            engine.coming -= 1
        engine.kv.give(move.reserved_blocks)
        engine.reserved_blocks -= move.reserved_blocks
        self._cluster.touch(engine)

    def _copy(self, move: _Move, tokens: int, then: Callable[[_Move, float], None]) -> None:
        source, destination = self._home_of(move.source), self._home_of(move.destination)
        bytes = round(tokens * source.token_bytes)

        def arrived(now: float) -> None:
            if self._moves.get(move.sequence) is move:  # else its source or destination is lost
                self._cluster.order = TIMER
                then(move, now)

        self._cluster.links.between(source.gpus, destination.gpus).send(bytes, KV, None, arrived)


class Handovers(Fleet):
    """Engines with roles that stay: prefilled requests go on where memory comes back. Arguments as ``Migrations``."""

    def __init__(self, cluster: Cluster, home_of: Callable[[Engine], Home], setup_s: float = 0.0) -> None:
        self._migrations = Migrations(cluster, home_of, setup_s)
        cluster.fleet = self

    def freed(self, engine: Engine, now: float) -> None:
        self._migrations.take_in(engine, now)
