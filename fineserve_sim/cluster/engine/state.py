"""The state inside one engine, and the parts of it that others see."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import chain

from fineserve_sim.cluster.engine.kv import CountedBlocks, EngineKV
from fineserve_sim.cluster.engine.sequence import Decodes, Lane, Queue, SequenceState
from fineserve_sim.cluster.engine.tp_group import TpGroup
from fineserve_sim.cluster.scenario import EngineSettings
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.interfaces import EngineLoad, EngineState

BatchSums = tuple[int, int, int, int, int, int]
"""The running sums of a batch that the latency model asks for (see ``StepModel.step_s``)."""


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine before it exists. ``max_tokens`` bounds prompt and output of a sequence together. ``settings`` has the block
    size of its memory."""

    engine: int
    model: str
    step: StepModel
    kv: EngineKV
    max_tokens: int
    settings: EngineSettings

    @property
    def able(self) -> bool:
        """Whether the engine has room for a prompt and a token; without it the controller turns requests away."""
        return self.max_tokens > 1


class PrefixTier(ABC):
    """Memory behind a link, where prefixes wait for sequences that begin alike."""

    @abstractmethod
    def has_more(self, sequence: SequenceState) -> bool:
        """Whether this tier has a longer part of the sequence's prefix than the engine itself."""

    @abstractmethod
    def fetch(self, queue: Queue) -> bool:
        """The first waiting sequence gets blocks, and its prefix is copied into them. False, and nothing done, when they do
        not fit."""


