"""One engine, and the loop that it goes through: form, launch, complete.

An engine serves one model instance, or a pipeline of several. It has one lane for each batch that it may have in flight.
Each lane goes round the same loop for ever:

    idle ──start──► asked ──turn──► form ──► launch ──► in flight ──► complete ──► turn ...
                              ▲        └──► rest: nothing to compute, the lane is idle again

* **Form**: the *batching* policy says which sequences compute what in the next batch, and takes the KV blocks for it. This is
  the part in which engines of another make differ from vLLM.
* **Launch**: the *executor* puts the batch in flight, and says when it ends. ``Spans`` runs it on one instance, ``Lone`` does
  the same without events, ``Pipeline`` sends it through stages.
* **Complete**: tokens come out. Prefills yield their first token, decodes go on, and finished sequences leave.

Where a decode finds no KV block, a sequence is recomputed later, or waits in a *tier* of memory behind a link.

The parts share the state of the engine (``State``): sequences, queues, lanes, KV and counters. A part takes its engine when it
is made, and takes its place in it. Executors call ``turn`` and ``complete`` themselves, for they know when a batch ends. This
costs one call a batch more than a single class that does everything.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Final

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.links import Links
from fineserve_sim.cluster.engine.sequence import Decodes, Lane, PromptChunk, Queue, SequenceState
from fineserve_sim.cluster.engine.state import Seat, State
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.scenario import Left
from fineserve_sim.latency.sharing import Demand
from fineserve_sim.policy.memory.preemption import arrival_order, preemption_victim

NEVER: Final = float("inf")


class EngineHost(ABC):
    """The cluster around an engine: the calls by which an engine tells it news or asks it. ``order`` is the order of the event
    under way. With ``logs`` the host writes down each computed batch or span. With ``attentive`` it looks at each launch. A
    fleet that tells engines to stop, or sequences to leave them, hears of it by ``stopped``, ``leaves`` and ``prefilled``."""

    # A base class and no protocol: compiled code calls the methods of a protocol by their names.
    engines: dict[int, Engine]
    links: Links
    order: int
    merging: bool
    logs: bool
    attentive: bool
    outcomes: Outcomes
    stopped: Callable[[Engine, float], None]
    leaves: Callable[[Engine, Lane, SequenceState, float], None]
    prefilled: Callable[[Engine, SequenceState, float], None]

    @abstractmethod
    def consult(self, engine: Engine, now: float) -> None: ...
    @abstractmethod
    def ask_again(self, engine: Engine, now: float) -> None: ...
    @abstractmethod
    def ask_again_s(self, engine: Engine) -> float: ...
    @abstractmethod
    def settle(self, engine: Engine, now: float, order: int) -> None: ...
    @abstractmethod
    def settle_now(self, engine: Engine, now: float) -> None: ...
    @abstractmethod
    def set_demand(self, engine: Engine, now: float, need: Demand) -> None: ...
    @abstractmethod
    def steps_that_fit(self, engine: Engine, decodes: Decodes, most: int) -> int: ...
    @abstractmethod
    def launched(self, engine: Engine, lane: Lane, now: float, *, sure: bool) -> None: ...
    @abstractmethod
    def computed(self, engine: Engine, lane: Lane, since_s: float, now: float, iterations: int, stage: int) -> None: ...
    @abstractmethod
    def touch(self, engine: Engine) -> None: ...
    @abstractmethod
    def progressed(self, engine: Engine) -> None: ...
    @abstractmethod
    def finished(self, engine: Engine, sequence: SequenceState, now: float) -> None: ...
    @abstractmethod
    def preempted(self, engine: Engine, sequence: SequenceState, now: float | None = None) -> None: ...
    @abstractmethod
    def returned(self, engine: Engine, sequences: Collection[SequenceState], now: float, left: Left) -> None: ...
    @abstractmethod
    def memory_freed(self, engine: Engine, now: float) -> None: ...
    @abstractmethod
    def stalled(self, engine: Engine, now: float) -> None: ...
    @abstractmethod
    def rested(self, engine: Engine, now: float) -> None: ...


class Batching(ABC):
    """The policy that chooses the contents of the engine's next batch. It becomes ``engine.batching``."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.batching = self

    @abstractmethod
    def form(self, lane: Lane, now: float) -> None:
        """Take the blocks for the next token of each decode, then choose the lane's ``chunks`` and take their blocks."""

    @abstractmethod
    def prompt_chunks(self, lane: Lane) -> list[PromptChunk]:
        """The prompt parts for the lane's next batch, with their blocks taken."""

    def put_back(self, sequence: SequenceState, queue: Queue) -> None:
        """A sequence that gave way waits again; under vLLM it goes first."""
        queue.put_back(sequence)

    def forget(self) -> None:  # noqa: B027 - most policies plan one batch at a time
        """A sequence went away or came: plans over several batches are void."""


