"""From a scenario to a cluster that stands ready: profile, place, divide memory, build engines and schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fineserve_sim.catalog import GpuSpec
from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.compose.memory import (
    build_manager,
    caches_prefixes,
    engine_block_tokens,
    engine_kv,
    legacy_kernel,
    tenants_on,
    usable_bytes,
)
from fineserve_sim.cluster.compose.parts import Parts, cluster_of
from fineserve_sim.cluster.compose.policies import EngineFactsheet, build_placement, build_schedulers
from fineserve_sim.cluster.compose.profiling import demand_of, step_model
from fineserve_sim.cluster.compose.sharing import SmShares, check_exclusive, contention_of
from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.lone import LoneEngine
from fineserve_sim.cluster.engine.seat import Seat
from fineserve_sim.cluster.engine.spans import SpanEngine
from fineserve_sim.cluster.host import Cluster, Scope
from fineserve_sim.cluster.samples import Column, EngineSampler
from fineserve_sim.cluster.scenario import Scenario, ScenarioError, ServedModel
from fineserve_sim.cluster.sharing.domain import domains_of
from fineserve_sim.cluster.sharing.wakeups import Wakeups
from fineserve_sim.cluster.step_times import StepTimes
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.fleet.facts import EngineBinding
from fineserve_sim.policy.interfaces import GpuSlot, Instance, LocalScheduler, ModelDemand, Placement
from fineserve_sim.policy.memory.paged import GpuMemory
from fineserve_sim.policy.placement.tp_groups import tp_groups
from fineserve_sim.systems.spec import ContiguousSpec, KvCachedSpec, KvSlabSpec, VTensorSpec


def compose(scenario: Scenario, placed: tuple[Placement, dict[str, ModelDemand]] | None = None) -> Parts:
    """With what ``place`` gave, where known. Raises ScenarioError when a model fits on no GPU (group) of the empty cluster,
    or a pinned placement is impossible."""
    placement, demands = placed or place(scenario)
    managers = _managers(scenario, placement.instances, demands)
    seats = _seats(scenario, placement.instances, managers)
    instances = placement.instances
    served = {model.id: model for model in scenario.models}
    bindings = [
        EngineBinding(seat.engine, seat.model, instances[seat.engine].gpus, seat.kv.capacity_tokens()) for seat in seats
    ]
    sheets = [
        factsheet(scenario, served[seat.model], binding, seat.step, seat.settings.block_tokens)
        for seat, binding in zip(seats, bindings, strict=True)
        if seat.able
    ]
    schedulers = build_schedulers(scenario.system.scheduler, sheets)
    clock = Clock()
    contention, shares = contention_of(scenario), SmShares(scenario)
    for engine, instance in enumerate(instances):
        contention.join(engine, instance.gpus, shares.of(instance.model, instance.gpus))
    controller = Controller(_routes(scenario, instances, seats, schedulers))
    cluster = cluster_of(scenario, clock, controller, contention)
    asked = {engine for scope, scheduler in schedulers.items() if scheduler is not None for engine in scope}
    wakeups = {gpu.id: Wakeups(clock) for gpu in scenario.gpus}
    engines = [
        _engine(seat, cluster, wakeups[instances[seat.engine].gpus[0]], asked=seat.engine in asked) for seat in seats
    ]
    scopes = [Scope(engines) for engines in (*schedulers, *((seat.engine,) for seat in seats if not seat.able))]
    cluster.connect(engines, domains_of(engines, [instance.gpus for instance in instances], managers), scopes)
    by_gpu = tuple(managers[gpu] for gpu in sorted(managers))
    columns = [
        Column(engine.model, partial(tuple, (engine,)), partial(controller.bound_to, engine.index))
        for engine in engines
    ]
    capacities = tuple(manager.ledger().total_bytes for manager in by_gpu)
    return Parts(cluster, EngineSampler(columns, by_gpu), StepTimes(cluster.engines.values), capacities, placement)


def _engine(seat: Seat, cluster: Cluster, wakeups: Wakeups, *, asked: bool) -> SpanEngine:
    """An engine that shares nothing, and for which no scheduler is ``asked``, goes its own way."""
    shares_gpu = cluster.contention.contended(seat.engine)
    if cluster.merging and isinstance(seat.kv, CountedBlocks) and not (shares_gpu or asked):
        return LoneEngine(seat, cluster, wakeups)
    return SpanEngine(seat, cluster, wakeups, shares_gpu=shares_gpu)


def place(scenario: Scenario) -> tuple[Placement, dict[str, ModelDemand]]:
    """The system's placement, and the demand of each model that led to it. Raises as ``compose`` does, and where two engines
    are on an exclusive GPU."""
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
    check_exclusive(scenario, placement.instances)
    return placement, demands


def _check_fits_somewhere(demand: ModelDemand, slots: Sequence[GpuSlot]) -> None:
    groups = tp_groups(slots, demand.tp)
    budget = {slot.id: slot.memory_bytes for slot in slots}
    if not groups:
        raise ScenarioError(
            f"model {demand.id} needs {demand.tp} GPUs of one node (tp); the cluster has {len(slots)} GPUs"
        )
    if all(min(budget[gpu] for gpu in group) < demand.weight_bytes for group in groups):
        largest = max(budget.values()) / 2**30
        raise ScenarioError(
            f"model {demand.id} fits on no GPU: it needs {demand.weight_bytes / 2**30:.1f} GiB for weights at tp={demand.tp}, "
            f"a GPU has {largest:.1f} GiB usable; raise its tp or choose a smaller precision"
        )


def seats_of(scenario: Scenario, placed: tuple[Placement, dict[str, ModelDemand]]) -> list[Seat]:
    """The engines of a placement, before they exist."""
    placement, demands = placed
    return _seats(scenario, placement.instances, _managers(scenario, placement.instances, demands))


def _managers(
    scenario: Scenario, instances: Sequence[Instance], demands: dict[str, ModelDemand]
) -> dict[int, GpuMemory]:
    tenants = tenants_on(scenario, instances, demands)
    gpus = {gpu.id: gpu for gpu in scenario.gpus}
    shared = {tenant.engine for members in tenants.values() if len(members) > 1 for tenant in members}
    loners = set(range(len(instances))) - shared
    return {
        gpu: build_manager(scenario.system.memory, usable_bytes(gpus[gpu], scenario.engine), members, loners)
        for gpu, members in tenants.items()
    }


def _seats(scenario: Scenario, instances: Sequence[Instance], managers: Mapping[int, GpuMemory]) -> list[Seat]:
    served_by_id = {model.id: model for model in scenario.models}
    gpus = {gpu.id: gpu.spec for gpu in scenario.gpus}
    return [
        seat_on(scenario, engine, served_by_id[i.model], gpus[i.gpus[0]], [managers[gpu] for gpu in i.gpus])
        for engine, i in enumerate(instances)
    ]


def seat_on(scenario: Scenario, engine: int, served: ServedModel, gpu: GpuSpec, memories: Sequence[GpuMemory]) -> Seat:
    """An engine of this model on GPUs of this type, with the KV memory of each."""
    memory = scenario.system.memory
    settings = replace(scenario.engine, block_tokens=engine_block_tokens(served, scenario.engine, memory))
    kv = engine_kv(engine, memories, settings.block_tokens, caches=caches_prefixes(memory))
    step = step_model(served, gpu, settings, legacy_kernel(memory))
    longest = settings.block_tokens if isinstance(memory, ContiguousSpec) else served.model.max_context_tokens
    return Seat(engine, served.id, step, kv, min(longest, kv.capacity_tokens()), settings)


def _routes(
    scenario: Scenario,
    instances: Sequence[Instance],
    seats: Sequence[Seat],
    schedulers: Mapping[tuple[int, ...], LocalScheduler | None],
) -> dict[str, list[Route]]:
    scheduler_of = {engine: scheduler for scope, scheduler in schedulers.items() for engine in scope}
    routes: dict[str, list[Route]] = {model.id: [] for model in scenario.models}
    for seat in seats:
        if seat.able:
            rate_per_s = instances[seat.engine].rate_per_s
            routes[seat.model].append(Route(seat.engine, rate_per_s, seat.max_tokens, scheduler_of[seat.engine]))
    return routes


def factsheet(
    scenario: Scenario, served: ServedModel, engine: EngineBinding, step: StepModel, block_tokens: int
) -> EngineFactsheet:
    """What the scheduler of an engine of this model is told."""
    budget = scenario.engine.token_budget
    return EngineFactsheet(
        engine=engine.engine,
        gpu=engine.gpus[0],
        slo_s=served.ttft_slo_s,
        prefill=lambda tokens, decoding: step.prefill_s(tokens, decoding, budget),
        prefill_tokens_per_s=budget / step.prefill_s(budget, 0, budget),
        kv_capacity_tokens=engine.kv_tokens,
        block_tokens=block_tokens,
        shares_memory=isinstance(scenario.system.memory, KvSlabSpec | KvCachedSpec | VTensorSpec),
    )
