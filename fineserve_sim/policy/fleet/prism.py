"""Prism's residency policy (section 6.2): idle eviction, activation on demand, and moves.

It evicts idle models under memory pressure only, activates an evicted model on its first request, and moves models when the
KV pressure ratio (KVPR, see ``placement/kvpr.py``) is out of balance. Its text leaves open when a GPU is under pressure. Here
it is when less than a tenth of its KV memory is free, when an activation or a move does not fit, or when a request waited for
memory alone since the last look.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache

from fineserve_sim.policy.fleet.books import Books
from fineserve_sim.policy.fleet.views import EngineView, FleetView, Start, Status, Stop, Suggestion
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement.kvpr import KvprPlacement, best_group


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

    def __init__(
        self,
        models: Mapping[str, ModelDemand],
        gpus: Sequence[GpuSlot],
        kvpr: KvprPlacement,
        *,
        evict: bool = True,
        move: bool = True,
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
        self._evicts = evict
        self._moves = move
        self._idle_s = idle_s
        self._pressure_fraction = pressure_fraction
        self._replace_s = replace_s
        self._min_stay_s = min_stay_s
        self._next_replacement_s = replace_s
        self._placed_s: dict[str, float] = {}  # when each model was last activated or moved

    def suggest(self, now: float, view: FleetView) -> list[Suggestion]:
        idle = self._idle_engines(view)
        books = Books(self._gpus, self._models, view, idle, self._pressure_fraction)
        activated = self._activate(now, view, books)
        suggestions = [*activated, *self._relieve(view, books)]
        if self._moves and (activated or now >= self._next_replacement_s):
            self._next_replacement_s = (now // self._replace_s + 1) * self._replace_s
            suggestions += self._rebalance(now, view, books)
        return suggestions

    def _idle_engines(self, view: FleetView) -> list[EngineView]:
        """Whom to evict, in this order: the model with the largest SLO first, among equals the longest idle."""
        if not self._evicts:
            return []
        idle_s = self._idle_s
        idle = [
            engine
            for engine in view.engines
            if engine.idle_s > idle_s and engine.status is Status.RESIDENT and not engine.requests
        ]
        return sorted(idle, key=lambda engine: (-self._models[engine.model].slo_s, -engine.idle_s, engine.engine))

    def _activate(self, now: float, view: FleetView, books: Books) -> list[Suggestion]:
        """Engines for pending models, first come first served: who fits nowhere lets nobody pass, unless it would not fit on
        empty GPUs either (some are lost)."""
        suggestions: list[Suggestion] = []
        weigh, models, rates_per_s = self._kvpr.part_weight, self._models, view.rates_per_s
        part_weight = cache(lambda model: weigh(models[model], rates_per_s[model]))  # for those that are asked for
        for pending in view.pending:
            found = self._target(models[pending.model], part_weight, books)
            if found is None:
                if books.would_hold(models[pending.model]):
                    break
                continue
            gpus, evicted = found
            suggestions += _make_room(evicted, books)
            suggestions.append(Start(pending.model, gpus))
            books.take(pending.model, gpus)
            self._placed_s[pending.model] = now
        return suggestions

    def _target(
        self, model: ModelDemand, part_weight: Callable[[str], float], books: Books
    ) -> tuple[tuple[int, ...], list[EngineView]] | None:
        """The GPUs with the lowest KVPR among those that fit the model once idle ones are evicted, and who these are."""
        evicted: dict[int, Sequence[EngineView]] = {}
        ratio_of: dict[int, float] = {}
        ratio, own_weight = self._kvpr.ratio, part_weight(model.id)
        for gpu, leaving, others, kv_bytes in books.room_for(model.id):
            evicted[gpu] = leaving
            ratio_of[gpu] = ratio(sum(map(part_weight, others)), kv_bytes, model, own_weight)
        gpus = best_group(model.tp, ratio_of, {gpu: slot.node for gpu, slot in self._gpus.items()})
        if gpus is None:
            return None
        return gpus, books.in_turn(engine for gpu in gpus for engine in evicted[gpu])

    def _relieve(self, view: FleetView, books: Books) -> list[Suggestion]:
        """Evict idle models from GPUs under pressure until it is gone; where requests were seen waiting, one at a time."""
        suggestions: list[Suggestion] = []
        for gpu in books.with_idle():
            waits = gpu in view.pressed
            while waits or books.constrained(gpu):
                victim = books.next_idle(gpu)
                if victim is None:
                    break
                suggestions += _make_room([victim], books)
                waits = False
        return suggestions

    def _rebalance(self, now: float, view: FleetView, books: Books) -> list[Suggestion]:
        """Moves that Algorithm 1 asks for, as far as they fit and the model stayed long enough where it is."""
        demands = [replace(self._models[model], rate_per_s=view.rates_per_s[model]) for model in books.homes]
        placement = self._kvpr.place(demands, books.slots_for_homes(), books.homes)
        suggestions: list[Suggestion] = []
        for instance in placement.instances:
            engine = books.resident.get(instance.model)
            moved_s = self._placed_s.get(instance.model, float("-inf"))
            if engine is None or instance.gpus == engine.gpus or now - moved_s < self._min_stay_s:
                continue
            evicted = books.evictions_for_move(engine, instance.gpus)
            if evicted is None:
                continue
            suggestions += _make_room(evicted, books)
            suggestions.append(Start(engine.model, instance.gpus, replaces=engine.engine))
            books.take(engine.model, instance.gpus)
            self._placed_s[engine.model] = now
        return suggestions


def _make_room(evicted: Sequence[EngineView], books: Books) -> list[Suggestion]:
    for engine in evicted:
        books.give_back(engine)
    return [Stop(engine.engine) for engine in evicted]
