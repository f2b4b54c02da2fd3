"""From a scenario to a cluster of groups that stands ready."""

from __future__ import annotations

from dataclasses import dataclass

from fineserve_sim.catalog import weight_bytes
from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.compose import place
from fineserve_sim.cluster.groups.cluster import GroupCluster, Makers, Policies
from fineserve_sim.cluster.groups.cost import fit_chunk_cost
from fineserve_sim.cluster.groups.forming import Former, Lookahead, TokenCount
from fineserve_sim.cluster.groups.group import GroupSettings
from fineserve_sim.cluster.groups.instance import Instance, InstanceLinks, ModelBytes
from fineserve_sim.cluster.groups.regroup import TransferRules
from fineserve_sim.cluster.groups.relief import Recompute, Relief, Swap
from fineserve_sim.cluster.links import Link
from fineserve_sim.cluster.memory import geometry, peak_activation_bytes, usable_bytes
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.profiling import step_model
from fineserve_sim.cluster.scenario import Gpu, Scenario, ScenarioError, ServedModel
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.groups.dispatch import DispatchPolicy, LeastLoaded, LeastQueued, MostFree, RoundRobin
from fineserve_sim.policy.groups.drop_plan import even_split
from fineserve_sim.policy.groups.migration import LlumnixMigration
from fineserve_sim.policy.groups.throttle import KunServeDrop, ScaleOut
from fineserve_sim.policy.interfaces import Placement
from fineserve_sim.systems.spec import (
    FcfsSpec,
    FreenessDispatchSpec,
    KunServeDropSpec,
    LeastLoadedDispatchSpec,
    LeastQueuedDispatchSpec,
    PipelineSpec,
    PrivatePoolsSpec,
    SwapPoolsSpec,
    SystemSpec,
)

LINKS_PER_INSTANCE = 4


@dataclass(frozen=True, slots=True)
class GroupParts:
    """A composed run. ``base_kv_bytes``: KV memory of a GPU that holds all its weights."""

    clock: Clock
    cluster: GroupCluster
    outcomes: Outcomes
    placement: Placement
    sizes: ModelBytes
    base_kv_bytes: int


