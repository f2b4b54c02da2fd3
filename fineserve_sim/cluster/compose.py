"""From a scenario to a cluster that stands ready: profile, place, divide memory, build engines and schedulers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.cluster import Cluster, Scope
from fineserve_sim.cluster.contention import Contention
from fineserve_sim.cluster.domain import MemoryDomain
from fineserve_sim.cluster.engine import Engine
from fineserve_sim.cluster.kv import EngineKV
from fineserve_sim.cluster.memory import build_manager, tenants_by_gpu, usable_bytes
from fineserve_sim.cluster.outcomes import Outcomes, Sampler
from fineserve_sim.cluster.policies import EngineFactsheet, build_placement, build_schedulers
from fineserve_sim.cluster.profiling import demand_of, step_model
from fineserve_sim.cluster.scenario import Scenario, ScenarioError, ServedModel
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.fineserve_placement import base_footprint
from fineserve_sim.policy.interfaces import GpuSlot, Instance, KVManager, ModelDemand, Placement
from fineserve_sim.policy.tp_groups import tp_groups
from fineserve_sim.systems.spec import KvSlabSpec


@dataclass(frozen=True, slots=True)
class Parts:
    """A composed run. ``managers`` are the KV memories of the GPUs that host engines, by GPU id."""

    clock: Clock
    cluster: Cluster
    outcomes: Outcomes
    sampler: Sampler
    managers: tuple[KVManager, ...]
    placement: Placement


def compose(scenario: Scenario) -> Parts:
    """Raises ScenarioError when a model fits on no GPU (group) of the empty cluster, or the system cannot place it there."""
    served = {model.id: model for model in scenario.models}
    placement, demands = place(scenario)
    instances = placement.instances
    managers = _managers(scenario, instances, demands)
    clock, outcomes = Clock(), Outcomes(scenario.trace)
    kvs = [
        EngineKV(engine, [managers[gpu] for gpu in instance.gpus], scenario.engine.block_tokens)
        for engine, instance in enumerate(instances)
    ]
    limits = [min(served[i.model].model.max_context_tokens, kv.capacity_tokens()) for i, kv in zip(instances, kvs, strict=True)]
    # An engine without room for a token gets no requests; they are turned away at the door.
    able = [engine for engine, limit in enumerate(limits) if limit > 1]
    sheets = [_factsheet(scenario, engine, instances[engine], kvs[engine]) for engine in able]
    schedulers = build_schedulers(scenario.system.scheduler, sheets)
    scheduler_of = {engine: scheduler for scope, scheduler in schedulers.items() for engine in scope}
    routes = {
        model: [
            Route(e, instances[e].rate_per_s, limits[e], scheduler_of[e]) for e in able if instances[e].model == model
        ]
        for model in served
    }
    controller = Controller(routes)
    contention = Contention([instance.gpus for instance in instances])
    cluster = Cluster(
        clock,
        controller,
        contention,
        outcomes,
        [Scope(scope) for scope in schedulers],
        merging=not scenario.exact_steps and scenario.engine.contention == "composition",
        check=scenario.check,
        log=scenario.log,
    )
    engines = [
        Engine(e, step_model(served[i.model], _gpu_of(scenario, i), scenario.engine), kv, limit, bool(contention.neighbours[e]), scenario.engine, clock, cluster)
        for e, (i, kv, limit) in enumerate(zip(instances, kvs, limits, strict=True))
    ]
    cluster.connect(engines, _domains(scenario, engines, instances, managers))
    models = [instance.model for instance in instances]
    by_gpu = tuple(managers[gpu] for gpu in sorted(managers))
    return Parts(clock, cluster, outcomes, Sampler(engines, by_gpu, models, cluster.queued), by_gpu, placement)


def place(scenario: Scenario) -> tuple[Placement, dict[str, ModelDemand]]:
    """The system's placement, and the demand of each model that led to it. Raises as ``compose`` does."""
    slots = [GpuSlot(gpu.id, gpu.node, usable_bytes(gpu, scenario.engine)) for gpu in scenario.gpus]
    spec = scenario.system.placement
    slope = getattr(spec, "mme", None) == "slope"
    demands = {
        model.id: demand_of(model, scenario.gpus[0].spec, scenario.engine, slope=slope) for model in scenario.models
    }
    for demand in demands.values():
        _check_fits_somewhere(demand, slots)
    try:
        placement = build_placement(spec).place(list(demands.values()), slots)
    except ValueError as error:
        raise ScenarioError(f"system {scenario.system.name}: {error}") from error
    return placement, demands


