"""What an engine is to everybody but itself: its state as others see it, and what they may do with it.

How it batches is ``batcher``'s part, how long a batch takes that of ``spans``, ``lone`` and ``pipeline``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.kv import CountedBlocks, EngineKV
from fineserve_sim.cluster.engine.sequence import Decodes, Lane, Queue, SequenceState
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.scenario import EngineSettings, Left
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.sharing import Demand
from fineserve_sim.policy.interfaces import EngineLoad, EngineState
from fineserve_sim.policy.memory.preemption import arrival_order, preemption_victim

NEVER = float("inf")

BatchSums = tuple[int, int, int, int, int, int]
"""The running sums of a batch that the latency model asks for (see ``StepModel.step_s``)."""


class EngineHost(Protocol):
    """The cluster around an engine: what it hears, and what it is asked. ``engines`` by id; ``order`` of the event under way;
    ``logs``: whether what is computed is written down; ``attentive``: whether somebody looks at what is launched."""

    engines: dict[int, Engine]
    order: int
    merging: bool
    logs: bool
    attentive: bool
    outcomes: Outcomes

    def consult(self, engine: Engine, now: float) -> None: ...
    def ask_again_s(self, engine: Engine) -> float: ...
    def settle(self, engine: Engine, now: float, order: int) -> None: ...
    def settle_now(self, engine: Engine, now: float) -> None: ...
    def set_demand(self, engine: Engine, now: float, need: Demand) -> None: ...
    def steps_that_fit(self, engine: Engine, decodes: Decodes, most: int) -> int: ...
    def launched(self, engine: Engine, lane: Lane, now: float, *, sure: bool) -> None: ...
    def computed(self, engine: Engine, lane: Lane, since_s: float, now: float, iterations: int, stage: int) -> None: ...
    def touch(self, engine: Engine) -> None: ...
    def progressed(self, engine: Engine) -> None: ...
    def finished(self, engine: Engine, sequence: SequenceState, now: float) -> None: ...
    def preempted(self, engine: Engine, sequence: SequenceState, now: float | None = None) -> None: ...
    def returned(self, engine: Engine, sequences: Collection[SequenceState], now: float, left: Left) -> None: ...
    def memory_freed(self, engine: Engine, now: float) -> None: ...
    def stalled(self, engine: Engine, now: float) -> None: ...
    def rested(self, engine: Engine, now: float) -> None: ...
    def stopped(self, engine: Engine, now: float) -> None: ...
    def leaves(self, engine: Engine, lane: Lane, sequence: SequenceState, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Seat:
    """An engine before it exists. ``max_tokens`` bounds prompt and output of a sequence together; the block of ``settings`` is
    that of its memory."""

    engine: int
    model: str
    step: StepModel
    kv: EngineKV
    max_tokens: int
    settings: EngineSettings

    @property
    def able(self) -> bool:
        """Without room for a prompt and a token the engine gets no requests: they are turned away at the door."""
        return self.max_tokens > 1


class Engine(ABC):
    """Batches of one model instance.

    ``stalled`` sequences wait for KV from elsewhere; ``swapped`` ones are on their way to host memory, there, on their way
    back, or pause, with the blocks that they hold here; ``coming`` ones are elsewhere still, and have their slots here and
    ``reserved_blocks``; ``promised_blocks`` is at least what is taken without another question.
    ``stopping``: it forms no more batches; ``closing``: those that it preempts go elsewhere. ``columns`` of a timeline,
    one a stage: the first counts its requests. ``next_boundary_s`` is the next boundary to settle inside the batch that is
    computed, ``order`` that of its step ends among what happens at the same time.
    """

    def __init__(self, seat: Seat, host: EngineHost, *, lanes: int = 1, shared_queue: bool = True) -> None:
        self._settings = settings = seat.settings
        self._host = host
        self.index, self.model, self.max_tokens = seat.engine, seat.model, seat.max_tokens
        self.step, self.kv = seat.step, seat.kv
        self.order = order_of(Kind.STEP_END, seat.engine)
        self.columns: tuple[int, ...] = (seat.engine,)
        self.queues = [Queue(settings.block_tokens) for _ in range(1 if shared_queue else lanes)]
        self.lanes = [
            Lane(self.queues[lane % len(self.queues)], Decodes(settings.block_tokens)) for lane in range(lanes)
        ]
        self.stalled: dict[SequenceState, None] = {}
        self.swapped: dict[SequenceState, int] = {}
        self.slowdown = 1.0
        self.next_boundary_s = NEVER
        self.coming = self.reserved_blocks = self.promised_blocks = self._backlog_tokens = 0
        self.stopping = self.closing = self.gone = self.composition_changed = self._preempted = False

    @property
    def busy(self) -> bool:
        """An iteration is in flight."""
        return any(lane.launched for lane in self.lanes)

    @property
    def wants_memory(self) -> bool:
        """Requests wait for their prefill, or for more of it."""
        return any(queue.waiting or queue.prefilling for queue in self.queues)

    @property
    def iterations(self) -> int:
        """Iterations done, up to the last settled boundary."""
        return sum(lane.decodes.iteration for lane in self.lanes)

    @property
    def waiting(self) -> int:
        """Sequences that hold no KV."""
        return sum([len(queue.waiting) for queue in self.queues])

    @property
    def running(self) -> int:
        """Sequences with a slot: decoding, in prefill, swapped, or waiting for their KV."""
        inside = len(self.stalled) + len(self.swapped)
        for lane in self.lanes:
            inside += lane.decodes.size + len(lane.joining)
        for queue in self.queues:
            inside += len(queue.prefilling)
        return inside

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
        return bool(self.stalled or self.swapped) or any(lane.has_work for lane in self.lanes)

    def state(self) -> EngineState:
        """What a scheduler sees. Requests that were dispatched and have not started yet count as running."""
        promised = self.requests
        return EngineState(
            running=promised,
            decoding=sum([lane.size for lane in self.lanes]),
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
        held = [lane.decodes.held_blocks(lane.leaving, ahead=lane.launched) for lane in self.lanes]
        shortest_blocks, index = min(chain.from_iterable(held), default=(0, None))
        return load._replace(shortest=index, shortest_blocks=shortest_blocks)

    def blocks_of(self, lane: Lane, sequence: SequenceState) -> int:
        """Blocks of a sequence that decodes in ``lane``, with the one for the token under way."""
        return self.kv.blocks_for(lane.decodes.cached_tokens_of(sequence) + lane.launched)

    def batch_of(self, lane: Lane) -> BatchSums:
        """The running sums of the lane's batch."""
        decodes = lane.decodes.size
        tokens = pairs = context = ending = 0
        for sequence, done, size in lane.chunks:
            tokens += size
            pairs += size * done + size * (size + 1) // 2
            context += done
            ending += done + size == sequence.target_tokens
        return decodes, lane.decodes.context_tokens, tokens, pairs, context, decodes + ending

    def partial_prefills(self) -> list[SequenceState]:
        """Prefills that hold memory."""
        return [sequence for queue in self.queues for sequence in queue.prefilling]

    def accept(self, sequence: SequenceState) -> None:
        """A dispatched request joins the queue, that of the lane with the fewest; it starts at the next iteration."""
        self._bound_output(sequence)
        queue = self.queues[0]
        if len(self.queues) > 1:
            queue = min(self.lanes, key=lambda lane: lane.started + len(lane.queue.waiting)).queue
        queue.append(sequence)
        self._backlog_tokens += sequence.target_tokens

    def _bound_output(self, sequence: SequenceState) -> None:
        """Here it ends at ``max_tokens`` at the latest, as vLLM's requests do at max_model_len, and after one token more at the
        earliest. What another engine bound it to counts no more."""
        most = max(self.max_tokens - sequence.prompt_tokens, sequence.generated_tokens + 1)
        sequence.output_tokens = min(sequence.asked_tokens, most)

    @abstractmethod
    def start(self, now: float) -> None:
        """If idle, form a batch at this moment, after everything else that happens in it."""

    def replan(self, now: float) -> None:
        """Something changed for this engine: form a batch at this moment, or after the iteration in flight."""
        self.start(now)

    def cut(self) -> None:  # noqa: B027 - most batches are planned one by one
        """Plan anew after the iteration in flight. Its earlier boundaries must be settled."""

    def rescale(self, now: float, slowdown: float) -> None:
        """The contention changes: what is under way takes proportionally longer or shorter."""
        self.slowdown = slowdown

    def adopt(self, sequence: SequenceState, now: float) -> None:
        """A sequence with its KV in place goes on: to decode, or with its prefill."""
        self.stalled.pop(sequence, None)
        self._bound_output(sequence)
        self.kv.keep(sequence)
        lane = min(self.lanes, key=lambda lane: lane.started)
        if sequence.prefilled:
            lane.joining.append(sequence)
        else:
            lane.queue.prefilling.append(sequence)
            lane.queue.prefilling.sort(key=arrival_order)
            self._backlog_tokens += sequence.target_tokens - sequence.cached_tokens
            self._forget_plan()
        self.composition_changed = True
        self._host.touch(self)
        self.replan(now)

    @abstractmethod
    def preempt(self, sequence: SequenceState, lane: Lane, now: float) -> None:
        """Recompute it later: free its blocks, put it back to the front of the queue."""

    def preempt_latest_prefill(self, now: float) -> None:
        """Give up the partial prefill that arrived last: its memory unblocks others. There must be one."""
        latest = preemption_victim(self.partial_prefills())
        self.preempt(latest, next(lane for lane in self.lanes if latest in lane.queue.prefilling), now)

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
        started = sorted(self._take_started(), key=arrival_order)
        for sequence in started:
            self.kv.release(sequence)
        self.leave()
        return started

    def abandon(self) -> list[SequenceState]:
        """End the engine at once, in the middle of an iteration too. Returns its requests, oldest first; those that had started
        have lost their KV, and are told to the host as preempted. Boundaries must be settled."""
        started = self._take_started()
        for sequence in started:
            self.kv.release(sequence, computed=False)
            sequence.lose_kv()
            self._host.preempted(self, sequence)
        lost = [*started, *self.take_waiting()]
        self.leave()
        return sorted(lost, key=arrival_order)

    def _take_started(self) -> list[SequenceState]:
        """Remove and return all that had started; of those in flight, the block for the token under way counts as cached."""
        started = [*self.stalled]
        for lane in self.lanes:
            for sequence in list(lane.decodes):
                lane.decodes.remove(sequence)
                sequence.cached_tokens += lane.launched
                started.append(sequence)
            started += lane.joining
            lane.joining.clear()
        started += self.partial_prefills()
        self.stalled.clear()
        for queue in self.queues:
            queue.prefilling.clear()
        return started

    def leave(self) -> None:
        """The engine ends: nobody calls it any more."""
        self.kv.forget()
        self.gone = True

    def check(self) -> None:
        """Raise AssertionError unless the blocks that its sequences hold are those that it takes, and each has a slot."""
        most = self._settings.max_sequences
        slots_hold = self.free_slots >= 0 and all(lane.size <= most for lane in self.lanes)
        assert slots_hold, f"engine {self.index}: more sequences than slots"
        if not isinstance(self.kv, CountedBlocks):
            return
        resting = [*self.stalled, *self.partial_prefills(), *chain.from_iterable(lane.joining for lane in self.lanes)]
        held = self.reserved_blocks + sum(self.swapped.values())
        held += sum(self.kv.blocks_for(sequence.cached_tokens) for sequence in resting)
        held += sum(self.blocks_of(lane, sequence) for lane in self.lanes for sequence in lane.decodes)
        assert held == self.kv.used_blocks(), f"engine {self.index}: {held} blocks held, {self.kv.used_blocks()} taken"
