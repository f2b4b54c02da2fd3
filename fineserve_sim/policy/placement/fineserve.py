"""Model-to-GPU placement of FineServe (paper section 6.2, Algorithm 1), run once, from scratch.

There are two phases. The first finds the base footprint F_M of each model: weights, mean activations and mean KV at the
smallest profiled batch that carries the expected rate. If that batch breaks the TTFT SLO, or none carries the rate, the rate
is split over one more replica. The second places the replicas, those of the model with the largest footprint first. Each goes
to the candidate (a GPU, or a TP group) with the best score (module ``mme``) after taking it in.

The listing has no memory check. Here a candidate must keep K_rem >= 0 on each of its GPUs, since with a negative K_rem the
score would prefer models that use memory badly. Whole engines must fit, too: an engine reserves more activations than a small
batch has, and vLLM starts none without room for KV. All bytes are per GPU; K_rem of a group is that of its fullest GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, OperatingPoint, Placement
from fineserve_sim.policy.placement import check_options, tp_groups
from fineserve_sim.policy.placement.mme import marginal_efficiency

Unmet = Literal["rate", "spread"]
Place = tuple[ModelDemand, int, tuple[int, ...]]
"""A model, the number of its replica and the GPUs of that."""


class Footprint(NamedTuple):
    """Fixed memory F_M per GPU and replica, the replicas and the operating point behind it, and whether it meets the SLO."""

    footprint_bytes: int
    replicas: int
    point: OperatingPoint
    feasible: bool


def base_footprint(model: ModelDemand, candidates: int, unmet: Unmet = "rate") -> Footprint:
    """F_M with the fewest replicas, at most ``candidates``, that carry the model's rate within its SLO.

    If no number does, F_M is taken at the smallest profiled batch, and ``unmet`` says how many replicas there are. "rate": the
    fewest that carry the rate whatever the SLO, all candidates if none do. "spread": all candidates if the smallest batch
    meets the SLO, else one. Raises ValueError if the model has no profile or there is no candidate.
    """
    if not model.profile:
        raise ValueError(f"model {model.id} has no profile: its footprint needs at least one operating point")
    if candidates < 1:
        raise ValueError(f"model {model.id} has no candidate GPU group of size {model.tp}")
    by_batch = sorted(model.profile, key=lambda point: point.batch)
    counts = range(1, candidates + 1)
    least = (  # by batch, the index of the first count from which on it carries the rate
        bisect_left(counts, True, key=lambda count: point.throughput_per_s >= model.rate_per_s / count)
        for point in by_batch
    )
    steps = sorted({counts[index] for index in least if index < candidates})
    for replicas in steps:
        point = next(point for point in by_batch if point.throughput_per_s >= model.rate_per_s / replicas)
        if feasible := point.ttft_s <= model.slo_s:
            break
    else:
        point, feasible = by_batch[0], False
        spread = candidates if point.ttft_s <= model.slo_s else 1
        replicas = spread if unmet == "spread" else min(steps, default=candidates)
    fixed_bytes = model.weight_bytes + point.activation_bytes + point.kv_bytes
    return Footprint(fixed_bytes, replicas, point, feasible)


def tp_degree(demands: Sequence[ModelDemand], groups: Mapping[int, int]) -> int:
    """The degree of one model where it is left open (section 6.2: candidates are GPUs, or groups of them).

    ``demands`` are its profiles at each degree that holds it. ``groups`` says how many groups of GPUs each degree has.

    A degree counts if some number of replicas, each at the smallest batch that carries its part of the rate, stays within the
    SLO. Fewer replicas win, so that replicas grow only as long as no degree carries the rate; then the smaller batch, then the
    smaller degree. It is the smallest degree if none counts. Raises ValueError without a demand, or for one without profile.
    """
    if not demands:
        raise ValueError("a model needs at least one degree at which it fits")
    footprints = {demand.tp: base_footprint(demand, groups[demand.tp]) for demand in demands}
    counting = [(each.replicas, each.point.batch, tp) for tp, each in footprints.items() if each.feasible]
    return min(counting)[2] if counting else min(footprints)


def placed_degrees(
    wanted: Mapping[str, ModelDemand],
    smaller: Mapping[str, Sequence[int]],
    placed: Callable[[Mapping[str, int]], bool],
) -> dict[str, int]:
    """Degrees at which all models are ``placed``. Chosen model by model, degrees may leave no GPU for some.

    They start as ``wanted``, and the largest goes down a step at a time: of equal ones that of the lowest rate, then of the
    first name. The search ends when all are at their least, even if some model still has no GPU. ``smaller``: the degrees
    below the wanted one at which each model fits, among others.
    """
    degrees = {model: demand.tp for model, demand in wanted.items()}
    while not placed(degrees):
        below = {model: max((tp for tp in smaller[model] if tp < degrees[model]), default=0) for model in degrees}
        if not (higher := [model for model, tp in below.items() if tp]):
            break
        first = min(higher, key=lambda model: (-degrees[model], wanted[model].rate_per_s, model))
        degrees[first] = below[first]
    return degrees


@dataclass(frozen=True)
class FineServePlacement:
    """Algorithm 1.

    ``score``: "mean" is eq. 3, "exact" eq. 1. ``colocation`` of replicas of one model on the same GPUs: "avoid"
    unless no other candidate has room, "forbid", or "allow". ``replicas``: "first_places" gives every model its first place
    before any gets a second one. "literal" places all replicas of a model before the next model, even if that model then fits
    nowhere. "yield" gives up replicas until every model has a place. "one" replicates nothing. ``unmet``: how many replicas a
    model has whose SLO no number of them meets (``base_footprint``). ``order``: models are sorted by their footprint on all
    GPUs of an instance ("model") or on one of them ("gpu"). Ties go to the larger weights, then the lower id (models); to fewer
    residents, then the lower GPU ids (candidates). If only some replicas of a model find room, they share its whole rate and
    the model is reported infeasible. Raises ValueError for unknown options; ``place`` does for a model without profile.

    Every replica is scored on every candidate of its size, a few float operations each; "yield" does all that again for
    each replica that is given up.
    """

    score: Literal["mean", "exact"] = "mean"
    colocation: Literal["avoid", "forbid", "allow"] = "avoid"
    replicas: Literal["first_places", "literal", "yield", "one"] = "first_places"
    unmet: Unmet = "rate"
    order: Literal["model", "gpu"] = "model"

    def __post_init__(self) -> None:
        check_options(self)

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        groups = {tp: tp_groups(gpus, tp) for tp in {model.tp for model in models}}
        placeable = [model for model in models if groups[model.tp]]
        footprints = {
            model.id: base_footprint(model, 1 if self.replicas == "one" else len(groups[model.tp]), self.unmet)
            for model in placeable
        }
        placeable.sort(key=lambda model: self._rank(model, footprints[model.id]))
        replicas = {id: footprint.replicas for id, footprint in footprints.items()}
        firsts = [(model, 0) for model in placeable] if self.replicas == "first_places" else []
        while True:
            others = [(model, number) for model in placeable for number in range(bool(firsts), replicas[model.id])]
            places = self._assign([*firsts, *others], footprints, groups, gpus)
            placed = {model.id for model, _, _ in places}
            if self.replicas != "yield" or len(placed) == len(placeable) or max(replicas.values()) == 1:
                return _summary(models, footprints, places)
            # The most replicated model gives up one replica; among equals, the one with the largest footprint.
            replicas[max(placeable, key=lambda model: replicas[model.id]).id] -= 1

    def _rank(self, model: ModelDemand, footprint: Footprint) -> tuple[int, int, str]:
        """Models with the lowest are placed first."""
        gpus = model.tp if self.order == "model" else 1
        return -gpus * footprint.footprint_bytes, -gpus * model.weight_bytes, model.id

    def _assign(
        self,
        in_turn: Iterable[tuple[ModelDemand, int]],
        footprints: Mapping[str, Footprint],
        groups: Mapping[int, Sequence[tuple[int, ...]]],
        gpus: Sequence[GpuSlot],
    ) -> list[Place]:
        """Replicas, in turn, each on its best group; those that find no room are left out."""
        members = {gpu.id: _Gpu(gpu.memory_bytes, gpu.memory_bytes) for gpu in gpus}
        candidates = {tp: [_Candidate(group, [members[gpu] for gpu in group]) for group in groups[tp]] for tp in groups}
        places: list[Place] = []
        hosts: defaultdict[str, set[int]] = defaultdict(set)  # by model, the GPUs that have a replica already
        full: set[str] = set()  # models whose last replica found no room: another one finds none
        for model, replica in in_turn:
            if model.id in full:
                continue
            footprint_bytes = footprints[model.id].footprint_bytes
            if (best := self._best(model, footprint_bytes, candidates[model.tp], hosts[model.id])) is None:
                full.add(model.id)
                continue
            for gpu in best.members:
                gpu.left_bytes -= footprint_bytes
                gpu.room_bytes -= max(footprint_bytes, model.engine_bytes)
                gpu.residents[model.id, replica] = marginal_efficiency(model)
            for candidate in (candidate for gpu in best.members for candidate in gpu.candidates):
                candidate.count()
            hosts[model.id].update(best.gpus)
            places.append((model, replica, best.gpus))
        return places

    def _best(
        self, model: ModelDemand, footprint_bytes: int, candidates: Sequence[_Candidate], hosts: set[int]
    ) -> _Candidate | None:
        """The candidate with the highest score after taking in one replica; None if it fits nowhere."""
        engine_bytes, efficiency, by_mean = model.engine_bytes, marginal_efficiency(model), self.score == "mean"
        fitting = [
            each for each in candidates if each.left_bytes >= footprint_bytes and each.room_bytes >= engine_bytes
        ]
        if hosts and self.colocation != "allow":
            apart = [each for each in fitting if hosts.isdisjoint(each.gpus)]
            fitting = apart if apart or self.colocation == "forbid" else fitting

        def rank(candidate: _Candidate) -> tuple[float, int, tuple[int, ...]]:
            mean = (candidate.efficiency_sum + efficiency) / (candidate.residents + 1)
            mu = mean if by_mean else max(candidate.efficiency_max, efficiency)
            return -(candidate.left_bytes - footprint_bytes) * mu, candidate.residents, candidate.gpus

        return min(fitting, key=rank, default=None)


@dataclass(slots=True)
class _Gpu:
    """What footprints and what whole engines leave of one GPU, the efficiency of each resident (model, replica), and the
    candidates that it is a member of."""

    left_bytes: int
    room_bytes: int
    residents: dict[tuple[str, int], float] = field(default_factory=dict)
    candidates: list[_Candidate] = field(default_factory=list)


class _Candidate:
    """GPUs that may take a replica: what is left of the fullest one, and what a score needs of all residents."""

    def __init__(self, gpus: tuple[int, ...], members: Sequence[_Gpu]) -> None:
        self.gpus, self.members = gpus, members
        for gpu in members:
            gpu.candidates.append(self)
        self.count()

    def count(self) -> None:
        """A member has another resident."""
        here = {resident: mu for gpu in self.members for resident, mu in gpu.residents.items()}
        self.left_bytes = min(gpu.left_bytes for gpu in self.members)
        self.room_bytes = min(gpu.room_bytes for gpu in self.members)
        self.residents = len(here)
        self.efficiency_sum = sum(here.values())
        self.efficiency_max = max(here.values(), default=0.0)


def _summary(models: Sequence[ModelDemand], footprints: Mapping[str, Footprint], places: Sequence[Place]) -> Placement:
    """The placement, with each model's rate split evenly over the replicas that found room."""
    placed = Counter(model.id for model, _, _ in places)
    met = {id for id, footprint in footprints.items() if footprint.feasible and placed[id] >= footprint.replicas}
    return Placement(
        instances=tuple(
            Instance(model.id, replica, gpus, model.rate_per_s / placed[model.id], footprints[model.id].footprint_bytes)
            for model, replica, gpus in places
        ),
        unplaced=tuple(model.id for model in models if not placed[model.id]),
        infeasible=tuple(model.id for model in models if placed[model.id] and model.id not in met),
    )
