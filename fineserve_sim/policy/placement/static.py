"""Placements that follow no score: pinned by hand, one model per GPU (the Dedicated baseline), one model on all, in turn."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, Placement
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement import placed_on, tp_groups


class PinnedPlacement:
    """Each model on the GPU groups that the user names, one replica per group.

    For example ``{"8b": [(0,), (1,)], "70b": [(2, 3)]}``: two replicas of 8b, one of 70b with TP 2.
    Models that are not named stay unplaced.
    """

    def __init__(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self._groups = {model: [tuple(group) for group in replicas] for model, replicas in groups.items()}

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        """Raises ValueError if a pinned model is not there, or if engines take more than a GPU has. ValueError, too, if a
        group does not match the TP degree of its model, or names an unknown GPU or one GPU twice."""
        ids = [model.id for model in models]
        if unknown := self._groups.keys() - set(ids):
            raise ValueError(f"the placement pins {sorted(unknown)}, but there are only {ids}")
        homes = {id: self._groups.get(id, []) for id in ids}
        known = {gpu.id for gpu in gpus}
        ledger = MemoryLedger.of(gpus)
        for model in models:
            for number, group in enumerate(homes[model.id]):
                if len(group) != model.tp or len(set(group)) != len(group):
                    raise ValueError(f"model {model.id} needs {model.tp} distinct GPUs, but is pinned to {group}")
                if not known.issuperset(group):
                    raise ValueError(f"model {model.id} is pinned to GPUs {group}, but the cluster has {sorted(known)}")
                try:
                    ledger.claim((model.id, number), group, model.engine_bytes)
                except ValueError as error:
                    raise ValueError(f"model {model.id} is pinned to GPUs {group}, but {error}") from None
        return placed_on(models, homes, gpus)


class ReplicasPlacement:
    """Replicas of one model on every GPU or TP group that holds its engine, the rate split over them."""

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        """Raises ValueError unless there is exactly one model."""
        if len(models) != 1:
            there = [model.id for model in models]
            raise ValueError(f"replicas of one model fill the cluster, but there are {there}; take placement pinned")
        ledger, (model,) = MemoryLedger.of(gpus), models
        groups = tp_groups(gpus, model.tp)
        homes = {model.id: [group for group in groups if ledger.has_room(group, model.engine_bytes)]}
        return placed_on(models, homes, gpus)


class DedicatedPlacement:
    """Every model alone on a GPU or TP group of its own. Larger TP degrees go first, then larger weights, then
    lower ids, each to the first free group that holds its engine; models for which none is left are unplaced."""

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        ledger, used = MemoryLedger.of(gpus), set[int]()
        homes: dict[str, list[tuple[int, ...]]] = {}
        for model in sorted(models, key=lambda model: (-model.tp, -model.weight_bytes, model.id)):
            free = (group for group in tp_groups(gpus, model.tp) if used.isdisjoint(group))
            home = next((group for group in free if ledger.has_room(group, model.engine_bytes)), ())
            homes[model.id] = [home] if home else []
            used.update(home)
        return placed_on(models, homes, gpus)


class RoundRobinPlacement:
    """Placement in turn, as an operator does by hand. Prism without its global scheduler (PR-10-global) starts so.

    Models by falling weights of all their parts, each to the next GPU or TP group in turn. A group that does not hold
    the engine, with at least a byte left for KV, is passed over; models that fit nowhere are unplaced. Ties: lower id.
    """

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        ledger = MemoryLedger.of(gpus)
        in_turn = {model.tp: deque(tp_groups(gpus, model.tp)) for model in models}
        homes: dict[str, list[tuple[int, ...]]] = {}
        for model in sorted(models, key=lambda model: (-model.weight_bytes * model.tp, model.id)):
            groups = in_turn[model.tp]
            for group in tuple(groups):
                groups.rotate(-1)
                if ledger.has_room(group, model.engine_bytes):
                    homes[model.id] = [group]
                    ledger.claim(model.id, group, model.engine_bytes)
                    break
        return placed_on(models, homes, gpus)
