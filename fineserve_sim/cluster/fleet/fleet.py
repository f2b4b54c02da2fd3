"""Models that come and go: carries out the controller's ``Activate`` and ``Evict`` and tells it the time.

An engine is built when its weights are loaded, and joins its GPUs: their memory, their contention, the scopes of their
schedulers. When that changes, the domains and scopes that it touches are formed anew, and their spans in flight end after the
iteration: no part of an engine needs to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from simpy.events import Event as ClockEvent

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.engine.spans import SpanEngine
from fineserve_sim.cluster.fleet.base import Fleet
from fineserve_sim.cluster.fleet.loader import Loader
from fineserve_sim.cluster.fleet.memory import FleetMemory
from fineserve_sim.cluster.host import Cluster, Scope
from fineserve_sim.cluster.sharing.domain import domains_of
from fineserve_sim.latency.sharing import IDLE
from fineserve_sim.policy.commands import Activate, Evict, Survey
from fineserve_sim.policy.events import EngineDrained, EngineFailed, EngineReady, EnginesResized, GpusRepaired, Tick
from fineserve_sim.policy.fleet.controller import FleetController
from fineserve_sim.policy.memory.kvcached import VirtualKV

TICK = order_of(Kind.TIMER, 1)
LOADED = order_of(Kind.TIMER, 2)
FAILED = order_of(Kind.TIMER, 3)


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """What an engine of a model takes of each of its GPUs: weights to load, all bytes beside KV, its KV block (bytes, or the
    tensors of virtual memory). ``context_tokens`` bounds a sequence."""

    weight_bytes: int
    fixed_bytes: int
    block: VirtualKV | int
    context_tokens: int


@dataclass(slots=True)
class _Resident:
    """An engine on its GPUs, loading or loaded: of which model, and whether it goes once it is empty."""

    model: str
    gpus: tuple[int, ...]
    drains: bool = False


class ModelFleet(Fleet):
    """``bytes_of`` by model; ``build`` makes the engine of a model on GPUs, whose memory knows it already, and brings it
    to their contention."""

    lends = True

    def __init__(
        self,
        cluster: Cluster,
        controller: FleetController,
        memory: FleetMemory,
        loader: Loader,
        bytes_of: Mapping[str, EngineBytes],
        build: Callable[[int, str, tuple[int, ...]], SpanEngine],
    ) -> None:
        self._cluster = cluster
        self._controller = controller
        self._memory = memory
        self._loader = loader
        self._bytes_of = bytes_of
        self._build = build
        self._residents: dict[int, _Resident] = {}
        self._serving: dict[str, dict[int, Engine]] = {model: {} for model in bytes_of}
        self._touched: set[int] = set()  # GPUs whose engines or memory changed
        self._loaded: ClockEvent | None = None
        self._told: set[int] = set()  # engines whose limit the controller knows
        self._lost: set[int] = set()  # GPUs
        cluster.fleet = self
        cluster.actions |= {Survey: self._survey, Activate: self._activate, Evict: self._evict}

    def begin(self, placed: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """These models are resident from the start, as engines 0, 1, ...; the first tick is set."""
        for engine, (model, gpus) in enumerate(placed):
            self._residents[engine] = _Resident(model, gpus)
            self._build_on(engine)
        self.reform(0.0)
        self._cluster.clock.at(self._controller.next_tick_s, TICK, self._on_tick)

    # --- what others see -------------------------------------------------------------------------------------------

    def engines_of(self, model: str) -> list[Engine]:
        """Those of this model that are loaded."""
        return list(self._serving[model].values())

    def queued_for(self, model: str) -> int:
        """Requests that wait in schedulers for this model's engines, or for an engine to come."""
        bound = sum(self._controller.bound_to(engine.index) for engine in self.engines_of(model))
        return self._controller.held(model) + bound

    def check(self) -> None:
        self._memory.check()
        for id, engine in self._cluster.engines.items():
            held_bytes = self._memory.held_bytes(id, self._residents[id].gpus[0])
            assert id in self._cluster.active or not (engine.requests or held_bytes), f"engine {id} serves unseen"

    # --- events ----------------------------------------------------------------------------------------------------

    def rested(self, engine: Engine, now: float) -> None:
        """An engine that was to go when it is empty goes."""
        if self._residents[engine.index].drains and not engine.has_work:
            self._leave(engine, now)
            self._cluster.hear(now, EngineDrained(engine.index))

    def _on_tick(self, _: ClockEvent) -> None:
        cluster = self._cluster
        now: float = cluster.clock.now
        cluster.order = TICK
        self._look(now)
        cluster.clock.at(self._controller.next_tick_s, TICK, self._on_tick)

    def _on_loaded(self, event: ClockEvent) -> None:
        if event is not self._loaded:
            return  # what loads has changed since
        cluster = self._cluster
        now: float = cluster.clock.now
        cluster.order = LOADED
        for engine in self._loader.advance(now):
            resident = self._residents[engine]
            self._memory.join(engine, resident.gpus, self._bytes_of[resident.model].block, now)
            self._build_on(engine)
            self.reform(now)
            self._change(resident.gpus)  # its queue may get those who waited for it, and no command says so
            cluster.hear(now, EngineReady(engine))
        self._await_loading()

    def _await_loading(self) -> None:
        at_s = self._loader.next_change_s()
        self._loaded = self._cluster.clock.at(at_s, LOADED, self._on_loaded) if at_s < float("inf") else None

    def _look(self, now: float) -> None:
        """Tell the controller how everything stands: what only engines that serve change, and what each GPU leaves."""
        cluster = self._cluster
        serving = {id: cluster.engines[id] for id in sorted(cluster.active)}
        for engine in serving.values():
            cluster.settle_now(engine, now)
        running = {id: requests for id, engine in serving.items() if (requests := engine.requests)}
        free_bytes = self._memory.free_bytes({id: self._residents[id].gpus for id in serving})
        for gpu in self._lost:
            del free_bytes[gpu]
        commands = cluster.tell(now, Tick(running, free_bytes))
        for id in self._controller.waited_for():  # a look clears what schedulers noted about memory: ask them again
            cluster.ask_again(cluster.engines[id], now)
        cluster.carry_out(commands, now)

    # --- commands --------------------------------------------------------------------------------------------------

    def _survey(self, command: Survey, now: float) -> None:
        self._look(now)

    def _activate(self, command: Activate, now: float) -> None:
        cluster, bytes = self._cluster, self._bytes_of[command.model]
        self._residents[command.engine] = _Resident(command.model, command.gpus)
        for engine in self._connected(command.gpus):  # memory that spans counted on may be gone
            cluster.settle_now(cluster.engines[engine], now)
        self._memory.take(command.gpus, bytes.fixed_bytes, now)
        self._loader.begin(now, command.engine, command.gpus, bytes.weight_bytes)
        self._await_loading()
        self._change(command.gpus)

    def _evict(self, command: Evict, now: float) -> None:
        cluster, gpus = self._cluster, self._residents[command.engine].gpus
        engine = cluster.engines.get(command.engine)
        if engine is not None and command.drain and engine.has_work:
            self._residents[command.engine].drains = True
        else:
            lost = self._take_away(command.engine, now)
            if engine is None:
                self._await_loading()
            else:
                cluster.returned(engine, lost, now)
                if command.drain:
                    cluster.hear(now, EngineDrained(command.engine))
        self._change(gpus)

    # --- GPUs that are lost and come back ---------------------------------------------------------------------------

    def fail(self, gpu: int) -> None:
        cluster = self._cluster
        now: float = cluster.clock.now
        cluster.settle_all(now, FAILED)
        self._lost.add(gpu)
        hit = [id for id, resident in self._residents.items() if gpu in resident.gpus]
        lost: list[tuple[Engine, list[SequenceState]]] = []
        for id in hit:
            engine = cluster.engines.get(id)
            sequences = self._take_away(id, now)
            if engine is not None:
                lost.append((engine, sequences))
        self._await_loading()
        for id in hit:  # the first takes all others with it
            cluster.hear(now, EngineFailed(id, (gpu,)))
        for engine, sequences in lost:
            cluster.returned(engine, sequences, now)
        self.reform(now)

    def repair(self, gpu: int) -> None:
        cluster = self._cluster
        now: float = cluster.clock.now
        cluster.settle_all(now, FAILED)
        self._lost.remove(gpu)
        cluster.hear(now, GpusRepaired((gpu,)))

    # --- the fleet -------------------------------------------------------------------------------------------------

    def _build_on(self, engine: int) -> None:
        """An engine whose memory knows it."""
        resident, cluster = self._residents[engine], self._cluster
        cluster.engines[engine] = self._serving[resident.model][engine] = self._build(
            engine, resident.model, resident.gpus
        )
        self._change(resident.gpus)

    def _take_away(self, id: int, now: float) -> list[SequenceState]:
        """An engine goes, loading or loaded. Returns its requests, which have lost their KV."""
        engine = self._cluster.engines.get(id)
        if engine is None:
            self._loader.cancel(now, id)
            self._give_up(id, now)
            return []
        self._cluster.settle_now(engine, now)
        lost = engine.abandon()
        self._leave(engine, now)
        return lost

    def _leave(self, engine: Engine, now: float) -> None:
        """An empty engine leaves its GPUs."""
        cluster = self._cluster
        cluster.settle(engine, now, cluster.order)
        cluster.set_demand(engine, now, IDLE)
        cluster.contention.leave(engine.index)
        if not engine.gone:
            engine.leave()
        cluster.disconnect(engine)
        del self._serving[engine.model][engine.index]
        self._memory.leave(engine.index, self._residents[engine.index].gpus, now)
        self._give_up(engine.index, now)

    def _give_up(self, engine: int, now: float) -> None:
        resident = self._residents.pop(engine)
        self._memory.give(resident.gpus, self._bytes_of[resident.model].fixed_bytes, now)
        self._change(resident.gpus)

    def _change(self, gpus: Iterable[int]) -> None:
        """What is on these GPUs is to be formed anew."""
        self._touched.update(gpus)
        self._cluster.changed = True

    def reform(self, now: float) -> None:
        """Form domains and scopes anew where engines came or went; those engines plan again after their iteration in flight,
        idle ones at once."""
        cluster = self._cluster
        ids = sorted(self._connected(self._touched))
        self._touched.clear()
        engines = [cluster.engines[id] for id in ids]
        for engine in engines:
            cluster.settle_now(engine, now)
        gpus_of = [self._residents[id].gpus for id in ids]
        spans = [engine for engine in engines if isinstance(engine, SpanEngine)]
        scopes = {scope: Scope(scope) for scope in map(self._scope, engines)}
        cluster.connect(engines, domains_of(spans, gpus_of, self._memory.managers), list(scopes.values()))
        cluster.changed = False
        self._tell_limits(engines, now)
        for engine in engines:
            if engine.busy:
                engine.cut()
            elif engine.has_work or self._controller.waiting(engine.index):
                engine.start(now)

    def _connected(self, gpus: Iterable[int]) -> set[int]:
        """The loaded engines on these GPUs, and all that are near them: on a GPU of one of them, and so on."""
        found: set[int] = set()
        seen, left = set[int](), list(gpus)
        while left:
            gpu = left.pop()
            if gpu not in seen:
                seen.add(gpu)
                here = self._cluster.contention.demands[gpu].keys()
                left += [other for engine in here - found for other in self._residents[engine].gpus]
                found |= here
        return found

    def _tell_limits(self, engines: Sequence[Engine], now: float) -> None:
        """What the longest sequence of each engine is, as its GPUs are now."""
        limits = {}
        for engine in engines:
            longest = min(self._bytes_of[engine.model].context_tokens, engine.kv.capacity_tokens())
            if engine.max_tokens != longest or engine.index not in self._told:
                engine.max_tokens = longest
                limits[engine.index] = longest
        if limits:
            self._told |= limits.keys()
            self._cluster.hear(now, EnginesResized(limits))

    def _scope(self, engine: Engine) -> tuple[int, ...]:
        return self._controller.scope_of(engine.index) or (engine.index,)
