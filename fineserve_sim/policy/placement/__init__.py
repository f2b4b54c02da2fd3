"""Placement: which model goes on which GPUs, and what the policies share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Literal, get_args, get_origin, get_type_hints

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, Placement


def check_options(policy: object) -> None:
    """Raises ValueError unless each field of a Literal type has one of the values of its type."""
    for name, kind in get_type_hints(type(policy)).items():
        value = getattr(policy, name)
        if get_origin(kind) is Literal and value not in get_args(kind):
            *others, last = map(repr, get_args(kind))
            raise ValueError(f"{name} is {value!r}: use {', '.join(others)} or {last}")


def placed_on(models: Sequence[ModelDemand], homes: Mapping[str, Sequence[tuple[int, ...]]]) -> Placement:
    """A replica of each model on each of its ``homes``, in that order, charged with its weights; the rate is split evenly
    over them. Models without a home are unplaced."""
    by_id = {model.id: model for model in models}
    instances = [
        Instance(id, replica, gpus, by_id[id].rate_per_s / len(groups), by_id[id].weight_bytes)
        for id, groups in homes.items()
        for replica, gpus in enumerate(groups)
    ]
    return Placement(tuple(instances), unplaced=tuple(model.id for model in models if not homes.get(model.id)))


def tp_groups(gpus: Iterable[GpuSlot], tp: int) -> list[tuple[int, ...]]:
    """Aligned, contiguous groups of ``tp`` GPU ids inside one node, by node and id. What is left over at the end of a node
    forms no group. Raises ValueError if ``tp`` < 1."""
    if tp < 1:
        raise ValueError(f"tensor-parallel degree is {tp}: it must be at least 1")
    in_order = sorted(gpus, key=lambda gpu: (gpu.node, gpu.id))
    nodes = [[gpu.id for gpu in members] for _, members in groupby(in_order, key=lambda gpu: gpu.node)]
    return [tuple(ids[start : start + tp]) for ids in nodes for start in range(0, len(ids) - tp + 1, tp)]
