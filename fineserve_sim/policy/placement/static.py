"""Placements that follow no score: pinned by hand, one model per GPU (the Dedicated baseline), or one model on all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, Placement
from fineserve_sim.policy.placement.tp_groups import tp_groups


class PinnedPlacement:
    """Each model on the GPU groups that the user names, one replica per group.

    For example ``{"8b": [(0,), (1,)], "70b": [(2, 3)]}``: two replicas of 8b, one of 70b with TP 2.
    The rate is split evenly over the replicas. Models that are not named stay unplaced.
    """

    def __init__(self, groups: Mapping[str, Sequence[Sequence[int]]]) -> None:
        self._groups = {model: [tuple(group) for group in replicas] for model, replicas in groups.items()}

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        """Raises ValueError if a pinned model is not there, if a group does not match the TP degree of its model, names
        an unknown GPU or one GPU twice, or if weights exceed the memory of a GPU."""
        unknown = self._groups.keys() - {model.id for model in models}
        if unknown:
            raise ValueError(
                f"the placement pins {sorted(unknown)}, but there are only {[model.id for model in models]}"
            )
        instances: list[Instance] = []
        for model in models:
            replicas = self._groups.get(model.id, [])
            for replica, group in enumerate(replicas):
                _check_group(model, group, gpus)
                rate_per_s = model.rate_per_s / len(replicas)
                instances.append(Instance(model.id, replica, group, rate_per_s, model.weight_bytes))
        _check_memory(instances, gpus)
        unplaced = tuple(model.id for model in models if not self._groups.get(model.id))
        return Placement(tuple(instances), unplaced)


class DedicatedPlacement:
    """Every model alone on a GPU or TP group of its own. Larger TP degrees go first, then larger weights, then
    lower ids, each to the first free group that holds its weights; models for which none is left are unplaced."""

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        memory_bytes = {gpu.id: gpu.memory_bytes for gpu in gpus}
        free = set(memory_bytes)
        instances = []
        for model in sorted(models, key=lambda model: (-model.tp, -model.weight_bytes, model.id)):
            fitting = (
                group
                for group in tp_groups(gpus, model.tp)
                if free.issuperset(group) and all(memory_bytes[gpu] >= model.weight_bytes for gpu in group)
            )
            group = next(fitting, None)
            if group is not None:
                free.difference_update(group)
                instances.append(Instance(model.id, 0, group, model.rate_per_s, model.weight_bytes))
        placed = {instance.model for instance in instances}
        return Placement(tuple(instances), unplaced=tuple(model.id for model in models if model.id not in placed))


class ReplicasPlacement:
    """Replicas of one model on every GPU or TP group that holds its weights, the rate split evenly over them."""

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        """Raises ValueError unless there is exactly one model."""
        if len(models) != 1:
            raise ValueError(f"replicas of one model fill the cluster, but there are {[model.id for model in models]}")
        (model,) = models
        memory_bytes = {gpu.id: gpu.memory_bytes for gpu in gpus}
        groups = [
            group
            for group in tp_groups(gpus, model.tp)
            if all(memory_bytes[gpu] >= model.weight_bytes for gpu in group)
        ]
        instances = tuple(
            Instance(model.id, replica, group, model.rate_per_s / len(groups), model.weight_bytes)
            for replica, group in enumerate(groups)
        )
        return Placement(instances, unplaced=() if instances else (model.id,))


def _check_group(model: ModelDemand, group: tuple[int, ...], gpus: Sequence[GpuSlot]) -> None:
    ids = {gpu.id for gpu in gpus}
    if len(group) != model.tp or len(set(group)) != len(group):
        raise ValueError(f"model {model.id} needs {model.tp} distinct GPUs, but is pinned to {group}")
    if not ids.issuperset(group):
        raise ValueError(f"model {model.id} is pinned to GPUs {group}, but the cluster has {sorted(ids)}")


def _check_memory(instances: Sequence[Instance], gpus: Sequence[GpuSlot]) -> None:
    needed_bytes: Counter[int] = Counter()
    for instance in instances:
        needed_bytes.update(dict.fromkeys(instance.gpus, instance.footprint_bytes))
    for gpu in gpus:
        if needed_bytes[gpu.id] > gpu.memory_bytes:
            raise ValueError(
                f"the weights pinned to GPU {gpu.id} need {needed_bytes[gpu.id] / 2**30:.1f} GiB, "
                f"but it has {gpu.memory_bytes / 2**30:.1f} GiB"
            )
