"""The tensor-parallel degree of a model where it is left open (FineServe, section 6.2: candidates are GPUs, or groups of them).

Every degree is profiled. One counts if some number of replicas, each at the smallest batch that carries its part of the rate,
stays within the SLO. Fewer replicas win, so that replicas grow only as long as no degree carries the rate; then the smaller
batch, then the smaller degree. Chosen model by model, degrees may leave no GPU for some model; then some take less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fineserve_sim.policy.interfaces import ModelDemand
from fineserve_sim.policy.placement.fineserve import base_footprint


def tp_degree(demands: Sequence[ModelDemand], groups: Mapping[int, int]) -> int:
    """The degree of one model whose ``demands`` are its profiles at each degree that holds it; ``groups`` is how many groups
    of GPUs there are of each. The smallest degree if none carries the rate within the SLO.

    Raises ValueError without a demand, or for one without profile.
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
    """Degrees at which all models are ``placed``: the ``wanted`` ones, of which the largest goes down a step at a time (of
    equal ones that of the lowest rate, then of the first name). Where all are at their least and some model still has no GPU,
    those. ``smaller``: the degrees below the wanted one at which each model fits, among others."""
    degrees = {model: demand.tp for model, demand in wanted.items()}
    while not placed(degrees):
        below = {model: max((tp for tp in smaller[model] if tp < degrees[model]), default=0) for model in degrees}
        higher = [model for model, tp in below.items() if tp]
        if not higher:
            break
        first = min(higher, key=lambda model: (-degrees[model], wanted[model].rate_per_s, model))
        degrees[first] = below[first]
    return degrees