class State:
    """The sequences of one engine, its KV and its counters.

    A sequence that has started is in exactly one place: the ``decodes`` or ``joining`` of a lane, the ``prefilling`` of a
    queue, ``stalled`` or ``swapped``. Stalled sequences wait for KV from elsewhere. Swapped ones are in a tier, paused or on
    their way, with the blocks that they hold here. ``coming`` sequences are elsewhere still, and have slots here and
    ``reserved_blocks``.
    """

    def __init__(self, seat: Seat, *, lanes: int = 1, shared_queue: bool = True) -> None:
        self.settings = settings = seat.settings
        self.index, self.model, self.max_tokens = seat.engine, seat.model, seat.max_tokens
        self.step, self.kv = seat.step, seat.kv
        self.columns: tuple[int, ...] = (seat.engine,)  # of a timeline, one a stage: the first counts its requests
        self.stages: tuple[TpGroup, ...] = ()  # of a pipeline, in order, with their layers
        self.layout: tuple[range, ...] = ()
        self.queues = [Queue(settings.block_tokens) for _ in range(1 if shared_queue else lanes)]
        self.lanes = [
            Lane(self.queues[lane % len(self.queues)], Decodes(settings.block_tokens, seat.step.tail))
            for lane in range(lanes)
        ]
        self.prefixes: PrefixTier | None = None
        self.stalled: dict[SequenceState, None] = {}
        self.swapped: dict[SequenceState, int] = {}
        self.hands_over = False  # what it has prefilled decodes elsewhere
        self.yields = True  # a prefill yields a token; else whoever takes over computes the last one again
        self.coming = self.reserved_blocks = self.awaited_blocks = 0
        self.backlog_tokens = 0  # to be prefilled, of all that is queued or in prefill
        self.slowdown = 1.0  # by contention, now

    @property
    def busy(self) -> bool:
        """An iteration is in flight."""
        for lane in self.lanes:  # noqa: SIM110 - half the time of a generator
            if lane.launched:
                return True
        return False

    @property
    def wants_memory(self) -> bool:
        """Requests wait for their prefill, or for more of it."""
        for queue in self.queues:  # noqa: SIM110 - half the time of a generator
            if queue.waiting or queue.prefilling:
                return True
        return False

    @property
    def iterations(self) -> int:
        """Iterations done, up to the last settled boundary."""
        return sum(lane.decodes.iteration + lane.prompt_batches for lane in self.lanes)

    @property
    def waiting(self) -> int:
        """Sequences that hold no KV."""
        return sum([len(queue.waiting) for queue in self.queues])

    @property
    def running(self) -> int:
        """Sequences with a slot: decoding, in prefill, swapped, or waiting for their KV."""
        lane = self.lanes[0]
        inside = len(self.stalled) + len(self.swapped) + lane.decodes.size + len(lane.joining)
        inside += len(lane.queue.prefilling)
        if len(self.lanes) > 1:
            inside += sum([other.size for other in self.lanes[1:]])
            inside += sum([len(queue.prefilling) for queue in self.queues[1:]])
        return inside

    @property
    def free_slots(self) -> int:
        """Sequences that may start or come, as far as slots go."""
        return self.settings.max_sequences * len(self.lanes) - self.running - self.coming

    @property
    def requests(self) -> int:
        """All that were dispatched here and have not ended."""
        return self.running + self.waiting

    @property
    def has_work(self) -> bool:
        """A sequence is here, waiting or started."""
        return bool(self.stalled or self.swapped) or any(lane.has_work for lane in self.lanes)

    def partial_prefills(self) -> list[SequenceState]:
        """Prefills that hold memory."""
        return [sequence for queue in self.queues for sequence in queue.prefilling]

    def too_long(self, sequence: SequenceState) -> bool:
        """Whether even the empty memory could not hold the tokens that the sequence must prefill, and one more."""
        return sequence.target_tokens >= self.kv.capacity_tokens()

    def state(self) -> EngineState:
        """The state that a scheduler sees. Requests that were dispatched and have not started yet count as running."""
        promised = self.requests
        return EngineState(
            running=promised,
            decoding=sum([lane.size for lane in self.lanes]),
            prefill_tokens=self.backlog_tokens,
            free_slots=max(0, self.settings.max_sequences * len(self.lanes) - promised),
            free_kv_tokens=self.kv.free_tokens(),
            slowdown=self.slowdown,
        )

    def load(self, *, shortest: bool = False) -> EngineLoad:
        """The load that a dispatcher sees; ``shortest`` also names the running request that a migration would move."""
        used_blocks, queue = self.kv.used_blocks(), self.queues[0]
        queued_blocks, head_blocks = queue.queued_blocks, queue.head_blocks
        if len(self.queues) > 1:
            queued_blocks = sum([queue.queued_blocks for queue in self.queues])
            head_blocks = max([queue.head_blocks for queue in self.queues])
        queued_blocks += self.awaited_blocks
        capacity_blocks, stalled = used_blocks + self.kv.free_blocks(), len(self.stalled)
        fullest_bytes = self._fullest_bytes(used_blocks) if self.stages else 0
        shortest_blocks, index = self._shortest() if shortest else (0, None)
        blocks = used_blocks, capacity_blocks, queued_blocks, head_blocks
        return EngineLoad(*blocks, self.running, stalled, fullest_bytes, index, shortest_blocks)

    def _shortest(self) -> tuple[int, int | None]:
        """The blocks of the running request that a migration would move, and its index."""
        held = [lane.decodes.held_blocks(lane.leaving, ahead=lane.under_way) for lane in self.lanes]
        return min(chain.from_iterable(held), default=(0, None))

    def _fullest_bytes(self, used_blocks: int) -> int:
        """The most KV bytes on one of the stages, less the bytes kept for sequences to come."""
        kept_bytes = [(pool.held_blocks - used_blocks) * pool.block_bytes for pool in self.kv.pools]
        return max([stage.kv.used_bytes - kept for stage, kept in zip(self.stages, kept_bytes, strict=True)])

    def blocks_of(self, lane: Lane, sequence: SequenceState) -> int:
        """Blocks of a sequence that decodes in ``lane``, with the one for the token under way."""
        return self.kv.blocks_for(lane.decodes.cached_tokens_of(sequence) + lane.under_way)

    def batch_of(self, lane: Lane) -> BatchSums:
        """The running sums of the lane's batch."""
        decodes, decoded = (lane.decodes.size, lane.decodes.attended_tokens) if lane.decoding else (0, 0)
        tokens = pairs = context = ending = 0
        for sequence, done, size in lane.chunks:
            tokens += size
            pairs += size * done + size * (size + 1) // 2
            context += done
            ending += done + size == sequence.target_tokens
        return decodes, decoded, tokens, pairs, context, decodes + ending

    def check(self) -> None:
        """Raise AssertionError unless the engine takes exactly the blocks that its sequences hold, and each has a slot."""
        most = self.settings.max_sequences
        slots_hold = self.free_slots >= 0 and all(lane.size <= most for lane in self.lanes)
        assert slots_hold, f"engine {self.index}: more sequences than slots"
        if not isinstance(self.kv, CountedBlocks):
            return
        resting = [*self.stalled, *self.partial_prefills(), *chain.from_iterable(lane.joining for lane in self.lanes)]
        held = self.reserved_blocks + sum(self.swapped.values())
        held += sum(self.kv.blocks_for(sequence.cached_tokens) for sequence in resting)
        held += sum(self.blocks_of(lane, sequence) for lane in self.lanes for sequence in lane.decodes)
        assert held == self.kv.used_blocks(), f"engine {self.index}: {held} blocks held, {self.kv.used_blocks()} taken"

    def take_started(self) -> list[SequenceState]:
        """Remove and return all that had started. The token under way of a decode in flight counts as cached: it has a
        block."""
        started = [*self.stalled]
        for lane in self.lanes:
            for sequence in list(lane.decodes):
                lane.decodes.remove(sequence)
                sequence.cached_tokens += lane.under_way
                started.append(sequence)
            started += lane.joining
            lane.joining.clear()
        started += self.partial_prefills()
        self.stalled.clear()
        for queue in self.queues:
            queue.prefilling.clear()
        return started
