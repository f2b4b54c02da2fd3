"""Balanced placement: each GPU goes where requests would be late, by the closed forms of ``queueing``.

All models are packed first, the largest first, each on the first GPUs with room. The GPUs beyond are then given one after the
other, in the order of their ids. After each, engines of the GPUs with the most late requests move, change places, get a
replica beside them or lose one, as long as fewer requests are late. No step of it depends on GPUs to come and none is for
the worse. So once all models have a place, more GPUs never raise the late requests that are predicted.

A replica costs what decoding on one more GPU takes from its neighbours. So models are replicated where their rate asks for
it, and no further.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from math import inf

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, Placement
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement import placed_on, tp_groups
from fineserve_sim.policy.placement.queueing import PARTS, Load, late_per_s, load_of, rates

Group = tuple[int, ...]
Change = Mapping[str, tuple[Group, ...]]
"""The new groups of some models."""

REACH = 64
"""Moves are tried from and to so many GPUs, divided by those in use: all of 8, the worst and the best of 64."""

GAIN = 1e-9
"""A change must spare this part of the late requests."""


class BalancedPlacement:
    """Fewest late requests by queueing. Models that fit nowhere are unplaced. Raises ValueError for a model without profile."""

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        in_order = sorted(gpus, key=lambda gpu: (gpu.node, gpu.id))
        packed = _packed(models, in_order)
        last = {gpu for group in packed.values() for gpu in group}
        homes = Homes(models, in_order, {id: (group,) for id, group in packed.items()})
        for number, gpu in enumerate(in_order, 1):
            homes.open(gpu)
            last.discard(gpu.id)
            if not last:
                homes.improve(max(1, REACH // number))
        return placed_on(models, {model.id: homes.groups.get(model.id, ()) for model in models}, gpus)


def _packed(models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> dict[str, Group]:
    """Models by falling degree and engine bytes, each on the first GPUs with room."""
    ledger = MemoryLedger.of(gpus)
    groups = {tp: tp_groups(gpus, tp) for tp in {model.tp for model in models}}
    least_bytes = {tp: min(model.engine_bytes for model in models if model.tp == tp) for tp in groups}
    found = {}
    for model in sorted(models, key=lambda model: (-model.tp, -model.engine_bytes, model.id)):
        group = next((each for each in groups[model.tp] if ledger.has_room(each, model.engine_bytes)), None)
        if group is not None:
            ledger.claim(model.id, group, model.engine_bytes)
            found[model.id] = group
            if not ledger.has_room(group, least_bytes[model.tp]):
                groups[model.tp].remove(group)
    return found


class Homes:
    """Where models are, and how many requests are late on each GPU that is open. ``groups``: of each model that has any, of
    the ones that ``tp_groups`` makes of these GPUs."""

    def __init__(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot], groups: Change) -> None:
        self._models = {model.id: model for model in models}
        self.groups: dict[str, tuple[Group, ...]] = dict(groups)
        self._memory_bytes = {gpu.id: gpu.memory_bytes for gpu in gpus}
        self._here: dict[int, list[str]] = {gpu.id: [] for gpu in gpus}
        for id, own in groups.items():
            for group in own:
                for gpu in group:
                    self._here[gpu].append(id)
        self._group_of = {
            tp: {gpu: group for group in tp_groups(gpus, tp) for gpu in group} for tp in {model.tp for model in models}
        }
        self._kind_of = {gpu.id: gpu.kind for gpu in gpus}
        self._most_per_s = {
            (model.id, kind): model.on(kind).most_per_s
            for model in models
            if model.by_kind
            for kind in set(self._kind_of.values())
        }
        self._loads: dict[tuple[str, float, int], list[Load]] = {}
        self._late: dict[int, float] = {}

    def open(self, gpu: GpuSlot) -> None:
        """Engines may come to this GPU from now on."""
        self._late[gpu.id] = self._predicted(gpu.id, self._here[gpu.id], {})

    def improve(self, reach: int) -> None:
        """Change what spares the most late requests, for as long as something does, at most a few times."""
        for _ in range(4 * reach):
            best = self.best(reach, -GAIN * sum(self._late.values()))
            if best is None:
                return
            self._apply(best)

    def best(self, reach: int, least: float, cost: Callable[[Change], float] = lambda change: 0.0) -> Change | None:
        """The change after which the fewest requests a second are late, its ``cost`` added; None where none gains more."""
        best = None
        for change in self._changes(reach):
            gain = self._gain(change, least) + cost(change)
            if gain < least:
                best, least = change, gain
        return best

    def added(self, id: str, group: Group) -> float:
        """How many more requests a second are late with a first engine of this model on these GPUs; infinite without room."""
        self.groups.setdefault(id, ())
        return self._gain({id: (group,)}, inf)

    def _load(self, id: str, groups: Sequence[Group], kind: int) -> list[Load]:
        """The load of a model's engine on GPUs of this kind in each of the ``PARTS``, where the model's engines are on all
        ``groups``."""
        engines: float = len(groups)
        if self._most_per_s:  # so many of this kind would have its part of the requests
            together_per_s = sum(self._most_per_s[id, self._kind_of[group[0]]] for group in groups)
            engines = together_per_s / self._most_per_s[id, kind]
        if (id, engines, kind) not in self._loads:
            model = self._models[id].on(kind)
            self._loads[id, engines, kind] = [load_of(model, engines, times) for times in rates(model)]
        return self._loads[id, engines, kind]

    def _predicted(self, gpu: int, here: Sequence[str], change: Change) -> float:
        kind = self._kind_of[gpu]
        loads = [self._load(id, change[id] if id in change else self.groups[id], kind) for id in here]
        in_parts = zip(PARTS, zip(*loads, strict=True), strict=True) if loads else ()
        return sum([part * late_per_s(each, self._memory_bytes[gpu]) for part, each in in_parts])

    def _touched(self, change: Change) -> set[int]:
        """GPUs whose engines or their loads change."""
        touched: set[Group] = set()
        for id, groups in change.items():
            old, new = set(self.groups[id]), set(groups)
            touched |= old ^ new if len(old) == len(new) else old | new
        return {gpu for group in touched for gpu in group}

    def _gain(self, change: Change, least: float) -> float:
        """The change in late requests a second, negative where fewer are late. It is infinite unless it is below ``least``,
        and where engines do not fit."""
        touched = self._touched(change)
        gain = -sum([self._late[gpu] for gpu in touched])
        if gain >= least:
            return inf
        for gpu in touched:
            gain += self._predicted(gpu, self._after(gpu, change), change)
            if gain >= least:
                return inf
        return gain

    def _after(self, gpu: int, change: Change) -> list[str]:
        """The models on a GPU after a change."""
        stay = [id for id in self._here[gpu] if id not in change]
        return stay + [id for id, groups in change.items() if any(gpu in group for group in groups)]

    def _apply(self, change: Change) -> None:
        touched = self._touched(change)
        for gpu in touched:
            self._here[gpu] = self._after(gpu, change)
        self.groups |= change
        for gpu in touched:
            self._late[gpu] = self._predicted(gpu, self._here[gpu], {})

    def _changes(self, reach: int) -> Iterator[Change]:
        """Changes that may help the GPUs with the most late requests: to those with the fewest, and to the newest."""
        sources = nlargest(reach, self._late, key=self._late.__getitem__)
        targets = dict.fromkeys([next(reversed(self._late)), *nsmallest(reach, self._late, key=self._late.__getitem__)])
        for source in sources:
            for id in self._here[source]:
                groups, group_of = self.groups[id], self._group_of[self._models[id].tp]
                own = group_of[source]
                if len(groups) > 1:
                    yield {id: tuple(group for group in groups if group != own)}
                for target in targets:
                    group = group_of.get(target)
                    if group is None or group in groups or not all(gpu in self._late for gpu in group):
                        continue
                    moved = tuple(group if each == own else each for each in groups)
                    yield {id: moved}
                    yield {id: (*groups, group)}
                    yield from self._exchanges(id, moved, own, group)

    def _exchanges(self, id: str, moved: tuple[Group, ...], own: Group, group: Group) -> Iterator[Change]:
        """The model moves, and one of its degree comes in its place."""
        for other in self._here[group[0]]:
            theirs = self.groups[other]
            if group in theirs and own not in theirs:
                yield {id: moved, other: tuple(own if each == group else each for each in theirs)}
