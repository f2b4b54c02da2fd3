"""The ``balanced`` placement under rates that drift: a model moves when that pays for its bytes.

At regular times the policy predicts the late requests of the present placement from the observed rates, as ``balanced`` does.
It makes the one change that spares most, if that pays:

    late requests a second that it spares x horizon > requests that come while the weights of its new engines load

So nothing moves under a constant load once the placement is as good as single changes make it. A model with much to load moves
only if that spares more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fineserve_sim.policy.fleet.toward import Spot, toward
from fineserve_sim.policy.fleet.views import EngineView, FleetView, Status, Suggestion, next_multiple
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement import tp_groups
from fineserve_sim.policy.placement.balanced import REACH, Change, Group, Homes


@dataclass
class DriftingHomes:
    """``models`` by id, with profiles, their ``weight_bytes`` being all that an engine takes beside KV. ``replace_s``: seconds
    between two changes. ``horizon_s``: the seconds within which a change must pay. A model without requests for ``idle_s``
    gives way to one that waits. ``load_bytes_per_s``: the rate at which weights come to a GPU. Raises ValueError for times or
    rates that are not positive, and for a model without a profile."""

    models: Mapping[str, ModelDemand]
    gpus: Sequence[GpuSlot]
    replace_s: float = 60.0
    horizon_s: float = 600.0
    idle_s: float = 45.0
    load_bytes_per_s: float = 50e9

    def __post_init__(self) -> None:
        if min(self.replace_s, self.horizon_s, self.load_bytes_per_s) <= 0:
            raise ValueError("replace_s, horizon_s and load_bytes_per_s must be positive")
        if without := [id for id, model in self.models.items() if not model.profile]:
            raise ValueError(f"model {without[0]} has no profile, by which late requests are predicted")
        self._next_s = self.replace_s
        self._groups = {tp: tp_groups(self.gpus, tp) for tp in {model.tp for model in self.models.values()}}
        self._wanted: dict[str, tuple[Group, ...]] | None = None

    def suggest(self, now: float, view: FleetView) -> list[Suggestion]:
        """The suggestions that lead to the wanted placement, which changes when it is time and nothing moves."""
        if self._wanted is None:
            self._wanted = _present(view)
        self._forget_lost(view)
        self._admit(view)
        still = all(engine.status is Status.RESIDENT for engine in view.engines)
        if still and view.free_bytes and now >= self._next_s:
            self._next_s = next_multiple(self.replace_s, now)
            self._wanted |= self._paying(view) or {}
        spots = [(id, group) for id, groups in self._wanted.items() for group in groups]
        return list(toward(spots, view, {id: model.weight_bytes for id, model in self.models.items()}))

    def _forget_lost(self, view: FleetView) -> None:
        """Groups with a GPU that is lost are wanted no more."""
        assert self._wanted is not None
        there = view.free_bytes.keys()
        self._wanted = {
            id: tuple(group for group in groups if there >= set(group)) for id, groups in self._wanted.items()
        }

    def _admit(self, view: FleetView) -> None:
        """A model that waits without a place gets one where it fits now, and where the fewest requests are late. Else it takes
        the place of models that have been idle for long."""
        assert self._wanted is not None
        for pending in view.pending:
            if self._wanted.get(pending.model):
                continue
            model = self.models[pending.model]
            fits = [group for group in self._groups[model.tp] if self._has_room(model, group, view, ())]
            if fits:
                homes = self._homes(view)
                self._wanted[model.id] = (min(fits, key=lambda group: homes.added(model.id, group)),)
            elif (found := self._displaced(model, view)) is not None:
                group, idle = found
                for engine in idle:
                    self._wanted[engine.model] = tuple(own for own in self._wanted[engine.model] if own != engine.gpus)
                self._wanted[model.id] = (group,)

    def _has_room(self, model: ModelDemand, group: Group, view: FleetView, going: Sequence[EngineView]) -> bool:
        """Whether the model fits on these GPUs once some engines have gone and the engines with promised room have come."""
        free_bytes = {gpu: view.free_bytes.get(gpu, 0) for gpu in group}
        changes = [(engine.model, engine.gpus, 1) for engine in going]
        changes += [(id, gpus, -1) for id, gpus in self._promised(view)]
        for id, gpus, sign in changes:
            for gpu in free_bytes.keys() & set(gpus):
                free_bytes[gpu] += sign * self.models[id].weight_bytes
        return min(free_bytes.values()) >= model.weight_bytes

    def _promised(self, view: FleetView) -> list[Spot]:
        """The spots that are wanted and have no engine yet."""
        assert self._wanted is not None
        there = {(engine.model, engine.gpus) for engine in view.engines if engine.status is not Status.DRAINING}
        return [(id, gpus) for id, groups in self._wanted.items() for gpus in groups if (id, gpus) not in there]

    def _displaced(self, model: ModelDemand, view: FleetView) -> tuple[Group, list[EngineView]] | None:
        """A group, and the idle engines that must leave it: those whose models get the fewest requests."""
        found = []
        for group in self._groups[model.tp]:
            idle = [engine for engine in view.engines if set(engine.gpus) & set(group) and self._is_idle(engine)]
            if view.free_bytes.keys() >= set(group) and idle and self._has_room(model, group, view, idle):
                found.append((sum(view.rates_per_s[engine.model] for engine in idle), group, idle))
        if not found:
            return None
        _, group, idle = min(found, key=lambda each: each[:2])
        return group, idle

    def _is_idle(self, engine: EngineView) -> bool:
        assert self._wanted is not None
        wanted = engine.gpus in self._wanted.get(engine.model, ())
        return wanted and engine.status is Status.RESIDENT and not engine.requests and engine.idle_s >= self.idle_s

    def _paying(self, view: FleetView) -> Change | None:
        """The change that spares most beyond its cost, if one does."""
        return self._homes(view).best(
            max(1, REACH // len(self.gpus)), 0.0, lambda change: self._waiting(change, view) / self.horizon_s
        )

    def _homes(self, view: FleetView) -> Homes:
        assert self._wanted is not None
        models = [replace(model, rate_per_s=view.rates_per_s[id]) for id, model in self.models.items()]
        homes = Homes(models, self.gpus, {id: groups for id, groups in self._wanted.items() if groups})
        for gpu in self.gpus:
            if gpu.id in view.free_bytes:
                homes.open(gpu)
        return homes

    def _waiting(self, change: Change, view: FleetView) -> float:
        """The requests that come while the weights of a change's new engines load."""
        return sum(
            view.rates_per_s[id] * len(new) * self.models[id].weight_bytes / self.load_bytes_per_s
            for id, new in self._new(change)
        )

    def _new(self, change: Change) -> Iterator[tuple[str, list[Group]]]:
        assert self._wanted is not None
        for id, groups in change.items():
            yield id, [group for group in groups if group not in self._wanted.get(id, ())]


def _present(view: FleetView) -> dict[str, tuple[Group, ...]]:
    """Where engines are or will be, by model."""
    spots: list[Spot] = [(engine.model, engine.gpus) for engine in view.engines if engine.status is not Status.DRAINING]
    return {id: tuple(group for model, group in spots if model == id) for id, _ in spots}
