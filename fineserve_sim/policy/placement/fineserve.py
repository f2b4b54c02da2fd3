"""Model-to-GPU placement of FineServe (paper section 6.2, Algorithm 1), run once, from scratch.

Two phases. First the base footprint F_M of each model: weights, mean activations and mean KV at the smallest profiled
batch that carries the expected rate; if that batch breaks the TTFT SLO, or none carries the rate, the rate is split
over one more replica. Replicas are there to meet the rate: where no number of them meets the SLO, the rate alone says how
many there are. Then the replicas, those of the model with the largest footprint first, each go to the candidate (a GPU, or a
TP group) with the best score (module ``mme``) after taking them in.

The listing has no memory check; here a candidate must keep K_rem >= 0 on each of its GPUs, since with a negative K_rem
the score would prefer models that use memory badly, and whole engines must fit: an engine reserves more activations than a
small batch has, and vLLM starts none without room for KV. All bytes are per GPU; K_rem of a group is that of its fullest GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Literal, NamedTuple

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, OperatingPoint, Placement
from fineserve_sim.policy.placement.mme import marginal_efficiency
from fineserve_sim.policy.placement.tp_groups import tp_groups

Unmet = Literal["rate", "spread"]
Order = Literal["model", "gpu"]


class Footprint(NamedTuple):
    """Fixed memory F_M per GPU and replica, the replicas and the operating point behind it, and whether it meets
    the SLO."""

    footprint_bytes: int
    replicas: int
    point: OperatingPoint
    feasible: bool


def base_footprint(model: ModelDemand, candidates: int, unmet: Unmet = "rate") -> Footprint:
    """F_M with the fewest replicas, at most ``candidates``, that carry the model's rate within its SLO.

    If no number does, F_M is taken at the smallest profiled batch, and ``unmet`` says how many replicas there are: with "rate"
    the fewest that carry the rate whatever the SLO, all candidates if none do; with "spread" all candidates if the smallest
    batch meets the SLO, else one. Raises ValueError if the model has no profile or there is no candidate.
    """
    if not model.profile:
        raise ValueError(f"model {model.id} has no profile: its footprint needs at least one operating point")
    if candidates < 1:
        raise ValueError(f"model {model.id} has no candidate GPU group of size {model.tp}")
    steps = _replica_steps(model, candidates)
    for replicas in steps:
        carrying = [point for point in model.profile if point.throughput_per_s >= model.rate_per_s / replicas]
        point = min(carrying, key=lambda point: point.batch, default=None)
        if point is not None and point.ttft_s <= model.slo_s:
            return Footprint(_footprint_bytes(model, point), replicas, point, feasible=True)
    smallest = min(model.profile, key=lambda point: point.batch)
    spread = candidates if smallest.ttft_s <= model.slo_s else 1
    replicas = spread if unmet == "spread" else min(steps, default=candidates)
    return Footprint(_footprint_bytes(model, smallest), replicas, smallest, feasible=False)


def _replica_steps(model: ModelDemand, candidates: int) -> list[int]:
    """The numbers of replicas, rising, from which on another profiled batch carries the rate."""
    counts = range(1, candidates + 1)
    least = (
        bisect_left(counts, True, key=lambda count: point.throughput_per_s >= model.rate_per_s / count)
        for point in model.profile
    )
    return sorted({counts[index] for index in least if index < candidates})


class FineServePlacement:
    """Algorithm 1.

    ``score``: "mean" is eq. 3, "exact" eq. 1. ``colocation`` of replicas of one model on the same GPUs: "avoid"
    unless no other candidate has room, "forbid", or "allow". ``replicas``: "first_places" gives every model its first place
    before any gets a second one; "literal" places all replicas of a model before the next model, even if that model then fits
    nowhere; "yield" gives up replicas until every model has a place; "one" replicates nothing. ``unmet``: how many replicas a
    model has whose SLO no number of them meets (``base_footprint``). ``order``: models are sorted by their footprint on all
    GPUs of an instance ("model") or on one of them ("gpu"). Ties go to the larger weights, then the lower id (models); to fewer
    residents, then the lower GPU ids (candidates). If only some replicas of a model find room, they share its whole rate and
    the model is reported infeasible. Raises ValueError for unknown options; ``place`` does for a model without profile.

    Every replica is scored on every candidate of its size, a few float operations each; "yield" does all that again for
    each replica that is given up.
    """

    def __init__(
        self,
        score: Literal["mean", "exact"] = "mean",
        colocation: Literal["avoid", "forbid", "allow"] = "avoid",
        replicas: Literal["first_places", "literal", "yield", "one"] = "first_places",
        unmet: Unmet = "rate",
        order: Order = "model",
    ) -> None:
        if score not in ("mean", "exact"):
            raise ValueError(f"score is {score!r}: use 'mean' or 'exact'")
        if colocation not in ("avoid", "forbid", "allow"):
            raise ValueError(f"colocation is {colocation!r}: use 'avoid', 'forbid' or 'allow'")
        if replicas not in ("first_places", "literal", "yield", "one"):
            raise ValueError(f"replicas is {replicas!r}: use 'first_places', 'literal', 'yield' or 'one'")
        if unmet not in ("rate", "spread"):
            raise ValueError(f"unmet is {unmet!r}: use 'rate' or 'spread'")
        if order not in ("model", "gpu"):
            raise ValueError(f"order is {order!r}: use 'model' or 'gpu'")
        self._replicas, self._unmet, self._order = replicas, unmet, order
        self._shares = score == "mean"
        self._colocation = colocation

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        groups = {tp: tp_groups(gpus, tp) for tp in {model.tp for model in models}}
        footprints = {
            model.id: base_footprint(model, 1 if self._replicas == "one" else len(groups[model.tp]), self._unmet)
            for model in models
            if groups[model.tp]
        }
        placeable = [model for model in models if groups[model.tp]]
        placeable.sort(key=lambda model: self._rank(model, footprints[model.id]))
        replicas = {id: footprint.replicas for id, footprint in footprints.items()}
        instances = self._assign(placeable, footprints, replicas, groups, gpus)
        while (
            self._replicas == "yield"
            and len({i.model for i in instances}) < len(placeable)
            and max(replicas.values()) > 1
        ):
            # The most replicated model gives up one replica; among equals, the one with the largest footprint.
            replicas[max(placeable, key=lambda model: replicas[model.id]).id] -= 1
            instances = self._assign(placeable, footprints, replicas, groups, gpus)
        return _summary(models, footprints, instances)

    def _rank(self, model: ModelDemand, footprint: Footprint) -> tuple[int, int, str]:
        """Models with the lowest are placed first."""
        gpus = model.tp if self._order == "model" else 1
        return -gpus * footprint.footprint_bytes, -gpus * model.weight_bytes, model.id

    def _assign(
        self,
        models: Sequence[ModelDemand],
        footprints: Mapping[str, Footprint],
        replicas: Mapping[str, int],
        groups: Mapping[int, Sequence[tuple[int, ...]]],
        gpus: Sequence[GpuSlot],
    ) -> list[Instance]:
        """Every replica of ``models``, in their order, on its best group; those that find no room are left out."""
        left_bytes = {gpu.id: gpu.memory_bytes for gpu in gpus}
        room_bytes = dict(left_bytes)  # what whole engines leave
        residents: dict[int, dict[tuple[str, int], float]] = {gpu: {} for gpu in left_bytes}
        candidates = {
            tp: [_Candidate(group, least := min(left_bytes[gpu] for gpu in group), least) for group in groups[tp]]
            for tp in groups
        }
        with_gpu: defaultdict[int, list[_Candidate]] = defaultdict(list)
        for candidate in chain.from_iterable(candidates.values()):
            for gpu in candidate.gpus:
                with_gpu[gpu].append(candidate)
        instances: list[Instance] = []
        hosts: defaultdict[str, set[int]] = defaultdict(set)  # by model, the GPUs that have a replica already
        full: set[str] = set()  # models whose last replica found no room: another one finds none
        for model, replica in self._in_turn(models, replicas):
            if model.id in full:
                continue
            footprint_bytes, efficiency = footprints[model.id].footprint_bytes, marginal_efficiency(model)
            roomy = [each for each in candidates[model.tp] if each.room_bytes >= model.engine_bytes]
            best = self._best(efficiency, footprint_bytes, roomy, hosts[model.id])
            if best is None:
                full.add(model.id)
                continue
            for gpu in best.gpus:
                left_bytes[gpu] -= footprint_bytes
                room_bytes[gpu] -= max(footprint_bytes, model.engine_bytes)
                residents[gpu][model.id, replica] = efficiency
            for candidate in chain.from_iterable(with_gpu[gpu] for gpu in best.gpus):
                candidate.count(left_bytes, room_bytes, residents)
            hosts[model.id].update(best.gpus)
            instances.append(Instance(model.id, replica, best.gpus, 0.0, footprint_bytes))
        return instances

    def _in_turn(self, models: Sequence[ModelDemand], replicas: Mapping[str, int]) -> Iterator[tuple[ModelDemand, int]]:
        """Models with the numbers of their replicas, in the order in which those get their places."""
        firsts = self._replicas == "first_places"
        if firsts:
            yield from ((model, 0) for model in models)
        for model in models:
            yield from ((model, replica) for replica in range(firsts, replicas[model.id]))

    def _best(
        self, efficiency: float, footprint_bytes: int, candidates: Sequence[_Candidate], hosts: set[int]
    ) -> _Candidate | None:
        """The candidate with the highest score after taking in one replica; None if it fits nowhere."""
        if hosts and self._colocation != "allow":
            apart = [candidate for candidate in candidates if hosts.isdisjoint(candidate.gpus)]
            best = self._best(efficiency, footprint_bytes, apart, set())
            if best is not None or self._colocation == "forbid":
                return best
        best, best_score, shares = None, 0.0, self._shares
        for candidate in candidates:
            left_bytes = candidate.remaining_bytes - footprint_bytes
            if left_bytes < 0:
                continue
            score = left_bytes * (
                (candidate.efficiency_sum + efficiency) / (candidate.residents + 1)
                if shares
                else max(candidate.efficiency_max, efficiency)
            )
            if best is None or score > best_score or (score == best_score and candidate.rank < best.rank):
                best, best_score = candidate, score
        return best


@dataclass(slots=True)
class _Candidate:
    """GPUs that may take a replica: what footprints and what whole engines leave of the fullest one, and what a score needs
    of all residents."""

    gpus: tuple[int, ...]
    remaining_bytes: int
    room_bytes: int
    residents: int = 0
    efficiency_sum: float = 0.0
    efficiency_max: float = 0.0

    @property
    def rank(self) -> tuple[int, tuple[int, ...]]:
        """Among equal scores the lowest comes first."""
        return self.residents, self.gpus

    def count(
        self,
        left_bytes: Mapping[int, int],
        room_bytes: Mapping[int, int],
        residents: Mapping[int, Mapping[tuple[str, int], float]],
    ) -> None:
        """A resident came to a member; all maps are by GPU, the residents are efficiencies by (model, replica)."""
        here = {resident: efficiency for gpu in self.gpus for resident, efficiency in residents[gpu].items()}
        self.remaining_bytes = min(left_bytes[gpu] for gpu in self.gpus)
        self.room_bytes = min(room_bytes[gpu] for gpu in self.gpus)
        self.residents = len(here)
        self.efficiency_sum = sum(here.values())
        self.efficiency_max = max(here.values())


def _footprint_bytes(model: ModelDemand, point: OperatingPoint) -> int:
    return model.weight_bytes + point.activation_bytes + point.kv_bytes


def _summary(
    models: Sequence[ModelDemand], footprints: dict[str, Footprint], instances: Sequence[Instance]
) -> Placement:
    """The placement, with each model's rate split evenly over the replicas that found room."""
    placed = Counter(instance.model for instance in instances)
    rate_per_s = {model.id: model.rate_per_s / placed[model.id] for model in models if placed[model.id]}
    return Placement(
        instances=tuple(replace(instance, rate_per_s=rate_per_s[instance.model]) for instance in instances),
        unplaced=tuple(model.id for model in models if not placed[model.id]),
        infeasible=tuple(
            id for id in rate_per_s if not footprints[id].feasible or placed[id] < footprints[id].replicas
        ),
    )
