"""Builds a ready cluster from a scenario of many models, whose engines stay or come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fineserve_sim.catalog import weight_bytes
from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.compose.memory import (
    build_manager,
    caches_prefixes,
    check_outside,
    claimed,
    copied_s,
    engine_block_tokens,
    engine_kv,
    fixed_bytes,
    geometry,
    legacy_kernel,
    offloads,
    resident_bytes,
    slots_of,
    tenants_on,
    virtual_kv,
)
from fineserve_sim.cluster.compose.place import Placed
from fineserve_sim.cluster.compose.policies import (
    EngineFactsheet,
    build_activation_costs,
    build_residency,
    build_schedulers,
    build_sleepers,
)
from fineserve_sim.cluster.compose.profiling import sharing_of, slowest, sm_share, step_model
from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.links import Links
from fineserve_sim.cluster.engine.lone import Lone
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.offload import offload
from fineserve_sim.cluster.engine.ranks import Rank, Together
from fineserve_sim.cluster.engine.seating import seated
from fineserve_sim.cluster.engine.spans import Spans, Wakeups
from fineserve_sim.cluster.engine.state import Seat
from fineserve_sim.cluster.fleet.fleet import ModelFleet
from fineserve_sim.cluster.fleet.loader import Loader
from fineserve_sim.cluster.fleet.memory import EngineBytes, FleetMemory
from fineserve_sim.cluster.host import Cluster, Scope
from fineserve_sim.cluster.run import Parts
from fineserve_sim.cluster.samples import Column, EngineSampler
from fineserve_sim.cluster.scenario import WAKES, EngineSettings, Scenario, ScenarioError, ServedModel
from fineserve_sim.cluster.sharing.contention import Contention
from fineserve_sim.cluster.sharing.domain import domains_of
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.sharing import LAWS
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.fleet.controller import FleetController
from fineserve_sim.policy.fleet.roster import EngineBinding, FleetModel
from fineserve_sim.policy.fleet.views import ResidencyPolicy
from fineserve_sim.policy.interfaces import GpuSlot, Instance, LocalScheduler, ModelDemand
from fineserve_sim.policy.memory.paged import PrivatePools
from fineserve_sim.systems.spec import (
    ActivationSpec,
    ContiguousSpec,
    KvCachedSpec,
    KvSlabSpec,
    PrivatePoolsSpec,
    SwapPoolsSpec,
    VTensorSpec,
)


def compose(scenario: Scenario, placed: Placed) -> Parts:
    """The engines of the placement, which stay. Raises ScenarioError for a memory that cannot be."""
    build = Builder(scenario, placed)
    gpus_of = [instance.gpus for instance in build.placement.instances]
    seats = build.seats()
    able = [seat for seat in seats if seat.able]
    schedulers = build.schedulers(
        [EngineBinding(seat.engine, seat.model, gpus_of[seat.engine], seat.kv.capacity_tokens()) for seat in able]
    )
    scheduler_of = {engine: scheduler for scope, scheduler in schedulers.items() for engine in scope}
    controller = Controller(build.routes(seats), schedulers)
    cluster = cluster_of(scenario, build.clock, controller, build.contention, build.links)
    engines = [build.engine(seat, cluster, alone=scheduler_of.get(seat.engine) is None) for seat in seats]
    scopes = [Scope(scope) for scope in (*schedulers, *((seat.engine,) for seat in seats if not seat.able))]
    cluster.connect(engines, domains_of(engines, gpus_of, build.managers), scopes)
    columns = [
        Column(engine.model, partial(tuple, (engine,)), partial(controller.bound_to, engine.index))
        for engine in engines
    ]
    capacities = tuple(build.managers[gpu].ledger().total_bytes for gpu in sorted(build.managers))
    return build.parts(cluster, columns, capacities)


def compose_fleet(scenario: Scenario, placed: Placed) -> Parts:
    """As ``compose``, for engines that come and go. Models that the placement finds no room for have no engine at first; where
    engines sleep, they have no process either, and weights on disk alone."""
    settings, memory, residency = scenario.engine, scenario.system.memory, scenario.system.residency
    assert residency is not None
    if not isinstance(memory, KvCachedSpec | PrivatePoolsSpec):
        raise ScenarioError(f"a system with residency needs memory kvcached or private, not {memory.policy}")
    build = Builder(scenario, placed)
    bytes_of = {id: _engine_bytes(served, settings, memory) for id, served in build.served.items()}
    models = {}
    for id, served in build.served.items():
        demand = replace(placed[1][id], weight_bytes=bytes_of[id].fixed_bytes, activation_bytes=0)
        models[id] = FleetModel(demand, served.model.max_context_tokens)
    slots, demands = slots_of(scenario), {id: model.demand for id, model in models.items()}
    controller = FleetController(
        models,
        slots,
        build.placement.instances,
        _residency(scenario, demands, slots),
        build.schedulers,
        tick_s=residency.tick_s,
    )
    cluster = cluster_of(scenario, build.clock, controller, build.contention, build.links)

    def engine(id: int, model: str, gpus: tuple[int, ...]) -> Engine:
        engine = seated(build.seat(id, model, gpus), cluster)
        offload(engine, build.clock, cluster.log)
        Spans(engine, build.wakeups[gpus[0]], shares_gpu=True)
        return engine

    node_of = {gpu.id: gpu.node for gpu in scenario.gpus}
    fleet = ModelFleet(
        cluster,
        controller,
        FleetMemory(build.ledger, build.managers, partial(_divided, scenario, placed[1])),
        Loader(node_of),
        build_sleepers(residency, node_of),
        build_activation_costs(residency),
        bytes_of,
        engine,
    )
    fleet.begin([(instance.model, instance.gpus) for instance in build.placement.instances])
    columns = [Column(id, partial(fleet.engines_of, id), partial(fleet.queued_for, id)) for id in build.served]
    parts = build.parts(cluster, columns, tuple(build.ledger.usable_bytes.values()))
    if isinstance(residency, ActivationSpec) and residency.sleep is not None:
        return replace(parts, counters=lambda _: {name: fleet.activations[tier] for tier, name in WAKES.items()})
    return parts


def _engine_bytes(
    served: ServedModel, settings: EngineSettings, memory: KvCachedSpec | PrivatePoolsSpec
) -> EngineBytes:
    weights, block = weight_bytes(served.model, served.precision, served.tp), geometry(served, settings)
    return EngineBytes(
        weights,
        resident_bytes(served, settings) - weights,
        fixed_bytes(served, settings),
        virtual_kv(memory, block) if isinstance(memory, KvCachedSpec) else block.block_bytes,
        served.model.max_context_tokens,
    )


def _divided(
    scenario: Scenario, demands: Mapping[str, ModelDemand], free_bytes: int, loading: Mapping[int, str]
) -> PrivatePools:
    """Pools for engines that load on one GPU, by id their models, in the bytes that all others leave."""
    alone = [Instance(model, 0, (0,), demands[model].rate_per_s, 0) for model in loading.values()]
    tenants = tenants_on(scenario, alone, demands)[0]
    here = [replace(tenant, engine=id) for id, tenant in zip(loading, tenants, strict=True)]
    usable = free_bytes + sum(tenant.fixed_bytes for tenant in here)
    if sum(max(tenant.footprint_bytes, tenant.fixed_bytes) for tenant in here) > usable:
        here = [replace(tenant, footprint_bytes=tenant.fixed_bytes) for tenant in here]  # footprints have no room
    pools = build_manager(scenario.system.memory, usable, here)
    assert isinstance(pools, PrivatePools)
    return pools


def _residency(scenario: Scenario, demands: Mapping[str, ModelDemand], slots: Sequence[GpuSlot]) -> ResidencyPolicy:
    """Raises ScenarioError for GPUs that the policy cannot divide among these models."""
    assert scenario.system.residency is not None
    try:
        return build_residency(scenario.system.residency, scenario.system.placement, demands, slots)
    except ValueError as error:
        raise ScenarioError(f"system {scenario.system.name}: {error}") from error


def links_of(scenario: Scenario, clock: Clock) -> Links:
    """All links of the GPUs. Links to host memory have the rate that the system or the engine settings give, if any."""
    memory, offloading = scenario.system.memory, scenario.engine.kv_offloading
    host_bytes_per_s = offloading.bytes_per_s if offloading is not None else None
    return Links(
        clock, scenario.gpus, memory.host_bytes_per_s if isinstance(memory, SwapPoolsSpec) else host_bytes_per_s
    )


def cluster_of(
    scenario: Scenario, clock: Clock, controller: Controller, contention: Contention, links: Links
) -> Cluster:
    """A cluster without engines yet, which looks as closely as the scenario asks."""
    merging = not scenario.exact_steps and scenario.engine.contention == "composition"
    context_tokens = {served.id: served.model.max_context_tokens for served in scenario.models}
    cluster = Cluster(
        clock, controller, contention, context_tokens, merging=merging, check=scenario.check, log=scenario.log
    )
    cluster.links = links
    return cluster


class Builder:
    """Builds the engines of a scenario and their schedulers. ``ledger``: the bytes that engines claim of each GPU, and its KV
    memory. ``tenants``: of the placement, by GPU. ``managers``: the KV memories by GPU, of GPUs with engines, or of all where
    engines come and go."""

    def __init__(self, scenario: Scenario, placed: Placed) -> None:
        self.placement, demands = placed
        self.served = {model.id: model for model in scenario.models}
        self.clock = Clock()
        self.links = links_of(scenario, self.clock)
        self.wakeups = {gpu.id: Wakeups(self.clock) for gpu in scenario.gpus}
        modes = {gpu.id: sharing_of(gpu, scenario).mode for gpu in scenario.gpus}
        # Engines that meet in one slice of a GPU take turns there; of exclusive GPUs each has one engine.
        self.contention = Contention({gpu: LAWS.get(mode, LAWS["time_slice"]) for gpu, mode in modes.items()})
        self._scenario = scenario
        self._together: dict[str, Together] = {}  # by model, the group of its ranks that were built last
        self._gpus = {gpu.id: gpu for gpu in scenario.gpus}
        check_outside(scenario, self.placement.instances)
        self.tenants = tenants_on(scenario, self.placement.instances, demands)
        shared = {tenant.engine for members in self.tenants.values() if len(members) > 1 for tenant in members}
        loners = set(range(len(self.placement.instances))) - shared
        memory, comes_and_goes = scenario.system.memory, scenario.system.residency is not None
        slots = slots_of(scenario)
        self.ledger = claimed(slots, self.placement.instances, self.served, scenario.engine)
        self.managers = {}
        for slot in slots:
            if comes_and_goes or slot.id in self.tenants:
                here = self.tenants.get(slot.id, ())
                virtual = slot.memory_bytes if comes_and_goes else None
                manager = build_manager(memory, slot.memory_bytes, here, loners, virtual=virtual)
                self.ledger.set_pool(slot.id, manager.ledger().total_bytes)
                self.managers[slot.id] = manager

    def seats(self) -> list[Seat]:
        """A seat for each instance of the placement."""
        return [self.seat(id, instance.model, instance.gpus) for id, instance in enumerate(self.placement.instances)]

    def seat(self, engine: int, model: str, gpus: tuple[int, ...]) -> Seat:
        """The seat of a new engine on these GPUs; the engine does not exist yet."""
        memory = self._scenario.system.memory
        share = sm_share(self._scenario, self.served[model], [self._gpus[gpu] for gpu in gpus])
        self.contention.join(engine, gpus, share)
        settings = replace(self._scenario.engine, block_tokens=self._block_tokens(model))
        managers = [self.managers[gpu] for gpu in gpus]
        offloading = offloads(self._scenario)
        below = None if offloading is None else (offloading, self.links.of(gpus))
        kv = engine_kv(engine, managers, settings.block_tokens, caches=caches_prefixes(memory), below=below)
        contiguous = isinstance(memory, ContiguousSpec)
        longest = settings.block_tokens if contiguous else self.served[model].model.max_context_tokens
        return Seat(engine, model, self._step(model, gpus), kv, min(longest, kv.capacity_tokens()), settings)

    def engine(self, seat: Seat, cluster: Cluster, *, alone: bool) -> Engine:
        """An engine of the placement, once all have seats. Its executor is ``Lone`` only if it shares nothing, no scheduler is
        asked for it (``alone``) and no client waits for its requests."""
        wakeups = self.wakeups[self.placement.instances[seat.engine].gpus[0]]
        shares_gpu = self.contention.contended(seat.engine)
        engine = seated(seat, cluster)
        offload(engine, self.clock, cluster.log)
        if (ranks := self.served[seat.model].ranks) > 1:
            self._join_ranks(engine, ranks)
            return engine
        waited_for = self._scenario.clients is not None
        if cluster.merging and isinstance(seat.kv, CountedBlocks) and alone and not shares_gpu and not waited_for:
            Lone(engine, wakeups)
        else:
            Spans(engine, wakeups, shares_gpu=shares_gpu)
        return engine

    def _join_ranks(self, engine: Engine, ranks: int) -> None:
        """The engine steps together with the other ranks of its group, which are built one after the other. Raises
        ScenarioError where it shares a GPU."""
        if self.contention.contended(engine.index):
            raise ScenarioError(
                f"model {engine.model}: data-parallel ranks (dp) share no GPU; give them whole GPUs of their own"
            )
        begun = self._together.get(engine.model)
        if begun is None or begun.size == ranks:
            begun = self._together[engine.model] = Together(self.clock)
        Rank(engine, begun)

    def routes(self, seats: Sequence[Seat]) -> dict[str, list[Route]]:
        """Where the requests of each model go, among engines of the placement. An engine that can hold no sequence gets none
        while the model has others; alone it is the one that refuses them."""
        able = {seat.model for seat in seats if seat.able}
        routes: dict[str, list[Route]] = {model: [] for model in self.served}
        for seat in seats:
            if seat.able or seat.model not in able:
                rate_per_s = self.placement.instances[seat.engine].rate_per_s
                routes[seat.model].append(Route(seat.engine, rate_per_s, seat.max_tokens))
        return routes

    def schedulers(self, engines: Sequence[EngineBinding]) -> Mapping[tuple[int, ...], LocalScheduler | None]:
        return build_schedulers(self._scenario.system.scheduler, [self._factsheet(engine) for engine in engines])

    def _factsheet(self, engine: EngineBinding) -> EngineFactsheet:
        step, budget = self._step(engine.model, engine.gpus), self._scenario.engine.token_budget
        return EngineFactsheet(
            engine=engine.engine,
            gpu=engine.gpus[0],
            slo_s=self.served[engine.model].ttft_slo_s,
            prefill=lambda tokens, decoding, pairs: step.prefill_s(tokens, decoding, budget, pairs),
            prefill_tokens_per_s=budget / step.prefill_s(budget, 0, budget),
            kv_capacity_tokens=engine.kv_tokens,
            block_tokens=self._block_tokens(engine.model),
            shares_memory=isinstance(self._scenario.system.memory, KvSlabSpec | KvCachedSpec | VTensorSpec),
        )

    def _block_tokens(self, model: str) -> int:
        return engine_block_tokens(self.served[model], self._scenario.engine, self._scenario.system.memory)

    def _step(self, model: str, gpus: tuple[int, ...]) -> StepModel:
        served, settings = self.served[model], self._scenario.engine
        gpu = slowest(served, [self._gpus[gpu].spec for gpu in gpus], settings)
        kernel = legacy_kernel(self._scenario.system.memory)
        return step_model(served, gpu, settings, kernel, copied_s(served, self._scenario))

    def token_bytes(self, model: str) -> int:
        """KV bytes of a token over all GPUs of an engine."""
        served = self.served[model]
        return geometry(served, self._scenario.engine).token_bytes * served.tp

    def parts(self, cluster: Cluster, columns: Sequence[Column], kv_capacity_bytes: tuple[int, ...]) -> Parts:
        sampler = EngineSampler(columns, [self.managers[gpu] for gpu in sorted(self.managers)])
        return Parts(cluster, sampler, kv_capacity_bytes, self.placement)