def compose_groups(scenario: Scenario) -> GroupParts:
    """Raises ScenarioError for a system that does not fit together, or a model or cluster that does not fit it."""
    system = scenario.system
    execution = system.execution or PipelineSpec()
    _check_system(scenario, execution)
    (served,) = scenario.models
    placement, _ = place(scenario)
    gpus = {gpu.id: gpu for gpu in scenario.gpus}
    first = gpus[placement.instances[0].gpus[0]]
    sizes = _sizes(scenario, served, first)
    step = step_model(served, first.spec, scenario.engine)
    clock, outcomes = Clock(), Outcomes(scenario.trace)
    instances = [
        Instance(
            number,
            gpus[seat.gpus[0]].node,
            seat.gpus,
            sizes,
            _links(scenario, clock, number, gpus[seat.gpus[0]]),
            clock,
        )
        for number, seat in enumerate(placement.instances)
    ]
    spares = 0 if system.scaling is None else system.scaling.instances
    serving = len(instances) - spares
    if serving < execution.stages or serving % execution.stages:
        raise ScenarioError(
            f"system {system.name}: {serving} serving instances do not make pipelines of {execution.stages} stages"
        )
    layout = even_split(sizes.layers, execution.stages)
    cluster = GroupCluster(
        clock,
        outcomes,
        instances,
        instances[serving:],
        _makers(scenario, sizes, step, execution),
        _policies(scenario, sizes, {instance.id: instance.node for instance in instances}),
        min(served.model.max_context_tokens, _capacity_tokens(sizes, layout, scenario.engine.block_tokens)),
        TransferRules(
            coordinated=system.drop is None or system.drop.exchange == "coordinated",
            chunk_s=_stage_s(step, scenario.engine.token_budget),
            remap_s=0.0 if system.drop is None else system.drop.remap_s,
        ),
        check=scenario.check,
        log=scenario.log,
    )
    for start in range(0, serving, execution.stages):
        members = tuple(instances[start : start + execution.stages])
        for member, layers in zip(members, layout, strict=True):
            member.resident = frozenset(layers)
        cluster.create(members, layout)
    return GroupParts(clock, cluster, outcomes, placement, sizes, max(0, sizes.base_kv_bytes) // served.tp)


def _check_system(scenario: Scenario, execution: PipelineSpec) -> None:
    system = scenario.system
    if len(scenario.models) != 1:
        raise ScenarioError(f"system {system.name} serves one model; the cluster has {len(scenario.models)}")
    if not isinstance(system.scheduler, FcfsSpec):
        raise ScenarioError(
            f"system {system.name}: a system with dispatch schedules by fcfs, not {system.scheduler.policy}"
        )
    if isinstance(system.memory, PrivatePoolsSpec):
        plain = not system.memory.prefix_cache and system.memory.attention == "current"
    else:
        plain = isinstance(system.memory, SwapPoolsSpec)
    if not plain or system.residency is not None:
        raise ScenarioError(
            f"system {system.name}: a system with dispatch has resident models, and private or swap memory without prefix "
            "cache or legacy kernels"
        )
    alone = "swap memory" if isinstance(system.memory, SwapPoolsSpec) else "migration" if system.migration else ""
    if alone and (execution.stages > 1 or system.drop is not None):
        raise ScenarioError(f"system {system.name}: {alone} is for instances alone, not for pipelines")


def _sizes(scenario: Scenario, served: ServedModel, gpu: Gpu) -> ModelBytes:
    settings = scenario.engine
    weights = weight_bytes(served.model, served.precision, served.tp) * served.tp
    fixed = (settings.context_bytes + peak_activation_bytes(served, settings)) * served.tp
    block = geometry(served, settings)
    layers = served.model.layers
    sizes = ModelBytes(
        layers=layers,
        layer_bytes=weights // layers,
        rest_bytes=weights % layers,
        block_layer_bytes=block.block_layer_bytes * served.tp,
        token_layer_bytes=block.token_bytes * served.tp / layers,
        pool_bytes=usable_bytes(gpu, settings) * served.tp - fixed,
        hidden_bytes=served.model.hidden_size * 2,
    )
    if sizes.base_kv_bytes < sizes.block_bytes:
        raise ScenarioError(f"model {served.id} leaves no memory for one KV block on an instance of {served.tp} GPUs")
    return sizes


def _capacity_tokens(sizes: ModelBytes, layout: tuple[range, ...], block_tokens: int) -> int:
    """Tokens that a group holds from the start: its tightest stage bounds it."""
    blocks = min(
        (sizes.pool_bytes - sizes.rest_bytes - len(layers) * sizes.layer_bytes)
        // (len(layers) * sizes.block_layer_bytes)
        for layers in layout
    )
    return blocks * block_tokens


def _links(scenario: Scenario, clock: Clock, number: int, gpu: Gpu) -> InstanceLinks:
    """One of each kind for every GPU of the instance, taken together: TP ranks send their shards side by side."""
    (served,) = scenario.models
    memory = scenario.system.memory
    host = memory.host_bytes_per_s if isinstance(memory, SwapPoolsSpec) else gpu.spec.pcie_bytes_per_s
    rates = (gpu.network_bytes_per_s, gpu.spec.peer_bytes_per_s, host, host)
    network, node, to_host, from_host = (
        Link(clock, rate * served.tp, 1 + number * LINKS_PER_INSTANCE + kind) for kind, rate in enumerate(rates)
    )
    return InstanceLinks(network, node, to_host, from_host)


def _stage_s(step: StepModel, budget_tokens: int) -> float:
    """Seconds of one stage of two with a full token budget: what a chunk of a coordinated transfer may take."""
    return step.step_s(0, 0, budget_tokens, budget_tokens * (budget_tokens + 1) // 2, 0, 1) / 2


def _makers(scenario: Scenario, sizes: ModelBytes, step: StepModel, execution: PipelineSpec) -> Makers:
    engine = scenario.engine
    by_lookahead = execution.microbatches == "lookahead"
    shared = by_lookahead or execution.queues == "shared"
    settings = GroupSettings(sizes, step, engine.block_tokens, engine.max_sequences, shared)
    swaps = isinstance(scenario.system.memory, SwapPoolsSpec)
    cost = fit_chunk_cost(step) if by_lookahead else None

    def former(stages: int) -> Former:
        if cost is None or stages == 1:
            return TokenCount(engine.token_budget)
        least = execution.min_tokens or engine.token_budget
        return Lookahead(engine.token_budget, least, cost, execution.lookahead, engine.block_tokens)

    def relief(first: Instance) -> Relief:
        return Swap(first.links.to_host, first.links.from_host) if swaps else Recompute()

    return Makers(settings, former, relief)


def _policies(scenario: Scenario, sizes: ModelBytes, node_of: dict[int, int]) -> Policies:
    system = scenario.system
    migration, scaling = system.migration, system.scaling
    return Policies(
        dispatch=_dispatch(system),
        drop=None if system.drop is None else _drop(system.drop, sizes, node_of),
        migration=None if migration is None else LlumnixMigration(migration.out_blocks, migration.in_blocks),
        scale_out=None if scaling is None else ScaleOut(scaling.growing_samples, scaling.start_s),
        start_s=0.0 if scaling is None else scaling.start_s,
    )


def _dispatch(system: SystemSpec) -> DispatchPolicy:
    if isinstance(system.dispatch, LeastLoadedDispatchSpec):
        return LeastLoaded(system.dispatch.queued)
    if isinstance(system.dispatch, FreenessDispatchSpec):
        return MostFree(system.dispatch.queued)
    return LeastQueued() if isinstance(system.dispatch, LeastQueuedDispatchSpec) else RoundRobin()


def _drop(spec: KunServeDropSpec, sizes: ModelBytes, node_of: dict[int, int]) -> KunServeDrop:
    return KunServeDrop(
        sizes.copy_bytes,
        sizes.block_bytes,
        node_of=node_of,
        trigger=spec.trigger,
        restore_below=spec.restore_below,
        required=spec.required,
        max_group=spec.max_group,
        falling_samples=spec.falling_samples,
        restore=spec.restore,
    )
