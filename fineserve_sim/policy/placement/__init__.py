"""Placement: which model goes on which GPUs, and what the policies share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args, get_origin, get_type_hints

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, Placement


def check_options(policy: object) -> None:
    """Raises ValueError unless each field of a Literal type has one of the values of its type."""
    for name, kind in get_type_hints(type(policy)).items():
        value = getattr(policy, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            *others, last = map(repr, get_args(kind))
            raise ValueError(f"{name} is {value!r}: use {', '.join(others)} or {last}")


def one_replica_each(models: Sequence[ModelDemand], homes: Mapping[str, tuple[int, ...]]) -> Placement:
    """Models on their ``homes``, in that order, charged with their weights; those without a home are unplaced."""
    by_id = {model.id: model for model in models}
    return Placement(
        tuple(Instance(id, 0, gpus, by_id[id].rate_per_s, by_id[id].weight_bytes) for id, gpus in homes.items()),
        unplaced=tuple(model.id for model in models if model.id not in homes),
    )


def tp_groups(gpus: Iterable[GpuSlot], tp: int) -> list[tuple[int, ...]]:
    """Aligned, contiguous groups of ``tp`` GPU ids inside one node, by node and id. The GPUs that are left over at
    the end of a node form no group. Raises ValueError if ``tp`` < 1."""
    if tp < 1:
        raise ValueError(f"tensor-parallel degree is {tp}: it must be at least 1")
    nodes: defaultdict[int, list[int]] = defaultdict(list)
    for gpu in sorted(gpus, key=lambda gpu: (gpu.node, gpu.id)):
        nodes[gpu.node].append(gpu.id)
    return [tuple(ids[start : start + tp]) for ids in nodes.values() for start in range(0, len(ids) - tp + 1, tp)]
