"""Where a scenario's models go. A placement is a pure function of demands and GPUs: nothing is profiled or simulated here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fineserve_sim.cluster.compose.memory import slots_of
from fineserve_sim.cluster.compose.policies import build_placement
from fineserve_sim.cluster.compose.profiling import sharing_of
from fineserve_sim.cluster.compose.ranks import in_ranks
from fineserve_sim.cluster.scenario import Scenario, ScenarioError
from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, Placement
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement import tp_groups
from fineserve_sim.systems.spec import ActivationSpec

Placed = tuple[Placement, Mapping[str, ModelDemand]]
"""A placement, and the demand of each model that led to it."""


def place(scenario: Scenario, demands: Mapping[str, ModelDemand]) -> Placed:
    """The system's placement of models with these ``demands``, by id. Raises ScenarioError when a model fits on no GPU (group)
    of the empty cluster, a pinned placement is impossible, or two engines are on an exclusive GPU."""
    slots = slots_of(scenario)
    for demand in demands.values():
        _check_fits_somewhere(demand, slots)
    try:
        placement = build_placement(scenario.system.placement).place(list(demands.values()), slots)
    except ValueError as error:
        raise ScenarioError(f"system {scenario.system.name}: {error}") from error
    _check_groups(slots, placement.instances)
    _check_exclusive(scenario, placement.instances)
    return replace(placement, instances=in_ranks(scenario, placement.instances)), demands


def _check_fits_somewhere(demand: ModelDemand, slots: Sequence[GpuSlot]) -> None:
    groups = tp_groups(slots, demand.tp)
    if not groups:
        raise ScenarioError(
            f"model {demand.id} needs {demand.tp} GPUs of one kind in one node (tp); the cluster has {len(slots)} GPUs"
            if len({slot.kind for slot in slots}) > 1
            else f"model {demand.id} needs {demand.tp} GPUs of one node (tp); the cluster has {len(slots)} GPUs"
        )
    empty = MemoryLedger.of(slots)
    if not any(empty.has_room(group, demand.engine_bytes) for group in groups):
        largest = max(slot.memory_bytes for slot in slots) / 2**30
        raise ScenarioError(
            f"model {demand.id} fits on no GPU: its engine takes {demand.engine_bytes / 2**30:.1f} GiB beside KV at "
            f"tp={demand.tp}, a GPU has {largest:.1f} GiB usable; raise its tp or choose a smaller precision"
        )


def _check_groups(slots: Sequence[GpuSlot], instances: Iterable[Instance]) -> None:
    """Raises ScenarioError when an instance is on GPUs of several kinds."""
    kind_of = {slot.id: slot.kind for slot in slots}
    for instance in instances:
        if len({kind_of[gpu] for gpu in instance.gpus}) > 1:
            raise ScenarioError(
                f"model {instance.model} is placed on GPUs {list(instance.gpus)}, which are of several kinds; a TP group "
                "needs one"
            )


def _check_exclusive(scenario: Scenario, instances: Iterable[Instance]) -> None:
    """Raises ScenarioError when two engines are on a GPU that is for one, or will be."""
    here: dict[int, str] = {}
    alone = {gpu.id for gpu in scenario.gpus if sharing_of(gpu, scenario).mode == "exclusive"}
    if alone and isinstance(scenario.system.residency, ActivationSpec):
        raise ScenarioError(
            f"system {scenario.system.name} brings several models to a GPU: it cannot run with sharing exclusive"
        )
    for instance in instances:
        for gpu in alone.intersection(instance.gpus):
            if other := here.get(gpu):
                raise ScenarioError(
                    f"system {scenario.system.name} puts {other} and {instance.model} on GPU {gpu}, whose sharing is "
                    f"exclusive; share it (mps, time_slice) or take another placement or more GPUs"
                )
            here[gpu] = instance.model
