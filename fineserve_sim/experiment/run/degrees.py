"""The TP degrees at which models run, where the file leaves them open (``tp: auto``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fineserve_sim.cluster import ServedModel
from fineserve_sim.cluster.compose.policies import build_placement
from fineserve_sim.cluster.compose.profiling import demand_of
from fineserve_sim.experiment.file.degrees import AUTO, groups_by_degree, pinned_degree, slots_of
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.policy.interfaces import ModelDemand
from fineserve_sim.policy.placement.degree import degrees_apart, tp_degree
from fineserve_sim.systems.spec import DedicatedPlacementSpec, PinnedPlacementSpec, SystemSpec


def at_degrees(setup: Setup, system: SystemSpec, models: Sequence[ServedModel]) -> tuple[ServedModel, ...]:
    """The models of a setup at the degrees of its file. One that is open is that which carries the model's rate within its
    limit; under a system that gives each model GPUs of its own no more than leaves some for all of them; that of the GPUs to
    which a model is pinned."""
    placement = system.placement
    if isinstance(placement, PinnedPlacementSpec):
        pinned = (pinned_degree(setup, model, placement.groups[model.id]) for model in setup.models)
        return tuple(replace(served, tp=tp) for served, tp in zip(models, pinned, strict=True))
    if all(model.entry.tp != AUTO for model in setup.models):
        return tuple(models)
    demands: dict[str, dict[int, ModelDemand]] = {}
    degrees: dict[str, int] = {}
    for model, served in zip(setup.models, models, strict=True):
        groups = groups_by_degree(setup, model) if model.entry.tp == AUTO else {served.tp: 1}
        own = {tp: demand_of(replace(served, tp=tp), setup.gpus[0].spec, setup.engine, slope=False) for tp in groups}
        demands[served.id] = own
        degrees[served.id] = tp_degree([*own.values()], groups)
    if isinstance(placement, DedicatedPlacementSpec):
        degrees = degrees_apart(demands, degrees, build_placement(placement), slots_of(setup))
    return tuple(replace(served, tp=degrees[served.id]) for served in models)
