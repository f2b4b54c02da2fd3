"""Residency: which models are on GPUs. What a policy sees of the fleet, what it may suggest, and Prism's policy.

An *engine* is one stay of a model on GPUs: activated (loading), then ready (resident), then evicted, at once or after it
ended its requests (draining). Requests of a model without an engine wait; such a model is *pending*. A policy suggests to
start and stop engines; the controller, which owns the fleet, does what is possible and refuses the rest.

Prism (section 6.2) evicts idle models under memory pressure only, activates an evicted model on its first request, and
moves models when the KV pressure ratio (KVPR, see ``kvpr.py``) is out of balance. Its text leaves open when a GPU is
under pressure. Here it is when less than a tenth of its KV memory is free, when an activation or a move does not fit, or
when a request waited for memory alone since the last look.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Protocol

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement.kvpr import GpuLoad, KvprPlacement, best_group


class Status(StrEnum):
    """Where an engine is in its life; nothing is dispatched to one that drains."""

    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


class EngineView(NamedTuple):
    """``idle_s``: seconds since a request ran in it or waited for it; 0 while one does. ``requests``: how many do."""

    engine: int
    model: str
    gpus: tuple[int, ...]
    status: Status
    idle_s: float
    requests: int


class Pending(NamedTuple):
    """Requests of a model that no engine serves or will serve: how many, since when, the arrival time of the oldest."""

    model: str
    requests: int
    since_s: float
    oldest_arrival_s: float


@dataclass(frozen=True, slots=True)
class FleetView:
    """All that a residency policy sees at one moment.

    ``engines`` in the order of their ids, ``pending`` in the order in which models began to wait, ``rates_per_s`` the moving
    averages by model, ``free_bytes`` by GPU what weights could take now, ``pressed`` the GPUs where a request waited
    for memory alone since the last look.
    """

    engines: tuple[EngineView, ...]
    pending: tuple[Pending, ...]
    rates_per_s: Mapping[str, float]
    free_bytes: Mapping[int, int]
    pressed: frozenset[int]


class Start(NamedTuple):
    """Activate a model on these GPUs, instead of the engine ``replaces`` if one is named (a move)."""

    model: str
    gpus: tuple[int, ...]
    replaces: int | None = None


class Stop(NamedTuple):
    """Evict an engine; see ``commands.Evict`` for ``drain``."""

    engine: int
    drain: bool = True


Suggestion = Start | Stop


class ResidencyPolicy(Protocol):
    def suggest(self, now: float, view: FleetView) -> Sequence[Suggestion]:
        """What to do now, in this order. A suggestion may count on the memory that those before it free."""
        ...


class PrismResidency:
    """Idle eviction, activation on demand, and re-placement by KVPR.

    ``models`` by id, their ``weight_bytes`` being all that an engine takes beside KV. ``kvpr`` scores GPUs and decides on
    moves. A model is idle after ``idle_s`` without requests; with ``evicts`` off nothing is ever evicted. Every
    ``replace_s`` seconds, and when a model is activated, models may move, each at most once in ``min_stay_s``; with
    ``moves`` off none does. A GPU is under pressure below ``pressure_fraction`` of its KV memory free. Raises ValueError
    for times or fractions out of range.
    """

    def __init__(
        self,
        models: Mapping[str, ModelDemand],
        gpus: Sequence[GpuSlot],
        kvpr: KvprPlacement,
        *,
        evicts: bool = True,
        moves: bool = True,
        idle_s: float = 45.0,
        pressure_fraction: float = 0.1,
        replace_s: float = 10.0,
        min_stay_s: float = 30.0,
    ) -> None:
        if min(idle_s, min_stay_s) < 0 or replace_s <= 0:
            raise ValueError(f"idle_s={idle_s} and min_stay_s={min_stay_s} must be >= 0, replace_s={replace_s} > 0")
        if not 0 <= pressure_fraction < 1:
            raise ValueError(f"pressure_fraction is {pressure_fraction}: it must be at least 0 and below 1")
        self._models = dict(models)
        self._gpus = {gpu.id: gpu for gpu in gpus}
        self._kvpr = kvpr
        self._evicts = evicts
        self._moves = moves
        self._idle_s = idle_s
        self._pressure_fraction = pressure_fraction
        self._replace_s = replace_s
        self._min_stay_s = min_stay_s
        self._next_replacement_s = replace_s
        self._placed_s: dict[str, float] = {}  # when each model was last activated or moved

    def suggest(self, now: float, view: FleetView) -> list[Suggestion]:
        memory = _Memory(self._gpus, self._models, view, self._pressure_fraction)
        idle = self._idle_engines(view)
        activated = self._activate(now, view, memory, idle)
        suggestions = [*activated, *self._relieve(view, memory, idle)]
        if self._moves and (activated or now >= self._next_replacement_s):
            self._next_replacement_s = (now // self._replace_s + 1) * self._replace_s
            suggestions += self._rebalance(now, view, memory, idle)
        return suggestions

    def _idle_engines(self, view: FleetView) -> list[EngineView]:
        """Whom to evict, in this order: the model with the largest SLO first, among equals the longest idle."""
        if not self._evicts:
            return []
        idle = [
            engine
            for engine in view.engines
            if engine.status is Status.RESIDENT and not engine.requests and engine.idle_s > self._idle_s
        ]
        return sorted(idle, key=lambda engine: (-self._models[engine.model].slo_s, -engine.idle_s, engine.engine))

    def _activate(self, now: float, view: FleetView, memory: _Memory, idle: list[EngineView]) -> list[Suggestion]:
        """Engines for pending models, first come first served: who fits nowhere lets nobody pass."""
        suggestions: list[Suggestion] = []
        for pending in view.pending:
            model = self._demand(pending.model, view)
            found = self._target(model, view, memory, idle)
            if found is None:
                break
            gpus, evicted = found
            suggestions += self._make_room(evicted, memory, idle)
            suggestions.append(Start(model.id, gpus))
            memory.take(model.id, gpus)
            self._placed_s[model.id] = now
        return suggestions

    def _target(
        self, model: ModelDemand, view: FleetView, memory: _Memory, idle: Sequence[EngineView]
    ) -> tuple[tuple[int, ...], list[EngineView]] | None:
        """The GPUs with the lowest KVPR among those that fit the model once idle ones are evicted, and who these are."""
        room = {gpu: memory.evictions_for(model.id, gpu, idle) for gpu in self._gpus}
        weights = {id: self._kvpr.part_weight(self._demand(id, view)) for id in memory.homes}
        loads = {
            gpu: memory.load_without(gpu, evicted, weights) for gpu, evicted in room.items() if evicted is not None
        }
        part = self._kvpr.part_weight(model)
        gpus = best_group(model.tp, loads, {gpu: self._kvpr.ratio(load, model, part) for gpu, load in loads.items()})
        if gpus is None:
            return None
        evicted = {engine.engine: engine for gpu in gpus for engine in room[gpu] or ()}
        return gpus, [engine for engine in idle if engine.engine in evicted]

    def _relieve(self, view: FleetView, memory: _Memory, idle: list[EngineView]) -> list[Suggestion]:
        """Evict idle models from GPUs under pressure until it is gone; where requests were seen waiting, one at a time."""
        suggestions: list[Suggestion] = []
        for gpu in sorted(self._gpus):
            waits = gpu in view.pressed
            while waits or memory.constrained(gpu):
                victim = next((engine for engine in idle if gpu in engine.gpus), None)
                if victim is None:
                    break
                suggestions += self._make_room([victim], memory, idle)
                waits = False
        return suggestions

    def _rebalance(self, now: float, view: FleetView, memory: _Memory, idle: list[EngineView]) -> list[Suggestion]:
        """Moves that Algorithm 1 asks for, as far as they fit and the model stayed long enough where it is."""
        demands = [self._demand(model, view) for model in memory.homes]
        placement = self._kvpr.place(demands, memory.slots_for_homes(), memory.homes)
        suggestions: list[Suggestion] = []
        for instance in placement.instances:
            engine = memory.resident.get(instance.model)
            moved_s = self._placed_s.get(instance.model, float("-inf"))
            if engine is None or instance.gpus == engine.gpus or now - moved_s < self._min_stay_s:
                continue
            others = [other for other in idle if other is not engine]
            evicted = memory.evictions_for_group(engine.model, instance.gpus, others)
            if evicted is None:
                continue
            suggestions += self._make_room(evicted, memory, idle)
            suggestions.append(Start(engine.model, instance.gpus, replaces=engine.engine))
            memory.take(engine.model, instance.gpus)
            self._placed_s[engine.model] = now
        return suggestions

    def _make_room(self, evicted: Sequence[EngineView], memory: _Memory, idle: list[EngineView]) -> list[Suggestion]:
        for engine in evicted:
            memory.give_back(engine)
            idle.remove(engine)
        return [Stop(engine.engine) for engine in evicted]

    def _demand(self, model: str, view: FleetView) -> ModelDemand:
        """The model with its present rate."""
        return replace(self._models[model], rate_per_s=view.rates_per_s[model])


class _Memory:
    """The bytes of all GPUs while a policy thinks: what would be free after its suggestions so far.

    ``homes``: the GPUs of each model that is there or coming; of a model that moves, the new ones. ``resident``: the engines
    that serve there already.
    """

    def __init__(
        self, gpus: Mapping[int, GpuSlot], models: Mapping[str, ModelDemand], view: FleetView, headroom_fraction: float
    ) -> None:
        self._gpus = gpus
        self._models = models
        self._free = dict(view.free_bytes)
        self._headroom_fraction = headroom_fraction
        self._fixed = dict.fromkeys(gpus, 0)  # bytes that engines take beside KV
        self.homes: dict[str, tuple[int, ...]] = {}
        self.resident: dict[str, EngineView] = {}
        for engine in view.engines:
            for gpu in engine.gpus:
                self._fixed[gpu] += models[engine.model].weight_bytes
            if engine.status is not Status.DRAINING:
                self.homes[engine.model] = engine.gpus
                self.resident.pop(engine.model, None)
            if engine.status is Status.RESIDENT:
                self.resident[engine.model] = engine

    def constrained(self, gpu: int) -> bool:
        """Less than the headroom is free for KV."""
        return self._lacks_headroom(gpu, self._free[gpu], self._fixed[gpu])

    def take(self, model: str, gpus: tuple[int, ...]) -> None:
        self.homes[model] = gpus
        self.resident.pop(model, None)
        for gpu in gpus:
            self._free[gpu] -= self._models[model].weight_bytes
            self._fixed[gpu] += self._models[model].weight_bytes

    def give_back(self, engine: EngineView) -> None:
        """An idle engine goes: it holds no KV."""
        if self.resident.get(engine.model) is engine:
            del self.resident[engine.model], self.homes[engine.model]
        for gpu in engine.gpus:
            self._free[gpu] += self._models[engine.model].weight_bytes
            self._fixed[gpu] -= self._models[engine.model].weight_bytes

    def evictions_for(self, model: str, gpu: int, idle: Iterable[EngineView]) -> list[EngineView] | None:
        """The first of the ``idle`` engines on this GPU without which the model fits, headroom for KV included; None if it
        does not even fit without all of them."""
        weight_bytes = self._models[model].weight_bytes
        free, fixed = self._free[gpu] - weight_bytes, self._fixed[gpu] + weight_bytes
        evicted = []
        candidates = iter([engine for engine in idle if gpu in engine.gpus])
        while self._lacks_headroom(gpu, free, fixed):
            engine = next(candidates, None)
            if engine is None:
                return None
            evicted.append(engine)
            free += self._models[engine.model].weight_bytes
            fixed -= self._models[engine.model].weight_bytes
        return evicted

    def evictions_for_group(
        self, model: str, gpus: Iterable[int], idle: Sequence[EngineView]
    ) -> list[EngineView] | None:
        """As ``evictions_for``, on all these GPUs."""
        evicted: dict[int, EngineView] = {}
        for gpu in gpus:
            found = self.evictions_for(model, gpu, idle)
            if found is None:
                return None
            evicted |= {engine.engine: engine for engine in found}
        return list(evicted.values())

    def load_without(
        self, gpu: int, evicted: Sequence[EngineView] | None, part_weights: Mapping[str, float]
    ) -> GpuLoad:
        """KVPR's view of a GPU after these evictions."""
        gone = {engine.model for engine in evicted or ()}
        freed = sum(self._models[model].weight_bytes for model in gone)
        weight = sum(part_weights[model] for model, gpus in self.homes.items() if gpu in gpus and model not in gone)
        return GpuLoad(self._gpus[gpu].node, self._gpus[gpu].memory_bytes - self._fixed[gpu] + freed, weight)

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
