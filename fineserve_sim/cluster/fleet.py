"""A cluster whose engines come and go: it carries out the controller's ``Activate`` and ``Evict`` and tells it the time.

An engine is built when its weights are loaded, and joins its GPUs: their memory, their contention, the scopes of their
schedulers. When that changes, all of it is formed anew and every span in flight ends after its iteration: rare events,
and no part of an engine needs to know of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from simpy.events import Event as ClockEvent

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.cluster import Cluster, Log, Scope
from fineserve_sim.cluster.contention import Contention
from fineserve_sim.cluster.domain import domains_of
from fineserve_sim.cluster.engine import Engine
from fineserve_sim.cluster.fleet_memory import FleetMemory
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.sequence import SequenceState
from fineserve_sim.policy.commands import Activate, Command, Evict, Survey
from fineserve_sim.policy.events import EngineDrained, EngineReady, Event, RequestArrived, Tick
from fineserve_sim.policy.fleet.activation_cost import Loader
from fineserve_sim.policy.fleet.controller import FleetController
from fineserve_sim.policy.interfaces import Request
from fineserve_sim.policy.memory.geometry import KVGeometry

TICK = order_of(Kind.TIMER, 1)
LOADED = order_of(Kind.TIMER, 2)


@dataclass(frozen=True, slots=True)
class Tenancy:
    """What an engine of a model takes of each of its GPUs: weights to load, all bytes beside KV, its KV block."""

    weight_bytes: int
    fixed_bytes: int
    block: KVGeometry


@dataclass(slots=True)
class _Stay:
    """An engine on its GPUs: of which model, and whether it goes once it is empty."""

    model: str
    gpus: tuple[int, ...]
    drains: bool = False


class FleetCluster(Cluster):
    """``tenancies`` by model; ``build`` makes the engine of a model on GPUs, whose memory knows it already."""

    def __init__(
        self,
        clock: Clock,
        controller: FleetController,
        outcomes: Outcomes,
        memory: FleetMemory,
        loader: Loader,
        tenancies: Mapping[str, Tenancy],
        build: Callable[[Cluster, int, str, tuple[int, ...]], Engine],
        *,
        merging: bool,
        check: bool,
        log: Log | None,
    ) -> None:
        super().__init__(clock, controller, Contention(()), outcomes, (), merging=merging, check=check, log=log)
        self._fleet = controller
        self._memory = memory
        self._loader = loader
        self._tenancies = tenancies
        self._build = build
        self._stays: dict[int, _Stay] = {}
        self._changed = False
        self._depth = 0  # of commands that follow from commands
        self._loaded: ClockEvent | None = None
        self._iterations_gone = 0

    def begin(self, placed: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """These models are resident from the start, as engines 0, 1, ...; the first tick is set."""
        for engine, (model, gpus) in enumerate(placed):
            self._memory.take(gpus, self._tenancies[model].fixed_bytes)
            self._stays[engine] = _Stay(model, gpus)
            self._join(engine)
        self._reform(0.0)
        self._clock.at(self._fleet.next_tick_s, TICK, self._on_tick)

    # --- what others see -------------------------------------------------------------------------------------------

    def resident(self) -> list[Engine]:
        """The engines that are loaded."""
        return list(self.engines.values())

    def engines_of(self, model: str) -> list[Engine]:
        """Those of this model."""
        return [engine for engine in self.engines.values() if self._stays[engine.index].model == model]

    def iterations(self) -> int:
        return self._iterations_gone + super().iterations()

    def queued_for(self, model: str) -> int:
        """Requests that wait in schedulers for this model's engines, or for an engine to come."""
        return self._fleet.held(model) + sum(self.queued(engine.index) for engine in self.engines_of(model))

    # --- events ----------------------------------------------------------------------------------------------------

    def rested(self, engine: Engine, now: float) -> None:
        """An engine that was to go when it is empty goes."""
        if self._stays[engine.index].drains and not engine.has_work:
            self._leave(engine.index, now)
            self._hear(now, EngineDrained(engine.index))

    def _on_tick(self, _: ClockEvent) -> None:
        now: float = self._clock.now
        self._order = TICK
        self._look(now)
        self._clock.at(self._fleet.next_tick_s, TICK, self._on_tick)

    def _on_loaded(self, event: ClockEvent) -> None:
        if event is not self._loaded:
            return  # what loads has changed since
        now: float = self._clock.now
        self._order = LOADED
        for engine in self._loader.advance(now):
            self._join(engine)
            self._reform(now)
            self._changed = True  # its queue may get those who waited for it, and no command says so
            self._hear(now, EngineReady(engine))
        self._await_loading()

    def _await_loading(self) -> None:
        at_s = self._loader.next_change_s()
        self._loaded = self._clock.at(at_s, LOADED, self._on_loaded) if at_s < float("inf") else None

    def _hear(self, now: float, event: Event) -> None:
        self._carry_out(self._tell(now, event), now)

    def _look(self, now: float) -> None:
        """Tell the controller how everything stands."""
        self.settle_all(now, self._order)
        states = {engine.index: engine.state() for engine in self.engines.values()}
        commands = self._tell(now, Tick(states, self._memory.free_bytes()))
        for engine in self.engines.values():  # a look clears what schedulers noted about memory: ask them again
            self._ask_again(engine, now)
        self._carry_out(commands, now)

    # --- commands --------------------------------------------------------------------------------------------------

    def _carry_out(self, commands: Sequence[Command], now: float, asking: Engine | None = None) -> None:
        """What follows from a command is done before the next one; when all is done, the fleet is formed anew."""
        self._depth += 1
        for command in commands:
            if isinstance(command, Survey):
                self._look(now)
            elif isinstance(command, Activate):
                self._activate(command, now)
            elif isinstance(command, Evict):
                self._evict(command, now)
            else:
                super()._carry_out((command,), now, asking)
        self._depth -= 1
        if self._changed and not self._depth:
            self._reform(now)

    def _activate(self, command: Activate, now: float) -> None:
        tenancy = self._tenancies[command.model]
        self._stays[command.engine] = _Stay(command.model, command.gpus)
        self.settle_all(now, self._order)  # memory that spans counted on may be gone
        self._memory.take(command.gpus, tenancy.fixed_bytes)
        self._loader.begin(now, command.engine, command.gpus, tenancy.weight_bytes)
        self._await_loading()
        self._changed = True

    def _evict(self, command: Evict, now: float) -> None:
        engine = self.engines.get(command.engine)
        if engine is None:
            self._loader.cancel(now, command.engine)
            self._await_loading()
            self._give_up(command.engine)
        elif command.drain and engine.has_work:
            self._stays[command.engine].drains = True
        else:
            self._domain_of[command.engine].settle(now, self._order)
            model = self._stays[command.engine].model
            lost = engine.abandon()
            self._leave(command.engine, now)
            for sequence in lost:
                self._come_again(sequence, model, now)
            if command.drain:
                self._hear(now, EngineDrained(command.engine))
        self._changed = True

    def _come_again(self, sequence: SequenceState, model: str, now: float) -> None:
        """A request that lost its KV arrives anew, with what it generated as part of its prompt."""
        self._sequences[sequence.index] = sequence
        request = Request(sequence.index, model, sequence.arrival_s, sequence.target_tokens)
        self._carry_out(self._tell(now, RequestArrived(request)), now)

    # --- the fleet -------------------------------------------------------------------------------------------------

    def _join(self, engine: int) -> None:
        stay = self._stays[engine]
        self._memory.join(engine, stay.gpus, self._tenancies[stay.model].block)
        self._contention.join(engine, stay.gpus)
        self.engines[engine] = self._build(self, engine, stay.model, stay.gpus)
        self._changed = True

    def _leave(self, engine: int, now: float) -> None:
        """An empty engine leaves its GPUs, and at once those who are asked together."""
        gone = self.engines[engine]
        self.settle(gone, now, self._order)
        self.set_shares(gone, now, 0.0, 0.0)
        self._contention.leave(engine)
        gone.wakeups.leave(gone)
        self._iterations_gone += gone.iterations
        scope = self._scope_of.pop(engine)
        scope.engines = tuple(other for other in scope.engines if other != engine)
        del self.engines[engine]
        self._memory.leave(engine, self._stays[engine].gpus)
        self._give_up(engine)

    def _give_up(self, engine: int) -> None:
        stay = self._stays.pop(engine)
        self._memory.give(stay.gpus, self._tenancies[stay.model].fixed_bytes)
        self._changed = True

    def _reform(self, now: float) -> None:
        """Form domains and scopes anew; every engine plans again after its iteration in flight, idle ones at once."""
        self.settle_all(now, self._order)
        engines = [self.engines[id] for id in sorted(self.engines)]
        gpus_of = [self._stays[engine.index].gpus for engine in engines]
        self.connect(engines, domains_of(engines, gpus_of, self._memory.managers))
        scopes = {scope: Scope(scope) for scope in map(self._scope, engines)}
        self._scope_of = {engine.index: scopes[self._scope(engine)] for engine in engines}
        self._changed = False
        for engine in engines:
            if engine.busy:
                engine.cut()
            elif engine.has_work or self._controller.waiting(engine.index):
                engine.start(now)
        if self._check:
            self._memory.check()

    def _scope(self, engine: Engine) -> tuple[int, ...]:
        return self._fleet.scope_of(engine.index) or (engine.index,)

    def stalled(self, engine: Engine, now: float) -> None:
        """Memory may have gone to weights: then the engine waits until it comes back."""
        domain = self._domain_of[engine.index]
        if any(other.prefilling for other in domain.engines):
            super().stalled(engine, now)
