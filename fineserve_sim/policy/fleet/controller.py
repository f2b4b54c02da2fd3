"""The controller of engines that come and go. It owns which engine is on which GPU, and which requests wait for which model.

It extends ``Controller`` by the life of engines (see ``views.py``):

    a request arrives, no engine of its model serves   hold the request; ask for the state of everything (Survey)
    Tick (the answer, and at regular times)            ask the residency policy; activate and evict what the books allow
    EngineReady                                        distribute the held requests of its model
    EngineDrained, EngineFailed                        distribute what waited for the engine; Survey if requests are held

Local schedulers know the engines of their GPU and their capacities (``EnginesResized``). When engines come or go on a
GPU, the controller makes its schedulers anew and gives them what waits. That is rare, and no scheduler needs to know of
residency.

Invariants: a request is held, or bound to one engine, never both. No request is bound to an engine that drains. A model
has one loading engine at most.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter

from fineserve_sim.policy import events
from fineserve_sim.policy.commands import Activate, Command, Evict, Reject, Survey
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.fleet.roster import EngineEntry, FleetModel, Roster, SchedulerMaker
from fineserve_sim.policy.fleet.views import FleetView, Pending, ResidencyPolicy, Start, Status, Stop, next_multiple
from fineserve_sim.policy.interfaces import GpuSlot, Instance, LocalScheduler, Request

RATE_WINDOW_S = 60.0
"""Rates of models are averages over so long (Prism, its later version)."""

_IN_TURN = attrgetter("arrival_s", "id")


class FleetController(Controller):
    """A controller that activates and evicts engines as ``residency`` suggests.

    ``instances`` are resident from the start, as engines 0, 1, ... in their order. Ticks come every ``tick_s``. Rates are
    moving averages that start at the expected rates of ``models``.
    """

    stays = "engines that come and go neither merge nor migrate"

    def __init__(
        self,
        models: Mapping[str, FleetModel],
        gpus: Sequence[GpuSlot],
        instances: Sequence[Instance],
        residency: ResidencyPolicy,
        make_schedulers: SchedulerMaker,
        *,
        tick_s: float = 1.0,
    ) -> None:
        super().__init__({})
        if tick_s <= 0:
            raise ValueError(f"tick_s is {tick_s}: ticks must be apart")
        self.next_tick_s = 0.0
        self._tick_s = tick_s
        self._make_schedulers = make_schedulers
        self._roster = Roster(gpus)
        self._models, self._engines = self._roster.models, self._roster.engines
        self._pressed: set[int] = set()
        for id, model in models.items():
            self.add_model(id, model, residency)
        for instance in instances:
            self._roster.enter(instance.model, instance.gpus, Status.RESIDENT)
        self._handlers |= {
            events.Tick: self._tick,
            events.EngineReady: self._ready,
            events.EnginesResized: self._resize,
            events.EngineDrained: lambda event: self._gone(self._roster.told_of(event.engine, Status.DRAINING)),
            events.EngineFailed: lambda event: self._gone(self._roster.told_of(event.engine), event.lost),
            events.GpusRepaired: self._repaired,
        }
        self._remake_schedulers(self._roster.gpus)

    def add_model(self, id: str, model: FleetModel, residency: ResidencyPolicy) -> None:
        """Add a model without an engine; ``residency`` is a policy that knows it."""
        self._residency = residency
        self._roster.add_model(id, model, RATE_WINDOW_S)
        self._lead(id, ())

    def remove_model(self, id: str, residency: ResidencyPolicy) -> None:
        """Remove a model and all its engines. Raises ValueError while requests of it wait."""
        model = self._models[id]
        if model.held or any(self.bound_to(engine) for engine in model.engines):
            raise ValueError(f"requests wait for model {id}")
        self._residency = residency
        for engine in [*model.engines.values()]:
            self._remove(engine)
        del self._models[id], self._routes[id]

    def held(self, model: str) -> int:
        """The number of requests of the model that wait because no engine serves it."""
        return len(self._models[model].held)

    def scope_of(self, engine: int) -> tuple[int, ...]:
        """The engines that share the scheduler of this resident engine, for ``EngineStepped``. Empty for others."""
        found = self._engines.get(engine)
        return found.scope if found else ()

    def waited_for(self) -> list[int]:
        """The engines that requests in schedulers are bound to."""
        return sorted(engine for engine, requests in self._requests.items() if requests)

    def status(self, engine: int) -> Status | None:
        """The state of an engine; None for one that is gone or never was."""
        found = self._engines.get(engine)
        return found.status if found else None

    def _arrive(self, event: events.RequestArrived | events.RequestReturned) -> list[Command]:
        request = self._expected(event)
        model = self._models[request.model]
        if isinstance(event, events.RequestArrived):  # one that comes back is no new demand
            model.rate.note(self._now)
        if self._routes[request.model].instances:
            return super()._arrive(event)
        if request.prompt_tokens >= model.max_tokens:
            return [Reject(request.id, f"prompt of {request.prompt_tokens} tokens, at most {model.max_tokens - 1}")]
        self._hold(request)
        return [Survey()] if len(model.held) == 1 and not model.is_coming else []

    def _abort(self, event: events.RequestAborted) -> list[Command]:
        for model in self._models.values():
            model.held.pop(event.request_id, None)
        return super()._abort(event)

    def _hold(self, request: Request) -> None:
        model = self._models[request.model]
        if not model.held:
            model.held_since_s = self._now
        model.held[request.id] = request

    def _deliver(self, request: Request, engine: int) -> list[Command]:
        self._engines[engine].busy_s = self._now
        return super()._deliver(request, engine)

    def _schedule(self, event: events.EngineStepped) -> list[Command]:
        """Note the GPUs that are short of memory.

        If no request may start at an engine that has a slot and no prompt to compute, its requests wait for memory.
        """
        commands = super()._schedule(event)
        if not commands:
            for engine, state in event.engines.items():
                if self.bound_to(engine) and state.free_slots and not state.prefill_tokens:
                    self._pressed.update(self._engines[engine].gpus)
        return commands

    def _ready(self, event: events.EngineReady) -> list[Command]:
        ready = self._roster.told_of(event.engine, Status.LOADING)
        if ready is None:
            return []  # evicted or lost while it was loading
        ready.status = Status.RESIDENT
        ready.busy_s = self._now
        self._remake_schedulers(ready.gpus)
        model = self._models[ready.model]
        held, model.held = model.held, {}
        commands = self._distribute(sorted(held.values(), key=_IN_TURN))
        if ready.replaces is not None and self.status(ready.replaces) is Status.RESIDENT:
            commands += self._evict(self._engines[ready.replaces], drain=True)
        return commands

    def _gone(self, engine: EngineEntry | None, lost: Iterable[int] = ()) -> list[Command]:
        """Remove the engine, and all on ``lost`` GPUs. Requests that wait for them, or for their memory, may get others."""
        gone = {} if engine is None else {engine.engine: engine}
        for gpu in lost:
            gone |= self._roster.on_gpu[gpu]
        waiting = [request for id in sorted(gone) for request in self._remove(gone[id])]
        return [*self._distribute(waiting), *self._look_for_waiting()] if gone else []

    def _repaired(self, event: events.GpusRepaired) -> list[Command]:
        if not self._roster.gpus.keys() >= set(event.gpus):
            raise ValueError(f"GPUs {event.gpus} are repaired, but there are {sorted(self._roster.gpus)}")
        return self._look_for_waiting()

    def _look_for_waiting(self) -> list[Command]:
        """Ask for the state of everything, if requests are held for a model that no engine loads for."""
        return [Survey()] if any(model.held and not model.is_coming for model in self._models.values()) else []

    def _evict(self, engine: EngineEntry, *, drain: bool) -> list[Command]:
        """``drain`` leaves the engine on its GPUs until it is told to be empty."""
        return [Evict(engine.engine, drain), *self._distribute(self._remove(engine, drains=drain))]

    def _remove(self, engine: EngineEntry, *, drains: bool = False) -> list[Request]:
        """Route no request to the engine any more; unless it drains, it is gone. Returns its waiting requests, unbound."""
        waiting = sorted(self._requests.pop(engine.engine, {}).values(), key=_IN_TURN)
        for request in waiting:
            del self._bound[request.id]
        if engine.scope:
            self._lead(engine.model, self._routes_beside(engine))
            self._queues.pop(engine.engine, None)
            engine.scope = ()
        if drains:
            engine.status = Status.DRAINING
        else:
            self._roster.remove(engine)
        self._remake_schedulers(engine.gpus)
        return waiting

    def _resize(self, event: events.EnginesResized) -> list[Command]:
        """Tell routes and schedulers what their engines can hold.

        A prompt that its engine cannot hold any more would block it for ever: it goes to another engine, or is rejected.
        """
        resized = [(engine, tokens) for id, tokens in event.kv_tokens.items() if (engine := self._roster.told_of(id))]
        too_long: list[Request] = []
        for engine, tokens in resized:
            self._roster.resize(engine, tokens)
            routes, turns, _ = self._routes[engine.model]
            self._lead(engine.model, routes, turns)
            requests = self._requests.get(engine.engine, {}).values()
            too_long += [request for request in requests if request.prompt_tokens >= engine.route.max_tokens]
        for request in too_long:
            self._unbind(request.id)
        self._remake_schedulers({gpu for engine, _ in resized for gpu in engine.gpus})
        return self._distribute(sorted(too_long, key=_IN_TURN))

    def _distribute(self, requests: Iterable[Request]) -> list[Command]:
        """Lead requests to the engines of their model, or hold them while it has none."""
        commands: list[Command] = []
        for request in requests:
            if self._routes[request.model].instances:
                commands += super()._arrive(events.RequestReturned(request))
            else:
                self._hold(request)
        return commands

    def _remake_schedulers(self, gpus: Iterable[int]) -> None:
        """Engines on these GPUs came, went or were resized: new schedulers for all their queues, with what waits there."""
        for queue in self._roster.queues_of(gpus):
            for scope, scheduler in self._make_schedulers(queue).items():
                self._open(scope, scheduler)

    def _open(self, scope: Sequence[int], scheduler: LocalScheduler | None) -> None:
        super()._open(scope, scheduler)
        for engine in [self._engines[id] for id in scope]:
            engine.scope = tuple(scope)
            self._lead(engine.model, [*self._routes_beside(engine), engine.route])
        waiting = [request for id in scope for request in self._requests.get(id, {}).values()]
        for request in sorted(waiting, key=_IN_TURN):
            self._deliver(request, self._bound[request.id])

    def _routes_beside(self, engine: EngineEntry) -> list[Route]:
        return [route for route in self._routes[engine.model].instances if route is not engine.route]

    def _tick(self, event: events.Tick) -> list[Command]:
        if self._now >= self.next_tick_s:
            self.next_tick_s = next_multiple(self._tick_s, self._now)
        view = self._view(event)
        self._pressed.clear()
        free_bytes = dict(event.free_bytes)
        commands: list[Command] = []
        for suggestion in self._residency.suggest(self._now, view):
            if isinstance(suggestion, Stop):
                commands += self._stop(suggestion, event.running, free_bytes)
            else:
                commands += self._start(suggestion, free_bytes)
        return commands

    def _view(self, event: events.Tick) -> FleetView:
        now = self._now
        for id, engine in self._engines.items():
            engine.requests = event.running.get(id, 0) + self.bound_to(id)
            if engine.requests:
                engine.busy_s = now
            engine.idle_s = now - engine.busy_s
        pending = [
            Pending(id, len(model.held), model.held_since_s, min(request.arrival_s for request in model.held.values()))
            for id, model in self._models.items()
            if model.held and not model.is_coming
        ]
        first = {pending.model: min(self._models[pending.model].held) for pending in pending}
        return FleetView(
            tuple(self._engines.values()),
            tuple(sorted(pending, key=lambda pending: (pending.since_s, first[pending.model]))),
            {id: model.rate.per_s(now) for id, model in self._models.items()},
            event.free_bytes,
            frozenset(self._pressed),
        )

    def _stop(self, stop: Stop, running: Mapping[int, int], free_bytes: dict[int, int]) -> list[Command]:
        engine = self._engines.get(stop.engine)
        if engine is None or engine.status is Status.DRAINING:
            return []
        serves = stop.engine in running
        if serves and stop.drain:
            return self._evict(engine, drain=True)
        for gpu in engine.gpus:
            free_bytes[gpu] += self._models[engine.model].demand.weight_bytes
        # The KV of what ran is free as well, but how much that is, only a new look tells.
        return [*self._evict(engine, drain=False), *([Survey()] if serves else [])]

    def _start(self, start: Start, free_bytes: dict[int, int]) -> list[Command]:
        """Activate an engine if the books allow it."""
        model, gpus = self._models[start.model], start.gpus
        demand, nodes = model.demand, {self._roster.gpus[gpu].node for gpu in gpus}
        loading = any(engine.status is Status.LOADING for engine in model.engines.values())
        if loading or len(set(gpus)) != len(gpus) or len(gpus) != demand.tp or len(nodes) != 1:
            return []
        if any(free_bytes.get(gpu, 0) < demand.weight_bytes for gpu in gpus):
            return []
        for gpu in gpus:
            free_bytes[gpu] -= demand.weight_bytes
        engine = self._roster.enter(start.model, gpus, Status.LOADING)
        engine.replaces, engine.busy_s = start.replaces, self._now
        return [Activate(engine.engine, start.model, gpus)]
