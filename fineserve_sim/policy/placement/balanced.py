"""Balanced placement: each GPU goes where requests would be late, by the closed forms of ``queueing``.

All models are packed first, the largest first, each on the first GPUs with room. The GPUs beyond are then given one after the
other, in the order of their ids. After each, engines of the GPUs with the most late requests move, change places, get a
replica beside them or lose one, as long as fewer requests are late. No step of it depends on GPUs to come and none is for
the worse. So once all models have a place, more GPUs never raise the late requests that are predicted.

A replica costs what decoding on one more GPU takes from its neighbours. So models are replicated where their rate asks for
it, and no further.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from math import inf

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, Placement
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement import placed_on, tp_groups
from fineserve_sim.policy.placement.queueing import PARTS, Load, late_per_s, load_of, rates

Group = tuple[int, ...]
Change = Mapping[str, tuple[Group, ...]]
"""The new groups of some models."""

Loads = list[Load]
"""The load of one engine in each of the ``PARTS``."""

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
        self._loads: dict[tuple[str, float, int], Loads] = {}
        self._here: dict[int, dict[str, Loads]] = {gpu.id: {} for gpu in gpus}
        for id, own in groups.items():
            for group in own:
                for gpu in group:
                    self._here[gpu][id] = self._load(id, own, gpu)
        self._late: dict[int, float] = {}

    def open(self, gpu: GpuSlot) -> None:
        """Engines may come to this GPU from now on."""
        self._late[gpu.id] = self._predicted(gpu.id, self._here[gpu.id].values())

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
        for id, own, targets in self._candidates(reach):
            without = {gpu: self._predicted(gpu, self._after(gpu, {id: ()}).values()) for gpu in own}
            for change in self._changes(id, own, targets):
                gain = self._gain(change, least, without) + cost(change)
                if gain < least:
                    best, least = change, gain
        return best

    def added(self, id: str, group: Group) -> float:
        """How many more requests a second are late with a first engine of this model on these GPUs; infinite without room."""
        self.groups.setdefault(id, ())
        return self._gain({id: (group,)}, inf, {})

    def _load(self, id: str, groups: Sequence[Group], gpu: int) -> Loads:
        """The load of a model's engine on this GPU, where the model's engines are on all ``groups``."""
        kind, engines = self._kind_of[gpu], float(len(groups))
        if self._most_per_s:  # so many of this kind would have its part of the requests
            together_per_s = sum(self._most_per_s[id, self._kind_of[group[0]]] for group in groups)
            engines = together_per_s / self._most_per_s[id, kind]
        loads = self._loads.get((id, engines, kind))
        if loads is None:
            model = self._models[id].on(kind)
            loads = self._loads[id, engines, kind] = [load_of(model, engines, times) for times in rates(model)]
        return loads

    def _predicted(self, gpu: int, here: Collection[Loads], most: float = inf) -> float:
        """Late requests a second of these engines on a GPU; infinite if there are at least ``most``."""
        memory_bytes, late = self._memory_bytes[gpu], 0.0
        for number in reversed(range(len(PARTS))):  # the busiest first
            late += PARTS[number] * late_per_s([loads[number] for loads in here], memory_bytes)
            if late >= most:
                return inf
        return late

    def _touched(self, change: Change) -> set[int]:
        """GPUs whose engines or their loads change."""
        touched: set[Group] = set()
        for id, groups in change.items():
            old, new = set(self.groups[id]), set(groups)
            touched |= old ^ new if len(old) == len(new) else old | new
        return {gpu for group in touched for gpu in group}

    def _gain(self, change: Change, least: float, without: Mapping[int, float]) -> float:
        """The change in late requests a second, negative where fewer are late. It is infinite unless it is below ``least``,
        and where engines do not fit. ``without``: how many are late on the GPUs that a model leaves. What comes in its
        place does not make them fewer."""
        touched = self._touched(change)
        gain = -sum([self._late[gpu] for gpu in touched], 0.0)
        if gain + sum(without.values(), 0.0) >= least:
            return inf
        for gpu in touched:
            after = self._after(gpu, change)
            if len(after) < len(self._here[gpu]):  # the model left, and none came
                gain += without[gpu]
            else:
                gain += self._predicted(gpu, after.values(), least - gain)
            if gain >= least:
                return inf
        return gain

    def _after(self, gpu: int, change: Change) -> dict[str, Loads]:
        """The models on a GPU after a change."""
        after = self._here[gpu].copy()
        for id, groups in change.items():
            after.pop(id, None)
            for group in groups:
                if gpu in group:
                    after[id] = self._load(id, groups, gpu)
        return after

    def _apply(self, change: Change) -> None:
        for gpu in self._touched(change):
            self._here[gpu] = self._after(gpu, change)
            self._late[gpu] = self._predicted(gpu, self._here[gpu].values())
        self.groups |= change

    def _candidates(self, reach: int) -> Iterator[tuple[str, Group, list[int]]]:
        """Engines on the GPUs with the most late requests, and the GPUs that may take some over: those with the fewest, and
        the newest."""
        sources = nlargest(reach, self._late, key=self._late.__getitem__)
        fewest = nsmallest(reach, self._late, key=self._late.__getitem__)
        targets = list(dict.fromkeys([next(reversed(self._late)), *fewest]))
        for source in sources:
            for id in self._here[source]:
                yield id, self._group_of[self._models[id].tp][source], targets

    def _changes(self, id: str, own: Group, targets: Iterable[int]) -> Iterator[Change]:
        """The model leaves its ``own`` group, moves to one of the targets, gets a replica there or changes places."""
        groups, group_of = self.groups[id], self._group_of[self._models[id].tp]
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
