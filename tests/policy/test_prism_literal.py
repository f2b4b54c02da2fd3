"""Prism's residency policy against itself, said as plainly as it can be: every answer looks through all engines and GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.fleet.prism import PrismResidency
from fineserve_sim.policy.fleet.views import EngineView, FleetView, Pending, Start, Status, Stop, Suggestion
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement.kvpr import KvprPlacement

IDLE_S, FRACTION = 45.0, 0.1


class LiteralPrism:
    """One look at a fleet with the default options, KVPR by request rates before the addition."""

    def __init__(self, models: dict[str, ModelDemand], gpus: list[GpuSlot], view: FleetView) -> None:
        self.gpus = {gpu.id: gpu for gpu in gpus}
        self.models = {id: replace(model, rate_per_s=view.rates_per_s[id]) for id, model in models.items()}
        self.view = view
        self.here: list[tuple[str, tuple[int, ...]]] = [(engine.model, engine.gpus) for engine in view.engines]
        self.free = dict(view.free_bytes)
        self.homes = {engine.model: engine.gpus for engine in view.engines if engine.status is not Status.DRAINING}
        coming = {engine.model for engine in view.engines if engine.status is Status.LOADING}
        serving = [engine for engine in view.engines if engine.status is Status.RESIDENT]
        self.resident = {engine.model: engine for engine in serving if engine.model not in coming}
        idle = [engine for engine in serving if not engine.requests and engine.idle_s > IDLE_S]
        self.idle = sorted(idle, key=lambda e: (-self.models[e.model].slo_s, -e.idle_s, e.engine))
        self.moved: set[str] = set()

    def suggest(self, moves: bool) -> list[Suggestion]:
        activated = list(self.activate())
        return [*activated, *self.relieve(), *(self.rebalance() if moves or activated else ())]

    def activate(self) -> Iterator[Suggestion]:
        for pending in self.view.pending:
            model = self.models[pending.model]
            ranked: dict[int, list[tuple[float, int]]] = {}
            for gpu, slot in self.gpus.items():
                evicted = self.evictions(model, gpu, self.idle)
                if evicted is not None:
                    gone = {engine.model for engine in evicted}
                    weight = sum(self.weight(m) for m, home in self.homes.items() if gpu in home and m not in gone)
                    kv_bytes = slot.memory_bytes - self.fixed(gpu) + sum(self.models[m].weight_bytes for m in gone)
                    ranked.setdefault(slot.node, []).append((weight / kv_bytes, gpu))
            best = min((sorted(node)[: model.tp] for node in ranked.values() if len(node) >= model.tp), default=None)
            if best is None:
                return
            gpus = tuple(sorted(gpu for _, gpu in best))
            evicted_here = [engine for gpu in gpus for engine in self.evictions(model, gpu, self.idle) or ()]
            yield from self.evict([engine for engine in self.idle if engine in evicted_here])
            yield self.start(model.id, gpus, None)

    def relieve(self) -> Iterator[Suggestion]:
        for gpu in sorted(self.gpus):
            waits = gpu in self.view.pressed
            while waits or self.lacks(gpu, self.free[gpu], self.fixed(gpu)):
                victim = next((engine for engine in self.idle if gpu in engine.gpus), None)
                if victim is None:
                    break
                yield from self.evict([victim])
                waits = False

    def rebalance(self) -> Iterator[Suggestion]:
        for_homes = {
            gpu: sum(self.models[m].weight_bytes for m, home in self.homes.items() if gpu in home) for gpu in self.gpus
        }
        slots = [
            replace(slot, memory_bytes=slot.memory_bytes - self.fixed(gpu) + for_homes[gpu])
            for gpu, slot in self.gpus.items()
        ]
        placement = KvprPlacement().place([self.models[m] for m in self.homes], slots, self.homes)
        for instance in placement.instances:
            engine = self.resident.get(instance.model)
            if engine is None or instance.gpus == engine.gpus or engine.model in self.moved:
                continue
            others = [other for other in self.idle if other is not engine]
            found = [self.evictions(self.models[engine.model], gpu, others) for gpu in instance.gpus]
            if None not in found:
                yield from self.evict(list(dict.fromkeys(other for some in found for other in some or ())))
                yield self.start(engine.model, instance.gpus, engine.engine)

    def evictions(self, model: ModelDemand, gpu: int, idle: list[EngineView]) -> list[EngineView] | None:
        candidates = [engine for engine in idle if gpu in engine.gpus]
        for count in range(len(candidates) + 1):
            freed_bytes = sum(self.models[engine.model].weight_bytes for engine in candidates[:count])
            more_bytes = model.weight_bytes - freed_bytes
            if not self.lacks(gpu, self.free[gpu] - more_bytes, self.fixed(gpu) + more_bytes):
                return candidates[:count]
        return None

    def evict(self, engines: list[EngineView]) -> Iterator[Suggestion]:
        for engine in engines:
            self.idle.remove(engine)
            self.here.remove((engine.model, engine.gpus))
            if self.resident.get(engine.model) is engine:
                del self.resident[engine.model], self.homes[engine.model]
            for gpu in engine.gpus:
                self.free[gpu] += self.models[engine.model].weight_bytes
        return iter([Stop(engine.engine) for engine in engines])

    def start(self, model: str, gpus: tuple[int, ...], replaces: int | None) -> Start:
        self.here.append((model, gpus))
        self.homes[model] = gpus
        self.resident.pop(model, None)
        self.moved.add(model)
        for gpu in gpus:
            self.free[gpu] -= self.models[model].weight_bytes
        return Start(model, gpus, replaces)

    def weight(self, model: str) -> float:
        return KvprPlacement().part_weight(self.models[model], self.models[model].rate_per_s)

    def fixed(self, gpu: int) -> int:
        return sum(self.models[model].weight_bytes for model, gpus in self.here if gpu in gpus)

    def lacks(self, gpu: int, free_bytes: int, fixed_bytes: int) -> bool:
        kv_bytes = self.gpus[gpu].memory_bytes - fixed_bytes
        return kv_bytes <= 0 or free_bytes < FRACTION * kv_bytes


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[str, ModelDemand], list[GpuSlot], FleetView]:
    """Up to ten models of several sizes and degrees on up to six GPUs, some moving, some pending."""
    slots = [GpuSlot(id, id // 3, 100) for id in range(draw(st.integers(1, 6)))]
    facts = st.tuples(st.integers(5, 60), st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([1, 1, 1, 2]))
    models = {}
    for i in range(draw(st.integers(1, 10))):
        size, slo_s, tp = draw(facts)
        models[f"m{i}"] = ModelDemand(f"m{i}", 1.0, slo_s, tp, size, 1)
    free = {slot.id: 100 for slot in slots}
    engines: list[EngineView] = []
    for model in (*models.values(), *models.values()):
        before = [engine.status for engine in engines if engine.model == model.id]
        if draw(st.booleans()) or model.tp > len(slots) or Status.LOADING in before:
            continue
        on = tuple(sorted(draw(st.sets(st.integers(0, len(slots) - 1), min_size=model.tp, max_size=model.tp))))
        status = Status.LOADING if before else draw(st.sampled_from([*Status, Status.RESIDENT]))
        idle_s = draw(st.sampled_from([0.0, 46.0, 90.0]))
        if all(free[gpu] >= model.weight_bytes for gpu in on):
            engines.append(EngineView(len(engines), model.id, on, status, idle_s, int(idle_s == 0)))
            free.update({gpu: free[gpu] - model.weight_bytes for gpu in on})
    there = {engine.model for engine in engines if engine.status is not Status.DRAINING}
    absent = [id for id in models if id not in there and draw(st.booleans())]
    pending = tuple(Pending(id, 1, float(turn), float(turn)) for turn, id in enumerate(absent))
    left = {gpu: draw(st.integers(0, bytes)) for gpu, bytes in free.items()}
    rates = {id: draw(st.floats(0, 20)) for id in models}
    pressed = frozenset(gpu for gpu in free if draw(st.booleans()))
    return models, slots, FleetView(tuple(engines), pending, rates, left, pressed)


@given(fleets(), st.booleans())
def test_the_books_suggest_what_a_look_through_everything_does(
    fleet: tuple[dict[str, ModelDemand], list[GpuSlot], FleetView], moves: bool
) -> None:
    models, slots, seen = fleet
    prism = PrismResidency(models, slots, KvprPlacement())
    assert prism.suggest(10.0 if moves else 0.0, seen) == LiteralPrism(models, slots, seen).suggest(moves)
