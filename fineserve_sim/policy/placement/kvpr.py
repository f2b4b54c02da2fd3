"""KVPR greedy placement (Prism, Algorithm 1; Prism* of FineServe runs it once).

KV pressure ratio of a GPU = SLO-weighted request rate of its models / memory left for their KV caches. Models, by
falling weight, go where the ratio is lowest, so that the largest ratio stays small. A GPU must keep some memory for KV
after taking a model, activations included, else it is skipped: an engine without KV memory does not start. The ratio of Prism*
charges memory with weights only. Measuring the memory left for KV, as Prism's engines do, charges activations, too.

A model of TP degree n is n equal parts, each with its shard's weights and 1/n of the rate. A part passes over GPUs that host
a sibling and stays in its node. So the parts go to the node with the lowest ratio, where its n lowest ratios are.

Prism places a model once. Prism* runs on FineServe's workers, where "each replica is treated as a separate model for placement
and scheduling" (FineServe, sections 4 and 6.2). So the replicas that Algorithm 1 of FineServe asks for are models here, each
with its part of the rate. As there, every model gets its first place before any gets a second one, and replicas of one model
share a GPU only where no other has room.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Literal, NamedTuple

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, Placement
from fineserve_sim.policy.placement import check_options, placed_on, tp_groups
from fineserve_sim.policy.placement.fineserve import base_footprint


@dataclass(frozen=True)
class KvprPlacement:
    """Greedy placement by KVPR.

    ``evaluate``: the ratio "pre": before the model is added (listing and proof of Prism), or "post": with it.
    ``weight``: "req_rate" is rate / TTFT SLO. "token_rate" (later version of Prism) is token rate x KV bytes per token / TPOT
    SLO, or the TTFT SLO of a model without TPOT SLO. ``tau`` and ``threshold`` matter to models that have a place already.
    With "relative" they move only if the best ratio is below tau x the ratio of their place; with "absolute", if it is lower
    by more than tau. Ties: lower model id, lower GPU id. ``charges``: the bytes that a model takes from KV memory, its
    "weights" or all that its "engine" takes. ``replicas``: "one" of each model, or as many as ``base_footprint`` has with this
    option; replicas without room are left out. Models that fit nowhere are ``unplaced``. Raises ValueError for unknown options
    and a negative tau.

    A model costs the GPUs of lower ratio that are too full for it, and the node on which it goes; judged with it, all GPUs.
    """

    evaluate: Literal["pre", "post"] = "pre"
    weight: Literal["req_rate", "token_rate"] = "req_rate"
    tau: float = 0.8
    threshold: Literal["relative", "absolute"] = "relative"
    charges: Literal["weights", "engine"] = "weights"
    replicas: Literal["one", "slo", "rate"] = "one"

    def __post_init__(self) -> None:
        check_options(self)
        if self.tau < 0:
            raise ValueError(f"tau is {self.tau}: a migration threshold cannot be negative")

    def place(
        self,
        models: Sequence[ModelDemand],
        gpus: Sequence[GpuSlot],
        current: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Placement:
        """Place all models from scratch. ``current`` names the GPUs of models that run already; see ``tau``. All
        parts of a model stay or all move. Raises ValueError if ``current`` names a GPU that is not there, and for a model
        without profile where there may be several replicas."""
        current = current or {}
        known = {gpu.id for gpu in gpus}
        for id, home in current.items():
            if not known.issuperset(home):
                raise ValueError(f"model {id} is said to run on GPUs {home}, but the cluster has {sorted(known)}")
        parts = {model.id: self._part(model, gpus) for model in models}
        least_bytes = min((part.charge_bytes for part in parts.values()), default=0)
        ranking = _Ranking(gpus, self.evaluate == "post", least_bytes)
        homes: dict[str, list[tuple[int, ...]]] = {}
        replicas = ((number, -part.weight, id) for id, part in parts.items() for number in range(part.replicas))
        for _, _, id in sorted(replicas):
            part, own = parts[id], homes.setdefault(id, [])
            if (group := self._target(part, ranking, own, current.get(id))) is not None:
                own.append(group)
                for gpu in group:
                    ranking.add(gpu, part)
        return placed_on(models, homes, gpus)

    def _part(self, model: ModelDemand, gpus: Sequence[GpuSlot]) -> _Part:
        """The load that each part of each replica adds. Where there are several kinds of GPU, the kind with the most replicas
        counts."""
        replicas = 1
        if self.replicas != "one":
            kind_of = {gpu.id: gpu.kind for gpu in gpus}
            groups = Counter(kind_of[group[0]] for group in tp_groups(gpus, model.tp))
            counts = [
                base_footprint(model.on(kind), candidates, replicas=self.replicas).replicas
                for kind, candidates in groups.items()
            ]
            replicas = max(counts, default=1)
        weight = self.part_weight(model, model.rate_per_s / replicas)
        return _Part(model.tp, weight, self._charge(model), model.engine_bytes, replicas)

    def part_weight(self, model: ModelDemand, rate_per_s: float) -> float:
        """Weight of one TP part at this request rate. Bytes per token are per GPU, so the token weight already is the weight
        of a part. Raises ValueError if the weight needs the tokens of a request and the model does not tell them."""
        if self.weight == "req_rate":
            return rate_per_s / model.slo_s / model.tp
        if model.tokens_per_request <= 0:
            raise ValueError(f"model {model.id} has no tokens_per_request, which weight='token_rate' needs")
        tokens_per_s = rate_per_s * model.tokens_per_request
        slo_s = model.slo_s if model.tpot_slo_s is None else model.tpot_slo_s
        return tokens_per_s * model.token_bytes / slo_s

    def ratio(self, weight: float, kv_bytes: int, model: ModelDemand, part_weight: float) -> float:
        """KVPR by which a GPU of this weight and KV memory is judged for a part of ``model``: before taking it, or with it."""
        if self.evaluate == "post":
            return (weight + part_weight) / (kv_bytes - self._charge(model))
        return weight / kv_bytes

    def _charge(self, model: ModelDemand) -> int:
        return model.engine_bytes if self.charges == "engine" else model.weight_bytes

    def _target(
        self, part: _Part, ranking: _Ranking, siblings: Sequence[tuple[int, ...]], current: tuple[int, ...] | None
    ) -> tuple[int, ...] | None:
        """GPUs for a replica, apart from its ``siblings`` where it can: the best ones, or the present ones while the best are
        not better enough."""
        taken = {gpu for group in siblings for gpu in group}
        best = ranking.best_group(part, taken) or (ranking.best_group(part) if taken else None)
        if best is None or current is None or not all(ranking.loads[gpu].has_room(part) for gpu in current):
            return best
        best_ratio, current_ratio = (max(ranking.ratios(group, part).values()) for group in (best, current))
        relative = self.threshold == "relative"
        moves = best_ratio < self.tau * current_ratio if relative else current_ratio - best_ratio > self.tau
        return best if moves else current


class _Part(NamedTuple):
    """The load that each part of a replica adds to its GPU: its weight, the bytes that the ratio charges to KV memory, and the
    bytes that its engine takes."""

    tp: int
    weight: float
    charge_bytes: int
    engine_bytes: int
    replicas: int


@dataclass(slots=True)
class _Load:
    """One GPU during a pass: the memory that its models leave for KV by their charges, the memory that their engines leave,
    and the sum of their part weights."""

    kv_bytes: int
    left_bytes: int
    weight: float = 0.0

    def has_room(self, part: _Part) -> bool:
        """Whether the part has room. An engine that is left no KV memory does not start, at any charge."""
        return self.kv_bytes > part.charge_bytes and self.left_bytes > part.engine_bytes


class _Ranking:
    """The GPUs of one pass by rising ratio before a part is added, without the GPUs that have no room for any part. With
    ``adds_first`` they are judged with the part. An addition shifts a list of all GPUs, by one memory move."""

    def __init__(self, gpus: Sequence[GpuSlot], adds_first: bool, least_bytes: int) -> None:
        self.loads = {gpu.id: _Load(gpu.memory_bytes, gpu.memory_bytes) for gpu in gpus}
        self._adds_first, self._least_bytes = adds_first, least_bytes
        self._node_of = {gpu.id: gpu.node for gpu in gpus}
        self._members: defaultdict[int, list[int]] = defaultdict(list)
        for gpu in gpus:
            self._members[gpu.node].append(gpu.id)
        self._ranked = sorted((0.0, gpu) for gpu, load in self.loads.items() if load.kv_bytes > least_bytes)

    def add(self, gpu: int, part: _Part) -> None:
        load = self.loads[gpu]
        del self._ranked[bisect_left(self._ranked, (load.weight / load.kv_bytes, gpu))]
        load.weight += part.weight
        load.kv_bytes -= part.charge_bytes
        load.left_bytes -= part.engine_bytes
        if load.kv_bytes > self._least_bytes:
            insort(self._ranked, (load.weight / load.kv_bytes, gpu))

    def ratios(self, gpus: Iterable[int], part: _Part) -> dict[int, float]:
        """The ratios by which the GPUs with room for the part are judged."""
        weight, charge_bytes = (part.weight, part.charge_bytes) if self._adds_first else (0.0, 0)
        loads = ((gpu, self.loads[gpu]) for gpu in gpus)
        return {
            gpu: (load.weight + weight) / (load.kv_bytes - charge_bytes) for gpu, load in loads if load.has_room(part)
        }

    def best_group(self, part: _Part, taken: Collection[int] = ()) -> tuple[int, ...] | None:
        """As the function of this name, among GPUs with room for the part that are not ``taken``."""
        if self._adds_first:
            return best_group(part.tp, self.ratios(self.loads.keys() - taken, part), self._node_of)
        passed: set[int] = set()  # nodes without room for all parts
        for _, gpu in self._ranked:
            node = self._node_of[gpu]
            if node not in passed and gpu not in taken and self.loads[gpu].has_room(part):
                free = [member for member in self._members[node] if member not in taken]
                if group := best_group(part.tp, self.ratios(free, part), self._node_of):
                    return group
                passed.add(node)
        return None


def best_group(tp: int, ratio_of: Mapping[int, float], node_of: Mapping[int, int]) -> tuple[int, ...] | None:
    """``tp`` GPUs, in id order, with the lowest ratios of one node: the node of the lowest ratio that has room for all
    parts. Only GPUs in ``ratio_of`` have room. None when no node has enough of them. Looks at each of them."""
    nodes: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for gpu, ratio in ratio_of.items():
        nodes[node_of[gpu]].append((ratio, gpu))
    best = min((node for node in nodes.values() if len(node) >= tp), key=min, default=None)
    return tuple(sorted(gpu for _, gpu in nsmallest(tp, best))) if best else None
