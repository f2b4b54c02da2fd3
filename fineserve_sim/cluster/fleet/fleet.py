"""Models that come and go: carries out the controller's ``Activate`` and ``Evict`` and tells it the time.

An engine that is evicted may fall asleep on its GPUs: ``sleepers`` says which, and for how long. One that is still loading is
gone, as are models without an engine at the start.

An engine is built when its weights are loaded, and joins its GPUs: their memory, their contention, the scopes of their
schedulers. When that changes, the domains and scopes that it touches are formed anew. Their spans in flight end after the
iteration, so no part of an engine needs to know of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.fleet.loader import ActivationCost, Loader
from fineserve_sim.cluster.fleet.memory import EngineBytes, FleetMemory
from fineserve_sim.cluster.host import Cluster, Fleet, Scope
from fineserve_sim.cluster.scenario import Left
from fineserve_sim.cluster.sharing.domain import domains_of
from fineserve_sim.latency.sharing import IDLE
from fineserve_sim.policy.commands import Activate, Evict, Survey
from fineserve_sim.policy.events import EngineDrained, EngineFailed, EngineReady, EnginesResized, GpusRepaired, Tick
from fineserve_sim.policy.fleet.controller import FleetController
from fineserve_sim.policy.fleet.sleepers import Sleeper, Sleepers, Tier

TICK = order_of(Kind.TIMER, 1)
LOADED = order_of(Kind.TIMER, 2)


@dataclass(slots=True)
class _Resident:
    """An engine on its GPUs, loading or loaded: of which model, whether it goes once it is empty, and the ``kv_tokens`` that
    the controller was told."""

    model: str
    gpus: tuple[int, ...]
    drains: bool = False
    kv_tokens: int = -1


class ModelFleet(Fleet):
    """``costs`` of an activation, by where the weights are; ``activations`` counts them. ``bytes_of`` by model. ``build`` makes
    the engine of a model on GPUs, whose memory knows it already, and brings it to their contention."""

    def __init__(
        self,
        cluster: Cluster,
        controller: FleetController,
        memory: FleetMemory,
        loader: Loader,
        sleepers: Sleepers,
        costs: Mapping[Tier, ActivationCost],
        bytes_of: Mapping[str, EngineBytes],
        build: Callable[[int, str, tuple[int, ...]], Engine],
    ) -> None:
        self._cluster, self._controller = cluster, controller
        self._memory, self._loader = memory, loader
        self._sleepers, self._costs = sleepers, costs
        self._bytes_of, self._build = bytes_of, build
        self.activations: Counter[Tier] = Counter()
        self._residents: dict[int, _Resident] = {}
        self._serving: dict[str, dict[int, Engine]] = {model: {} for model in bytes_of}
        self._awaited_s = float("inf")  # when what loads changes next
        self._lost: set[int] = set()  # GPUs
        cluster.fleet = self
        cluster.stopped = self._shed
        cluster.actions[Survey] = lambda _, now: self._look(now)
        cluster.actions |= {Activate: self._activate, Evict: self._evict}

    def begin(self, placed: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """These models are resident from the start, as engines 0, 1, ...; the first tick is set."""
        for engine, (model, gpus) in enumerate(placed):
            self._residents[engine] = _Resident(model, gpus)
            self._build_on(engine)
        self.reform(0.0)
        self._cluster.tick(TICK, self._look)

    def engines_of(self, model: str) -> list[Engine]:
        """The loaded engines of this model."""
        return list(self._serving[model].values())

    def queued_for(self, model: str) -> int:
        """Requests that wait in schedulers for this model's engines, or for an engine to come."""
        return self._controller.held(model) + sum(map(self._controller.bound_to, self._serving[model]))

    def check(self) -> None:
        self._memory.check()
        self._sleepers.check()
        for id, engine in self._cluster.engines.items():
            held_bytes = self._memory.held_bytes(id, self._residents[id].gpus[0])
            assert id in self._cluster.active or not (engine.requests or held_bytes), f"engine {id} serves unseen"

    def rested(self, engine: Engine, now: float) -> None:
        """The engine is empty: take it away if it drains."""
        resident = self._residents[engine.index]
        if resident.drains:
            self._take_away(engine.index, now)
            self._fall_asleep(engine.index, resident, now)
            self._cluster.hear(now, EngineDrained(engine.index))

    def _look(self, now: float) -> None:
        """Tell the controller the state of everything: the requests of the serving engines, and the free bytes of each GPU."""
        cluster = self._cluster
        serving = {id: cluster.engines[id] for id in sorted(cluster.active)}
        for engine in serving.values():
            cluster.settle_now(engine, now)
        running = {id: requests for id, engine in serving.items() if (requests := engine.requests)}
        free_bytes = self._free_bytes()
        for gpu in self._lost:
            del free_bytes[gpu]
        commands = cluster.tell(now, Tick(running, free_bytes))
        for id in self._controller.waited_for():  # a look clears what schedulers noted about memory: ask them again
            cluster.ask_again(cluster.engines[id], now)
        cluster.carry_out(commands, now)

    def _free_bytes(self) -> dict[int, int]:
        """By GPU, the bytes that another engine could take now, with the bytes of sleepers, which would end. Exact where
        serving engines are settled."""
        serving = {id: self._residents[id].gpus for id in sorted(self._cluster.active)}
        free_bytes = self._memory.free_bytes(serving)
        return {gpu: bytes + self._sleepers.process_bytes(gpu) for gpu, bytes in free_bytes.items()}

    def _await_loading(self) -> None:
        self._awaited_s = self._loader.next_change_s()
        if self._awaited_s < float("inf"):
            self._cluster.at(self._awaited_s, LOADED, self._on_loaded)

    def _on_loaded(self, now: float) -> None:
        if now != self._awaited_s:
            return  # what loads has changed since
        for engine in self._loader.advance(now):
            resident = self._residents[engine]
            self._memory.join(engine, resident.gpus, self._bytes_of[resident.model].block, now)
            self._build_on(engine)
            self.reform(now)
            # Its queue may get those who waited for it, and no command says so.
            self._cluster.unformed.update(resident.gpus)
            self._cluster.hear(now, EngineReady(engine))
        self._await_loading()

    def _activate(self, command: Activate, now: float) -> None:
        bytes = self._bytes_of[command.model]
        self._residents[command.engine] = _Resident(command.model, command.gpus)
        self._settle(command.gpus, now)  # memory that spans counted on may be gone
        cost = self._costs[self._wake(command, now)]
        self._memory.claim(command.engine, command.gpus, bytes.fixed_bytes, now)
        self._memory.expect(command.engine, command.model, command.gpus)
        self._loader.begin(now, command.engine, command.gpus, bytes.weight_bytes, cost)
        self._await_loading()
        self._cluster.unformed.update(command.gpus)

    def _wake(self, command: Activate, now: float) -> Tier:
        """Where the weights of an engine come from. Sleepers give it their bytes."""
        tier, sleeper = self._sleepers.wake(command.model, command.gpus)
        self.activations[tier] += 1
        if sleeper is not None:
            self._memory.release(sleeper.engine, now)
        if len(self._sleepers):
            free_bytes, fixed_bytes = self._free_bytes(), self._bytes_of[command.model].fixed_bytes
            for gpu in command.gpus:
                self._end(self._sleepers.make_room(gpu, free_bytes[gpu] - fixed_bytes), now)
        return tier

    def _fall_asleep(self, id: int, resident: _Resident, now: float) -> None:
        """An engine has left its GPUs; its process may stay."""
        if self._sleepers.processes == 0:
            return
        bytes, gpus = self._bytes_of[resident.model], resident.gpus
        sleeper = Sleeper(id, resident.model, gpus, bytes.process_bytes, bytes.weight_bytes * len(gpus))
        self._settle(gpus, now)
        self._end(self._sleepers.sleep(sleeper, self._free_bytes()), now)
        if id in self._sleepers:
            self._memory.claim(id, gpus, bytes.process_bytes, now)

    def _end(self, sleepers: Iterable[Sleeper], now: float) -> None:
        for sleeper in sleepers:
            self._settle(sleeper.gpus, now)
            self._memory.release(sleeper.engine, now)
            self._cluster.unformed.update(sleeper.gpus)

    def _settle(self, gpus: Iterable[int], now: float) -> None:
        """Bring the memory of all engines near these GPUs up to now."""
        for engine in self._connected(gpus):
            self._cluster.settle_now(self._cluster.engines[engine], now)

    def _evict(self, command: Evict, now: float) -> None:
        cluster, resident = self._cluster, self._residents[command.engine]
        self._cluster.unformed.update(resident.gpus)
        engine = cluster.engines.get(command.engine)
        resident.drains = engine is not None and command.drain and engine.has_work
        if resident.drains:
            return
        lost = self._take_away(command.engine, now)
        if engine is None:
            self._await_loading()
        else:
            self._fall_asleep(command.engine, resident, now)
            cluster.returned(engine, lost, now, Left.EVICTED)
            if command.drain:
                cluster.hear(now, EngineDrained(command.engine))

    def fail(self, number: int, now: float) -> None:
        cluster = self._cluster
        self._lost.add(number)
        hit = [id for id, resident in self._residents.items() if number in resident.gpus]
        gone = [(cluster.engines.get(id), self._take_away(id, now)) for id in hit]
        self._end(self._sleepers.lose(number), now)
        self._await_loading()
        for id in hit:  # the first takes all others with it
            cluster.hear(now, EngineFailed(id, (number,)))
        for engine, sequences in gone:
            if engine is not None:
                cluster.returned(engine, sequences, now, Left.FAILED)
        self.reform(now)

    def repair(self, number: int, now: float) -> None:
        self._lost.remove(number)
        self._cluster.hear(now, GpusRepaired((number,)))

    def _build_on(self, id: int) -> None:
        """Build an engine whose memory already knows it."""
        resident = self._residents[id]
        engine = self._build(id, resident.model, resident.gpus)
        self._cluster.engines[id] = self._serving[resident.model][id] = engine
        self._cluster.unformed.update(resident.gpus)

    def _take_away(self, id: int, now: float) -> list[SequenceState]:
        """An engine leaves its GPUs, loading or loaded. Returns its requests, which have lost their KV."""
        cluster, resident = self._cluster, self._residents.pop(id)
        engine = self._serving[resident.model].pop(id, None)
        lost: list[SequenceState] = []
        if engine is None:
            self._loader.cancel(now, id)
            self._memory.give_up(id, resident.gpus)
        else:
            cluster.settle_now(engine, now)
            lost = engine.abandon()
            cluster.set_demand(engine, now, IDLE)
            cluster.contention.leave(id)
            cluster.disconnect(engine)
            self._memory.leave(id, resident.gpus, now)
        self._memory.release(id, now)
        self._cluster.unformed.update(resident.gpus)
        return lost

    def reform(self, now: float) -> None:
        """Form domains and scopes anew where engines came or went; the engines there plan again after their iteration in
        flight, idle ones at once."""
        cluster = self._cluster
        ids = sorted(self._connected(cluster.unformed))
        cluster.unformed.clear()
        engines = [self._serving[self._residents[id].model][id] for id in ids]
        for engine in engines:
            cluster.settle_now(engine, now)
        domains = domains_of(engines, [self._residents[id].gpus for id in ids], self._memory.managers)
        scopes = [Scope(scope) for scope in {self._controller.scope_of(id) or (id,) for id in ids}]
        cluster.connect(engines, domains, scopes)
        resized = {}  # what the memory of each engine holds, as its GPUs are now
        for engine in engines:
            resident, kv_tokens = self._residents[engine.index], engine.kv.capacity_tokens()
            if resident.kv_tokens != kv_tokens:
                resized[engine.index] = resident.kv_tokens = kv_tokens
                engine.max_tokens = min(self._bytes_of[engine.model].context_tokens, kv_tokens)
        if resized:
            cluster.hear(now, EnginesResized(resized))
        for engine in engines:
            if engine.index in resized and any(
                map(engine.too_long, [*engine.partial_prefills(), *engine.queues[0].waiting])
            ):
                engine.stop(now)
            elif engine.busy:
                engine.executor.cut()
            elif engine.has_work or self._controller.waiting(engine.index):
                engine.executor.start(now)
        for id in self._controller.waited_for():  # a request may have moved to an engine far from these
            if id not in ids:
                cluster.waits(cluster.engines[id], now)

    def _shed(self, engine: Engine, now: float) -> None:
        """An engine whose memory has shrunk stands between two iterations: prompts that it cannot hold go elsewhere."""
        lost = engine.shed(now)
        engine.go_on(now)
        self._cluster.memory_freed(engine, now)
        self._cluster.returned(engine, lost, now, Left.RESIZED)

    def _connected(self, gpus: Iterable[int]) -> set[int]:
        """The loaded engines on these GPUs, and all that are near them: on a GPU of one of them, and so on."""
        left, found = set(gpus), set[int]()
        while left:
            near = {engine for gpu in left for engine in self._cluster.contention.on(gpu)} - found
            found |= near
            left = {gpu for engine in near for gpu in self._residents[engine].gpus}
        return found
