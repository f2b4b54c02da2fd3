"""Placement: the GPUs of each model, and the parts that placement policies share."""

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


def placed_on(
    models: Sequence[ModelDemand], homes: Mapping[str, Sequence[tuple[int, ...]]], gpus: Iterable[GpuSlot]
) -> Placement:
    """A replica of each model on each of its ``homes``, in that order, charged with its weights. Models without a home are
    unplaced. The rate is split over the replicas by the most that each can serve: evenly on GPUs of one kind."""
    by_id, kind_of = {model.id: model for model in models}, {gpu.id: gpu.kind for gpu in gpus}
    instances = [
        Instance(id, replica, group, rate_per_s, by_id[id].weight_bytes)
        for id, groups in homes.items()
        for replica, (group, rate_per_s) in enumerate(
            zip(groups, split_rate(by_id[id], [kind_of[group[0]] for group in groups]), strict=True)
        )
    ]
    return Placement(tuple(instances), unplaced=tuple(model.id for model in models if not homes.get(model.id)))


def split_rate(model: ModelDemand, kinds: Sequence[int]) -> list[float]:
    """The rate of each replica of a model, on GPUs of these ``kinds``."""
    most_per_s = {kind: model.on(kind).most_per_s for kind in set(kinds)} if model.by_kind else {}
    if len(set(most_per_s.values())) < 2:
        return [model.rate_per_s / len(kinds) for _ in kinds]
    together_per_s = sum(most_per_s[kind] for kind in kinds)
    return [model.rate_per_s * most_per_s[kind] / together_per_s for kind in kinds]


def tp_groups(gpus: Iterable[GpuSlot], tp: int) -> list[tuple[int, ...]]:
    """Aligned, contiguous groups of ``tp`` GPU ids inside one node, by node and id. GPUs left over at the end of a node form
    no group. Raises ValueError if ``tp`` < 1."""
    if tp < 1:
        raise ValueError(f"tensor-parallel degree is {tp}: it must be at least 1")
    in_order = sorted(gpus, key=lambda gpu: (gpu.node, gpu.id))
    nodes = [[gpu.id for gpu in members] for _, members in groupby(in_order, key=lambda gpu: gpu.node)]
    return [tuple(ids[start : start + tp]) for ids in nodes for start in range(0, len(ids) - tp + 1, tp)]
