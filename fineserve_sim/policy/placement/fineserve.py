"""Model-to-GPU placement of FineServe (paper section 6.2, Algorithm 1), run once, from scratch.

There are two phases. The first finds the base footprint F_M of each model: weights, mean activations and mean KV at the
smallest profiled batch that carries the expected rate. If that batch breaks the TTFT SLO, or none carries the rate, the rate
is split over one more replica. The second places the replicas, beginning with the model of the largest footprint. Each goes
to the candidate (a GPU, or a TP group) with the best score (module ``mme``) after taking it in.

The listing has no memory check. Here a candidate must keep K_rem >= 0 on each of its GPUs, since with a negative K_rem the
score would prefer models that use memory badly. Whole engines must fit, too: an engine reserves more activations than a small
batch has, and vLLM starts none without room for KV. All bytes are per GPU; a group's K_rem is the K_rem of its fullest GPU.

The paper has one kind of GPU. Where there are several, a model has a footprint, a number of replicas r and an mme on each
kind. A replica on a kind carries 1/r of the rate, and replicas are added until all of it is carried. A kind on which no number
of replicas meets the SLO is taken only where the others have no room.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from operator import itemgetter
from typing import Literal, NamedTuple

from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, OperatingPoint, Placement
from fineserve_sim.policy.placement import check_options, tp_groups
from fineserve_sim.policy.placement.mme import marginal_efficiency

Replicas = Literal["slo", "rate"]
Unmet = Literal["rate", "spread"]


class Footprint(NamedTuple):
    """Fixed memory F_M per GPU and replica, the replicas and the operating point behind it, and whether it meets the SLO."""

    footprint_bytes: int
    replicas: int
    point: OperatingPoint
    feasible: bool


class Wanted(NamedTuple):
    """The memory that a replica of a model asks of each GPU of one kind, and its marginal efficiency there."""

    footprint: Footprint
    efficiency: float


Place = tuple[ModelDemand, int, tuple[int, ...], Footprint]
"""A model, the number of its replica, the GPUs of that and the footprint on them."""


def base_footprint(model: ModelDemand, candidates: int, unmet: Unmet = "rate", replicas: Replicas = "slo") -> Footprint:
    """F_M with the fewest replicas, at most ``candidates``, that carry the model's rate: within its SLO ("slo"), or at all.

    If no number does, F_M is taken at the smallest profiled batch, and ``unmet`` says how many replicas there are. "rate": the
    fewest that carry the rate without regard to the SLO, all candidates if none do. "spread": all candidates if the smallest
    batch meets the SLO, else one. Raises ValueError if the model has no profile or there is no candidate.
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
    for count in steps:
        point = next(point for point in by_batch if point.throughput_per_s >= model.rate_per_s / count)
        feasible = point.ttft_s <= model.slo_s
        if feasible or replicas == "rate":
            break
    else:
        point, feasible = by_batch[0], False
        spread = candidates if point.ttft_s <= model.slo_s else 1
        count = spread if unmet == "spread" else min(steps, default=candidates)
    fixed_bytes = model.weight_bytes + point.activation_bytes + point.kv_bytes
    return Footprint(fixed_bytes, count, point, feasible)


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

    They start as ``wanted``, and the largest goes down a step at a time. Among equal ones it is the degree of the model with
    the lowest rate, then with the first name. The search ends when all are at their least, even if some model still has no
    GPU. ``smaller``: the degrees below the wanted one at which each model fits, among others.
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
    unless no other candidate has room, "forbid", or "allow". ``replicas`` and ``unmet``: how many replicas a model has
    (``base_footprint``). ``turns``: "first_places" gives every model its first place before any gets a second one. "literal"
    places all replicas of a model before the next model, even if that model then fits nowhere. ``order``: models are sorted by
    their footprint on all GPUs of an instance ("model") or on one of them ("gpu"). Ties go to the larger weights, then the
    lower id (models); to fewer residents, then the lower GPU ids (candidates). If only some replicas of a model find room, they
    share its whole rate and the model is reported infeasible. Raises ValueError for unknown options; ``place`` does for a model
    without profile.

    Every replica is scored on every candidate of its size, a few float operations each.
    """

    score: Literal["mean", "exact"] = "mean"
    colocation: Literal["avoid", "forbid", "allow"] = "avoid"
    replicas: Replicas = "slo"
    turns: Literal["first_places", "literal"] = "first_places"
    unmet: Unmet = "rate"
    order: Literal["model", "gpu"] = "model"

    def __post_init__(self) -> None:
        check_options(self)

    def place(self, models: Sequence[ModelDemand], gpus: Sequence[GpuSlot]) -> Placement:
        kind_of = {gpu.id: gpu.kind for gpu in gpus}
        groups: dict[int, dict[int, list[tuple[int, ...]]]] = {}  # by degree and kind
        for tp in {model.tp for model in models}:
            groups[tp] = defaultdict(list)
            for group in tp_groups(gpus, tp):
                groups[tp][kind_of[group[0]]].append(group)
        placeable = [model for model in models if groups[model.tp]]
        wanted = {model.id: self._wanted(model, groups[model.tp]) for model in placeable}
        placeable.sort(key=lambda model: self._rank(model, wanted[model.id].values()))
        replicas = {id: max(each.footprint.replicas for each in kinds.values()) for id, kinds in wanted.items()}
        firsts = [(model, 0) for model in placeable] if self.turns == "first_places" else []
        others = [(model, number) for model in placeable for number in range(bool(firsts), replicas[model.id])]
        return _summary(models, self._assign([*firsts, *others], wanted, groups, gpus))

    def _wanted(self, model: ModelDemand, groups: Mapping[int, Sequence[tuple[int, ...]]]) -> dict[int, Wanted]:
        """The memory and efficiency of a replica on each kind that has groups for it."""
        found = {}
        for kind, candidates in groups.items():
            here = model.on(kind)
            footprint = base_footprint(here, len(candidates), self.unmet, self.replicas)
            found[kind] = Wanted(footprint, marginal_efficiency(here))
        return found

    def _rank(self, model: ModelDemand, wanted: Iterable[Wanted]) -> tuple[int, int, str]:
        """The rank of a model; the lowest is placed first. The largest of several footprints counts."""
        gpus = model.tp if self.order == "model" else 1
        largest_bytes = max(each.footprint.footprint_bytes for each in wanted)
        return -gpus * largest_bytes, -gpus * model.weight_bytes, model.id

    def _assign(
        self,
        in_turn: Iterable[tuple[ModelDemand, int]],
        wanted: Mapping[str, Mapping[int, Wanted]],
        groups: Mapping[int, Mapping[int, Sequence[tuple[int, ...]]]],
        gpus: Sequence[GpuSlot],
    ) -> list[Place]:
        """Place replicas in turn, each on its best group. Replicas that find no room, or no rate left to carry, are left
        out."""
        members = {gpu.id: _Gpu(gpu.memory_bytes, gpu.memory_bytes) for gpu in gpus}
        candidates = {
            tp: {
                kind: [_Candidate(kind, group, [members[gpu] for gpu in group]) for group in of_kind]
                for kind, of_kind in by_kind.items()
            }
            for tp, by_kind in groups.items()
        }
        places: list[Place] = []
        hosts: defaultdict[str, set[int]] = defaultdict(set)  # by model, the GPUs that have a replica already
        carried: defaultdict[str, Fraction] = defaultdict(Fraction)  # by model, the part of its rate
        ended: set[str] = (
            set()
        )  # models whose rate is carried, or whose last replica found no room: another one finds none
        for model, replica in in_turn:
            if model.id in ended:
                continue
            if (best := self._best(model, wanted[model.id], candidates[model.tp], hosts[model.id])) is None:
                ended.add(model.id)
                continue
            footprint, efficiency = wanted[model.id][best.kind]
            for gpu in best.members:
                gpu.left_bytes -= footprint.footprint_bytes
                gpu.room_bytes -= max(footprint.footprint_bytes, model.engine_bytes)
                gpu.residents[model.id, replica] = efficiency
            for candidate in (candidate for gpu in best.members for candidate in gpu.candidates):
                candidate.count()
            hosts[model.id].update(best.gpus)
            carried[model.id] += Fraction(1, footprint.replicas)
            if carried[model.id] >= 1:
                ended.add(model.id)
            places.append((model, replica, best.gpus, footprint))
        return places

    def _best(
        self,
        model: ModelDemand,
        wanted: Mapping[int, Wanted],
        candidates: Mapping[int, Sequence[_Candidate]],
        hosts: set[int],
    ) -> _Candidate | None:
        """The candidate with the highest score after taking in one replica, candidates on kinds that meet its SLO first; None
        if it fits nowhere."""
        engine_bytes, fitting = model.engine_bytes, {}
        for kind, of_kind in candidates.items():
            least_bytes = wanted[kind].footprint.footprint_bytes
            fitting[kind] = [
                each for each in of_kind if each.left_bytes >= least_bytes and each.room_bytes >= engine_bytes
            ]
        if hosts and self.colocation != "allow":
            apart = {kind: [each for each in fits if hosts.isdisjoint(each.gpus)] for kind, fits in fitting.items()}
            fitting = apart if any(apart.values()) or self.colocation == "forbid" else fitting
        bests = [self._best_of_kind(fits, wanted[kind]) for kind, fits in fitting.items() if fits]
        return min(bests, key=itemgetter(0))[1] if bests else None

    def _best_of_kind(self, fitting: Sequence[_Candidate], wanted: Wanted) -> tuple[tuple[object, ...], _Candidate]:
        """The candidate with the highest score, and its rank among the best of other kinds."""
        by_mean, (footprint, efficiency) = self.score == "mean", wanted
        footprint_bytes = footprint.footprint_bytes

        def rank(candidate: _Candidate) -> tuple[float, int, tuple[int, ...]]:
            mean = (candidate.efficiency_sum + efficiency) / (candidate.residents + 1)
            mu = mean if by_mean else max(candidate.efficiency_max, efficiency)
            return -(candidate.left_bytes - footprint_bytes) * mu, candidate.residents, candidate.gpus

        best = min(fitting, key=rank)
        return (not footprint.feasible, *rank(best)), best


@dataclass(slots=True)
class _Gpu:
    """One GPU: the bytes that footprints leave, the bytes that whole engines leave, the efficiency of each resident (model,
    replica), and the candidates that it is a member of."""

    left_bytes: int
    room_bytes: int
    residents: dict[tuple[str, int], float] = field(default_factory=dict)
    candidates: list[_Candidate] = field(default_factory=list)


class _Candidate:
    """GPUs of one kind that may take a replica, with the bytes left on the fullest and the facts of all residents that a score
    needs."""

    def __init__(self, kind: int, gpus: tuple[int, ...], members: Sequence[_Gpu]) -> None:
        self.kind, self.gpus, self.members = kind, gpus, members
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


def _summary(models: Sequence[ModelDemand], places: Sequence[Place]) -> Placement:
    """The placement, with each model's rate split over the replicas that found room by the parts that they carry."""
    parts: defaultdict[str, list[Footprint]] = defaultdict(list)
    for model, _, _, footprint in places:
        parts[model.id].append(footprint)
    carried = {id: sum(Fraction(1, each.replicas) for each in here) for id, here in parts.items()}
    met = {id for id, here in parts.items() if carried[id] >= 1 and all(each.feasible for each in here)}
    return Placement(
        instances=tuple(
            Instance(
                model.id,
                replica,
                gpus,
                model.rate_per_s / float(carried[model.id] * footprint.replicas),  # evenly where all carry as much
                footprint.footprint_bytes,
            )
            for model, replica, gpus, footprint in places
        ),
        unplaced=tuple(model.id for model in models if not parts[model.id]),
        infeasible=tuple(model.id for model in models if parts[model.id] and model.id not in met),
    )
