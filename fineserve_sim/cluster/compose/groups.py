"""Builds a ready cluster from a scenario of one model on many instances."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache, partial

from fineserve_sim.catalog import weight_bytes
from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.compose.memory import (
    caches_prefixes,
    copied_s,
    fixed_bytes,
    geometry,
    offloads,
    private_blocks,
    usable_bytes,
)
from fineserve_sim.cluster.compose.models import cluster_of, links_of
from fineserve_sim.cluster.compose.place import Placed
from fineserve_sim.cluster.compose.policies import options
from fineserve_sim.cluster.compose.profiling import chunk_cost, slowest, step_model
from fineserve_sim.cluster.engine.lookahead import LookaheadBatching
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.offload import offload
from fineserve_sim.cluster.engine.pipeline import Pipeline
from fineserve_sim.cluster.engine.seating import seated
from fineserve_sim.cluster.engine.spans import Spans, Wakeups
from fineserve_sim.cluster.engine.state import Seat
from fineserve_sim.cluster.engine.swap import HostTier
from fineserve_sim.cluster.engine.tp_group import ModelBytes, TpGroup
from fineserve_sim.cluster.fleet.instances import Instances
from fineserve_sim.cluster.fleet.regroup import TransferRules
from fineserve_sim.cluster.host import Cluster
from fineserve_sim.cluster.run import Parts
from fineserve_sim.cluster.samples import InstanceSampler, counters
from fineserve_sim.cluster.scenario import Gpu, Scenario, ScenarioError
from fineserve_sim.cluster.sharing.contention import Contention
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.groups.controller import GroupController, GroupModel
from fineserve_sim.policy.groups.dispatch import LlumnixMigration, dispatcher
from fineserve_sim.policy.groups.drop_plan import KunServeDrop, ScaleOut, even_split
from fineserve_sim.policy.groups.roles import Roles, split_of
from fineserve_sim.policy.memory.paged import PagedPool
from fineserve_sim.systems import spec as specs


def compose_groups(scenario: Scenario, placed: Placed) -> Parts:
    """The instances of a placement and their engines, for a scenario that ``check_groups`` accepts. Raises ScenarioError for a
    model or cluster that does not fit the system."""
    placement, _ = placed
    system, stages = scenario.system, _execution(scenario).stages
    spares = 0 if system.scaling is None else system.scaling.instances
    serving = len(placement.instances) - spares
    if serving < stages or serving % stages:
        raise ScenarioError(
            f"system {system.name}: {serving} serving instances do not make pipelines of {stages} stages"
        )
    build = _Builder(scenario, [instance.gpus for instance in placement.instances], _roles(scenario, serving))
    instances = build.instances()
    controller = build.controller(instances, spares)
    cluster = cluster_of(scenario, build.clock, controller, Contention({}), links_of(scenario, build.clock))
    drop, tokens = system.drop or specs.KunServeDropSpec(), scenario.engine.token_budget
    chunk_s = build.step.step_s(0, 0, tokens, tokens * (tokens + 1) // 2, 0, 1) / 2  # of one stage of two
    fleet = Instances(
        cluster,
        instances,
        partial(build.engine, cluster),
        TransferRules(drop.exchange == "coordinated", chunk_s),
        spares=spares,
        start_s=0.0 if system.scaling is None else system.scaling.start_s,
        migrates=system.migration is not None,
        setup_s=0.0 if system.roles is None else system.roles.setup_s,
    )
    fleet.begin(stages)
    sampler = InstanceSampler(build.served.id, instances, cluster)
    base_bytes = [max(0, each.sizes.base_kv_bytes) // build.served.tp for each in instances for _ in each.gpus]
    return Parts(
        cluster,
        sampler,
        tuple(base_bytes),
        placement,
        serving,
        partial(counters, fleet, sampler),
    )


def _execution(scenario: Scenario) -> specs.PipelineSpec:
    return scenario.system.execution or specs.PipelineSpec()


def _roles(scenario: Scenario, serving: int) -> Roles | None:
    """Which of so many instances prefill. Raises ScenarioError for too few."""
    spec = scenario.system.roles
    if spec is None:
        return None
    try:
        return Roles(split_of(serving, spec.prefill, spec.decode))
    except ValueError as error:
        raise ScenarioError(f"system {scenario.system.name}: {error}") from error


def check_groups(scenario: Scenario) -> None:
    """Raises ScenarioError for a system whose parts do not fit together, or that serves another number of models."""
    system, memory = scenario.system, scenario.system.memory
    swaps = isinstance(memory, specs.SwapPoolsSpec)
    plain = memory.attention == "current" if isinstance(memory, specs.PrivatePoolsSpec) else swaps
    pipelines = _execution(scenario).stages > 1 or system.drop is not None
    problem = None
    others = pipelines or swaps or caches_prefixes(memory) or system.migration is not None or system.scaling is not None
    if len(scenario.models) != 1 and system.roles is None:
        raise ScenarioError(f"system {system.name} serves one model; the cluster has {len(scenario.models)}")
    if not isinstance(system.scheduler, specs.FcfsSpec):
        problem = f"a system with dispatch schedules by fcfs, not {system.scheduler.policy}"
    elif not plain or system.residency is not None:
        problem = "a system with dispatch has resident models, and private or swap memory without legacy kernels"
    elif caches_prefixes(memory) and system.migration is not None:
        problem = "migration moves no prefix cache; leave one of them out"
    elif pipelines and (swaps or system.migration is not None):
        problem = f"{'swap memory' if swaps else 'migration'} is for instances alone, not for pipelines"
    elif system.roles is not None and (others or scenario.engine.batching != "vllm"):
        problem = "roles are for instances alone under vLLM's batching, without prefix caches, swap memory, migration or spares"
    elif pipelines and offloads(scenario):
        problem = "engine.kv_offloading is for instances alone, not for pipelines"
    elif scenario.engine.batching != "vllm" and (swaps or pipelines):
        problem = "engine.batching sglang is for engines on one instance each, without swap memory"
    elif scenario.faults and len(scenario.models) != 1:
        problem = "faults are for clusters of one model"
    if problem:
        raise ScenarioError(f"system {system.name}: {problem}")


class _Builder:
    """Builds the instances of the one model, on these ``groups`` of GPUs, and their engines. Raises ScenarioError when the
    memory of an instance holds no KV block beside the model."""

    def __init__(self, scenario: Scenario, groups: Sequence[tuple[int, ...]], roles: Roles | None) -> None:
        self._scenario, self._settings, self._memory = scenario, scenario.engine, scenario.system.memory
        self._roles = roles
        self._first_token = "prefill" if scenario.system.roles is None else scenario.system.roles.first_token
        self._execution = _execution(scenario)
        self._gpus = {gpu.id: gpu for gpu in scenario.gpus}
        (self.served,) = scenario.models
        self.step = self._step(self._gpus)
        self._groups = groups
        kinds = {gpu.spec: self._sizes(gpu) for gpu in (self._gpus[group[0]] for group in groups)}
        self._sizes_of = [kinds[self._gpus[group[0]].spec] for group in groups]  # by instance
        self.clock = Clock()
        self._wakeups: dict[TpGroup, Wakeups] = defaultdict(lambda: Wakeups(self.clock))

    def _sizes(self, gpu: Gpu) -> ModelBytes:
        served, settings = self.served, self._settings
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
            raise ScenarioError(
                f"model {served.id} leaves no memory for one KV block on an instance of {served.tp} GPUs"
            )
        return sizes

    def _holds_tokens(self, members: tuple[int, ...]) -> int:
        """Tokens that an engine over these instances, in the order of its stages, holds from the start: its tightest stage
        bounds it."""
        stages = [self._sizes_of[member] for member in members]
        blocks = min(
            (sizes.pool_bytes - sizes.rest_bytes - len(layers) * sizes.layer_bytes)
            // (len(layers) * sizes.block_layer_bytes)
            for sizes, layers in zip(stages, even_split(stages[0].layers, len(stages)), strict=True)
        )
        return blocks * self._settings.block_tokens

    def _longest(self, serving: int) -> int:
        """The longest sequence of any engine that serves from the start."""
        stages = self._execution.stages
        holds = [self._holds_tokens(tuple(range(at, at + stages))) for at in range(0, serving, stages)]
        first = serving if self._roles is None else self._roles.prefill  # each request needs an engine of each role
        return min(self.served.model.max_context_tokens, max(holds[:first]), max(holds[first:], default=max(holds)))

    def instances(self) -> list[TpGroup]:
        return [
            TpGroup(number, self._gpus[gpus[0]].node, gpus, sizes, self.clock)
            for number, (gpus, sizes) in enumerate(zip(self._groups, self._sizes_of, strict=True))
        ]

    def _step(self, gpus: Iterable[int]) -> StepModel:
        """Step times of these GPUs together."""
        gpu = slowest(self.served, [self._gpus[gpu].spec for gpu in gpus], self._settings)
        return step_model(self.served, gpu, self._settings, copied_s=copied_s(self.served, self._scenario))

    def controller(self, instances: Sequence[TpGroup], spares: int) -> GroupController:
        system, sizes = self._scenario.system, self._sizes_of[0]
        drop, migration, scaling = system.drop, system.migration, system.scaling
        node_of = {instance.id: instance.node for instance in instances}
        base_bytes = {instance.id: instance.sizes.base_kv_bytes for instance in instances}
        of_model = sizes.copy_bytes, sizes.block_bytes, base_bytes
        self._max_tokens = self._longest(len(instances) - spares)
        assert system.dispatch is not None
        return GroupController(
            GroupModel(
                self.served.id, sizes.layers, self._max_tokens, self._settings.block_tokens, cache(self._holds_tokens)
            ),
            [instance.gpus for instance in instances],
            dispatcher(**system.dispatch.model_dump()),
            drop=KunServeDrop(*of_model, node_of, **options(drop, "exchange")) if drop else None,
            migration=LlumnixMigration(**options(migration)) if migration else None,
            scale_out=ScaleOut(scaling.growing_samples, scaling.start_s) if scaling else None,
            stages=self._execution.stages,
            spares=spares,
            roles=self._roles,
        )

    def engine(
        self, cluster: Cluster, id: int, members: tuple[TpGroup, ...], layout: tuple[range, ...], shared: bool
    ) -> Engine:
        """See ``EngineMaker``."""
        settings, execution = self._settings, self._execution
        stages = zip(members, layout, strict=True)
        pools = [PagedPool(len(layers) * member.sizes.block_layer_bytes, member.kv) for member, layers in stages]
        offloading = offloads(self._scenario)
        below = None if offloading is None else (offloading, cluster.links.of(members[0].gpus))
        kv = private_blocks(pools, settings.block_tokens, caches=caches_prefixes(self._memory), below=below)
        # As the controller knows it: a pair is built before the memory of its dropped layers is KV.
        max_tokens = min(self._max_tokens, self._holds_tokens(tuple(member.id for member in members)))
        step = self._step([gpu for member in members for gpu in member.gpus])
        seat = Seat(id, self.served.id, step, kv, max_tokens, settings)
        if len(members) == 1 and not shared:
            (only,) = members
            engine = seated(seat, cluster)
            engine.columns = (only.id,)
            if self._roles is not None and only.id < self._roles.prefill:
                engine.hands_over = True
                engine.yields = self._first_token == "prefill"
            offload(engine, self.clock, cluster.log)
            Spans(engine, self._wakeups[only], shares_gpu=False)
            if isinstance(self._memory, specs.SwapPoolsSpec):
                links = cluster.links.of(only.gpus)
                HostTier(engine, links.to_host, links.from_host, only.sizes.block_bytes)
            return engine
        looks_ahead = execution.microbatches == "lookahead"
        shared_queue = looks_ahead or execution.queues == "shared"
        engine = seated(seat, cluster, lanes=len(members), shared_queue=shared_queue)
        if looks_ahead and len(members) > 1:
            least_tokens = execution.min_tokens or settings.token_budget
            LookaheadBatching(engine, least_tokens, chunk_cost(step), execution.lookahead)
        Pipeline(engine, members, layout, tuple(self._step(member.gpus) for member in members))
        return engine
