"""Offline placement of MuxServe, which MuxServe++ shares (the baselines of Prism).

The GPUs of a node are cut into *meshes*; models of one mesh share its GPUs and their KV memory, and all run with the mesh's
tensor-parallel degree. Every way to cut is tried. For each, models go by falling compute demand (request rate x weights)
to the mesh where they raise the estimated total throughput most; the cut with the largest total wins.

A mesh is estimated from profiles. Alone, a batch of b requests has the throughput

    b / (T_prefill(b) + out * T_decode(b))

and a model runs with the smallest b that meets its rate, found by bisection. Together, prefills come one after another
and decodes side by side, so everybody waits for all prefills: T_prefill becomes their sum. When the batches do not all
fit into the KV memory that the engines leave, all shrink by one factor, found by bisection as well.

The TP degree of a model is given here, so a mesh takes the models of its own size only. Cuts into sizes that no model has
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
from itertools import accumulate, chain, groupby
from operator import add
from typing import NamedTuple

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, Placement
from fineserve_sim.policy.placement import placed_on
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


class Profile:
    """A model's rates at any batch size, linear between the points of its profile; below the first, a part of the time in use.
    ``compute_demand`` is proportional to the FLOPs per second that it asks for: request rate x weights of all shards.
    ``least`` is the smallest batch size at which it meets its rate alone, the largest profiled one if none does; ``wanted`` is
    its operation at that size. Raises ValueError if the model has no profile.

    On a ``kind`` of GPU on which the model is slower, the same FLOPs are a larger demand; the demand on kind 0 is taken as it
    is.
    """

    def __init__(self, model: ModelDemand, kind: int = 0) -> None:
        if not model.profile:
            raise ValueError(f"model {model.id} has no profile, which MuxServe's optimiser needs")
        self.model = model
        self.rate_per_s, self.engine_bytes = model.rate_per_s, model.engine_bytes
        here = model.on(kind)
        self.compute_demand = model.rate_per_s * model.weight_bytes * model.tp * (model.most_per_s / here.most_per_s)
        self._batches = []
        for batch, throughput_per_s, ttft_s, _, kv_bytes in here.profile:  # what is not prefill of its time is decode
            self._batches.append(Batch(batch, ttft_s, max(0.0, batch / throughput_per_s - ttft_s), kv_bytes))
        self.least = self._least()
        self.wanted = self.at(self.least)

    def at(self, size: float) -> Batch:
        size = min(size, self._batches[-1].size)
        upper = bisect_left(self._batches, size, key=lambda batch: batch.size)
        high = self._batches[upper]
        if upper == 0:
            part = size / high.size
            return Batch(size, high.prefill_s * part, high.decode_s, high.kv_bytes * part)
        low = self._batches[upper - 1]
        part = (size - low.size) / (high.size - low.size)
        return Batch(*(start + part * (end - start) for start, end in zip(low, high, strict=True)))

    def _least(self) -> float:
        low, high = 0.0, self.at(math.inf).size
        if self._alone_per_s(high) < self.rate_per_s:
            return high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._alone_per_s(middle) >= self.rate_per_s else (middle, high)
        return high

    def _alone_per_s(self, size: float) -> float:
        batch = self.at(size)
        return batch.size / (batch.prefill_s + batch.decode_s)


def _cut_per_s(profiles: Sequence[Profile], kv_bytes: int) -> float:
    """Requests per second that the models of a mesh complete together, their batches cut to its KV memory."""
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        fits = sum(profile.at(profile.least * middle).kv_bytes for profile in profiles) <= kv_bytes
        low, high = (middle, high) if fits else (low, middle)
    batches = [profile.at(profile.least * low) for profile in profiles]
    prefill_s = sum(batch.prefill_s for batch in batches)
    return sum(
        min(profile.rate_per_s, batch.size / (prefill_s + batch.decode_s))
        for profile, batch in zip(profiles, batches, strict=True)
    )


@dataclass(slots=True)
class Mesh:
    """The models on one of the meshes of their size, which is counted by ``index``. ``memory_bytes`` is the usable memory of
    each GPU, which are of one ``kind``. ``throughput_per_s``: requests that they complete together, each at most its rate. The
    sums are of batches that are not cut."""

    index: int
    memory_bytes: int
    kind: int = 0
    throughput_per_s: float = 0.0
    profiles: list[Profile] = field(default_factory=list)
    served: list[tuple[float, float, float]] = field(default_factory=list)  # rate, batch and decode seconds of each
    engine_bytes: int = 0
    wanted_bytes: float = 0.0
    prefill_s: float = 0.0
    compute_demand: float = 0.0

    def with_model(self, profile: Profile, least_per_s: float = -math.inf) -> float:
        """Throughput with the model. Minus infinity if its engine leaves no memory for KV, or if it plainly adds less than
        ``least_per_s``: while no batch is cut, the others can only lose."""
        wanted_size, wanted_prefill_s, wanted_decode_s, wanted_kv_bytes = profile.wanted
        kv_bytes = self.memory_bytes - self.engine_bytes - profile.engine_bytes
        if kv_bytes <= 0:
            return -math.inf
        if self.wanted_bytes + wanted_kv_bytes > kv_bytes:
            return _cut_per_s([*self.profiles, profile], kv_bytes)
        prefill_s = self.prefill_s + wanted_prefill_s
        own_per_s = min(wanted_size / (prefill_s + wanted_decode_s), profile.rate_per_s)
        if own_per_s < least_per_s:
            return -math.inf
        others_per_s = 0.0
        for rate_per_s, size, decode_s in self.served:
            served_per_s = size / (prefill_s + decode_s)
            others_per_s += served_per_s if served_per_s < rate_per_s else rate_per_s
        return others_per_s + own_per_s

    def add(self, profile: Profile) -> None:
        self.throughput_per_s = self.with_model(profile)
        self.profiles.append(profile)
        self.served.append((profile.rate_per_s, profile.wanted.size, profile.wanted.decode_s))
        self.engine_bytes += profile.engine_bytes
        self.wanted_bytes += profile.wanted.kv_bytes
        self.prefill_s += profile.wanted.prefill_s
        self.compute_demand += profile.compute_demand


class MuxServePlacement:
    """MuxServe's optimiser, run once on mean rates.

    Models of one TP degree depend on a cut only by its number of meshes of that size, so meshes are filled once for each such
    number. The cuts that differ grow fast in number: about GPUs / size for each TP degree of the models, and their
    combinations, as a power of the nodes. With one degree there is one cut. Filling costs models x meshes estimates; a bound
    spares most of them where memory is not short, and one mesh stands for all that are empty.
    """

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        """Raises ValueError if a model has no profile."""
        kinds = range(1 + max((gpu.kind for gpu in gpus), default=0))
        by_kind = [[Profile(model, kind) for kind in kinds] for model in models]
        by_kind.sort(key=lambda of: (-of[0].compute_demand, of[0].model.id))
        in_order = [of[0].model for of in by_kind]
        profiles = {tp: [of for of in by_kind if of[0].model.tp == tp] for tp in {model.tp for model in models}}
        fill = cache(lambda size, meshes: _fill(profiles[size], meshes))
        homes: dict[str, tuple[int, ...]] = {}
        most_per_s = -math.inf
        for cut in _cuts(gpus, set(profiles)):
            filled: dict[int, Iterator[Mesh]] = {}
            for size in profiles:
                meshes = fill(size, tuple(min(map(_shape, mesh)) for mesh in cut if len(mesh) == size))
                if meshes is None:
                    break
                filled[size] = iter(meshes)
            else:
                in_turn = [next(filled[len(piece)]) for piece in cut]
                total_per_s = sum(mesh.throughput_per_s for mesh in in_turn)
                if total_per_s > most_per_s:  # the first of equals
                    most_per_s = total_per_s
                    homes = {
                        profile.model.id: tuple(gpu.id for gpu in piece)
                        for piece, mesh in zip(cut, in_turn, strict=True)
                        for profile in mesh.profiles
                    }
        if not homes:
            return KvprPlacement(charges="engine").place(models, gpus)
        return placed_on(models, {model.id: [homes[model.id]] for model in in_order}, gpus)


_TIE_PER_S = 2e-9
"""Gains are compared to nine digits: those that differ by more are never equal."""


def _shape(gpu: GpuSlot) -> tuple[int, int]:
    """What tells GPUs apart."""
    return gpu.memory_bytes, gpu.kind


def _fill(profiles: Sequence[Sequence[Profile]], shapes: Sequence[tuple[int, int]]) -> list[Mesh] | None:
    """Models, in this order, to meshes of their size by the largest gain; None if one fits nowhere. ``profiles``: of each
    model, by kind of GPU; ``shapes``: memory and kind of each mesh."""
    meshes = [Mesh(index, *shape) for index, shape in enumerate(shapes)]
    empty: defaultdict[tuple[int, int], list[Mesh]] = defaultdict(list)  # by shape, the first one last
    for mesh in reversed(meshes):
        empty[shapes[mesh.index]].append(mesh)
    used: list[Mesh] = []
    for by_kind in profiles:
        best, best_rank, least_per_s = None, (math.inf, 0.0, 0), -math.inf
        for mesh in chain([alike[-1] for alike in empty.values() if alike], used):
            profile = by_kind[mesh.kind]
            gain_per_s = mesh.with_model(profile, least_per_s) - mesh.throughput_per_s
            if gain_per_s == -math.inf:
                continue
            rank = -round(gain_per_s, 9), mesh.compute_demand, mesh.index
            if rank < best_rank:
                best, best_rank, least_per_s = mesh, rank, gain_per_s - _TIE_PER_S
        if best is None:
            return None
        if not best.profiles:
            used.append(empty[shapes[best.index]].pop())
        best.add(by_kind[best.kind])
    return meshes


Piece = tuple[GpuSlot, ...]
"""The GPUs of a mesh."""


def _cuts(gpus: Sequence[GpuSlot], sizes: set[int]) -> Iterator[tuple[Piece, ...]]:
    """Ways to cut all nodes into meshes of these sizes, contiguous, larger ones first. GPUs that no size fits stay unused.
    Where all GPUs are equal, one of the cuts into the same numbers of meshes is enough. Else one is enough of the cuts that
    differ by a permutation of nodes of one shape."""
    alike: defaultdict[tuple[tuple[int, int], ...], list[list[GpuSlot]]] = defaultdict(list)
    in_order = sorted(gpus, key=lambda gpu: (gpu.node, gpu.id))
    for members in (list(node) for _, node in groupby(in_order, key=lambda gpu: gpu.node)):
        alike[tuple(map(_shape, members))].append(members)
    equal = len(set(map(_shape, gpus))) == 1
    found: dict[tuple[int, ...], tuple[list[Piece], ...]]  # by what tells cuts apart, the pieces of each node
    found = {(0,) * len(sizes) if equal else (): ()}
    for shape, group in alike.items():
        choices = _sums(len(shape), sizes)
        counts = [tuple(choice.count(size) for size in sorted(sizes)) for choice in choices]
        within = {(0, key): cut for key, cut in found.items()}
        for node in group:
            pieces = [
                [tuple(node[end - size : end]) for end, size in zip(accumulate(choice), choice, strict=True)]
                for choice in choices
            ]
            longer: dict[tuple[int, tuple[int, ...]], tuple[list[Piece], ...]] = {}
            for (first, key), cut in within.items():
                for index in range(first, len(choices)):
                    longer_key = tuple(map(add, key, counts[index])) if equal else (*key, index)
                    longer.setdefault((index, longer_key), (*cut, pieces[index]))
            within = longer
        found = {}
        for (_, key), cut in within.items():
            found.setdefault(key, cut)
    for cut in found.values():
        yield tuple(sorted(chain.from_iterable(cut), key=lambda piece: piece[0].id))


def _sums(total: int, sizes: set[int]) -> list[tuple[int, ...]]:
    """Falling sequences of sizes that leave no room for another one within ``total``."""
    if total < min(sizes):
        return [()]
    return [
        (size, *rest)
        for size in sorted(sizes, reverse=True)
        if size <= total
        for rest in _sums(total - size, {other for other in sizes if other <= size})
    ]
