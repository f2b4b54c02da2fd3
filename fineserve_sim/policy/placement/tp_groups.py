"""Candidate GPU groups of a tensor-parallel model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from fineserve_sim.policy.interfaces import GpuSlot


def tp_groups(gpus: Iterable[GpuSlot], tp: int) -> list[tuple[int, ...]]:
    """Aligned, contiguous groups of ``tp`` GPU ids inside one node, by node and id. The GPUs that are left over at
    the end of a node form no group. Raises ValueError if ``tp`` < 1."""
    if tp < 1:
        raise ValueError(f"tensor-parallel degree is {tp}: it must be at least 1")
    nodes: defaultdict[int, list[int]] = defaultdict(list)
    for gpu in sorted(gpus, key=lambda gpu: (gpu.node, gpu.id)):
        nodes[gpu.node].append(gpu.id)
    return [tuple(ids[start : start + tp]) for ids in nodes.values() for start in range(0, len(ids) - tp + 1, tp)]
