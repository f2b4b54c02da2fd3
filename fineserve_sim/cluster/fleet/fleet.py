"""Models that come and go: carries out the controller's ``Activate`` and ``Evict`` and tells it the time.

An engine is built when its weights are loaded, and joins its GPUs: their memory, their contention, the scopes of their
schedulers. When that changes, the domains and scopes that it touches are formed anew. Their spans in flight end after the
iteration, so no part of an engine needs to know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.fleet.loader import Loader
from fineserve_sim.cluster.host import Cluster, Fleet, Scope
from fineserve_sim.cluster.scenario import Left
from fineserve_sim.cluster.sharing.domain import domains_of
from fineserve_sim.latency.sharing import IDLE
from fineserve_sim.policy.commands import Activate, Evict, Survey
from fineserve_sim.policy.events import EngineDrained, EngineFailed, EngineReady, EnginesResized, GpusRepaired, Tick
from fineserve_sim.policy.fleet.controller import FleetController
from fineserve_sim.policy.memory.kvcached import KvCachedManager, VirtualKV
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.memory.paged import GpuMemory, PrivatePools

TICK = order_of(Kind.TIMER, 1)
LOADED = order_of(Kind.TIMER, 2)


@dataclass(frozen=True, slots=True)
class EngineBytes:
    """The bytes that an engine of a model takes of each of its GPUs: weights to load, all bytes beside KV, its KV block
    (bytes, or the tensors of virtual memory). ``context_tokens`` bounds a sequence."""

    weight_bytes: int
    fixed_bytes: int
    block: VirtualKV | int
    context_tokens: int


class FleetMemory:
    """The memory of every GPU while engines come and go: their claims in ``ledger``, and ``managers`` of the KV memory in the
    rest, by GPU. Pages of kvcached take what claims leave, so they are no pool of the ledger. When an engine of private pools
    comes later, the free bytes are for it and for the loading engines: ``divide`` splits so many bytes among engines, with
    their models."""

    def __init__(
        self,
        ledger: MemoryLedger,
        managers: Mapping[int, GpuMemory],
        divide: Callable[[int, Mapping[int, str]], PrivatePools],
    ) -> None:
        self.managers = dict(managers)
        self._ledger = ledger
        self._divide = divide
        self._loading: dict[int, dict[int, str]] = {gpu: {} for gpu in managers}  # the models of engines, by GPU
        for gpu in self.managers:
            self._set_pool(gpu)

    def expect(self, engine: int, model: str, gpus: Iterable[int]) -> None:
        """The engine loads."""
        for gpu in gpus:
            self._loading[gpu][engine] = model

    def give_up(self, engine: int, gpus: Iterable[int]) -> None:
        """The engine loads no more."""
        for gpu in gpus:
            del self._loading[gpu][engine]

    def claim(self, engine: int, gpus: Iterable[int], fixed_bytes: int, now: float) -> None:
        """An engine that begins to load takes so much of each GPU."""
        self._ledger.claim(engine, gpus, fixed_bytes)
        self._set_limits(gpus, now)

    def release(self, engine: int, now: float) -> None:
        """An engine, loading or loaded, gives back its claims."""
        self._set_limits(self._ledger.release(engine), now)

    def _set_limits(self, gpus: Iterable[int], now: float) -> None:
        for gpu in gpus:
            manager = self.managers[gpu]
            if isinstance(manager, KvCachedManager):
                manager.advance(now)
                manager.set_limit(self._ledger.left_bytes(gpu))

    def _set_pool(self, gpu: int) -> None:
        manager = self.managers[gpu]
        self._ledger.set_pool(gpu, manager.ledger().total_bytes if isinstance(manager, PrivatePools) else 0)

    def join(self, engine: int, gpus: Sequence[int], block: VirtualKV | int, now: float) -> None:
        """A loaded engine may hold KV from now on, in blocks of so many bytes or in such tensors."""
        for gpu in gpus:
            manager = self.managers[gpu]
            if isinstance(manager, KvCachedManager):
                assert isinstance(block, VirtualKV)
                manager.advance(now)
                manager.join(engine, block)
            else:
                assert isinstance(manager, PrivatePools) and isinstance(block, int)
                parts = self._divide(self._ledger.free_bytes(gpu), self._loading[gpu])
                manager.join(engine, block, parts.pool(engine).memory.limit_bytes)
                self._set_pool(gpu)
        self.give_up(engine, gpus)

    def leave(self, engine: int, gpus: Iterable[int], now: float) -> None:
        """An engine that holds no KV any more goes."""
        for gpu in gpus:
            manager = self.managers[gpu]
            assert isinstance(manager, KvCachedManager | PrivatePools)
            if isinstance(manager, KvCachedManager):
                manager.advance(now)
            manager.leave(engine)
            self._set_pool(gpu)

    def free_bytes(self, serving: Mapping[int, Iterable[int]]) -> dict[int, int]:
        """By GPU, the bytes that the weights of another engine could take now. ``serving`` are the GPUs of the engines with
        requests: others hold no KV."""
        free = {gpu: self._ledger.free_bytes(gpu) for gpu in self.managers}
        for engine, gpus in serving.items():
            for gpu in gpus:
                free[gpu] -= self.held_bytes(engine, gpu)
        return free

    def held_bytes(self, engine: int, gpu: int) -> int:
        """KV memory that only this engine can use, as long as it holds it. It is 0 for private pools, whose bytes are not free
        anyway."""
        manager = self.managers[gpu]
        return manager.block_bytes_held(engine) if isinstance(manager, KvCachedManager) else 0

    def check(self) -> None:
        """Raise AssertionError if a KV memory contradicts itself; that claims and pools fit is always checked."""
        for manager in self.managers.values():
            manager.check()


@dataclass(slots=True)
class _Resident:
    """An engine on its GPUs, loading or loaded: of which model, whether it goes once it is empty, and the ``kv_tokens`` that
    the controller was told."""

    model: str
    gpus: tuple[int, ...]
    drains: bool = False
    kv_tokens: int = -1


class ModelFleet(Fleet):
    """``bytes_of`` by model; ``build`` makes the engine of a model on GPUs, whose memory knows it already, and brings it
    to their contention."""

    def __init__(
        self,
        cluster: Cluster,
        controller: FleetController,
        memory: FleetMemory,
        loader: Loader,
        bytes_of: Mapping[str, EngineBytes],
        build: Callable[[int, str, tuple[int, ...]], Engine],
    ) -> None:
        self._cluster, self._controller = cluster, controller
        self._memory, self._loader = memory, loader
        self._bytes_of, self._build = bytes_of, build
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
        for id, engine in self._cluster.engines.items():
            held_bytes = self._memory.held_bytes(id, self._residents[id].gpus[0])
            assert id in self._cluster.active or not (engine.requests or held_bytes), f"engine {id} serves unseen"

    def rested(self, engine: Engine, now: float) -> None:
        """The engine is empty: take it away if it drains."""
        if self._residents[engine.index].drains:
            self._take_away(engine.index, now)
            self._cluster.hear(now, EngineDrained(engine.index))

    def _look(self, now: float) -> None:
        """Tell the controller the state of everything: the requests of the serving engines, and the free bytes of each GPU."""
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
        cluster, bytes = self._cluster, self._bytes_of[command.model]
        self._residents[command.engine] = _Resident(command.model, command.gpus)
        for engine in self._connected(command.gpus):  # memory that spans counted on may be gone
            cluster.settle_now(cluster.engines[engine], now)
        self._memory.claim(command.engine, command.gpus, bytes.fixed_bytes, now)
        self._memory.expect(command.engine, command.model, command.gpus)
        self._loader.begin(now, command.engine, command.gpus, bytes.weight_bytes)
        self._await_loading()
        self._cluster.unformed.update(command.gpus)

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
            cluster.returned(engine, lost, now, Left.EVICTED)
            if command.drain:
                cluster.hear(now, EngineDrained(command.engine))

    def fail(self, number: int, now: float) -> None:
        cluster = self._cluster
        self._lost.add(number)
        hit = [id for id, resident in self._residents.items() if number in resident.gpus]
        gone = [(cluster.engines.get(id), self._take_away(id, now)) for id in hit]
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
