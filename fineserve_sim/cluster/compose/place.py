"""Where a scenario's models go. A placement is a pure function of demands and GPUs: nothing is profiled or simulated here.

It finds GPUs for all data-parallel ranks of a model together (``Experts.ranks``). Then each rank is an instance of its own,
with an engine of its own (``cluster/engine/ranks.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from fineserve_sim.cluster.compose.memory import slots_of
from fineserve_sim.cluster.compose.policies import build_placement
from fineserve_sim.cluster.compose.profiling import sharing_of
from fineserve_sim.cluster.scenario import EngineSettings, Scenario, ScenarioError
from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, Placement
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement import tp_groups
from fineserve_sim.systems import SystemSpec
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


def why_no_ranks(system: SystemSpec, settings: EngineSettings) -> str | None:
    """Why a cluster of this system and these engines cannot have data-parallel ranks; None if it can."""
    if system.residency is not None or system.dispatch is not None:
        axis = "residency" if system.residency is not None else "dispatch"
        return (
            f"dp is for engines that stay, and system {system.name} has {axis}; take dedicated, or a pinned placement"
        )
    for axis, chosen, known in (
        ("placement", system.placement.policy, ("dedicated", "pinned")),
        ("scheduler", system.scheduler.policy, ("fcfs",)),
        ("memory", system.memory.policy, ("private",)),
    ):
        if chosen not in known:
            return f"dp takes {axis} {' or '.join(known)}, and system {system.name} has {chosen}"
    if settings.batching != "vllm":
        return f"dp is vLLM's; leave it out with batching {settings.batching}"
    if settings.step_times is not None:
        return "dp takes predicted step times; leave engine.step_times out"
    return "dp has no cache in host memory yet; leave engine.kv_offloading out" if settings.kv_offloading else None


def check_ranks(scenario: Scenario) -> None:
    """Raises ScenarioError for data-parallel ranks that this system or these engines cannot have."""
    for served in scenario.models:
        if served.ranks > 1 and (problem := why_no_ranks(scenario.system, scenario.engine)):
            raise ScenarioError(f"model {served.id}: {problem}")


def in_ranks(scenario: Scenario, instances: Sequence[Instance]) -> tuple[Instance, ...]:
    """Instances of data-parallel ranks as one instance a rank, side by side, each on GPUs of its own."""
    served = {model.id: model for model in scenario.models}
    found: list[Instance] = []
    for instance in instances:
        model = served[instance.model]
        for rank in range(model.ranks):
            gpus = instance.gpus[rank * model.tp : (rank + 1) * model.tp]
            number, rate_per_s = instance.replica * model.ranks + rank, instance.rate_per_s / model.ranks
            found.append(
                replace(instance, replica=number, gpus=gpus, rate_per_s=rate_per_s) if model.ranks > 1 else instance
            )
    return tuple(found)
