"""Continuous batching at iteration granularity, as vLLM does it (systems.md 1.3): the only place for it.

An iteration gives every decode of a lane one token, then fills the token budget with prompt chunks, oldest first. Memory is
paged; when a decode finds no block, somebody gives way: the request that arrived last is recomputed later, or what a
``Relief`` does instead. ``_form`` makes the next batch, ``_complete`` takes its tokens in; how long the batch is computed in
between, and on what, is the subclass's part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import Protocol

from fineserve_sim.cluster.engine.kv import CountedBlocks, EngineKV
from fineserve_sim.cluster.engine.queue import Lane, PromptChunk, Queue
from fineserve_sim.cluster.engine.sequence import Decodes, SequenceState
from fineserve_sim.cluster.scenario import EngineSettings
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.interfaces import EngineLoad, EngineState
from fineserve_sim.policy.memory.preemption import arrival_order, preemption_victim

BatchSums = tuple[int, int, int, int, int, int]
"""The running sums of a batch that the latency model asks for (see ``StepModel.step_s``)."""


class EngineHost(Protocol):
    """The cluster around an engine: what it hears, and what it is asked."""

    merging: bool
    logs: bool
    """Whether what is computed is written down."""

    def consult(self, engine: Engine, now: float) -> None:
        """The engine stands between two iterations: its scheduler may start requests."""
        ...

    def must_ask(self, engine: Engine) -> bool: ...
    def ask_again_s(self, engine: Engine) -> float: ...
    def settle(self, engine: Engine, now: float, order: int) -> None:
        """An event of the engine begins: bring the memory that it sees up to it."""
        ...

    def settle_now(self, engine: Engine, now: float) -> None:
        """As ``settle``, within the event under way."""
        ...

    def set_shares(self, engine: Engine, now: float, compute: float, bandwidth: float) -> None: ...
    def steps_that_fit(self, engine: Engine, decodes: Decodes, most: int) -> int: ...
    def launched(self, engine: Engine, lane: Lane, now: float, *, sure: bool) -> None: ...
    def computed(self, engine: Engine, lane: Lane, since_s: float, now: float, stage: int = 0) -> None:
        """A batch, or a span of alike ones, was computed since then."""
        ...

    def progressed(self, engine: Engine) -> None: ...
    def emitted(self, sequence: SequenceState, now: float) -> None: ...
    def finished(self, engine: Engine, sequence: SequenceState, now: float) -> None: ...
    def preempted(self, engine: Engine, sequence: SequenceState) -> None: ...
    def returned(self, engine: Engine, sequences: Collection[SequenceState], now: float) -> None:
        """The engine gives these back: they wait for another one."""
        ...

    def memory_freed(self, engine: Engine, now: float) -> None: ...
    def stalled(self, engine: Engine, now: float) -> None: ...
    def rested(self, engine: Engine, now: float) -> None: ...
    def stopped(self, engine: Engine, now: float) -> None: ...
    def leaves(self, engine: Engine, lane: Lane, sequence: SequenceState, now: float) -> None: ...


class Relief(Protocol):
    """What an engine does when a decode finds no KV block, instead of recomputing the latest.

    ``admits``: new sequences may start; ``held`` sequences are away from the lanes; ``boundaries_ahead``: so many iterations
    ahead it looks for blocks.
    """

    boundaries_ahead: int

    @property
    def admits(self) -> bool: ...
    @property
    def held(self) -> int: ...
    def members(self) -> list[SequenceState]:
        """The sequences that are away from the lanes."""
        ...

    def used_blocks(self) -> int:
        """Blocks that they hold."""
        ...

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
    """Batches of one model instance. ``max_tokens`` bounds prompt and output of a sequence together.

    ``stalled`` sequences wait for KV from elsewhere, ``reserved_blocks`` are held for sequences that are elsewhere still,
    ``promised_blocks`` is at least what is taken without another question.
    ``stopping``: it forms no more batches; ``closing``: those that it preempts go elsewhere. ``columns`` of a timeline,
    one a stage: the first counts its requests.
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
        "composition_changed",
        "gone",
        "index",
        "kv",
        "lanes",
        "max_tokens",
        "model",
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
        self,
        index: int,
        model: str,
        step: StepModel,
        kv: EngineKV,
        max_tokens: int,
        settings: EngineSettings,
        host: EngineHost,
        *,
        lanes: int = 1,
        shared_queue: bool = True,
        relief: Relief | None = None,
    ) -> None:
        self.index = index
        self.step = step
        self.kv = kv
        self.max_tokens = max_tokens
        self.relief = relief
        self.slowdown = 1.0
        self.promised_blocks = 0
        self.composition_changed = False
        self.stalled: dict[SequenceState, None] = {}
        self.reserved_blocks = 0
        self.stopping = self.closing = self.gone = False
        self.model = model
        self.columns: tuple[int, ...] = (index,)
        self.column = index
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
        inside = sum(lane.size for lane in self.lanes) + sum(len(queue.prefilling) for queue in self.queues)
        return inside + len(self.stalled) + (self.relief.held if self.relief else 0)

    @property
    def has_work(self) -> bool:
        return any(lane.has_work for lane in self.lanes) or bool(self.stalled or (self.relief and self.relief.held))

    def state(self) -> EngineState:
        """What a scheduler sees. Requests that were dispatched and have not started yet count as running."""
        promised = self.running + self.waiting
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
        free_blocks = self.kv.free_blocks()
        used_blocks = self.kv.used_blocks()
        candidate, candidate_blocks = self._shortest() if shortest else (None, 0)
        return EngineLoad(
            used_blocks=used_blocks,
            capacity_blocks=used_blocks + free_blocks,
            queued_blocks=sum(queue.queued_blocks for queue in self.queues),
            head_blocks=max(queue.head_blocks for queue in self.queues),
            running=self.running,
            stalled=len(self.stalled),
            shortest=candidate,
            shortest_blocks=candidate_blocks,
        )

    def blocks_of(self, lane: Lane, sequence: SequenceState) -> int:
        """Blocks of a sequence that decodes in ``lane``, with the one for the token under way."""
        return self.kv.blocks_for(lane.decodes.cached_tokens_of(sequence) + self._in_flight(lane))

    def _shortest(self) -> tuple[int | None, int]:
        decoding = ((lane, member) for lane in self.lanes for member in lane.decodes if member not in lane.leaving)
        blocks = [(self.blocks_of(lane, member), member.index) for lane, member in decoding]
        if not blocks:
            return None, 0
        held, index = min(blocks)
        return index, held

    @abstractmethod
    def _in_flight(self, lane: Lane) -> bool:
        """A batch of the lane is being computed."""

    def members(self) -> list[SequenceState]:
        """All sequences that hold memory here or are about to."""
        found = [sequence for lane in self.lanes for sequence in (*lane.decodes, *lane.joining)]
        found += [sequence for queue in self.queues for sequence in queue.prefilling]
        return found + list(self.stalled) + (self.relief.members() if self.relief else [])

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
        lane = min(self.lanes, key=_size)
        if sequence.prefilled:
            lane.join_next(sequence)
        else:
            lane.queue.prefilling.append(sequence)
            lane.queue.prefilling.sort(key=arrival_order)
            self._backlog_tokens += sequence.target_tokens - sequence.cached_tokens
            self._forget_plan()
        self.composition_changed = True
        self.replan(now)

    def freed(self, now: float) -> None:
        """Blocks came back outside of an iteration."""
        self._host.memory_freed(self, now)
        self.replan(now)

    @abstractmethod
    def replan(self, now: float) -> None:
        """Something changed for this engine: form a batch at this moment, or after the iteration in flight."""

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
        """Raise AssertionError unless the blocks that its sequences hold are those that it takes."""
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

    # --- one iteration ---------------------------------------------------------------------------------------------

    def _form(self, lane: Lane, now: float) -> None:
        """The lane's next batch: a KV slot for the next token of each decode, then prompt chunks for what the budget leaves."""
        if lane.moving:
            self._let_move(lane, now)
        self._preempted = False
        if self.relief is not None:
            self.relief.before(self, lane, now)
        growing = lane.decodes.needing_block()
        if growing and not self.kv.grow_each(growing):
            self._make_room(lane, growing, now)
        queue = lane.queue
        lane.chunks = self._prompt_chunks(lane) if queue.waiting or queue.prefilling else []

    def _let_move(self, lane: Lane, now: float) -> None:
        """Sequences join the decodes, and those that are to go elsewhere leave."""
        lane.moving = False
        lane.let_join()
        while lane.leaving:
            self._host.leaves(self, lane, lane.leaving.pop(), now)

    def _make_room(self, lane: Lane, growing: Collection[SequenceState], now: float) -> None:
        """Somebody gives way until all that grow have their block: the request of the lane that arrived last is recomputed."""
        if self.relief is not None:
            self.relief.make_room(self, lane, growing, now)
        else:
            while growing and not self.kv.grow_each(growing):
                self.preempt(preemption_victim(lane.victims(self._computing())), lane, now)
        self._host.memory_freed(self, now)

    def _computing(self) -> Iterator[SequenceState]:
        """Sequences with a prompt chunk in flight."""
        return (sequence for lane in self.lanes if lane.launched for sequence, _, _ in lane.chunks)

    def _prompt_chunks(self, lane: Lane) -> list[PromptChunk]:
        """Chunked prefill: partial prefills, then the head of the queue, until the token budget is full."""
        queue, left = lane.queue, self._settings.token_budget - lane.decodes.size
        chunks: list[PromptChunk] = []
        for sequence in queue.prefilling:
            done = sequence.cached_tokens
            size = min(left, sequence.target_tokens - done)
            if done == sequence.target_tokens:
                continue  # its last chunk is in flight
            if size < 1 or not self.kv.grow(sequence, done + size):
                return chunks
            sequence.cached_tokens = done + size
            chunks.append((sequence, done, size))
            left -= size
        slots = self._free_slots() if left > 0 and queue.waiting else 0
        while left > 0 and slots > 0 and queue.waiting:
            sequence = queue.waiting[0]
            if sequence.preempted and not self._may_return(sequence):
                break
            if sequence.prefix is None:
                size = min(left, sequence.target_tokens)
                if not self.kv.grow(sequence, size):
                    break
                sequence.cached_tokens = size
                queue.start()
                self.composition_changed = True
                chunks.append((sequence, 0, size))
            else:
                chunk = self.begin_prefill(queue, left)
                if chunk is None:
                    break
                chunks.append(chunk)
                size = chunk[2]
            left -= size
            slots -= 1
        return chunks

    def take_chunk(self, sequence: SequenceState, tokens: int) -> PromptChunk | None:
        """The next ``tokens`` of a prefill, if there is memory for them."""
        done = sequence.cached_tokens
        if tokens < 1 or not self.kv.grow(sequence, done + tokens):
            return None
        sequence.cached_tokens = done + tokens
        return sequence, done, tokens

    def begin_prefill(self, queue: Queue, most: int) -> PromptChunk | None:
        """The first waiting sequence starts behind what is cached of its prefix, if there is memory for its first chunk."""
        sequence = queue.waiting[0]
        reused = 0
        if sequence.prefix is not None:
            sequence.cached_tokens = reused = self.kv.reuse(sequence)
        chunk = self.take_chunk(sequence, min(most, sequence.target_tokens - reused))
        if chunk is None:
            if reused:  # cached blocks are no use to it yet, and may be to others
                self.kv.release(sequence)
                sequence.cached_tokens = 0
            return None
        self._backlog_tokens -= reused
        queue.start()
        self.composition_changed = True
        return chunk

    def may_start(self, sequence: SequenceState) -> bool:
        """A slot, nobody with an older claim, and for one that lost its KV room for all of it."""
        return self._free_slots() > 0 and (not sequence.preempted or self._may_return(sequence))

    def _free_slots(self) -> int:
        """Sequences that may start now; none while others have an older claim to the memory."""
        if self._preempted or (self.relief is not None and not self.relief.admits):
            return 0
        return self._settings.max_sequences * len(self.lanes) - self.running

    def _may_return(self, sequence: SequenceState) -> bool:
        """There is room for all of a sequence that lost its KV, and a block to go on: else two could evict each other for
        ever."""
        wanted = sequence.target_tokens + self._settings.block_tokens
        return self.kv.free_tokens() >= min(wanted, self.kv.capacity_tokens())

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

    def _complete(self, lane: Lane, iterations: int, now: float) -> bool:
        """The batch is done at ``now``: tokens come out, sequences finish or go on to decode. Whether memory came back."""
        decodes = lane.decodes
        decodes.advance()
        self._iterations += iterations
        finished = decodes.pop_finished()
        if lane.chunks:
            self._host.progressed(self)
            for sequence, done, size in lane.chunks:
                self._backlog_tokens -= size
                if done + size == sequence.target_tokens:
                    self._end_prefill(lane, sequence, finished, now)
        if finished:
            self._retire(finished, now)
            self.composition_changed = True
        return bool(finished)

    def _end_prefill(self, lane: Lane, sequence: SequenceState, finished: list[SequenceState], now: float) -> None:
        """A prefill yields a token (the first one, or the next after a recomputation), and its sequence decodes."""
        lane.queue.prefilling.remove(sequence)
        self.composition_changed = True
        if sequence.prefix is not None:
            self.kv.keep(sequence)
        sequence.generated_tokens += 1
        self._host.emitted(sequence, now)
        if sequence.generated_tokens == sequence.output_tokens:
            finished.append(sequence)
        elif self._pipelined:
            self._to_decode(lane, sequence)
        else:
            lane.decodes.join(sequence)

    def _to_decode(self, lane: Lane, sequence: SequenceState) -> None:
        """Of a pipeline: which lane decodes it from its next batch on."""
        raise NotImplementedError

    def _retire(self, finished: Iterable[SequenceState], now: float) -> None:
        for sequence in finished:
            self.kv.release(sequence)
            self._host.finished(self, sequence, now)

    def preempt(self, sequence: SequenceState, lane: Lane, now: float) -> None:
        """Recompute later: free the blocks, go to the front of the queue with the generated tokens as part of the prompt."""
        if sequence in lane.decodes:
            lane.decodes.remove(sequence)
            self._backlog_tokens += sequence.prompt_tokens + sequence.generated_tokens
        else:
            lane.queue.prefilling.remove(sequence)
            self._backlog_tokens += sequence.cached_tokens
            self._forget_plan()
        self.kv.release(sequence)
        sequence.lose_kv()
        self.composition_changed = True
        self._preempted = True
        self._host.preempted(self, sequence)
        if sequence.generated_tokens and sequence.target_tokens >= self.kv.capacity_tokens():
            self._backlog_tokens -= sequence.target_tokens
            self._host.finished(self, sequence, now)  # it has outgrown the memory: cut, as at vLLM's max_model_len
        elif self.closing:
            self._backlog_tokens -= sequence.target_tokens
            self._host.returned(self, [sequence], now)
        else:
            lane.queue.put_back(sequence)

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

    def _forget_plan(self) -> None:  # noqa: B027 - most engines plan nothing
        """A sequence that may be planned with went away, or came."""


def _size(lane: Lane) -> int:
    return lane.size


def _occupancy(lane: Lane) -> int:
    return lane.size + len(lane.queue.waiting) + len(lane.queue.prefilling)