class Tier(ABC):
    """Memory behind a link, where KV of decodes may wait. It takes its place as ``engine.tier``.

    ``moving``: sequences are on their way or away, so nothing new starts. ``boundaries_ahead``: a span ends so many iterations
    before its blocks run out.
    """

    boundaries_ahead = 0

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.tier = self

    @property
    @abstractmethod
    def moving(self) -> bool: ...

    @abstractmethod
    def exchange(self, lane: Lane) -> None:
        """Between two batches: start to send sequences away, or to bring them back."""

    @abstractmethod
    def make_room(self, lane: Lane, growing: Collection[SequenceState], now: float) -> None:
        """The decodes ``growing`` need a block each, and there are not enough."""

    @abstractmethod
    def lose(self) -> None:
        """The engine is lost, and the KV in this tier with it: the tier's sequences join the stalled ones, without KV."""


class Executor(ABC):
    """The part that runs batches in time, on an instance or a pipeline. It becomes ``engine.executor``.

    ``order`` is the rank of its step ends among simultaneous events. ``next_boundary_s``: the next boundary to settle inside
    the span under way. ``events`` counts the events that did not go through the clock.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.order = order_of(Kind.STEP_END, engine.index)
        self.next_boundary_s = NEVER
        self.events = 0
        engine.executor = self

    @abstractmethod
    def start(self, now: float) -> None:
        """Idle lanes ask for a turn at this moment, after everything else that happens in it."""

    @abstractmethod
    def launch(self, lane: Lane, now: float) -> None:
        """Put the lane's batch in flight."""

    @abstractmethod
    def rest(self, lane: Lane, now: float) -> None:
        """The lane has nothing to compute."""

    def replan(self, now: float) -> None:
        """Something changed for this engine: form a batch at this moment, or after the iteration in flight."""
        self.start(now)

    def cut(self) -> None:  # noqa: B027 - most batches are planned one by one
        """Plan anew after the iteration in flight. Its earlier boundaries must be settled."""

    def rescale(self, now: float, slowdown: float) -> None:
        """The contention changes: the work under way takes proportionally longer or shorter."""
        self.engine.slowdown = slowdown

    def stop(self, now: float) -> None:
        """The engine forms no more batches. Tell the host when the last one has left, or at once."""
        if self.engine.busy:
            self.cut()
        else:
            self.engine.host.stopped(self.engine, now)

    def leave(self) -> None:  # noqa: B027 - most keep nothing elsewhere
        """The engine ends."""


