"""The controller of engines that come and go: it owns who is on which GPU, and what waits for whom.

It extends ``Controller`` by the life of engines (see ``residency.py``). Requests of a model without a resident engine are
held, and the first of them makes the controller ask for the state of everything (``Survey``); the answer (``Tick``) goes
to the residency policy, whose suggestions it checks against its own books. Ticks also come at regular times.

Local schedulers serve engines that share a GPU queue (Prism) or one engine each, and know capacities that change when
engines come and go. So when that happens on a GPU, its schedulers are made anew and given what waits: rare, and no
scheduler needs to know of residency.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fineserve_sim.policy import events
from fineserve_sim.policy.commands import Activate, Command, Evict, Reject, Survey
from fineserve_sim.policy.controller import Controller, QueueLength, Route
from fineserve_sim.policy.fleet.facts import EngineBinding, FleetModel, SchedulerMaker
from fineserve_sim.policy.fleet.rates import MovingRate
from fineserve_sim.policy.fleet.roster import Roster, RosterEntry
from fineserve_sim.policy.fleet.views import EngineView, FleetView, Pending, ResidencyPolicy, Start, Status, Stop
from fineserve_sim.policy.interfaces import EngineState, GpuSlot, Instance, LocalScheduler, Request


class FleetController(Controller):
    """A controller that activates and evicts engines as ``residency`` suggests.

    ``instances`` are resident from the start, as engines 0, 1, ... in their order; GPUs are ``gpus``. Ticks come every
    ``tick_s``; rates are averages over ``rate_window_s``, which start at the expected rates of ``models``.
    """

    def __init__(
        self,
        models: Mapping[str, FleetModel],
        gpus: Sequence[GpuSlot],
        instances: Sequence[Instance],
        residency: ResidencyPolicy,
        make_schedulers: SchedulerMaker,
        *,
        tick_s: float = 1.0,
        rate_window_s: float = 60.0,
    ) -> None:
        super().__init__({})
        if tick_s <= 0:
            raise ValueError(f"tick_s is {tick_s}: ticks must be apart")
        self.next_tick_s = 0.0
        self._ticks = 0  # counted: multiples of a fraction do not add up
        self._tick_s = tick_s
        self._models: dict[str, FleetModel] = {}
        self._gpus = {gpu.id: gpu for gpu in gpus}
        self._rate_window_s = rate_window_s
        self._make_schedulers = make_schedulers
        self._rates: dict[str, MovingRate] = {}
        self._largest_bytes = max(gpu.memory_bytes for gpu in gpus)
        self._roster = Roster(self._gpus)
        self._held: dict[str, dict[int, Request]] = {}
        for id, model in models.items():
            self.add_model(id, model, residency)
        for instance in instances:
            self._roster.enter(RosterEntry(instance.model, instance.gpus, Status.RESIDENT))
        self._scopes: dict[int, tuple[int, ...]] = {}
        self._held_since_s: dict[str, float] = {}
        self._pressed: set[int] = set()
        self._longest: dict[int, int] = {}  # tokens, by engine that was told of
        self._handlers |= {
            events.Tick: self._tick,
            events.EngineReady: lambda event: self._ready(event.engine),
            events.EnginesResized: lambda event: self._resize(event.max_tokens),
            events.EngineDrained: lambda event: self._gone(event.engine),
            events.EngineFailed: lambda event: self._gone(event.engine, event.lost),
            events.GpusRepaired: lambda event: self._look_for_waiting(),
        }
        self._remake_schedulers(self._gpus)

    # --- models that come and go -----------------------------------------------------------------------------------

    def add_model(self, id: str, model: FleetModel, residency: ResidencyPolicy) -> None:
        """From now on there is one more model, without an engine; ``residency`` is a policy that knows it."""
        self._residency = residency
        self._models[id] = model
        self._rates[id] = MovingRate(self._rate_window_s, model.demand.rate_per_s)
        self._roster.of_model[id] = set()
        self._held[id] = {}
        self._lead(id, ())

    def remove_model(self, id: str, residency: ResidencyPolicy) -> None:
        """The model is no more, nor are its engines, wherever they were. Raises ValueError while requests of it wait."""
        if self._held[id] or any(self._requests.get(engine) for engine in self._roster.of_model[id]):
            raise ValueError(f"requests wait for model {id}")
        self._residency = residency
        for engine in sorted(self._roster.of_model[id]):
            self._remove(engine)
        for table in (self._models, self._rates, self._roster.of_model, self._held, self._held_since_s):
            table.pop(id, None)
        for book in (self._routes, self._turns, self._shortest):
            book.pop(id)

    # --- what others see -------------------------------------------------------------------------------------------

    def held(self, model: str) -> int:
        """How many requests of the model wait because no engine serves it."""
        return len(self._held[model])

    def scope_of(self, engine: int) -> tuple[int, ...]:
        """The engines that the scheduler of a resident engine serves, for ``EngineStepped``. Empty for others."""
        return self._scopes.get(engine, ())

    def waited_for(self) -> list[int]:
        """The engines that requests in schedulers are bound to."""
        return sorted(engine for engine, requests in self._requests.items() if requests)

    def status(self, engine: int) -> Status | None:
        """None for an engine that is not there (any more)."""
        found = self._roster.engines.get(engine)
        return found.status if found else None

    # --- requests --------------------------------------------------------------------------------------------------

    def _arrive(self, event: events.RequestArrived | events.RequestReturned) -> list[Command]:
        request = event.request
        if isinstance(event, events.RequestArrived):  # one that comes back is no new demand
            self._rates[request.model].note(self._now)
        if self._routes[request.model]:
            return super()._arrive(event)
        limit = self._max_tokens(request.model)
        if request.prompt_tokens >= limit:
            return [Reject(request.id, f"prompt of {request.prompt_tokens} tokens, at most {limit - 1}")]
        self._hold(request)
        is_news = self.held(request.model) == 1 and not self._coming(request.model)
        return [Survey()] if is_news else []

    def _abort(self, event: events.RequestAborted) -> list[Command]:
        for held in self._held.values():
            held.pop(event.request_id, None)
        return super()._abort(event)

    def _hold(self, request: Request) -> None:
        held = self._held[request.model]
        if not held:
            self._held_since_s[request.model] = self._now
        held[request.id] = request

    def _deliver(self, request: Request, route: Route) -> list[Command]:
        self._roster.engines[route.engine].busy_s = self._now
        return super()._deliver(request, route)

    def _schedule(self, event: events.EngineStepped) -> list[Command]:
        commands = super()._schedule(event)
        if not commands:
            self._note_pressure(event.engines)
        return commands

    def _note_pressure(self, engines: Mapping[int, EngineState]) -> None:
        """Nobody may start: if that engine has a slot and no prompt to compute, its requests wait for memory."""
        for engine, state in engines.items():
            if self._requests.get(engine) and state.free_slots and not state.prefill_tokens:
                self._pressed.update(self._roster.engines[engine].gpus)

    # --- the life of engines ---------------------------------------------------------------------------------------

    def _ready(self, engine: int) -> list[Command]:
        ready = self._roster.engines.get(engine)
        if ready is None or ready.status is not Status.LOADING:
            return []  # evicted or lost while it was loading
        ready.status = Status.RESIDENT
        ready.busy_s = self._now
        self._remake_schedulers(ready.gpus)
        commands = self._distribute(ready.model, self._take_held(ready.model))
        if ready.replaces is not None and self.status(ready.replaces) is Status.RESIDENT:
            commands += self._evict(ready.replaces, drain=True)
        return commands

    def _gone(self, engine: int, lost: Iterable[int] = ()) -> list[Command]:
        """It is not there any more, nor is any on the GPUs that are lost: who waits for them or for their memory may get
        others."""
        ids = {engine}.union(*(self._roster.on_gpu[gpu] for gpu in lost)) & self._roster.engines.keys()
        models = [self._roster.engines[id].model for id in sorted(ids)]
        waiting = [self._remove(id) for id in sorted(ids)]
        commands = [c for model, those in zip(models, waiting, strict=True) for c in self._distribute(model, those)]
        return [*commands, *self._look_for_waiting()] if ids else []

    def _look_for_waiting(self) -> list[Command]:
        """Ask for the state of everything, if requests wait for an engine that nobody has asked for."""
        return [Survey()] if any(held and not self._coming(model) for model, held in self._held.items()) else []

    def _remove(self, engine: int) -> list[Request]:
        """The requests that waited for it, which are now bound to none."""
        gone = self._roster.engines[engine]
        waiting = self._close(engine)
        self._roster.remove(engine)
        self._requests.pop(engine, None)
        self._longest.pop(engine, None)
        self._remake_schedulers(gone.gpus)
        return waiting

    def _evict(self, engine: int, *, drain: bool) -> list[Command]:
        """``drain`` leaves the engine on its GPUs until it is told to be empty."""
        leaving = self._roster.engines[engine]
        if not drain:
            return [Evict(engine, drain), *self._distribute(leaving.model, self._remove(engine))]
        leaving.status = Status.DRAINING
        waiting = self._close(engine)
        self._remake_schedulers(leaving.gpus)
        return [Evict(engine, drain), *self._distribute(leaving.model, waiting)]

    def _resize(self, max_tokens: Mapping[int, int]) -> list[Command]:
        """Routes know what their engines can hold."""
        self._longest |= max_tokens
        for model in {self._roster.engines[engine].model for engine in max_tokens if engine in self._roster.engines}:
            routes = self._routes[model]
            limits = [self._longest.get(route.engine, route.max_tokens) for route in routes]
            turns = self._turns[model]
            self._lead(model, [replace(r, max_tokens=limit) for r, limit in zip(routes, limits, strict=True)])
            self._turns[model] = turns
        return []

    def _close(self, engine: int) -> list[Request]:
        """Lead nobody to the engine any more. The requests that waited for it, which are now bound to none."""
        if engine not in self._scopes:
            return []
        waiting = self._release([engine])
        model = self._roster.engines[engine].model
        self._lead(model, [route for route in self._routes[model] if route.engine != engine])
        for table in (self._scopes, self._schedulers, self._queues):
            table.pop(engine, None)
        return waiting

    def _release(self, engines: Iterable[int]) -> list[Request]:
        """Unbind what waits for these engines, in the order of arrival. Their schedulers are to be made anew, or not needed."""
        waiting = [request for engine in engines for request in self._requests.get(engine, {}).values()]
        for request in waiting:
            self._unbind(request.id)
        return sorted(waiting, key=_arrival)

    def _distribute(self, model: str, requests: Iterable[Request]) -> list[Command]:
        """Lead requests to the engines of their model, or hold them while it has none."""
        commands: list[Command] = []
        for request in requests:
            if self._routes[model]:
                commands += super()._arrive(events.RequestReturned(request))
            else:
                self._hold(request)
        return commands

    def _take_held(self, model: str) -> list[Request]:
        held, self._held[model] = self._held[model], {}
        return sorted(held.values(), key=_arrival)

    # --- schedulers ------------------------------------------------------------------------------------------------

    def _remake_schedulers(self, gpus: Iterable[int]) -> None:
        """Engines on these GPUs came or went: new schedulers for all queues that they touch, with what waits in them."""
        for queue in self._roster.queues_of(gpus):
            members = self._roster.members_of(queue)
            homes = {id: engine for engine in members for id in self._requests.get(engine, ())}
            waiting = self._release(members)
            made = self._make_schedulers([self._binding(id) for id in members])
            for scope, scheduler in made.items():
                self._open(scope, scheduler)
            for request in waiting:
                self._deliver(request, self._route_of(request.model, homes[request.id]))

    def _open(self, scope: tuple[int, ...], scheduler: LocalScheduler | None) -> None:
        queue = QueueLength()
        for id in scope:
            engine = self._roster.engines[id]
            model = self._models[engine.model]
            longest = self._longest.get(id, self._max_tokens(engine.model))  # 0: its GPUs leave it no page
            route = Route(id, model.demand.rate_per_s, longest, scheduler)
            self._lead(engine.model, [*(o for o in self._routes[engine.model] if o.engine != id), route])
            self._scopes[id] = scope
            if scheduler is not None:
                self._schedulers[id] = scheduler
                self._queues[id] = queue

    def _route_of(self, model: str, engine: int) -> Route:
        return next(route for route in self._routes[model] if route.engine == engine)

    def _binding(self, engine: int) -> EngineBinding:
        here = self._roster.engines[engine]
        kv_bytes = min(self._gpus[gpu].memory_bytes - self._taken_bytes(gpu) for gpu in here.gpus)
        kv_tokens = max(1, kv_bytes // self._models[here.model].demand.token_bytes)
        return EngineBinding(engine, here.model, here.gpus, kv_tokens)

    def _taken_bytes(self, gpu: int) -> int:
        """What engines take there beside KV."""
        here = [self._roster.engines[id].model for id in self._roster.on_gpu[gpu]]
        return sum(self._models[model].demand.weight_bytes for model in here)

    def _max_tokens(self, model: str) -> int:
        """The longest sequence of the model, alone on the largest GPU."""
        facts = self._models[model]
        alone_bytes = self._largest_bytes - facts.demand.weight_bytes
        return min(facts.max_tokens, alone_bytes // facts.demand.token_bytes)

    # --- residency -------------------------------------------------------------------------------------------------

    def _tick(self, event: events.Tick) -> list[Command]:
        if self._now >= self.next_tick_s:
            self._ticks = max(self._ticks + 1, int(self._now / self._tick_s))
            self._ticks += self._ticks * self._tick_s <= self._now
            self.next_tick_s = self._ticks * self._tick_s
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
        now, running, waiting = self._now, event.running, self._requests
        engines = []
        for id, engine in self._roster.engines.items():
            requests = running.get(id, 0) + len(waiting.get(id, ()))
            if requests:
                engine.busy_s = now
            engines.append(EngineView(id, engine.model, engine.gpus, engine.status, now - engine.busy_s, requests))
        pending = [
            Pending(model, len(held), self._held_since_s[model], min(request.arrival_s for request in held.values()))
            for model, held in self._held.items()
            if held and not self._coming(model)
        ]
        return FleetView(
            tuple(engines),
            tuple(sorted(pending, key=lambda pending: (pending.since_s, pending.model))),
            {model: rate.per_s(now) for model, rate in self._rates.items()},
            event.free_bytes,
            frozenset(self._pressed),
        )

    def _coming(self, model: str) -> bool:
        """An engine of the model serves, or will."""
        return self._roster.any_of(model, Status.LOADING, Status.RESIDENT)

    def _stop(self, stop: Stop, running: Mapping[int, int], free_bytes: dict[int, int]) -> list[Command]:
        engine = self._roster.engines.get(stop.engine)
        if engine is None or engine.status is Status.DRAINING:
            return []
        serves = stop.engine in running
        if serves and stop.drain:
            return self._evict(stop.engine, drain=True)
        for gpu in engine.gpus:
            free_bytes[gpu] += self._models[engine.model].demand.weight_bytes
        # The KV of what ran is free as well, but how much that is, only a new look tells.
        return [*self._evict(stop.engine, drain=False), *([Survey()] if serves else [])]

    def _start(self, start: Start, free_bytes: dict[int, int]) -> list[Command]:
        """Activate an engine if the books allow it."""
        demand = self._models[start.model].demand
        loading = self._roster.any_of(start.model, Status.LOADING)
        nodes = {self._gpus[gpu].node for gpu in start.gpus}
        if loading or len(set(start.gpus)) != len(start.gpus) or len(start.gpus) != demand.tp or len(nodes) != 1:
            return []
        if any(free_bytes.get(gpu, 0) < demand.weight_bytes for gpu in start.gpus):
            return []
        engine = self._roster.enter(RosterEntry(start.model, start.gpus, Status.LOADING, start.replaces, self._now))
        for gpu in start.gpus:
            free_bytes[gpu] -= demand.weight_bytes
        self._remake_schedulers(start.gpus)
        return [Activate(engine, start.model, start.gpus)]


def _arrival(request: Request) -> tuple[float, int]:
    return request.arrival_s, request.id
