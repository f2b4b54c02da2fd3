"""Offline placement of MuxServe, which MuxServe++ shares (the baselines of Prism).

The GPUs of a node are cut into *meshes*; models of one mesh share its GPUs and their KV memory, and all run with the mesh's
tensor-parallel degree. Every way to cut is tried. For each, models go by falling compute demand (request rate x weights)
to the mesh where they raise the estimated total throughput most; the cut with the largest total wins.

A mesh is estimated from profiles. Alone, a batch of b requests has the throughput

    b / (T_prefill(b) + out * T_decode(b))

and a model runs with the smallest b that meets its rate, found by bisection. Together, prefills come one after another
and decodes side by side, so everybody waits for all prefills: T_prefill becomes their sum. When the batches do not all
fit into the KV memory that the engines leave, all shrink by one factor, found by bisection as well.

The TP degree of a model is given here, so a mesh takes the models of its own size only, and cuts into sizes that no model has
are left out. If no cut places all models, KVPR's greedy does (``kvpr.py``). Ties, frequent while rates are met
everywhere, go to the mesh with less compute demand; the original's choice among them is not documented.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations_with_replacement, product
from typing import NamedTuple

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, OperatingPoint, Placement
from fineserve_sim.policy.placement.kvpr import KvprPlacement

BISECTIONS = 30
"""Halvings of a batch factor in (0, 1]: a billionth is finer than any profile."""


class Batch(NamedTuple):
    """One model's operation at a (fractional) batch size: seconds that its prefills and its decodes take while the batch is
    served once, and KV bytes per GPU."""

    size: float
    prefill_s: float
    decode_s: float
    kv_bytes: float


def batch_at(model: ModelDemand, size: float) -> Batch:
    """The profile at a batch size, linear between its points; below the first, a part of the time in use. Raises
    ValueError if the model has no profile."""
    points = model.profile
    if not points:
        raise ValueError(f"model {model.id} has no profile, which MuxServe's optimiser needs")
    upper = bisect_left([point.batch for point in points], min(size, points[-1].batch))
    high = _profiled(points[upper])
    if upper == 0:
        part = size / high.size
        return Batch(size, high.prefill_s * part, high.decode_s, high.kv_bytes * part)
    low = _profiled(points[upper - 1])
    part = min(1.0, (size - low.size) / (high.size - low.size))
    return Batch(*(start + part * (end - start) for start, end in zip(low, high, strict=True)))


def _profiled(point: OperatingPoint) -> Batch:
    """What is not prefill of the time in which a batch is served once is decode."""
    served_s = point.batch / point.throughput_per_s
    return Batch(point.batch, point.ttft_s, max(0.0, served_s - point.ttft_s), point.kv_bytes)


@cache
def least_batch(model: ModelDemand) -> float:
    """The smallest batch size at which the model alone meets its rate; the largest profiled one if none does."""
    low, high = 0.0, batch_at(model, math.inf).size
    if _alone_per_s(model, high) < model.rate_per_s:
        return high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if _alone_per_s(model, middle) >= model.rate_per_s else (middle, high)
    return high


def _alone_per_s(model: ModelDemand, size: float) -> float:
    batch = batch_at(model, size)
    return batch.size / (batch.prefill_s + batch.decode_s)


def mesh_throughput(models: Sequence[ModelDemand], memory_bytes: int) -> float:
    """Requests per second that the models of a mesh complete together, each at most its rate; ``memory_bytes`` is the usable
    memory of each GPU. Minus infinity when their engines leave no memory for KV."""
    kv_bytes = memory_bytes - sum(model.engine_bytes for model in models)
    if kv_bytes <= 0:
        return float("-inf")
    wanted = {model.id: least_batch(model) for model in models}

    def batches(factor: float) -> list[Batch]:
        return [batch_at(model, wanted[model.id] * factor) for model in models]

    factor = 1.0
    if sum(batch.kv_bytes for batch in batches(1.0)) > kv_bytes:
        low = 0.0
        for _ in range(BISECTIONS):
            middle = (low + factor) / 2
            fits = sum(batch.kv_bytes for batch in batches(middle)) <= kv_bytes
            low, factor = (middle, factor) if fits else (low, middle)
        factor = low
    chosen = batches(factor)
    prefill_s = sum(batch.prefill_s for batch in chosen)
    return sum(
        min(model.rate_per_s, batch.size / (prefill_s + batch.decode_s))
        for model, batch in zip(models, chosen, strict=True)
    )


@dataclass(slots=True)
class _Mesh:
    gpus: tuple[int, ...]
    memory_bytes: int
    models: list[ModelDemand] = field(default_factory=list)
    throughput_per_s: float = 0.0
    compute_demand: float = 0.0

    def gain_per_s(self, model: ModelDemand) -> float:
        return mesh_throughput([*self.models, model], self.memory_bytes) - self.throughput_per_s

    def add(self, model: ModelDemand) -> None:
        self.models.append(model)
        self.throughput_per_s = mesh_throughput(self.models, self.memory_bytes)
        self.compute_demand += _compute_demand(model)


class MuxServePlacement:
    """MuxServe's optimiser, run once on mean rates."""

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        """Raises ValueError if a model has no profile."""
        order = sorted(models, key=lambda model: (-_compute_demand(model), model.id))
        sizes = {model.tp for model in models}
        found = [meshes for cut in _cuts(gpus, sizes) if (meshes := _assign(order, cut)) is not None]
        if not found:
            return KvprPlacement(charges="engine").place(models, gpus)
        best = max(found, key=lambda meshes: sum(mesh.throughput_per_s for mesh in meshes))  # the first of equals
        home = {model.id: mesh.gpus for mesh in best for model in mesh.models}
        return Placement(
            tuple(Instance(model.id, 0, home[model.id], model.rate_per_s, model.weight_bytes) for model in order)
        )


