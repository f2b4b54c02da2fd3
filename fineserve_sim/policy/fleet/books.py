"""A policy's books of the memory of all GPUs: what would be free after its suggestions so far."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fineserve_sim.policy.fleet.views import EngineView, FleetView, Status
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand


class Books:
    """Who is where, who may be evicted, and what is free.

    ``homes``: the GPUs of each model that is there or coming; of a model that moves, the new ones. ``resident``: the engines
    that serve there already. ``idle``: those of them that may be evicted, in this order. ``headroom_fraction`` of what
    engines leave for KV on a GPU is kept free.

    To open the books costs a step for each engine, to look for room one for each GPU; the rest costs what is touched.
    """

    def __init__(
        self,
        gpus: Mapping[int, GpuSlot],
        models: Mapping[str, ModelDemand],
        view: FleetView,
        idle: Sequence[EngineView],
        headroom_fraction: float,
    ) -> None:
        self._gpus = {gpu: slot for gpu, slot in gpus.items() if gpu in view.free_bytes}
        self._models = models
        self._free = dict(view.free_bytes)
        self._headroom_fraction = headroom_fraction
        self._fixed = dict.fromkeys(gpus, 0)  # bytes that engines take beside KV
        self.homes: dict[str, tuple[int, ...]] = {}
        self.resident: dict[str, EngineView] = {}
        for engine in view.engines:
            weight_bytes = models[engine.model].weight_bytes
            for gpu in engine.gpus:
                self._fixed[gpu] += weight_bytes
            if engine.status is Status.RESIDENT:
                self.homes[engine.model] = engine.gpus
                self.resident[engine.model] = engine
            elif engine.status is Status.LOADING:
                self.homes[engine.model] = engine.gpus
                self.resident.pop(engine.model, None)
        self._models_on: defaultdict[int, dict[str, None]] = defaultdict(dict)
        for model, home in self.homes.items():
            for gpu in home:
                self._models_on[gpu][model] = None
        self._turn = {engine.engine: turn for turn, engine in enumerate(idle)}
        self._idle_on: defaultdict[int, dict[int, EngineView]] = defaultdict(dict)
        for engine in idle:
            for gpu in engine.gpus:
                self._idle_on[gpu][engine.engine] = engine

    def with_idle(self) -> list[int]:
        """The GPUs, in the order of their ids, with engines that may be evicted."""
        return sorted(gpu for gpu, idle in self._idle_on.items() if idle)

    def next_idle(self, gpu: int) -> EngineView | None:
        """The first engine on this GPU that may be evicted."""
        return next(iter(self._idle_on[gpu].values()), None)

    def constrained(self, gpu: int) -> bool:
        """Less than the headroom is free for KV."""
        return self._lacks_headroom(gpu, self._free[gpu], self._fixed[gpu])

    def take(self, model: str, gpus: tuple[int, ...]) -> None:
        """An engine of the model comes; it is where the model is at home now."""
        self._leave_home(model)
        self.homes[model] = gpus
        for gpu in gpus:
            self._models_on[gpu][model] = None
            self._free[gpu] -= self._models[model].weight_bytes
            self._fixed[gpu] += self._models[model].weight_bytes

    def give_back(self, engine: EngineView) -> None:
        """An idle engine goes: it holds no KV."""
        if self.resident.get(engine.model) is engine:
            self._leave_home(engine.model)
            del self.homes[engine.model]
        for gpu in engine.gpus:
            del self._idle_on[gpu][engine.engine]
            self._free[gpu] += self._models[engine.model].weight_bytes
            self._fixed[gpu] -= self._models[engine.model].weight_bytes

    def _leave_home(self, model: str) -> None:
        self.resident.pop(model, None)
        for gpu in self.homes.get(model, ()):
            del self._models_on[gpu][model]

    def room_for(self, model: str) -> Iterator[tuple[int, Sequence[EngineView], Iterable[str], int]]:
        """All GPUs that fit an engine of the model, headroom for KV included, each with who must be evicted from it, the
        models that are at home there then, in the order in which they came, and the bytes left for KV beside them."""
        weight_bytes, fraction = self._models[model].weight_bytes, self._headroom_fraction
        for gpu, slot in self._gpus.items():
            left_bytes = slot.memory_bytes - self._fixed[gpu]
            kv_bytes = left_bytes - weight_bytes
            if kv_bytes > 0 and self._free[gpu] - weight_bytes >= fraction * kv_bytes:  # the common case
                yield gpu, (), self._models_on[gpu], left_bytes
                continue
            evicted = self._evictions_for(model, gpu, None)
            if evicted is not None:
                gone = {engine.model for engine in evicted}
                freed_bytes = sum(self._models[other].weight_bytes for other in gone)
                others = [other for other in self._models_on[gpu] if other not in gone]
                yield gpu, evicted, others, left_bytes + freed_bytes

    def would_hold(self, model: ModelDemand) -> bool:
        """Whether the GPUs that are there, empty, have room for all parts of the model on one node."""
        nodes = Counter(slot.node for slot in self._gpus.values() if slot.memory_bytes > model.weight_bytes)
        return max(nodes.values(), default=0) >= model.tp

    def evictions_for_move(self, engine: EngineView, gpus: Iterable[int]) -> list[EngineView] | None:
        """Who must be evicted so that an engine of the same model fits on all these GPUs, beside this one. None if it
        does not even fit without all idle ones."""
        evicted: dict[int, EngineView] = {}
        for gpu in gpus:
            found = self._evictions_for(engine.model, gpu, engine)
            if found is None:
                return None
            evicted |= {other.engine: other for other in found}
        return list(evicted.values())

    def in_turn(self, engines: Iterable[EngineView]) -> list[EngineView]:
        """Idle engines in the order in which they are evicted, each once."""
        distinct = {engine.engine: engine for engine in engines}
        return sorted(distinct.values(), key=lambda engine: self._turn[engine.engine])

    def _evictions_for(self, model: str, gpu: int, but: EngineView | None) -> Sequence[EngineView] | None:
        weight_bytes = self._models[model].weight_bytes
        free, fixed = self._free[gpu] - weight_bytes, self._fixed[gpu] + weight_bytes
        if not self._lacks_headroom(gpu, free, fixed):
            return ()
        evicted = []
        for engine in self._idle_on[gpu].values():
            if engine is but:
                continue
            evicted.append(engine)
            free += self._models[engine.model].weight_bytes
            fixed -= self._models[engine.model].weight_bytes
            if not self._lacks_headroom(gpu, free, fixed):
                return evicted
        return None

    def slots_for_homes(self) -> list[GpuSlot]:
        """The GPUs as a placement of the homes sees them: what others take (engines that drain or are moved away) is not
        there."""
        others = dict(self._fixed)
        for model, gpus in self.homes.items():
            for gpu in gpus:
                others[gpu] -= self._models[model].weight_bytes
        return [replace(slot, memory_bytes=slot.memory_bytes - others[slot.id]) for slot in self._gpus.values()]

    def _lacks_headroom(self, gpu: int, free_bytes: int, fixed_bytes: int) -> bool:
        kv_bytes = self._gpus[gpu].memory_bytes - fixed_bytes
        return kv_bytes <= 0 or free_bytes < self._headroom_fraction * kv_bytes
