"""The TP degrees at which models run, where the file leaves them open (``tp: auto``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fineserve_sim.cluster import ServedModel
from fineserve_sim.cluster.compose.facts import demand_of
from fineserve_sim.cluster.compose.policies import build_placement
from fineserve_sim.experiment.file.degrees import AUTO, groups_by_degree, pinned_degree, slots_of
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.policy.interfaces import ModelDemand
from fineserve_sim.policy.placement.fineserve import placed_degrees, tp_degree
from fineserve_sim.systems.spec import DedicatedPlacementSpec, PinnedPlacementSpec, PlacementSpec, SystemSpec


def at_degrees(setup: Setup, system: SystemSpec, models: Sequence[ServedModel]) -> tuple[ServedModel, ...]:
    """The models of a setup at the degrees of its file. A pinned model has the degree of its GPUs. A
    degree that is open is the one that carries the model's rate within its limit. It is less where the placement would leave
    some model without a GPU."""
    placement = system.placement
    if isinstance(placement, PinnedPlacementSpec):
        pinned = (pinned_degree(setup, model, placement.groups[model.id]) for model in setup.models)
        return tuple(replace(served, tp=tp) for served, tp in zip(models, pinned, strict=True))
    if all(model.entry.tp != AUTO for model in setup.models):
        return tuple(models)
    wanted: dict[str, ModelDemand] = {}
    fitting: dict[str, list[int]] = {}
    for model, served in zip(setup.models, models, strict=True):
        groups = groups_by_degree(setup, model) if model.entry.tp == AUTO else {served.tp: 1}
        demands = {tp: _demand(setup, replace(served, tp=tp)) for tp in groups}
        wanted[served.id], fitting[served.id] = demands[tp_degree([*demands.values()], groups)], [*groups]
    comes_and_goes = system.residency is not None and not isinstance(placement, DedicatedPlacementSpec)
    if comes_and_goes:  # who has no GPU at the start gets one later
        return tuple(replace(served, tp=wanted[served.id].tp) for served in models)
    degrees = placed_degrees(wanted, fitting, partial(_placed, setup, placement, models))
    return tuple(replace(served, tp=degrees[served.id]) for served in models)


def _placed(setup: Setup, placement: PlacementSpec, models: Sequence[ServedModel], degrees: Mapping[str, int]) -> bool:
    """Whether the placement finds GPUs for all models at these degrees."""
    slope = getattr(placement, "mme", None) == "slope"
    demands = [_demand(setup, replace(served, tp=degrees[served.id]), slope=slope) for served in models]
    return not build_placement(placement).place(demands, slots_of(setup)).unplaced


def _demand(setup: Setup, served: ServedModel, *, slope: bool = False) -> ModelDemand:
    return demand_of(served, setup.gpus[0].spec, setup.engine, slope=slope)