def _compute_demand(model: ModelDemand) -> float:
    """Request rate x weights of all shards: proportional to the FLOPs per second that the model asks for."""
    return model.rate_per_s * model.weight_bytes * model.tp


def _assign(order: Sequence[ModelDemand], cut: Sequence[tuple[GpuSlot, ...]]) -> list[_Mesh] | None:
    """Models to meshes by the largest gain; None if one fits nowhere."""
    meshes = [_Mesh(tuple(gpu.id for gpu in gpus), min(gpu.memory_bytes for gpu in gpus)) for gpus in cut]
    for model in order:
        able = [(mesh.gain_per_s(model), mesh) for mesh in meshes if len(mesh.gpus) == model.tp]
        able = [(gain, mesh) for gain, mesh in able if gain > float("-inf")]
        if not able:
            return None
        _, best = min(able, key=lambda one: (-round(one[0], 9), one[1].compute_demand, one[1].gpus))
        best.add(model)
    return meshes


def _cuts(gpus: Sequence[GpuSlot], sizes: set[int]) -> Iterator[tuple[tuple[GpuSlot, ...], ...]]:
    """Every way to cut all nodes into meshes of these sizes, contiguous, larger ones first. GPUs that no size fits stay
    unused. Nodes of one shape are interchangeable: of cuts that differ by a permutation of such nodes one is enough."""
    nodes: defaultdict[int, list[GpuSlot]] = defaultdict(list)
    for gpu in sorted(gpus, key=lambda gpu: (gpu.node, gpu.id)):
        nodes[gpu.node].append(gpu)
    alike: defaultdict[tuple[int, ...], list[list[GpuSlot]]] = defaultdict(list)
    for members in nodes.values():
        alike[tuple(gpu.memory_bytes for gpu in members)].append(members)
    choices = [
        [
            list(zip(group, sums, strict=True))
            for sums in combinations_with_replacement(_sums(len(shape), sizes), len(group))
        ]
        for shape, group in alike.items()
    ]
    for choice in product(*choices):
        pieces = [piece for group in choice for members, sizes_here in group for piece in _pieces(members, sizes_here)]
        yield tuple(sorted(pieces, key=lambda piece: piece[0].id))


def _pieces(members: Sequence[GpuSlot], sizes: Sequence[int]) -> Iterator[tuple[GpuSlot, ...]]:
    start = 0
    for size in sizes:
        yield tuple(members[start : start + size])
        start += size


def _sums(total: int, sizes: set[int]) -> list[tuple[int, ...]]:
    """Falling sequences of sizes that leave no room for another one within ``total``."""
    found: list[tuple[int, ...]] = []

    def extend(taken: tuple[int, ...], left: int, allowed: Sequence[int]) -> None:
        if left < min(sizes):
            found.append(taken)
        for index, size in enumerate(allowed):
            if size <= left:
                extend((*taken, size), left - size, allowed[index:])

    extend((), total, sorted(sizes, reverse=True))
    return found
