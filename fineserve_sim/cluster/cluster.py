"""The cluster in time: engines, what they share, and the controller that feeds them.

Engines of one GPU share memory through the policy's manager only, and its pace through ``Contention``. This module carries
news between them: who must be asked, woken or cut when something changes. It takes no decision of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.contention import Contention
from fineserve_sim.cluster.domain import MemoryDomain
from fineserve_sim.cluster.engine import NEVER, Engine
from fineserve_sim.cluster.lone_engine import LoneEngine
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.scenario import Fate
from fineserve_sim.cluster.sequence import DecodeSet, Prefix, SequenceState
from fineserve_sim.policy.commands import Command, Dispatch, Drop, Reject
from fineserve_sim.policy.controller import Controller
from fineserve_sim.policy.events import EngineStepped, Event, RequestArrived
from fineserve_sim.policy.interfaces import EngineState, Request

Log = Callable[[dict[str, object]], None]


@dataclass(slots=True, eq=False)
class Scope:
    """The engines that one local scheduler serves. It is asked again when ``stale``, or from ``ask_again_s`` on."""

    engines: tuple[int, ...]
    stale: bool = True
    ask_again_s: float = float("-inf")


class Cluster:
    """Connects engines, memory domains, contention and the controller. Without ``merging`` every iteration is planned by
    itself and the schedulers are asked at each of them; with ``check`` every memory is checked at every step."""

    def __init__(
        self,
        clock: Clock,
        controller: Controller,
        contention: Contention,
        outcomes: Outcomes,
        scopes: Sequence[Scope],
        *,
        merging: bool,
        check: bool,
        log: Log | None,
    ) -> None:
        self.engines: dict[int, Engine] = {}
        self.domains: list[MemoryDomain] = []
        self.merging = merging
        self._clock = clock
        self._controller = controller
        self._contention = contention
        self._outcomes = outcomes
        self._scope_of = {engine: scope for scope in scopes for engine in scope.engines}
        self._domain_of: dict[int, MemoryDomain] = {}
        self._check = check
        self._log = log
        self._order = 0
        self._sequences: dict[int, SequenceState] = {}
        self.prefixes: Sequence[Prefix] = ()  # by request, where KV memory keeps prefixes

    def connect(self, engines: Sequence[Engine], domains: Sequence[MemoryDomain]) -> None:
        """Attach the engines and the memory domains that partition them, instead of those before."""
        self.engines = {engine.index: engine for engine in engines}
        self.domains = list(domains)
        self._domain_of = {engine.index: domain for domain in domains for engine in domain.engines}

    # --- requests --------------------------------------------------------------------------------------------------

    def arrive(self, request: Request, output_tokens: int, now: float, order: int) -> None:
        """A request comes in. ``output_tokens`` is what it would generate if nothing cut it off (the oracle)."""
        self._order = order
        sequence = SequenceState(request.id, request.arrival_s, request.prompt_tokens, output_tokens)
        if self.prefixes:
            sequence.prefix = self.prefixes[request.id]
        self._sequences[request.id] = sequence
        self._carry_out(self._tell(now, RequestArrived(request)), now)
        engine_id = self._controller.engine_of(request.id)
        if engine_id is not None:
            self._outcomes.engine[request.id] = engine_id
            engine = self.engines[engine_id]
            self._ask_again(engine, now)
            if not engine.busy:
                engine.start(now)

    def iterations(self) -> int:
        """Engine iterations so far."""
        return sum(engine.iterations for engine in self.engines.values())

    def queued(self, engine: int) -> int:
        """Requests that wait in the scheduler for this very engine."""
        return self._controller.bound_to(engine)

    def emitted(self, sequence: SequenceState, now: float) -> None:
        self._outcomes.first_token(sequence.index, now)

    def finished(self, sequence: SequenceState, now: float) -> None:
        self._outcomes.end(sequence.index, now, Fate.FINISHED)

    def preempted(self, engine: Engine, sequence: SequenceState) -> None:
        self._outcomes.preemptions[sequence.index] += 1
        self._scope_of[engine.index].stale = True

    def progressed(self, engine: Engine) -> None:
        """Prompt tokens were computed: a scheduler that counts them may answer differently."""
        self._scope_of[engine.index].stale = True

    # --- scheduling ------------------------------------------------------------------------------------------------

    def consult(self, engine: Engine, now: float) -> None:
        """The engine stands between two iterations: let its scheduler start requests if the answer could be news."""
        scope = self._scope_of[engine.index]
        if not self._controller.waiting(engine.index):
            return
        news = scope.stale or engine.composition_changed or now >= scope.ask_again_s
        if self.merging and not news:
            return
        commands = self._tell(now, EngineStepped(engine.index, self._states(scope, now)))
        self._carry_out(commands, now, asking=engine)
        if self.merging:
            self._plan_next_question(scope, engine, now, changed=bool(commands))

    def _plan_next_question(self, scope: Scope, engine: Engine, now: float, *, changed: bool) -> None:
        """When the scheduler is to be asked again. Spans of the scope that were planned to go on beyond that end early."""
        planned_s = scope.ask_again_s
        scope.ask_again_s = NEVER
        if self._controller.waiting(engine.index):
            scope.ask_again_s = self._controller.unchanged_until(now, engine.index, self._states(scope, now))
        scope.stale = changed  # what it just decided may be news to itself
        if changed or scope.ask_again_s < planned_s:
            for other in scope.engines:
                if other != engine.index:
                    self._cut(self.engines[other], now)

    def must_ask(self, engine: Engine) -> bool:
        """Something changed since the engine's scheduler was asked: it wants to be asked after one iteration."""
        return self._scope_of[engine.index].stale and self._controller.waiting(engine.index) > 0

    def ask_again_s(self, engine: Engine) -> float:
        """The first time at which the engine's scheduler may have news without any event."""
        scope = self._scope_of[engine.index]
        return scope.ask_again_s if self._controller.waiting(engine.index) else NEVER

    def _states(self, scope: Scope, now: float) -> dict[int, EngineState]:
        for engine in scope.engines:
            self._domain_of[engine].settle(now, self._order)
        return {engine: self.engines[engine].state() for engine in scope.engines}

    def _ask_again(self, engine: Engine, now: float) -> None:
        """The scheduler's answer may differ now: end every span that waits for it."""
        scope = self._scope_of[engine.index]
        scope.stale = True
        if self._controller.waiting(engine.index):
            for other in scope.engines:
                self._cut(self.engines[other], now)

    def computed(self, engine: Engine, since_s: float, now: float) -> None:
        """A span of iterations of an engine has ended: write it down, with the time at which it began."""
        if self._log is not None:
            iterations, decodes, prefill_tokens = engine.in_flight()
            span = {"engine": engine.index, "seconds": now - since_s, "iterations": iterations}
            batch = {"decodes": decodes, "prefill_tokens": prefill_tokens}
            self._log({"now_s": since_s, "span": "EngineComputed", **span, **batch})

    # --- what engines share ----------------------------------------------------------------------------------------

    def settle(self, engine: Engine, now: float, order: int) -> None:
        """An event of this engine begins: bring the memory that it sees up to this moment."""
        self._order = order
        self._domain_of[engine.index].settle(now, order)

    def settle_all(self, now: float, order: int) -> None:
        """Somebody looks at everything: bring all memory up to this moment."""
        for domain in self.domains:
            domain.settle(now, order)

    def set_shares(self, engine: Engine, now: float, compute: float, bandwidth: float) -> None:
        """The engine's composition changed: so does the pace of its neighbours, and what schedulers may answer."""
        changed = self._contention.set_shares(engine.index, compute, bandwidth)
        slowdown = self._contention.slowdowns[engine.index]
        if slowdown != engine.slowdown:
            engine.slowdown = slowdown
            self._ask_again(engine, now)
        settled = self._domain_of[engine.index]  # when its event began
        for other in changed:
            neighbour = self.engines[other]
            if self._domain_of[other] is not settled:
                self._domain_of[other].settle(now, self._order)
            neighbour.rescale(now, self._contention.slowdowns[other])
            self._ask_again(neighbour, now)

    def steps_that_fit(self, engine: Engine, decodes: DecodeSet, most: int) -> int:
        return self._domain_of[engine.index].steps_that_fit(engine, decodes, most)

    def launched(self, engine: Engine, *, sure: bool) -> None:
        """The engine took blocks for an iteration: if the spans of the others are no longer sure of theirs, they end early.
        They are ``sure`` when the engine's own span was planned beside them."""
        domain = self._domain_of[engine.index]
        if not (sure or domain.promises_hold(engine)):
            for other in domain.engines:
                if other is not engine:
                    other.cut()
        if self._check:
            domain.check()

    def memory_freed(self, engine: Engine, now: float) -> None:
        """Blocks came back: whoever waits for memory tries again, at once when idle, else after its iteration."""
        for other in self._domain_of[engine.index].engines:
            if other is engine:
                continue
            self._scope_of[other.index].stale = True
            if other.waiting or other.prefilling or self._controller.waiting(other.index):
                if other.busy:
                    other.cut()
                else:
                    other.start(now)

    def stalled(self, engine: Engine, now: float) -> None:
        """The engine has work and no memory. When the whole domain stands still, partial prefills block one another: the one
        that arrived last gives its memory back."""
        domain = self._domain_of[engine.index]
        if any(other.busy or other.starting for other in domain.engines):
            return
        holders = [other for other in domain.engines if other.prefilling]
        if not holders:
            raise AssertionError(f"engine {engine.index} waits for memory that nobody holds")
        max(holders, key=Engine.latest_prefill_arrival).preempt_latest_prefill()
        for other in domain.engines:
            if other.has_work:
                other.start(now)

    def rested(self, engine: Engine, now: float) -> None:
        """The engine has nothing more to do."""

    def _cut(self, engine: Engine, now: float) -> None:
        if engine.busy:
            self._domain_of[engine.index].settle(now, self._order)
            engine.cut()

    # --- the controller --------------------------------------------------------------------------------------------

    def _tell(self, now: float, event: Event) -> list[Command]:
        commands = self._controller.handle(now, event)
        if self._log is not None:
            self._log({"now_s": now, "event": type(event).__name__, **_plain(event._asdict())})
            for command in commands:
                self._log({"now_s": now, "command": type(command).__name__, **_plain(command._asdict())})
        return commands

    def _carry_out(self, commands: Sequence[Command], now: float, asking: Engine | None = None) -> None:
        for command in commands:
            if isinstance(command, Dispatch):
                engine = self.engines[command.engine]
                sequence = self._sequences.pop(command.request_id)
                self._outcomes.engine[command.request_id] = command.engine
                if isinstance(engine, LoneEngine):
                    engine.post(now, self._order, sequence)
                    continue
                engine.accept(sequence)
                if engine is asking:
                    continue
                if engine.busy:
                    self._cut(engine, now)
                else:
                    engine.start(now)
            elif isinstance(command, Drop | Reject):
                self._sequences.pop(command.request_id, None)
                fate = Fate.REJECTED if isinstance(command, Reject) else Fate.DROPPED
                self._outcomes.end(command.request_id, now, fate)


def _plain(fields: Mapping[str, object]) -> dict[str, object]:
    """The fields of an event or command as JSON-able values."""
    return {name: _plain_value(value) for name, value in fields.items()}


def _plain_value(value: object) -> object:
    if isinstance(value, Request):
        return {name: getattr(value, name) for name in Request.__slots__}
    if isinstance(value, dict):
        return {str(key): _plain_value(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    return value
