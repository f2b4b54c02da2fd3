"""Placements that follow no score: pinned by hand, one model per GPU (the Dedicated baseline), one model on all, in turn."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import chain

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, Placement
from fineserve_sim.policy.placement import placed_on, tp_groups


class PinnedPlacement:
    """Each model on the GPU groups that the user names, one replica per group.

    For example ``{"8b": [(0,), (1,)], "70b": [(2, 3)]}``: two replicas of 8b, one of 70b with TP 2.
    Models that are not named stay unplaced.
    """

    def __init__(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self._groups = {model: [tuple(group) for group in replicas] for model, replicas in groups.items()}

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        """Raises ValueError if a pinned model is not there, if a group does not match the TP degree of its model, names
        an unknown GPU or one GPU twice, or if engines take more than a GPU has."""
        ids = [model.id for model in models]
        if unknown := self._groups.keys() - set(ids):
            raise ValueError(f"the placement pins {sorted(unknown)}, but there are only {ids}")
        homes = {id: self._groups.get(id, []) for id in ids}
        known = {gpu.id for gpu in gpus}
        needed_bytes: Counter[int] = Counter()
        for model in models:
            for group in homes[model.id]:
                if len(group) != model.tp or len(set(group)) != len(group):
                    raise ValueError(f"model {model.id} needs {model.tp} distinct GPUs, but is pinned to {group}")
                if not known.issuperset(group):
                    raise ValueError(f"model {model.id} is pinned to GPUs {group}, but the cluster has {sorted(known)}")
                needed_bytes.update(dict.fromkeys(group, model.engine_bytes))
        for gpu in gpus:
            if needed_bytes[gpu.id] > gpu.memory_bytes:
                raise ValueError(
                    f"the engines pinned to GPU {gpu.id} need {needed_bytes[gpu.id] / 2**30:.1f} GiB, "
                    f"but it has {gpu.memory_bytes / 2**30:.1f} GiB"
                )
        return placed_on(models, homes)


class ReplicasPlacement:
    """Replicas of one model on every GPU or TP group that holds its engine, the rate split evenly over them."""

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        """Raises ValueError unless there is exactly one model."""
        if len(models) != 1:
            raise ValueError(f"replicas of one model fill the cluster, but there are {[model.id for model in models]}")
        return placed_on(models, {models[0].id: _holding(models[0], gpus, {gpu.id: gpu.memory_bytes for gpu in gpus})})


class DedicatedPlacement:
    """Every model alone on a GPU or TP group of its own. Larger TP degrees go first, then larger weights, then
    lower ids, each to the first free group that holds its engine; models for which none is left are unplaced."""

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        free_bytes = {gpu.id: gpu.memory_bytes for gpu in gpus}
        homes: dict[str, list[tuple[int, ...]]] = {}
        for model in sorted(models, key=lambda model: (-model.tp, -model.weight_bytes, model.id)):
            homes[model.id] = _holding(model, gpus, free_bytes)[:1]
            for gpu in chain.from_iterable(homes[model.id]):
                del free_bytes[gpu]
        return placed_on(models, homes)


class RoundRobinPlacement:
    """Placement in turn: what an operator does by hand, and the start of Prism without its global scheduler (PR-10-global).

    Models by falling weights of all their parts, each to the next GPU or TP group in turn. A group that does not hold
    the engine, with at least a byte left for KV, is passed over; models that fit nowhere are unplaced. Ties: lower id.
    """

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        left_bytes = {gpu.id: gpu.memory_bytes for gpu in gpus}
        in_turn = {model.tp: deque(tp_groups(gpus, model.tp)) for model in models}
        homes: dict[str, list[tuple[int, ...]]] = {}
        for model in sorted(models, key=lambda model: (-model.weight_bytes * model.tp, model.id)):
            groups = in_turn[model.tp]
            for group in tuple(groups):
                groups.rotate(-1)
                if all(left_bytes[gpu] > model.engine_bytes for gpu in group):
                    homes[model.id] = [group]
                    for gpu in group:
                        left_bytes[gpu] -= model.engine_bytes
                    break
        return placed_on(models, homes)


def _holding(model: ModelDemand, gpus: Sequence[GpuSlot], free_bytes: Mapping[int, int]) -> list[tuple[int, ...]]:
    """The groups whose GPUs are all free and hold the engine."""
    groups = tp_groups(gpus, model.tp)
    return [group for group in groups if all(free_bytes.get(gpu, -1) >= model.engine_bytes for gpu in group)]