def _check_fits_somewhere(demand: ModelDemand, slots: Sequence[GpuSlot]) -> None:
    groups = tp_groups(slots, demand.tp)
    budget = {slot.id: slot.memory_bytes for slot in slots}
    if not groups:
        raise ScenarioError(f"model {demand.id} needs {demand.tp} GPUs of one node (tp); the cluster has {len(slots)} GPUs")
    if all(min(budget[gpu] for gpu in group) < demand.weight_bytes for group in groups):
        largest = max(budget.values()) / 2**30
        raise ScenarioError(
            f"model {demand.id} fits on no GPU: it needs {demand.weight_bytes / 2**30:.1f} GiB for weights at tp={demand.tp}, "
            f"a GPU has {largest:.1f} GiB usable; raise its tp or choose a smaller precision"
        )


def _managers(
    scenario: Scenario, instances: Sequence[Instance], demands: dict[str, ModelDemand]
) -> dict[int, KVManager]:
    served = {model.id: model for model in scenario.models}
    footprints = {id: base_footprint(demand, len(scenario.gpus)).footprint_bytes for id, demand in demands.items()}
    tenants = tenants_by_gpu(instances, served, footprints, scenario.engine)
    gpus = {gpu.id: gpu for gpu in scenario.gpus}
    return {
        gpu: build_manager(scenario.system.memory, usable_bytes(gpus[gpu], scenario.engine), members)
        for gpu, members in tenants.items()
    }


def _gpu_of(scenario: Scenario, instance: Instance) -> object:
    return next(gpu.spec for gpu in scenario.gpus if gpu.id == instance.gpus[0])


def _factsheet(scenario: Scenario, engine: int, instance: Instance, kv: EngineKV) -> EngineFactsheet:
    served: ServedModel = next(model for model in scenario.models if model.id == instance.model)
    step = step_model(served, _gpu_of(scenario, instance), scenario.engine)
    budget = scenario.engine.token_budget
    return EngineFactsheet(
        engine=engine,
        gpu=instance.gpus[0],
        slo_s=served.ttft_slo_s,
        prefill=lambda tokens, decoding: step.prefill_s(tokens, decoding, budget),
        prefill_tokens_per_s=budget / step.prefill_s(budget, 0, budget),
        kv_capacity_tokens=kv.capacity_tokens(),
        block_tokens=scenario.engine.block_tokens,
        shares_memory=isinstance(scenario.system.memory, KvSlabSpec),
    )


def _domains(
    scenario: Scenario, engines: Sequence[Engine], instances: Sequence[Instance], managers: dict[int, KVManager]
) -> list[MemoryDomain]:
    """Engines that share a slab memory, directly or through a TP group, form one domain; private pools keep them apart."""
    groups: list[tuple[set[int], list[Engine]]] = []
    for engine, instance in zip(engines, instances, strict=True):
        gpus, members = set(instance.gpus), [engine]
        if isinstance(scenario.system.memory, KvSlabSpec):
            touching = [group for group in groups if group[0] & gpus]
            groups = [group for group in groups if group not in touching]
            for others, neighbours in touching:
                gpus |= others
                members += neighbours
        groups.append((gpus, members))
    return [
        MemoryDomain(sorted(members, key=lambda engine: engine.index), [managers[gpu] for gpu in sorted(gpus)])
        for gpus, members in groups
    ]
