"""What an engine is to everybody but itself: its state as others see it, and what they may do with it.

How it batches is ``batcher``'s part, how long a batch takes that of ``spans``, ``lone`` and ``pipeline``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from itertools import chain
from typing import Protocol

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.queue import Lane, Queue
from fineserve_sim.cluster.engine.seat import Seat
from fineserve_sim.cluster.engine.sequence import Decodes, SequenceState
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.latency.sharing import Demand
from fineserve_sim.policy.interfaces import EngineLoad, EngineState
from fineserve_sim.policy.memory.preemption import arrival_order, preemption_victim

NEVER = float("inf")

BatchSums = tuple[int, int, int, int, int, int]
"""The running sums of a batch that the latency model asks for (see ``StepModel.step_s``)."""


class EngineHost(Protocol):
    """The cluster around an engine: what it hears, and what it is asked. ``engines`` by id; ``order`` of the event under way;
    ``logs``: whether what is computed is written down."""

    engines: dict[int, Engine]
    order: int
    merging: bool
    logs: bool
    outcomes: Outcomes

    def consult(self, engine: Engine, now: float) -> None: ...
    def must_ask(self, engine: Engine) -> bool: ...
    def ask_again_s(self, engine: Engine) -> float: ...
    def settle(self, engine: Engine, now: float, order: int) -> None: ...
    def settle_now(self, engine: Engine, now: float) -> None: ...
    def set_demand(self, engine: Engine, now: float, need: Demand) -> None: ...
    def steps_that_fit(self, engine: Engine, decodes: Decodes, most: int) -> int: ...
    def launched(self, engine: Engine, lane: Lane, now: float, *, sure: bool) -> None: ...
    def computed(self, engine: Engine, lane: Lane, since_s: float, now: float, stage: int = 0) -> None: ...
    def touch(self, engine: Engine) -> None: ...
    def progressed(self, engine: Engine) -> None: ...
    def finished(self, engine: Engine, sequence: SequenceState, now: float) -> None: ...
    def preempted(self, engine: Engine, sequence: SequenceState, now: float | None = None) -> None: ...
    def returned(self, engine: Engine, sequences: Collection[SequenceState], now: float) -> None: ...
    def memory_freed(self, engine: Engine, now: float) -> None: ...
    def stalled(self, engine: Engine, now: float) -> None: ...
    def rested(self, engine: Engine, now: float) -> None: ...
    def stopped(self, engine: Engine, now: float) -> None: ...
    def leaves(self, engine: Engine, lane: Lane, sequence: SequenceState, now: float) -> None: ...


class Relief(Protocol):
    """What an engine does when a decode finds no KV block, instead of recomputing the latest.

    ``admits``: new sequences may start; ``held`` sequences are away from the lanes (``members``) and hold ``used_blocks``;
    ``boundaries_ahead``: so many iterations ahead it looks for blocks.
    """

    boundaries_ahead: int

    @property
    def admits(self) -> bool: ...
    @property
    def held(self) -> int: ...
    def members(self) -> list[SequenceState]: ...
    def used_blocks(self) -> int: ...
    def abandon(self) -> list[SequenceState]:
        """The engine is lost: those away are, too, and hold nothing any more."""
        ...

    def before(self, engine: Engine, lane: Lane, now: float) -> None:
        """A batch is about to be formed."""
        ...

    def make_room(self, engine: Engine, lane: Lane, growing: Collection[SequenceState], now: float) -> None:
        """There are no blocks for all of ``growing``: afterwards those that still decode in ``lane`` have theirs."""
        ...


class Engine(ABC):
    """Batches of one model instance.

    ``stalled`` sequences wait for KV from elsewhere; ``coming`` ones are elsewhere still, and have their slots here and
    ``reserved_blocks``; ``promised_blocks`` is at least what is taken without another question.
    ``stopping``: it forms no more batches; ``closing``: those that it preempts go elsewhere. ``columns`` of a timeline,
    one a stage: the first counts its requests. ``next_boundary_s`` is the next boundary to settle inside the batch that is
    computed, ``order`` that of its step ends among what happens at the same time.
    """

    __slots__ = (
        "_backlog_tokens",
        "_host",
        "_iterations",
        "_pipelined",
        "_preempted",
        "_settings",
        "closing",
        "column",
        "columns",
        "coming",
        "composition_changed",
        "gone",
        "index",
        "kv",
        "lanes",
        "max_tokens",
        "model",
        "next_boundary_s",
        "order",
        "promised_blocks",
        "queues",
        "relief",
        "reserved_blocks",
        "slowdown",
        "stalled",
        "step",
        "stopping",
    )

    def __init__(
        self, seat: Seat, host: EngineHost, *, lanes: int = 1, shared_queue: bool = True, relief: Relief | None = None
    ) -> None:
        settings = seat.settings
        self.index = seat.engine
        self.model = seat.model
        self.step = seat.step
        self.kv = seat.kv
        self.max_tokens = seat.max_tokens
        self.relief = relief
        self.slowdown = 1.0
        self.promised_blocks = 0
        self.composition_changed = False
        self.stalled: dict[SequenceState, None] = {}
        self.coming = self.reserved_blocks = 0
        self.stopping = self.closing = self.gone = False
        self.columns: tuple[int, ...] = (seat.engine,)
        self.column = seat.engine
        self.next_boundary_s = NEVER
        self.order = order_of(Kind.STEP_END, seat.engine)
        self._settings = settings
        self._host = host
        self.queues = [Queue(settings.block_tokens) for _ in range(1 if shared_queue else lanes)]
        self.lanes = [Lane(self.queues[0 if shared_queue else lane], settings.block_tokens) for lane in range(lanes)]
        self._backlog_tokens = 0
        self._iterations = 0
        self._preempted = False
        self._pipelined = False  # sequences may decode in another lane than the one that prefilled them

    # --- what others see -------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def busy(self) -> bool:
        """An iteration is in flight."""

    @property
    @abstractmethod
    def starting(self) -> bool:
        """It is about to form a batch."""

    @property
    def wants_memory(self) -> bool:
        """Requests wait for their prefill, or for more of it."""
        return any(queue.waiting or queue.prefilling for queue in self.queues)

    @property
    def iterations(self) -> int:
        """Iterations done."""
        return self._iterations

    @property
    def waiting(self) -> int:
        """Sequences that hold no KV."""
        return sum(len(queue.waiting) for queue in self.queues)

    @property
    def running(self) -> int:
        """Sequences with a slot: decoding, in prefill, swapped, or waiting for their KV."""
        inside = sum([lane.size for lane in self.lanes]) + sum([len(queue.prefilling) for queue in self.queues])
        return inside + len(self.stalled) + (self.relief.held if self.relief else 0)

    @property
    def free_slots(self) -> int:
        """Sequences that may start or come, as far as slots go."""
        return self._settings.max_sequences * len(self.lanes) - self.running - self.coming

    @property
    def requests(self) -> int:
        """All that were dispatched here and have not ended."""
        return self.running + self.waiting

    @property
    def has_work(self) -> bool:
        return any(lane.has_work for lane in self.lanes) or bool(self.stalled or (self.relief and self.relief.held))

    def state(self) -> EngineState:
        """What a scheduler sees. Requests that were dispatched and have not started yet count as running."""
        promised = self.requests
        return EngineState(
            running=promised,
            decoding=sum(lane.size for lane in self.lanes),
            prefill_tokens=self._backlog_tokens,
            free_slots=max(0, self._settings.max_sequences * len(self.lanes) - promised),
            free_kv_tokens=self.kv.free_tokens(),
            slowdown=self.slowdown,
        )

    def load(self, *, shortest: bool = False) -> EngineLoad:
        """What a dispatcher sees; ``shortest`` names the running request that a migration would move, too."""
        used_blocks, queue = self.kv.used_blocks(), self.queues[0]
        queued_blocks, head_blocks = queue.queued_blocks, queue.head_blocks
        if len(self.queues) > 1:
            queued_blocks = sum([queue.queued_blocks for queue in self.queues])
            head_blocks = max([queue.head_blocks for queue in self.queues])
        blocks = (used_blocks, used_blocks + self.kv.free_blocks(), queued_blocks, head_blocks)
        load = EngineLoad(*blocks, self.running, len(self.stalled))
        if not shortest:
            return load
        held = [lane.decodes.held_blocks(lane.leaving, ahead=self._in_flight(lane)) for lane in self.lanes]
        shortest_blocks, index = min(chain.from_iterable(held), default=(0, None))
        return load._replace(shortest=index, shortest_blocks=shortest_blocks)

    def blocks_of(self, lane: Lane, sequence: SequenceState) -> int:
        """Blocks of a sequence that decodes in ``lane``, with the one for the token under way."""
        return self.kv.blocks_for(lane.decodes.cached_tokens_of(sequence) + self._in_flight(lane))

    @abstractmethod
    def _in_flight(self, lane: Lane) -> bool:
        """A batch of the lane is being computed."""

    def members(self) -> list[SequenceState]:
        """All sequences that hold memory here or are about to."""
        found = [sequence for lane in self.lanes for sequence in (*lane.decodes, *lane.joining)]
        found += [sequence for queue in self.queues for sequence in queue.prefilling]
        return found + list(self.stalled) + (self.relief.members() if self.relief else [])

    def partial_prefills(self) -> dict[SequenceState, Lane]:
        """Prefills that hold memory, each with a lane that may stop it."""
        return {sequence: lane for lane in self.lanes for sequence in lane.queue.prefilling}

    def latest_prefill_arrival(self) -> tuple[float, int]:
        """Arrival and index of the partial prefill that arrived last; there must be one."""
        return arrival_order(preemption_victim(self.partial_prefills()))

    def preempt_latest_prefill(self, now: float) -> None:
        """Give up that prefill: its memory unblocks others."""
        partial = self.partial_prefills()
        latest = preemption_victim(partial)
        self.preempt(latest, partial[latest], now)

    # --- what others do --------------------------------------------------------------------------------------------

    def accept(self, sequence: SequenceState) -> None:
        """A dispatched request joins the queue, that of the lane with the fewest; it starts at the next iteration. It ends at
        ``max_tokens`` at the latest, as vLLM's requests do at max_model_len."""
        sequence.output_tokens = min(sequence.output_tokens, self.max_tokens - sequence.prompt_tokens)
        queue = self.queues[0] if len(self.queues) == 1 else min(self.lanes, key=_occupancy).queue
        queue.append(sequence)
        self._backlog_tokens += sequence.target_tokens

    @abstractmethod
    def start(self, now: float) -> None:
        """If idle, form a batch at this moment, after everything else that happens in it."""

    @abstractmethod
    def cut(self) -> None:
        """Plan anew after the iteration in flight. Its earlier boundaries must be settled."""

    @abstractmethod
    def rescale(self, now: float, slowdown: float) -> None:
        """The contention changes: what is under way takes proportionally longer or shorter."""

    def adopt(self, sequence: SequenceState, now: float) -> None:
        """A sequence with its KV in place goes on: to decode, or with its prefill."""
        self.stalled.pop(sequence, None)
        self.kv.keep(sequence)
        lane = min(self.lanes, key=lambda lane: lane.started)
        if sequence.prefilled:
            lane.join_next(sequence)
        else:
            lane.queue.prefilling.append(sequence)
            lane.queue.prefilling.sort(key=arrival_order)
            self._backlog_tokens += sequence.target_tokens - sequence.cached_tokens
            self._forget_plan()
        self.composition_changed = True
        self._host.touch(self)
        self.replan(now)

    def freed(self, now: float) -> None:
        """Blocks came back outside of an iteration."""
        self._host.memory_freed(self, now)
        self.replan(now)

    @abstractmethod
    def replan(self, now: float) -> None:
        """Something changed for this engine: form a batch at this moment, or after the iteration in flight."""

    @abstractmethod
    def preempt(self, sequence: SequenceState, lane: Lane, now: float) -> None:
        """Recompute it later: free its blocks, put it back to the front of the queue."""

    def _forget_plan(self) -> None:  # noqa: B027 - most engines plan nothing
        """A sequence that may be planned with went away, or came."""

    def take_waiting(self) -> list[SequenceState]:
        """Remove and return the requests that have not started (again)."""
        self._forget_plan()
        taken = [sequence for queue in self.queues for sequence in queue.take_waiting()]
        self._backlog_tokens -= sum(sequence.target_tokens for sequence in taken)
        return taken

    def stop(self, now: float) -> None:
        """Form no more batches; the host is told (``stopped``) when the last one has left."""
        self.stopping = True
        if self.busy:
            self.cut()
        else:
            self._host.stopped(self, now)

    def go_on(self, now: float) -> None:
        """It need not stop after all."""
        self.stopping = False
        self.replan(now)

    def dissolve(self) -> list[SequenceState]:
        """End the engine between two iterations: its sequences that had started are returned, in order of arrival, with their
        cached tokens, and hold no block any more."""
        for lane in self.lanes:
            for sequence in list(lane.decodes):
                lane.decodes.remove(sequence)
                lane.joining.append(sequence)
        members = sorted(self.members(), key=arrival_order)
        for sequence in members:
            self.kv.release(sequence)
        self.leave()
        return members

    def leave(self) -> None:
        """The engine ends: nobody calls it any more."""
        self.kv.forget()
        self.gone = True

    def abandon(self) -> list[SequenceState]:
        """End the engine at once, in the middle of an iteration too. Returns its requests, oldest first; those that had started
        have lost their KV, and are told to the host as preempted. Boundaries must be settled."""
        started = [*self.stalled]
        for lane in self.lanes:
            for sequence in list(lane.decodes):
                lane.decodes.remove(sequence)
                sequence.cached_tokens += self._in_flight(lane)  # the block for the token under way
                started.append(sequence)
            started += lane.joining
        for queue in self.queues:
            started += queue.prefilling
        for sequence in started:
            self.kv.release(sequence, computed=False)
        started += self.relief.abandon() if self.relief else []
        for sequence in started:
            sequence.lose_kv()
            self._host.preempted(self, sequence)
        lost = [*started, *self.take_waiting()]
        self._clear()
        return sorted(lost, key=arrival_order)

    def check(self) -> None:
        """Raise AssertionError unless the blocks that its sequences hold are those that it takes, and each has a slot."""
        most = self._settings.max_sequences
        slots_hold = self.free_slots >= 0 and all(lane.size <= most for lane in self.lanes)
        assert slots_hold, f"engine {self.index}: more sequences than slots"
        if not isinstance(self.kv, CountedBlocks):
            return
        resting = [*self.stalled, *(sequence for queue in self.queues for sequence in queue.prefilling)]
        resting += [sequence for lane in self.lanes for sequence in lane.joining]
        held = self.reserved_blocks + sum(self.kv.blocks_for(sequence.cached_tokens) for sequence in resting)
        held += sum(self.blocks_of(lane, sequence) for lane in self.lanes for sequence in lane.decodes)
        held += self.relief.used_blocks() if self.relief else 0
        assert held == self.kv.used_blocks(), f"engine {self.index}: {held} blocks held, {self.kv.used_blocks()} taken"

    def _clear(self) -> None:
        """Nothing is here any more."""
        self.leave()
        self.stalled.clear()
        self._backlog_tokens = 0
        for lane in self.lanes:
            lane.chunks, lane.launched, lane.asked = [], False, False
            lane.joining.clear()
            lane.leaving.clear()
            lane.queue.prefilling.clear()


def _occupancy(lane: Lane) -> int:
    return lane.started + len(lane.queue.waiting)
