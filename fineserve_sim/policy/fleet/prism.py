"""Prism's residency policy (section 6.2): idle eviction, activation on demand, and moves.

It evicts idle models under memory pressure only, and activates an evicted model on its first request. It moves models when
the KV pressure ratio (KVPR, see ``placement/kvpr.py``) is out of balance. Its text leaves open when a GPU is under pressure.
Here it is when less than a tenth of its KV memory is free, or when an activation or a move does not fit. It also is when a
request waited for memory alone since the last look.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fineserve_sim.policy.fleet.views import EngineView, FleetView, Start, Status, Stop, Suggestion, next_multiple
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement.kvpr import KvprPlacement, best_group


@dataclass
class PrismResidency:
    """Idle eviction, activation on demand, and re-placement by KVPR.

    ``models`` by id, their ``weight_bytes`` being all that an engine takes beside KV. ``kvpr`` scores GPUs and decides on
    moves. A model is idle after ``idle_s`` without requests; with ``evict`` off nothing is ever evicted. Every
    ``replace_s`` seconds, and when a model is activated, models may move, each at most once in ``min_stay_s``; with
    ``move`` off none does. A GPU is under pressure below ``pressure_fraction`` of its KV memory free. Raises ValueError
    for times or fractions out of range.

    A look costs a step for each engine, a model that is activated one for each GPU, and a re-placement a run of KVPR for
    all models that are there.
    """

    models: Mapping[str, ModelDemand]
    gpus: Sequence[GpuSlot]
    kvpr: KvprPlacement
    evict: bool = True
    move: bool = True
    idle_s: float = 45.0
    pressure_fraction: float = 0.1
    replace_s: float = 10.0
    min_stay_s: float = 30.0

    def __post_init__(self) -> None:
        if min(self.idle_s, self.min_stay_s) < 0 or self.replace_s <= 0:
            times = (
                f"idle_s={self.idle_s} and min_stay_s={self.min_stay_s} must be >= 0, replace_s={self.replace_s} > 0"
            )
            raise ValueError(times)
        if not 0 <= self.pressure_fraction < 1:
            raise ValueError(f"pressure_fraction is {self.pressure_fraction}: it must be at least 0 and below 1")
        self._node_of = {gpu.id: gpu.node for gpu in self.gpus}
        self._next_replacement_s = self.replace_s
        self._placed_s: dict[str, float] = {}  # when each model was last activated or moved

    def suggest(self, now: float, view: FleetView) -> list[Suggestion]:
        books = _Books(self, view)
        activated = self._activate(now, view, books)
        suggestions = [*activated, *self._relieve(view, books)]
        if self.move and (activated or now >= self._next_replacement_s):
            self._next_replacement_s = next_multiple(self.replace_s, now)
            suggestions += self._rebalance(now, view, books)
        return suggestions

    def turn(self, engine: EngineView) -> tuple[float, float, int]:
        """The rank of an eviction: the engine of the model with the largest SLO goes first, among equals the longest idle."""
        return -self.models[engine.model].slo_s, -engine.idle_s, engine.engine

    def _activate(self, now: float, view: FleetView, books: _Books) -> list[Suggestion]:
        """Engines for pending models, first come first served, where KVPR is lowest without idle ones. A model that fits
        nowhere blocks the models behind it, unless it would not fit on empty GPUs either (some are lost)."""
        suggestions: list[Suggestion] = []
        weigh, models, rates_per_s = self.kvpr.part_weight, self.models, view.rates_per_s
        part_weight = cache(lambda model: weigh(models[model], rates_per_s[model]))  # for those that are asked for
        for model in [models[pending.model] for pending in view.pending]:
            ratio, own_weight = self.kvpr.ratio, part_weight(model.id)
            ratio_of = {
                gpu: ratio(sum(map(part_weight, others)), kv_bytes, model, own_weight)
                for gpu, others, kv_bytes in books.room_for(model)
            }
            gpus = best_group(model.tp, ratio_of, self._node_of)
            if gpus is not None:
                evicted = sorted(books.evictions(model, gpus) or (), key=self.turn)
                suggestions += [*map(books.stop, evicted), books.start(model, gpus)]
                self._placed_s[model.id] = now
            elif books.would_hold(model):
                break
        return suggestions

    def _relieve(self, view: FleetView, books: _Books) -> list[Suggestion]:
        """Evict idle models from GPUs under pressure until each GPU has room; where a request waited, at least one a look."""
        suggestions: list[Suggestion] = []
        for gpu, idle in sorted(books.idle_on.items()):
            waits = gpu in view.pressed
            while idle and (waits or not books.has_room(gpu)):
                suggestions.append(books.stop(next(iter(idle.values()))))
                waits = False
        return suggestions

    def _rebalance(self, now: float, view: FleetView, books: _Books) -> list[Suggestion]:
        """Moves that Algorithm 1 asks for, as far as they fit and the model stayed long enough where it is."""
        demands = [replace(self.models[model], rate_per_s=view.rates_per_s[model]) for model in books.homes]
        suggestions: list[Suggestion] = []
        for instance in self.kvpr.place(demands, books.slots_for_homes(), books.homes).instances:
            model, gpus, engine = self.models[instance.model], instance.gpus, books.resident.get(instance.model)
            stayed_s = now - self._placed_s.get(model.id, float("-inf"))
            if engine is None or gpus == engine.gpus or stayed_s < self.min_stay_s:
                continue
            evicted = books.evictions(model, gpus, but=engine.engine)
            if evicted is not None:
                suggestions += [*map(books.stop, evicted), books.start(model, gpus, replaces=engine.engine)]
                self._placed_s[model.id] = now
        return suggestions


class _Books:
    """The memory of all GPUs after the suggestions so far: engines by GPU, engines that may be evicted, and free bytes.

    ``homes``: the GPUs of each model that is there or coming; of a model that moves, the new ones. ``resident``: the engines
    that serve there already. ``idle_on``: by GPU the resident engines that may be evicted, in turn.

    Opening the books costs a step for each engine, and looking for room costs a step for each GPU. Other calls cost a step for
    each engine and GPU that they touch.
    """

    def __init__(self, prism: PrismResidency, view: FleetView) -> None:
        self._gpus = {gpu.id: gpu for gpu in prism.gpus if gpu.id in view.free_bytes}
        self._models, self._headroom_fraction = prism.models, prism.pressure_fraction
        self._free = dict(view.free_bytes)
        self._left = {gpu.id: gpu.memory_bytes for gpu in prism.gpus}  # what engines leave for KV
        self.homes: dict[str, tuple[int, ...]] = {}
        self.resident: dict[str, EngineView] = {}
        idle: list[EngineView] = []
        for engine in view.engines:
            weight_bytes = self._models[engine.model].weight_bytes
            for gpu in engine.gpus:
                self._left[gpu] -= weight_bytes
            if engine.status is not Status.DRAINING:
                self.homes[engine.model] = engine.gpus
                self.resident.pop(engine.model, None)
                if engine.status is Status.RESIDENT:
                    self.resident[engine.model] = engine
                    if prism.evict and engine.idle_s > prism.idle_s and not engine.requests:
                        idle.append(engine)
        self._models_on: defaultdict[int, dict[str, None]] = defaultdict(dict)  # in the order in which they came
        for model, home in self.homes.items():
            for gpu in home:
                self._models_on[gpu][model] = None
        self.idle_on: defaultdict[int, dict[int, EngineView]] = defaultdict(dict)
        for engine in sorted(idle, key=prism.turn):
            for gpu in engine.gpus:
                self.idle_on[gpu][engine.engine] = engine

    def start(self, model: ModelDemand, gpus: tuple[int, ...], replaces: int | None = None) -> Start:
        """An engine of the model comes; it is where the model is at home now."""
        self._leave_home(model.id)
        self.homes[model.id] = gpus
        for gpu in gpus:
            self._models_on[gpu][model.id] = None
            self._take(gpu, model.weight_bytes)
        return Start(model.id, gpus, replaces)

    def stop(self, engine: EngineView) -> Stop:
        """An idle engine goes: it holds no KV."""
        if self.resident.get(engine.model) is engine:
            self._leave_home(engine.model)
        for gpu in engine.gpus:
            del self.idle_on[gpu][engine.engine]
            self._take(gpu, -self._models[engine.model].weight_bytes)
        return Stop(engine.engine)

    def _leave_home(self, model: str) -> None:
        self.resident.pop(model, None)
        for gpu in self.homes.pop(model, ()):
            del self._models_on[gpu][model]

    def _take(self, gpu: int, weight_bytes: int) -> None:
        self._free[gpu] -= weight_bytes
        self._left[gpu] -= weight_bytes

    def has_room(self, gpu: int, more_bytes: int = 0) -> bool:
        """Whether the headroom is free for KV once an engine takes so much more."""
        kv_bytes = self._left[gpu] - more_bytes
        return kv_bytes > 0 and self._free[gpu] - more_bytes >= self._headroom_fraction * kv_bytes

    def evictions(self, model: ModelDemand, gpus: Iterable[int], but: int | None = None) -> list[EngineView] | None:
        """The engines to evict so that an engine of the model fits on all these GPUs, with headroom for KV; never the engine
        ``but``. None if it does not even fit without all idle ones."""
        evicted: dict[int, EngineView] = {}
        for gpu in gpus:
            more_bytes, idle = model.weight_bytes, iter(self.idle_on[gpu].values())
            while not self.has_room(gpu, more_bytes):
                engine = next(idle, None)
                if engine is None:
                    return None
                if engine.engine != but:
                    evicted[engine.engine] = engine
                    more_bytes -= self._models[engine.model].weight_bytes
        return list(evicted.values())

    def room_for(self, model: ModelDemand) -> Iterator[tuple[int, Iterable[str], int]]:
        """All GPUs that fit an engine of the model after ``evictions``, each with the models that are at home there then, in
        the order in which they came, and the bytes left for KV beside them."""
        weight_bytes = model.weight_bytes
        for gpu in self._gpus:
            others, left_bytes = self._models_on[gpu], self._left[gpu]
            if self.has_room(gpu, weight_bytes):  # the common case
                yield gpu, others, left_bytes
                continue
            evicted = self.evictions(model, [gpu])
            if evicted is not None:
                gone = {engine.model for engine in evicted}
                freed_bytes = sum(self._models[other].weight_bytes for other in gone)
                yield gpu, [other for other in others if other not in gone], left_bytes + freed_bytes

    def would_hold(self, model: ModelDemand) -> bool:
        """Whether the GPUs that are there, empty, have room for all parts of the model on one node."""
        nodes = Counter(gpu.node for gpu in self._gpus.values() if gpu.memory_bytes > model.weight_bytes)
        return max(nodes.values(), default=0) >= model.tp

    def slots_for_homes(self) -> list[GpuSlot]:
        """The GPUs as a placement of the homes sees them, without the bytes of other engines (that drain or are moved
        away)."""
        return [
            replace(
                slot, memory_bytes=self._left[gpu] + sum(self._models[id].weight_bytes for id in self._models_on[gpu])
            )
            for gpu, slot in self._gpus.items()
        ]