class Engine(State):
    """The loop of one engine, and the calls that others may make to it. ``State`` has its state."""

    batching: Batching
    executor: Executor

    def __init__(self, seat: Seat, host: EngineHost, *, lanes: int = 1, shared_queue: bool = True) -> None:
        super().__init__(seat, lanes=lanes, shared_queue=shared_queue)
        self.host = host
        self.tier: Tier | None = None
        # Between two batches it asks its scheduler, and tells others on its memory of blocks that preemptions freed. Lone
        # engines have neither. Pipelines have no scheduler, and engines on their instances look again at their own turns.
        self.consults = True
        self.stopping = False  # it forms no more batches
        self.closing = False  # sequences that it preempts go elsewhere
        self.gone = False
        self.composition_changed = False  # since the last launch
        self.preempted = False  # a sequence, since the batch began to be formed
        self.one_step = False  # it must form a batch after the next iteration, whatever happens

    def turn(self, lane: Lane, now: float) -> None:
        """The lane stands between two batches: form the next one and launch it, or rest."""
        lane.asked = False
        if self.consults:
            self.host.consult(self, now)
        if lane.joining or lane.leaving:
            self._let_move(lane, now)
        if self.tier is not None:
            self.tier.exchange(lane)
        self.preempted = False
        self.batching.form(lane, now)
        if self.preempted and self.consults:
            self.host.memory_freed(self, now)
        if lane.decodes.size or lane.chunks:
            self.executor.launch(lane, now)
        else:
            self.executor.rest(lane, now)

    def complete(self, lane: Lane, now: float) -> bool:
        """The lane's batch is done: tokens come out, sequences finish or go on to decode. Returns whether memory came back."""
        lane.launched = False
        finished = lane.decodes.advance() if lane.decoding else []
        if not lane.decoding:
            lane.prompt_batches += 1
        if lane.chunks:
            self.host.progressed(self)
            for sequence, done, size in lane.chunks:
                self.backlog_tokens -= size
                if done + size == sequence.target_tokens:
                    self._end_prefill(lane, sequence, finished, now)
        if finished:
            self.retire(finished, now)
            self.composition_changed = True
            return True
        return False

    def _let_move(self, lane: Lane, now: float) -> None:
        """Sequences join the decodes, and sequences that are to go elsewhere leave."""
        for sequence in lane.joining:
            lane.decodes.join(sequence)
        lane.joining.clear()
        while lane.leaving:
            self.host.leaves(self, lane, lane.leaving.pop(), now)

    def _end_prefill(self, lane: Lane, sequence: SequenceState, finished: list[SequenceState], now: float) -> None:
        """A prefill yields a token (the first one, or the next after a recomputation), and its sequence decodes."""
        lane.queue.prefilling.remove(sequence)
        self.composition_changed = True
        if sequence.prefix is not None:
            self.kv.keep(sequence)
        if self.yields:
            sequence.generated_tokens += 1
            self.host.outcomes.first_token(sequence.index, now)
        if sequence.generated_tokens == sequence.output_tokens:
            finished.append(sequence)
        elif self.hands_over:
            self.host.prefilled(self, sequence, now)
        elif len(self.lanes) == 1:
            lane.decodes.join(sequence)
        else:
            (min(self.lanes, key=lambda lane: lane.size) if len(self.queues) == 1 else lane).joining.append(sequence)

    def retire(self, finished: Iterable[SequenceState], now: float) -> None:
        """Free the blocks of sequences that have their last token, and tell the host."""
        for sequence in finished:
            self.kv.release(sequence)
            self.host.finished(self, sequence, now)

    def accept(self, sequence: SequenceState) -> None:
        """A dispatched request joins the queue of the lane with the fewest. It starts at the next iteration."""
        self._bound_output(sequence)
        queue = self.queues[0]
        if len(self.queues) > 1:
            queue = min(self.lanes, key=lambda lane: lane.started + len(lane.queue.waiting)).queue
        queue.append(sequence)
        self.backlog_tokens += sequence.target_tokens

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
            self.backlog_tokens += sequence.target_tokens - sequence.cached_tokens
            self.batching.forget()
        self.composition_changed = True
        self.host.touch(self)
        self.executor.replan(now)

    def _bound_output(self, sequence: SequenceState) -> None:
        """Here a sequence ends at ``max_tokens`` at the latest, as vLLM's requests do at max_model_len. It gets one token more
        at least. The bound of an earlier engine counts no more."""
        sequence.output_tokens = sequence.asked_tokens
        if sequence.prompt_tokens + sequence.asked_tokens > self.max_tokens:
            most = max(self.max_tokens - sequence.prompt_tokens, sequence.generated_tokens + 1)
            sequence.output_tokens = min(sequence.asked_tokens, most)

    def preempt(self, sequence: SequenceState, lane: Lane, now: float) -> None:
        """Free a sequence's blocks and put it back in the queue. It recomputes its prompt and generated tokens later."""
        if sequence in lane.decodes:
            lane.decodes.remove(sequence)
        else:
            lane.queue.prefilling.remove(sequence)
            self.backlog_tokens -= sequence.target_tokens - sequence.cached_tokens
            self.batching.forget()
        self.kv.release(sequence)
        sequence.lose_kv()
        self.composition_changed = True
        self.preempted = True
        self.host.preempted(self, sequence, now)
        if sequence.generated_tokens and self.too_long(sequence):
            self.host.finished(self, sequence, now)  # it has outgrown the memory: cut, as at vLLM's max_model_len
        elif self.closing:
            self.host.returned(self, [sequence], now, Left.REGROUPED)
        else:
            self.batching.put_back(sequence, lane.queue)
            self.backlog_tokens += sequence.target_tokens

    def preempt_latest_prefill(self, now: float) -> None:
        """Give up the partial prefill that arrived last: its memory unblocks others. There must be one."""
        latest = preemption_victim(self.partial_prefills())
        self.preempt(latest, next(lane for lane in self.lanes if latest in lane.queue.prefilling), now)

    def take_waiting(self) -> list[SequenceState]:
        """Remove and return the requests that have not started (again)."""
        self.batching.forget()
        taken = [sequence for queue in self.queues for sequence in queue.take_waiting()]
        self.backlog_tokens -= sum(sequence.target_tokens for sequence in taken)
        return taken

    def shed(self, now: float) -> list[SequenceState]:
        """The memory has shrunk: between two iterations, remove and return the prompts that are too long for it by now."""
        for lane in self.lanes:
            for sequence in filter(self.too_long, [*lane.queue.prefilling]):
                self.preempt(sequence, lane, now)
        lost = []
        for sequence in self.take_waiting():
            if not self.too_long(sequence):
                self.accept(sequence)
            elif sequence.generated_tokens:
                self.host.finished(self, sequence, now)
            else:
                lost.append(sequence)
        return lost

    def stop(self, now: float) -> None:
        """Form no more batches; the host is told (``stopped``) when the last one has left."""
        self.stopping = True
        self.executor.stop(now)

    def go_on(self, now: float) -> None:
        """It need not stop after all."""
        self.stopping = False
        self.executor.replan(now)

    def dissolve(self) -> list[SequenceState]:
        """End the engine between two iterations. Returns started sequences, oldest first, with cached tokens and no blocks."""
        started = sorted(self.take_started(), key=arrival_order)
        for sequence in started:
            self.kv.release(sequence)
        self._leave()
        return started

    def abandon(self) -> list[SequenceState]:
        """End the engine at once, in the middle of an iteration too. Returns its requests, oldest first. The host hears of
        each that had started as preempted: its KV is lost. Boundaries must be settled."""
        if self.tier is not None:
            self.tier.lose()
        started = self.take_started()
        for sequence in started:
            self.kv.release(sequence, computed=False)
            sequence.lose_kv()
            self.host.preempted(self, sequence)
        lost = [*started, *self.take_waiting()]
        self._leave()
        return sorted(lost, key=arrival_order)

    def _leave(self) -> None:
        """The engine takes no call any more."""
        self.kv.forget()
        self.gone = True
        self.executor.leave()
