"""KVPR greedy placement (Prism, Algorithm 1; Prism* of FineServe runs it once).

KV pressure ratio of a GPU = SLO-weighted request rate of its models / memory left for their KV caches. Models, by
falling weight, go where the ratio is lowest, so that the largest ratio stays small. A GPU must keep some memory for KV
after taking a model, else it is skipped. Prism* charges memory with weights only; who measures what is left for KV, as
Prism's engines do, charges an engine's activations, too.

A model of TP degree n is n equal parts, each with its shard's weights and 1/n of the rate. Parts go to distinct GPUs of
one node: if the lowest ratio is on a GPU that hosts a sibling, the next lowest one takes the part. For equal parts this
amounts to the n lowest ratios of the node with the lowest one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, Placement


class KvprPlacement:
    """Greedy placement by KVPR.

    ``evaluate``: the ratio "pre": before the model is added (listing and proof of Prism), or "post": with it.
    ``weight``: "req_rate" is rate / TTFT SLO; "token_rate" (later version of Prism) is token rate x KV bytes per
    token / TPOT SLO.
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
        loads = {gpu.id: GpuLoad(gpu.node, gpu.memory_bytes) for gpu in gpus}
        for id, place in current.items():
            if not loads.keys() >= set(place):
                raise ValueError(f"model {id} is said to run on GPUs {place}, but the cluster has {sorted(loads)}")
        weights = {model.id: self.part_weight(model) for model in models}
        instances = []
        for model in sorted(models, key=lambda model: (-weights[model.id], model.id)):
            weight = weights[model.id]
            group = self._target(model, weight, loads, current.get(model.id))
            if group is None:
                continue
            for gpu in group:
                loads[gpu].weight += weight
                loads[gpu].shared_kv_bytes -= self._charge(model)
            instances.append(Instance(model.id, 0, group, model.rate_per_s, model.weight_bytes))
        placed = {instance.model for instance in instances}
        return Placement(tuple(instances), unplaced=tuple(model.id for model in models if model.id not in placed))

    def part_weight(self, model: ModelDemand) -> float:
        """Weight of one TP part. Bytes per token are per GPU, so the token weight is that of a part as it stands. Raises
        ValueError if the weight needs the tokens of a request and the model does not tell them."""
        if not self._by_tokens:
            return model.rate_per_s / model.slo_s / model.tp
        if model.tokens_per_request <= 0:
            raise ValueError(f"model {model.id} has no tokens_per_request, which weight='token_rate' needs")
        tokens_per_s = model.rate_per_s * model.tokens_per_request
        return tokens_per_s * model.token_bytes / (model.tpot_slo_s or model.slo_s)

    def ratio(self, load: GpuLoad, model: ModelDemand, part_weight: float) -> float:
        """KVPR by which a GPU is judged for a part of ``model``: before taking it, or with it."""
        return load.ratio(part_weight, self._charge(model)) if self._adds_first else load.ratio(0.0, 0)

    def _charge(self, model: ModelDemand) -> int:
        return model.engine_bytes if self._charges_engine else model.weight_bytes

    def _target(
        self, model: ModelDemand, weight: float, loads: Mapping[int, GpuLoad], current: tuple[int, ...] | None
    ) -> tuple[int, ...] | None:
        """GPUs for the model: the best ones, or the present ones while the best are not better enough."""

        def ratio(gpu: int) -> float:
            return self.ratio(loads[gpu], model, weight)

        roomy = {gpu for gpu, load in loads.items() if load.shared_kv_bytes > self._charge(model)}
        best = best_group(model.tp, loads, ratio_of={gpu: ratio(gpu) for gpu in roomy})
        if best is None or current is None or not roomy >= set(current):
            return best
        best_ratio, current_ratio = max(map(ratio, best)), max(map(ratio, current))
        moves = best_ratio < self._tau * current_ratio if self._relative else current_ratio - best_ratio > self._tau
        return best if moves else current


@dataclass(slots=True)
class GpuLoad:
    """One GPU during a pass: the memory that its models leave for KV, and the sum of their part weights."""

    node: int
    shared_kv_bytes: int
    weight: float = 0.0

    def ratio(self, added_weight: float, added_bytes: int) -> float:
        return (self.weight + added_weight) / (self.shared_kv_bytes - added_bytes)


def best_group(tp: int, loads: Mapping[int, GpuLoad], ratio_of: Mapping[int, float]) -> tuple[int, ...] | None:
    """``tp`` GPUs, in id order, with the lowest ratios of one node: the node of the lowest ratio that has room for all
    parts. Only GPUs in ``ratio_of`` have room. None when no node has enough of them."""
    nodes: defaultdict[int, list[int]] = defaultdict(list)
    for gpu in sorted(ratio_of, key=lambda gpu: (ratio_of[gpu], gpu)):
        nodes[loads[gpu].node].append(gpu)
    complete = [ranked[:tp] for ranked in nodes.values() if len(ranked) >= tp]
    if not complete:
        return None
    best = min(complete, key=lambda ranked: (ratio_of[ranked[0]], ranked[0]))
    return tuple(sorted(best))
