"""The cluster in time: events go to the controller, its commands to engines.

Engines of one GPU share its memory only through the policy's manager, and its pace through ``Contention``. This module carries
news between them: it asks schedulers, wakes engines and cuts spans when something changes. It takes no decision of its own.
The table ``actions`` has a method for each kind of command; the fleets that let engines come and go (``fleet/``) add theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.engine.lone import Lone
from fineserve_sim.cluster.engine.loop import NEVER, Engine, EngineHost
from fineserve_sim.cluster.engine.sequence import Decodes, Lane, Prefix, SequenceState, Waiting
from fineserve_sim.cluster.loads import LoadWatch
from fineserve_sim.cluster.log import DecisionLog, Log
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.scenario import Cause, Fate, Left
from fineserve_sim.cluster.sharing.contention import Contention
from fineserve_sim.cluster.sharing.domain import MemoryDomain
from fineserve_sim.latency.sharing import Demand
from fineserve_sim.policy.commands import Command, Dispatch, Drop, Reject
from fineserve_sim.policy.controller import Controller
from fineserve_sim.policy.events import EngineStepped, Event, Loads, RequestArrived, RequestReturned
from fineserve_sim.policy.interfaces import EngineState, Request
from fineserve_sim.policy.memory.preemption import arrival_order

ARRIVAL: Final = order_of(Kind.ARRIVAL, 0)
TIMER: Final = order_of(Kind.TIMER, 0)
"""The orders of events that belong to no engine."""

Action = Callable[[Any, float], None]
"""Carries out a command now."""


@dataclass(slots=True, eq=False)
class Scope:
    """The engines that one local scheduler serves. It is asked again when ``stale``, or from ``ask_again_s`` on."""

    engines: tuple[int, ...]
    stale: bool = True
    ask_again_s: float = float("-inf")


class Fleet:
    """Adds and removes engines. The base class does nothing: a static cluster. The cluster calls ``rested`` when an engine runs
    dry, and ``reform`` after commands that left GPUs ``unformed``. ``fail`` loses a GPU, or an instance by its number in the
    placement, with all that its engines hold; their requests start again elsewhere. ``repair`` brings it back with empty
    memory. ``freed``: memory of an engine came back. ``check`` raises AssertionError if bytes do not add up."""

    def rested(self, engine: Engine, now: float) -> None: ...
    def reform(self, now: float) -> None: ...
    def fail(self, number: int, now: float) -> None: ...
    def repair(self, number: int, now: float) -> None: ...
    def freed(self, engine: Engine, now: float) -> None: ...
    def check(self) -> None: ...


class Cluster(EngineHost):
    """Connects engines, memory domains, contention and the controller. Without ``merging`` every iteration is planned by
    itself and the schedulers are asked at each of them. ``context_tokens`` by model. With ``check`` every memory is checked at
    every step."""

    def __init__(
        self,
        clock: Clock,
        controller: Controller,
        contention: Contention,
        context_tokens: Mapping[str, int],
        *,
        merging: bool = True,
        check: bool = False,
        log: Log | None = None,
    ) -> None:
        self.engines = {}  # no type here: compiled, an attribute that is declared twice is never freed
        self.active: set[int] = set()  # engines that got a request and did not rest since
        self.merging = merging
        self.clock, self.controller, self.contention = clock, controller, contention
        self.outcomes = Outcomes()
        self.fleet = Fleet()
        self.unformed: set[int] = set()  # GPUs whose engines or memory changed, and nothing was formed anew yet
        self.order = 0  # of the event under way
        self.log = None if log is None else DecisionLog(log)
        self.logs = log is not None
        self.loads = LoadWatch() if controller.needs_loads else None
        self.attentive = controller.needs_loads or check or self.logs
        self.actions: dict[type, Action] = {Dispatch: self._dispatch, Drop: self._refuse, Reject: self._refuse}
        self._scope_of: dict[int, Scope] = {}
        self._domain_of: dict[int, MemoryDomain] = {}
        self._check = check
        self._context_tokens = context_tokens
        self._depth = 0  # of commands that follow from commands
        self._asking: Engine | None = None
        self._waiting: dict[int, Waiting] = {}
        self._returned: dict[int, tuple[str, SequenceState]] = {}  # with their models, waiting for an engine again
        self._iterations_gone = 0

    def connect(self, engines: Sequence[Engine], domains: Sequence[MemoryDomain], scopes: Sequence[Scope]) -> None:
        """Attach engines, with the domains and scopes that partition them in place of their former ones."""
        self.engines |= {engine.index: engine for engine in engines}
        self.outcomes.stages |= {engine.index: engine.columns for engine in engines}
        self._domain_of |= {engine.index: domain for domain in domains for engine in domain.engines}
        self._scope_of |= {engine: scope for scope in scopes for engine in scope.engines}

    def disconnect(self, engine: Engine) -> set[int]:
        """An engine leaves. Returns the ids of the others in its domain, which are to be connected anew."""
        scope = self._scope_of.pop(engine.index)
        scope.engines = tuple(other for other in scope.engines if other != engine.index)
        del self.engines[engine.index]
        self._iterations_gone += engine.iterations
        self.active.discard(engine.index)
        return {other.index for other in self._domain_of.pop(engine.index).engines} - {engine.index}

    def iterations(self) -> int:
        """Steps of all engines that ever were."""
        return self._iterations_gone + sum(engine.iterations for engine in self.engines.values())

    def at(self, time_s: float, order: int, happens: Callable[[float], None]) -> None:
        """Call ``happens(now)`` at ``time_s``, as an event of this order that belongs to no engine."""

        def begin(now: float) -> None:
            self.order = order
            happens(now)

        self.clock.at(time_s, order, begin)

    def tick(self, order: int, look: Callable[[float], None]) -> None:
        """Call ``look(now)`` whenever the controller wants to be told everything, as an event of this order."""

        def ticked(now: float) -> None:
            look(now)
            self.tick(order, look)

        self.at(self.controller.next_tick_s, order, ticked)

    def arrive(self, request: Request, output_tokens: int, now: float, prefix: Prefix | None = None) -> None:
        """A request comes in. ``output_tokens`` are the tokens that it would generate if nothing cut it off (the oracle).
        ``prefix`` has its known prefixes, where KV memory keeps prefixes."""
        self.order = ARRIVAL
        waiting = self._waiting[request.id] = Waiting(request, output_tokens, prefix)
        self.hear(now, RequestArrived(request))
        engine_id = self.controller.engine_of(request.id)
        if engine_id is not None:
            waiting.engine = engine_id
            self.waits(self.engines[engine_id], now)

    def waits(self, engine: Engine, now: float) -> None:
        """A request has come to wait for this engine: its scheduler is asked, at once if the engine is idle."""
        self.ask_again(engine, now)
        engine.executor.start(now)

    def returned(self, engine: Engine, sequences: Collection[SequenceState], now: float, left: Left) -> None:
        """These sequences have left their engine and wait for one again; their generated tokens are part of their prompts."""
        for sequence in sequences:
            self.outcomes.leave(sequence.index, now, sequence.generated_tokens, left)
            self._returned[sequence.index] = engine.model, sequence
            again = Request(sequence.index, engine.model, sequence.arrival_s, sequence.target_tokens)
            self.hear(now, RequestReturned(again))
            if (engine_id := self.controller.engine_of(again.id)) is not None:
                self.waits(self.engines[engine_id], now)

    def close(self, end_s: float) -> None:
        """The run is over: requests that still wait or are under way do not finish."""
        for index, waiting in self._waiting.items():
            self.outcomes.arrive(index, waiting.engine)
        self.outcomes.close(end_s)

    def finished(self, engine: Engine, sequence: SequenceState, now: float) -> None:
        generated_tokens, fate, cause = sequence.generated_tokens, Fate.FINISHED, Cause.NONE
        if generated_tokens < sequence.asked_tokens:
            fate, cause = Fate.CUT, self._bounds(engine.model, sequence.prompt_tokens + generated_tokens)
        self.outcomes.end(sequence.index, now, fate, cause, generated_tokens=generated_tokens)

    def _bounds(self, model: str, tokens: int) -> Cause:
        """Why a sequence of the model has no more tokens than these."""
        return Cause.CONTEXT if tokens >= self._context_tokens[model] else Cause.MEMORY

    def preempted(self, engine: Engine, sequence: SequenceState, now: float | None = None) -> None:
        """The sequence lost its KV; at ``now``, unless its engine is lost with it. The scheduler sees another state of the
        engine, so engines of the scope may get another answer at their next boundary."""
        self.outcomes.preempted(sequence.index)
        if self.log is not None and now is not None:
            self.log.preempted(engine, sequence.index, now)
        scope = self._scope_of[engine.index]
        scope.stale = True
        if self.controller.waiting(engine.index):
            self._cut(scope, self.clock.now, but=engine.index)

    def progressed(self, engine: Engine) -> None:
        """Prompt tokens were computed: a scheduler that counts them may answer differently."""
        self._scope_of[engine.index].stale = True

    def consult(self, engine: Engine, now: float) -> None:
        """The engine stands between two iterations: let its scheduler start requests if the answer could be news."""
        if not self.controller.waiting(engine.index):
            return
        scope = self._scope_of[engine.index]
        news = scope.stale or engine.composition_changed or now >= scope.ask_again_s
        if self.merging and not news:
            return
        commands = self.tell(now, EngineStepped(engine.index, self._states(scope, now)))
        self.carry_out(commands, now, asking=engine)
        if self.merging:
            self._plan_next_question(scope, engine, now, changed=bool(commands))

    def _plan_next_question(self, scope: Scope, engine: Engine, now: float, *, changed: bool) -> None:
        """When the scheduler is to be asked again. Spans of the scope that were planned to go on beyond that end early."""
        planned_s = scope.ask_again_s
        scope.ask_again_s = NEVER
        if self.controller.waiting(engine.index):
            scope.ask_again_s = self.controller.unchanged_until(now, engine.index, self._states(scope, now))
        scope.stale = changed  # what it just decided may be news to itself
        if changed or scope.ask_again_s < planned_s:
            self._cut(scope, now, but=engine.index)

    def ask_again_s(self, engine: Engine) -> float:
        """The first time at which the engine's scheduler may have news without any event. It is -NEVER, before any time, if
        something changed since it was asked: it wants to be asked after one iteration."""
        if not self.controller.waiting(engine.index):
            return NEVER
        scope = self._scope_of[engine.index]
        return -NEVER if scope.stale else scope.ask_again_s

    def _states(self, scope: Scope, now: float) -> dict[int, EngineState]:
        for engine in scope.engines:
            self._domain_of[engine].settle(now, self.order)
        return {engine: self.engines[engine].state() for engine in scope.engines}

    def ask_again(self, engine: Engine, now: float) -> None:
        """The scheduler's answer may differ now: end every span that waits for it."""
        scope = self._scope_of[engine.index]
        scope.stale = True
        if self.controller.waiting(engine.index):
            self._cut(scope, now)

    def _cut(self, scope: Scope, now: float, but: int | None = None) -> None:
        """End the spans of the engines of a scope, except engine ``but``."""
        for index in scope.engines:
            if index != but and self.engines[index].busy:
                self._domain_of[index].settle(now, self.order)
                self.engines[index].executor.cut()

    def settle(self, engine: Engine, now: float, order: int) -> None:
        """An event of this engine begins: bring the memory that it sees up to this moment."""
        self.order = order
        self._domain_of[engine.index].settle(now, order)

    def settle_all(self, now: float, order: int) -> None:
        """Bring all memory up to this moment, for a look at everything."""
        self.order = order
        for domain in dict.fromkeys(self._domain_of.values()):
            domain.settle(now, order)

    def settle_now(self, engine: Engine, now: float) -> None:
        """Within the event under way, bring the memory that this engine sees up to it."""
        if domain := self._domain_of.get(engine.index):  # one that has just come has nothing to settle
            domain.settle(now, self.order)

    def set_demand(self, engine: Engine, now: float, need: Demand) -> None:
        """The engine's composition changed: so does the pace of its neighbours, and what schedulers may answer."""
        changed = self.contention.set_demand(engine.index, need)
        slowdown = self.contention.slowdowns[engine.index]
        if slowdown != engine.slowdown:
            engine.slowdown = slowdown
            self.ask_again(engine, now)
        settled = self._domain_of[engine.index]  # when its event began
        for other in changed:
            neighbour = self.engines[other]
            if self._domain_of[other] is not settled:
                self._domain_of[other].settle(now, self.order)
            neighbour.executor.rescale(now, self.contention.slowdowns[other])
            self.touch(neighbour)  # its next boundary has moved
            self.ask_again(neighbour, now)

    def steps_that_fit(self, engine: Engine, decodes: Decodes, most: int) -> int:
        return self._domain_of[engine.index].steps_that_fit(engine, decodes, most)

    def launched(self, engine: Engine, lane: Lane, now: float, *, sure: bool) -> None:
        """The engine took blocks for an iteration: if the spans of the others are no longer sure of theirs, they end early.
        They are ``sure`` when the engine's own span was planned beside them."""
        domain = self._domain_of[engine.index]
        if not (sure or domain.promises_hold(engine)):
            for other in domain.engines:
                if other is not engine:
                    other.executor.cut()
        if not self.attentive:
            return
        self.touch(engine)
        if self._check:
            domain.check()
            for other in domain.engines:
                other.check()
            self.fleet.check()
        if self.log is not None:
            self.log.launched(engine, lane, now)

    def computed(self, engine: Engine, lane: Lane, since_s: float, now: float, iterations: int, stage: int) -> None:
        """A batch or a span that began at ``since_s`` has ended: write it down."""
        if self.log is not None:
            self.log.computed(engine, lane, since_s, now, iterations, engine.columns[stage])

    def memory_freed(self, engine: Engine, now: float) -> None:
        """Blocks came back: engines that wait for memory try again, idle ones at once, others after their iteration."""
        self.touch(engine)
        for other in self._domain_of[engine.index].engines:
            if other is engine:
                continue
            self._scope_of[other.index].stale = True
            if other.wants_memory or self.controller.waiting(other.index):
                other.executor.replan(now)
        if engine.awaited_blocks:
            self.fleet.freed(engine, now)

    def stalled(self, engine: Engine, now: float) -> None:
        """The engine has work and no memory. When the whole domain stands still, partial prefills block one another: the one
        that arrived last gives its memory back."""
        domain = self._domain_of[engine.index]
        if any(lane.asked or lane.launched for other in domain.engines for lane in other.lanes):
            return
        holders = [other for other in domain.engines if other.partial_prefills()]
        if not holders or (engine.reserved_blocks and len(engine.partial_prefills()) < 2):
            return  # memory went to weights, or to a request that is on its way: it comes back
        latest = max(holders, key=lambda other: max(map(arrival_order, other.partial_prefills())))
        latest.preempt_latest_prefill(now)
        for other in domain.engines:
            if other.has_work:
                other.executor.start(now)

    def rested(self, engine: Engine, now: float) -> None:
        """The engine has nothing more to do."""
        self.active.discard(engine.index)
        self.fleet.rested(engine, now)

    def touch(self, engine: Engine) -> None:
        """The engine's load changed, and so may the loads of the engines that share its memory."""
        if self.loads is not None:
            self.loads.touch(self._domain_of[engine.index].engines)

    def hear(self, now: float, event: Event) -> None:
        """Tell the controller of an event and carry out its commands. A controller that needs loads is first told the loads
        that changed since it was told last."""
        if self.loads is not None:
            if loads := self.loads.changed(self, now):
                self.tell(now, Loads(loads))
            if self._check:
                self.loads.check(self, now)
        self.carry_out(self.tell(now, event), now)

    def tell(self, now: float, event: Event) -> list[Command]:
        """The controller's commands in answer to an event, written down."""
        commands = self.controller.handle(now, event)
        if self.log is not None:
            self.log.told(now, event, commands)
        return commands

    def carry_out(self, commands: Sequence[Command], now: float, asking: Engine | None = None) -> None:
        """Carry out the commands in order, each with its consequences before the next; when all is done, the fleet is formed
        anew."""
        self._depth += 1
        for command in commands:
            self._asking = asking
            self.actions[type(command)](command, now)
        self._depth -= 1
        if self.unformed and not self._depth:
            self.fleet.reform(now)

    def _dispatch(self, command: Dispatch, now: float) -> None:
        engine = self.engines[command.engine]
        waiting = self._waiting.pop(command.request_id, None)
        sequence = self._returned.pop(command.request_id)[1] if waiting is None else waiting.sequence()
        if sequence.target_tokens >= engine.max_tokens:  # its GPUs got others while the request waited
            if waiting is not None:
                self.outcomes.arrive(command.request_id, waiting.engine)
            self.returned(engine, [sequence], now, Left.RESIZED)
            return
        self.outcomes.enter(command.request_id, engine.index, now, sequence.generated_tokens)
        if isinstance(engine.executor, Lone):
            engine.executor.post(now, self.order, sequence)
            return
        engine.accept(sequence)
        self.active.add(engine.index)
        self.touch(engine)
        if engine is not self._asking:
            engine.executor.replan(now)

    def _refuse(self, command: Drop | Reject, now: float) -> None:
        waiting = self._waiting.pop(command.request_id, None)
        if waiting is None:
            model, sequence = self._returned.pop(command.request_id)
        else:
            model, sequence = waiting.request.model, waiting.sequence()
            self.outcomes.arrive(command.request_id, waiting.engine)
        if isinstance(command, Drop):
            self.outcomes.end(command.request_id, now, Fate.DROPPED, Cause.DEADLINE)
            return
        cause = Cause.PLACEMENT if command.unplaced else self._bounds(model, sequence.target_tokens)
        self.outcomes.end(command.request_id, now, Fate.REJECTED, cause)
