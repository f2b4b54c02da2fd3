"""From a scenario of one model on many instances to a cluster that stands ready."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from fineserve_sim.catalog import weight_bytes
from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.compose.chunk_cost import fit_chunk_cost
from fineserve_sim.cluster.compose.instances import place
from fineserve_sim.cluster.compose.memory import fixed_bytes, geometry, usable_bytes
from fineserve_sim.cluster.compose.parts import Parts, cluster_of
from fineserve_sim.cluster.compose.policies import options
from fineserve_sim.cluster.compose.profiling import step_model
from fineserve_sim.cluster.counters import counters
from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.kv import EngineKV, PrefixBlocks, StageBlocks
from fineserve_sim.cluster.engine.links import Link
from fineserve_sim.cluster.engine.lookahead import Lookahead
from fineserve_sim.cluster.engine.pipeline import PipelineEngine
from fineserve_sim.cluster.engine.seat import Seat
from fineserve_sim.cluster.engine.spans import SpanEngine
from fineserve_sim.cluster.engine.swap import Swap
from fineserve_sim.cluster.engine.tp_group import InstanceLinks, ModelBytes, TpGroup
from fineserve_sim.cluster.fleet.exchange import TransferRules
from fineserve_sim.cluster.fleet.instances import Instances
from fineserve_sim.cluster.host import Cluster
from fineserve_sim.cluster.samples import InstanceSampler
from fineserve_sim.cluster.scenario import Gpu, Scenario, ScenarioError, ServedModel
from fineserve_sim.cluster.sharing.contention import Contention
from fineserve_sim.cluster.sharing.wakeups import Wakeups
from fineserve_sim.cluster.step_times import StepTimes
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.groups.controller import GroupController, GroupModel
from fineserve_sim.policy.groups.dispatch import LlumnixMigration, dispatcher
from fineserve_sim.policy.groups.drop_plan import KunServeDrop, ScaleOut, even_split
from fineserve_sim.policy.interfaces import Instance
from fineserve_sim.policy.memory.paged import PoolShare
from fineserve_sim.systems import spec as specs

LINKS_PER_INSTANCE = 4


def compose_groups(scenario: Scenario) -> Parts:
    """Raises ScenarioError for a system that does not fit together, or a model or cluster that does not fit it."""
    system = scenario.system
    execution = system.execution or specs.PipelineSpec()
    _check_system(scenario, execution)
    (served,) = scenario.models
    placement, _ = place(scenario)
    spares = _spares(scenario, len(placement.instances), execution.stages)
    serving = len(placement.instances) - spares
    clock = Clock()
    instances = _instances(scenario, placement.instances, clock)
    sizes = instances[0].sizes
    controller = _controller(scenario, instances, execution.stages, spares)
    cluster = cluster_of(scenario, clock, controller, Contention({}))
    builder = _Builder(scenario, cluster, controller.max_tokens, execution)
    drop = system.drop or specs.KunServeDropSpec()
    chunk_s = _stage_s(builder.step, scenario.engine.token_budget)
    fleet = Instances(
        cluster,
        instances,
        builder.build,
        TransferRules(drop.exchange == "coordinated", chunk_s, drop.remap_s),
        spares=spares,
        start_s=0.0 if system.scaling is None else system.scaling.start_s,
        migrates=system.migration is not None,
    )
    fleet.begin(execution.stages)
    sampler = InstanceSampler(served.id, instances, cluster)
    base_bytes = max(0, sizes.base_kv_bytes) // served.tp
    return Parts(
        cluster,
        sampler,
        StepTimes(tuple),
        (base_bytes,) * sum(len(instance.gpus) for instance in instances),
        placement,
        serving,
        lambda last_arrival_s: counters(fleet, sampler, last_arrival_s),
    )


def _spares(scenario: Scenario, instances: int, stages: int) -> int:
    """Instances that serve only when asked for. Raises ScenarioError when the others make no pipelines."""
    system = scenario.system
    spares = 0 if system.scaling is None else system.scaling.instances
    serving = instances - spares
    if serving < stages or serving % stages:
        raise ScenarioError(
            f"system {system.name}: {serving} serving instances do not make pipelines of {stages} stages"
        )
    return spares


class _Builder:
    """Builds the engines of a run."""

    def __init__(self, scenario: Scenario, cluster: Cluster, max_tokens: int, execution: specs.PipelineSpec) -> None:
        (served,) = scenario.models
        self.step = step_model(served, scenario.gpus[0].spec, scenario.engine)
        self._cluster, self._max_tokens, self._execution = cluster, max_tokens, execution
        self._model, self._settings, self._memory = served.id, scenario.engine, scenario.system.memory
        self._wakeups: dict[TpGroup, Wakeups] = defaultdict(lambda: Wakeups(cluster.clock))
        self._cost = fit_chunk_cost(self.step) if execution.microbatches == "lookahead" else None

    def build(self, id: int, members: tuple[TpGroup, ...], layout: tuple[range, ...], shared: bool) -> Engine:
        settings, execution = self._settings, self._execution
        sizes = members[0].sizes
        stages = zip(members, layout, strict=True)
        pools = [PoolShare(member.kv, len(layers) * sizes.block_layer_bytes) for member, layers in stages]
        counted = StageBlocks(pools, settings.block_tokens)
        caches = isinstance(self._memory, specs.PrivatePoolsSpec) and self._memory.prefix_cache
        kv: EngineKV = PrefixBlocks(counted) if caches else counted
        max_tokens = min(self._max_tokens, counted.capacity_tokens())
        seat = Seat(id, self._model, self.step, kv, max_tokens, settings)
        if len(members) == 1 and not shared:
            swap = None
            if isinstance(self._memory, specs.SwapPoolsSpec):
                links = members[0].links
                swap = Swap(links.to_host, links.from_host, counted, sizes.block_bytes)
            engine = SpanEngine(seat, self._cluster, self._wakeups[members[0]], shares_gpu=False, relief=swap)
            engine.columns = (members[0].id,)
            engine.column = members[0].id
            return engine
        lookahead = None
        if self._cost is not None and len(members) > 1:
            least = execution.min_tokens or settings.token_budget
            lookahead = Lookahead(least, self._cost, execution.lookahead)
        return PipelineEngine(
            seat,
            self._cluster,
            members,
            layout,
            shared_queue=execution.microbatches == "lookahead" or execution.queues == "shared",
            lookahead=lookahead,
        )


def _instances(scenario: Scenario, placed: Sequence[Instance], clock: Clock) -> list[TpGroup]:
    gpus = {gpu.id: gpu for gpu in scenario.gpus}
    (served,) = scenario.models
    sizes = _sizes(scenario, served, gpus[placed[0].gpus[0]])
    return [
        TpGroup(
            number,
            gpus[instance.gpus[0]].node,
            instance.gpus,
            sizes,
            _links(scenario, clock, number, gpus[instance.gpus[0]]),
            clock,
        )
        for number, instance in enumerate(placed)
    ]


def _controller(scenario: Scenario, instances: Sequence[TpGroup], stages: int, spares: int) -> GroupController:
    system, settings = scenario.system, scenario.engine
    (served,) = scenario.models
    sizes = instances[0].sizes

    def holds_tokens(members: int) -> int:
        return _capacity_tokens(sizes, even_split(sizes.layers, members), settings.block_tokens)

    model = GroupModel(
        served.id,
        sizes.layers,
        min(served.model.max_context_tokens, holds_tokens(stages)),
        settings.block_tokens,
        holds_tokens,
    )
    drop, migration, scaling = system.drop, system.migration, system.scaling
    node_of = {instance.id: instance.node for instance in instances}
    assert system.dispatch is not None
    return GroupController(
        model,
        [instance.gpus for instance in instances],
        dispatcher(**system.dispatch.model_dump()),
        drop=KunServeDrop(
            sizes.copy_bytes, sizes.block_bytes, sizes.base_kv_bytes, node_of, **options(drop, "exchange", "remap_s")
        )
        if drop
        else None,
        migration=LlumnixMigration(**options(migration)) if migration else None,
        scale_out=ScaleOut(scaling.growing_samples, scaling.start_s) if scaling else None,
        stages=stages,
        spares=spares,
    )


def _check_system(scenario: Scenario, execution: specs.PipelineSpec) -> None:
    system = scenario.system
    if len(scenario.models) != 1:
        raise ScenarioError(f"system {system.name} serves one model; the cluster has {len(scenario.models)}")
    if not isinstance(system.scheduler, specs.FcfsSpec):
        raise ScenarioError(
            f"system {system.name}: a system with dispatch schedules by fcfs, not {system.scheduler.policy}"
        )
    if isinstance(system.memory, specs.PrivatePoolsSpec):
        plain = system.memory.attention == "current"
    else:
        plain = isinstance(system.memory, specs.SwapPoolsSpec)
    if not plain or system.residency is not None:
        raise ScenarioError(
            f"system {system.name}: a system with dispatch has resident models, and private or swap memory without "
            "legacy kernels"
        )
    caches = isinstance(system.memory, specs.PrivatePoolsSpec) and system.memory.prefix_cache
    if caches and system.migration is not None:
        raise ScenarioError(f"system {system.name}: migration moves no prefix cache; leave one of them out")
    alone = "swap memory" if isinstance(system.memory, specs.SwapPoolsSpec) else "migration" if system.migration else ""
    if alone and (execution.stages > 1 or system.drop is not None):
        raise ScenarioError(f"system {system.name}: {alone} is for instances alone, not for pipelines")


def _sizes(scenario: Scenario, served: ServedModel, gpu: Gpu) -> ModelBytes:
    settings = scenario.engine
    weights = weight_bytes(served.model, served.precision, served.tp) * served.tp
    fixed = fixed_bytes(served, settings) * served.tp - weights
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
    host = memory.host_bytes_per_s if isinstance(memory, specs.SwapPoolsSpec) else gpu.spec.pcie_bytes_per_s
    rates = (gpu.network_bytes_per_s, gpu.spec.peer_bytes_per_s, host, host)
    network, node, to_host, from_host = (
        Link(clock, rate * served.tp, 1 + number * LINKS_PER_INSTANCE + kind) for kind, rate in enumerate(rates)
    )
    return InstanceLinks(network, node, to_host, from_host)


def _stage_s(step: StepModel, budget_tokens: int) -> float:
    """Seconds of one stage of two with a full token budget: what a chunk of a coordinated transfer may take."""
    return step.step_s(0, 0, budget_tokens, budget_tokens * (budget_tokens + 1) // 2, 0, 1) / 2
