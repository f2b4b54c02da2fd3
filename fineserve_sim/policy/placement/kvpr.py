"""KVPR greedy placement (Prism, Algorithm 1; Prism* of FineServe runs it once).

KV pressure ratio of a GPU = SLO-weighted request rate of its models / memory left for their KV caches. Models, by
falling weight, go where the ratio is lowest, so that the largest ratio stays small. A GPU must keep some memory for KV
after taking a model, activations included, else it is skipped: an engine without KV memory does not start. The ratio of
Prism* charges memory with weights only; who measures what is left for KV, as Prism's engines do, charges activations, too.

A model of TP degree n is n equal parts, each with its shard's weights and 1/n of the rate. Parts go to distinct GPUs of
one node: if the lowest ratio is on a GPU that hosts a sibling, the next lowest one takes the part. For equal parts this
amounts to the n lowest ratios of the node with the lowest one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import Literal, NamedTuple

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, Placement


class KvprPlacement:
    """Greedy placement by KVPR.

    ``evaluate``: the ratio "pre": before the model is added (listing and proof of Prism), or "post": with it.
    ``weight``: "req_rate" is rate / TTFT SLO; "token_rate" (later version of Prism) is token rate x KV bytes per
    token / TPOT SLO, or the TTFT SLO of a model for which no TPOT SLO is set.
    ``tau`` and ``threshold`` matter to models that have a place already: they move only if the best ratio is below
    tau x the ratio of their place ("relative"), or lower by more than tau ("absolute"). Ties: lower model id, lower
    GPU id. ``charges``: what a model takes from KV memory, its "weights" or all that its "engine" takes.
    Models that fit nowhere are ``unplaced``. Raises ValueError for unknown options and a negative tau.
    """

    def __init__(
        self,
        evaluate: Literal["pre", "post"] = "pre",
        weight: Literal["req_rate", "token_rate"] = "req_rate",
        *,
        tau: float = 0.8,
        threshold: Literal["relative", "absolute"] = "relative",
        charges: Literal["weights", "engine"] = "weights",
    ) -> None:
        if charges not in ("weights", "engine"):
            raise ValueError(f"charges is {charges!r}: use 'weights' or 'engine'")
        if evaluate not in ("pre", "post"):
            raise ValueError(f"evaluate is {evaluate!r}: use 'pre' or 'post'")
        if weight not in ("req_rate", "token_rate"):
            raise ValueError(f"weight is {weight!r}: use 'req_rate' or 'token_rate'")
        if threshold not in ("relative", "absolute"):
            raise ValueError(f"threshold is {threshold!r}: use 'relative' or 'absolute'")
        if tau < 0:
            raise ValueError(f"tau is {tau}: a migration threshold cannot be negative")
        self._adds_first = evaluate == "post"
        self._by_tokens = weight == "token_rate"
        self._tau = tau
        self._relative = threshold == "relative"
        self._charges_engine = charges == "engine"

    def place(
        self,
        models: Sequence[ModelDemand],
        gpus: Sequence[GpuSlot],
        current: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Placement:
        """Place all models from scratch. ``current`` names the GPUs of models that run already; see ``tau``. All
        parts of a model stay or all move. Raises ValueError if ``current`` names a GPU that is not there."""
        current = current or {}
        charges = {model.id: self._charge(model) for model in models}
        ranking = _Ranking(gpus, least_bytes=min(charges.values(), default=0))
        for id, place in current.items():
            if not ranking.loads.keys() >= set(place):
                known = sorted(ranking.loads)
                raise ValueError(f"model {id} is said to run on GPUs {place}, but the cluster has {known}")
        weights = {model.id: self.part_weight(model, model.rate_per_s) for model in models}
        instances = []
        for model in sorted(models, key=lambda model: (-weights[model.id], model.id)):
            part = _Part(model.tp, weights[model.id], charges[model.id], model.engine_bytes)
            group = self._target(part, ranking, current.get(model.id))
            if group is None:
                continue
            for gpu in group:
                ranking.add(gpu, part)
            instances.append(Instance(model.id, 0, group, model.rate_per_s, model.weight_bytes))
        placed = {instance.model for instance in instances}
        return Placement(tuple(instances), unplaced=tuple(model.id for model in models if model.id not in placed))

    def part_weight(self, model: ModelDemand, rate_per_s: float) -> float:
        """Weight of one TP part at this request rate. Bytes per token are per GPU, so the token weight is that of a part as it
        stands. Raises ValueError if the weight needs the tokens of a request and the model does not tell them."""
        if not self._by_tokens:
            return rate_per_s / model.slo_s / model.tp
        if model.tokens_per_request <= 0:
            raise ValueError(f"model {model.id} has no tokens_per_request, which weight='token_rate' needs")
        tokens_per_s = rate_per_s * model.tokens_per_request
        slo_s = model.slo_s if model.tpot_slo_s is None else model.tpot_slo_s
        return tokens_per_s * model.token_bytes / slo_s

    def ratio(self, weight: float, kv_bytes: int, model: ModelDemand, part_weight: float) -> float:
        """KVPR by which a GPU of this weight and KV memory is judged for a part of ``model``: before taking it, or with it."""
        if self._adds_first:
            return (weight + part_weight) / (kv_bytes - self._charge(model))
        return weight / kv_bytes

    def _charge(self, model: ModelDemand) -> int:
        return model.engine_bytes if self._charges_engine else model.weight_bytes

    def _target(self, part: _Part, ranking: _Ranking, current: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """GPUs for the model: the best ones, or the present ones while the best are not better enough."""
        best = ranking.best_group(part, adds_first=self._adds_first)
        if best is None or current is None or not all(ranking.has_room(gpu, part) for gpu in current):
            return best
        best_ratio, current_ratio = (
            max(ranking.loads[gpu].judged(part, self._adds_first) for gpu in group) for group in (best, current)
        )
        moves = best_ratio < self._tau * current_ratio if self._relative else current_ratio - best_ratio > self._tau
        return best if moves else current


class _Part(NamedTuple):
    """What each part of a model adds to its GPU: its weight, the bytes by which its ratio is judged to take from KV memory,
    and those that its engine takes."""

    tp: int
    weight: float
    charge_bytes: int
    engine_bytes: int


@dataclass(slots=True)
class _Load:
    """One GPU during a pass: the memory that its models leave for KV by what they are charged, what their engines leave, and
    the sum of their part weights."""

    node: int
    shared_kv_bytes: int
    left_bytes: int
    weight: float = 0.0

    def ratio(self, added_weight: float, added_bytes: int) -> float:
        return (self.weight + added_weight) / (self.shared_kv_bytes - added_bytes)

    def judged(self, part: _Part, adds_first: bool) -> float:
        """The ratio with the part, or before it."""
        return self.ratio(part.weight, part.charge_bytes) if adds_first else self.ratio(0.0, 0)


class _Ranking:
    """The GPUs of one pass by rising ratio, those that have no room for any part left out.

    Looking for a group starts at the lowest ratio and costs what it passes over: GPUs too full for the part; nodes too full
    for all parts, and the members of each node that it counts; and, if ratios are judged with the part, all GPUs whose
    ratio before might be low enough. An addition shifts a list of all GPUs, by one memory move.
    """

    def __init__(self, gpus: Sequence[GpuSlot], least_bytes: int) -> None:
        self.loads = {gpu.id: _Load(gpu.node, gpu.memory_bytes, gpu.memory_bytes) for gpu in gpus}
        self._least_bytes = least_bytes
        self._most_bytes = max((gpu.memory_bytes for gpu in gpus), default=0)
        self._members: defaultdict[int, list[int]] = defaultdict(list)
        for gpu in gpus:
            self._members[gpu.node].append(gpu.id)
        self._ranked = sorted(
            (load.ratio(0.0, 0), gpu) for gpu, load in self.loads.items() if load.shared_kv_bytes > least_bytes
        )

    def has_room(self, gpu: int, part: _Part) -> bool:
        """An engine that is left no KV memory does not start, whatever it is charged."""
        load = self.loads[gpu]
        return load.shared_kv_bytes > part.charge_bytes and load.left_bytes > part.engine_bytes

    def add(self, gpu: int, part: _Part) -> None:
        load = self.loads[gpu]
        del self._ranked[bisect_left(self._ranked, (load.ratio(0.0, 0), gpu))]
        load.weight += part.weight
        load.shared_kv_bytes -= part.charge_bytes
        load.left_bytes -= part.engine_bytes
        if load.shared_kv_bytes > self._least_bytes:
            insort(self._ranked, (load.ratio(0.0, 0), gpu))

    def best_group(self, part: _Part, *, adds_first: bool) -> tuple[int, ...] | None:
        """As the function of this name, among GPUs with room for the part."""
        best: tuple[float, int] | None = None
        passed: set[int] = set()  # nodes without room for all parts
        for ratio, gpu in self._ranked:
            if best is not None and (not adds_first or self._least_with(part, ratio) >= best[0]):
                break
            load = self.loads[gpu]
            if load.node in passed or not self.has_room(gpu, part):
                continue
            if part.tp > 1 and len(self._roomy(load.node, part)) < part.tp:
                passed.add(load.node)
                continue
            found = load.judged(part, adds_first), gpu
            best = found if best is None else min(best, found)
        if best is None or part.tp == 1:
            return best and (best[1],)
        roomy = self._roomy(self.loads[best[1]].node, part)
        return tuple(sorted(nsmallest(part.tp, roomy, key=lambda gpu: (self.loads[gpu].judged(part, adds_first), gpu))))

    def _roomy(self, node: int, part: _Part) -> list[int]:
        return [gpu for gpu in self._members[node] if self.has_room(gpu, part)]

    def _least_with(self, part: _Part, ratio: float) -> float:
        """No GPU of at least this ratio has a lower one with the part: (w + a) / (s - c), where w = ratio x s, falls with s,
        and s is at most the memory of the largest GPU. A margin makes up for rounding."""
        most_bytes = self._most_bytes
        return (ratio * most_bytes + part.weight) / (most_bytes - part.charge_bytes) * (1 - 1e-12)


def best_group(tp: int, ratio_of: Mapping[int, float], node_of: Mapping[int, int]) -> tuple[int, ...] | None:
    """``tp`` GPUs, in id order, with the lowest ratios of one node: the node of the lowest ratio that has room for all
    parts. Only GPUs in ``ratio_of`` have room. None when no node has enough of them. Looks at each of them."""
    nodes: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    for gpu, ratio in ratio_of.items():
        nodes[node_of[gpu]].append((ratio, gpu))
    best = min((node for node in nodes.values() if len(node) >= tp), key=min, default=None)
    return tuple(sorted(gpu for _, gpu in nsmallest(tp, best))) if best else None
