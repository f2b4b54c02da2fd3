"""From a file and a scenario to engines that run under their driver: place, start, measure, connect."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fineserve_runtime.bounds import Bounds
from fineserve_runtime.config import ModelFiles, RuntimeFile, RuntimeSection
from fineserve_runtime.core import CoreSpec, GpuFacts, LayerFacts, LoadFacts, ModelFacts, Stay
from fineserve_runtime.decisions import Log
from fineserve_runtime.driver import Driver
from fineserve_runtime.engines.api import EngineConfig, EngineHandle, EngineHost, EngineListener, HostConfig, Mode
from fineserve_runtime.jobs import Observer
from fineserve_runtime.memories import SHARED, in_memory, paging
from fineserve_runtime.step_times import MeasuredStep, read_table
from fineserve_runtime.warmup import Relay, measure
from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.groups import check_groups
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.cluster.scenario import Scenario, ScenarioError, ServedModel
from fineserve_sim.policy.groups.drop_plan import even_split
from fineserve_sim.policy.groups.microbatch import LookaheadMode
from fineserve_sim.policy.interfaces import ModelDemand, Placement
from fineserve_sim.policy.memory.paged import Share, split_bytes
from fineserve_sim.policy.placement.fineserve import base_footprint
from fineserve_sim.systems.spec import ContiguousSpec, PrivatePoolsSpec, QlmResidencySpec, SwapPoolsSpec

StartHost = Callable[[HostConfig, EngineListener], EngineHost]


@dataclass(frozen=True, slots=True)
class Running:
    """Engines under a driver. ``placement`` is what the system's placement policy said; ``hosts`` and the ``relays`` that hear
    them go by the first device of each."""

    driver: Driver
    hosts: Mapping[int, EngineHost]
    spec: CoreSpec
    placement: Placement
    relays: Mapping[int, Relay]

    @property
    def capacity_bytes(self) -> tuple[int, ...]:
        return tuple(host.config.region_bytes for host in self.devices.values())

    @property
    def devices(self) -> dict[int, EngineHost]:
        """The host of each device."""
        return {gpu: host for host in self.hosts.values() for gpu in host.config.gpus}


def start_real_host(config: HostConfig, listener: EngineListener) -> EngineHost:
    """Real engines. Raises ValueError where vLLM is not installed."""
    try:
        from fineserve_runtime.engines.host import start_host
    except ImportError as problem:
        raise ValueError(f"vLLM cannot be imported ({problem}); install it as docs/runtime.md says") from None
    return start_host(config, listener)


def gpus() -> int:
    """How many GPUs the driver of this machine has, asked without torch, which takes seconds to import."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    found = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if found else 0


@contextmanager
def starting(section: RuntimeSection, devices: int) -> Iterator[StartHost]:
    """How the hosts of so many devices are started: on this machine, or on the Ray cluster of ``section``. Raises ValueError
    for a cluster that is not there."""
    if section.cluster is None:
        if section.backend == "cuda" and not gpus():
            raise ValueError("runtime.backend: cuda, but no GPU can be used here (no driver, or no device); take cpu")
        yield start_real_host
        return
    try:
        from fineserve_runtime.engines.ray_cluster import ray_cluster
    except ImportError as problem:
        raise ValueError(f"runtime.cluster: Ray cannot be imported ({problem}); pip install 'fineserve[ray]'") from None
    with ray_cluster(section.ray_address, devices, section.backend) as cluster:
        yield cluster.start_host


@contextmanager
def launch(
    file: RuntimeFile,
    scenario: Scenario,
    *,
    log: Log | None = None,
    observers: Sequence[Observer] = (),
    on_incident: Callable[[str, dict[str, object]], None] = lambda what, facts: None,
    start: StartHost | None = None,
) -> Iterator[Running]:
    """The scenario's system on real engines, until the block ends. ``start`` replaces how the file says that hosts start.
    Raises ValueError for what cannot run."""
    if scenario.system.dispatch is not None:
        check_groups(scenario)
    placement, demands = place(scenario, demands_of(scenario))
    if placement.unplaced and scenario.system.residency is None:
        raise ScenarioError(f"system {scenario.system.name}: no room for {', '.join(placement.unplaced)}")
    with ExitStack() as stack:
        configs = host_configs(file, scenario, placement, demands)
        relays = {gpu: Relay() for gpu in configs}
        start = start or stack.enter_context(starting(file.section, len(configs)))
        hosts = _start_hosts(configs, relays, start, stack, together=file.section.cluster is not None)
        spec = _core_spec(file, scenario, placement, hosts, _step_times(file, hosts, relays))
        section = file.section
        bounds = Bounds(section.queued_requests, section.queued_s, section.request_s, section.silent_s)
        driver = Driver(
            spec, bounds=bounds, handover=section.handover, log=log, observers=observers, on_incident=on_incident
        )
        for gpu, relay in relays.items():
            relay.to = driver.listener(gpu)
        driver.start(hosts)
        stack.callback(driver.close)
        yield Running(driver, hosts, spec, placement, relays)


def _start_hosts(
    configs: Mapping[int, HostConfig],
    relays: Mapping[int, Relay],
    start: StartHost,
    stack: ExitStack,
    *,
    together: bool,
) -> dict[int, EngineHost]:
    """``stack`` closes them. ``together`` for machines of their own; on this one, engines in a process start one by one."""

    def begin(gpu: int) -> EngineHost:
        host = start(configs[gpu], relays[gpu])
        stack.callback(host.close)
        return host

    if not together:
        return {gpu: begin(gpu) for gpu in configs}
    with ThreadPoolExecutor(len(configs)) as pool:
        return dict(zip(configs, pool.map(begin, configs), strict=True))


def host_configs(
    file: RuntimeFile, scenario: Scenario, placement: Placement, demands: Mapping[str, ModelDemand]
) -> dict[int, HostConfig]:
    """One host a GPU that has engines, or for all GPUs that engines with ranks tie together; by the first of them. Where models
    come and go, every GPU has an engine of each. Raises ScenarioError for devices that one machine cannot have side by side."""
    section = file.section
    seats = dict.fromkeys(resident(scenario, placement))
    if scenario.system.drop is not None:  # beside the instances, the pipeline that they make
        seats |= dict.fromkeys((model, tuple(gpu for _, group in seats for gpu in group)) for model, _ in list(seats))
    if scenario.system.residency is not None:
        seats = dict.fromkeys((model.id, (gpu.id,)) for gpu in scenario.gpus for model in scenario.models)
    gpus = sorted({gpu for _, group in seats for gpu in group})
    mode = _mode(section, len(gpus))
    on = {gpu: [name for name, group in seats if gpu in group] for gpu in gpus}
    limits = {gpu: _limits(scenario, section.region_bytes, names, demands) for gpu, names in on.items()}

    def engine(name: str, group: tuple[int, ...]) -> EngineConfig:
        least = min((limit for gpu in group if (limit := limits[gpu][name]) is not None), default=None)
        config = engine_config(name, section.models[name], file.folder, scenario, least, group)
        return config if scenario.system.drop is None else _dropping(config, scenario, gpus)

    configs = {}
    for tied in tied_devices(group for _, group in seats):
        configs[tied[0]] = HostConfig(
            engines=tuple(engine(name, group) for name, group in seats if group[0] in tied),
            region_bytes=section.region_bytes,
            mode=mode,
            device=section.backend,
            region_name=section.region_name,
            gpus=tied,
            slab_multiple=getattr(scenario.system.memory, "slab_multiple", 1),
            paging=paging(scenario.system.memory),
            contiguous=isinstance(scenario.system.memory, ContiguousSpec),
            weights_in_region=section.weights_in_region,
            poison_freed=section.poison_freed,
            silent_s=section.silent_s,
        )
    return configs


def _dropping(config: EngineConfig, scenario: Scenario, gpus: Sequence[int]) -> EngineConfig:
    """The engine of a system whose instances, one on each of ``gpus``, drop layers: an instance, or the pipeline over all."""
    if len(config.gpus) > 1:
        return replace(config, stages=len(gpus), borrows=True)
    (model,) = scenario.models
    kept = even_split(model.model.layers, len(gpus))[gpus.index(config.gpus[0])]
    return replace(config, keeps=(kept.start, kept.stop))


def resident(scenario: Scenario, placement: Placement) -> list[tuple[str, tuple[int, ...]]]:
    """The model and the devices of each engine that serves from the start: an instance, or a pipeline of several. Raises
    ScenarioError for instances that do not make pipelines."""
    stages, instances = _stages(scenario), placement.instances
    if len(instances) % stages:
        name = scenario.system.name
        raise ScenarioError(f"system {name}: {len(instances)} instances do not make pipelines of {stages} stages")
    groups = [instances[first : first + stages] for first in range(0, len(instances), stages)]
    return [(group[0].model, tuple(gpu for instance in group for gpu in instance.gpus)) for group in groups]


def _stages(scenario: Scenario) -> int:
    """Instances of an engine."""
    return 1 if scenario.system.execution is None else scenario.system.execution.stages


def tied_devices(groups: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """All devices of ``groups``, those together that share one, in order."""
    found: list[set[int]] = []
    for group in groups:
        tied = set(group).union(*(each for each in found if each & set(group)))
        found = [each for each in found if not each & tied] + [tied]
    return sorted(tuple(sorted(each)) for each in found)


def _mode(section: RuntimeSection, devices: int) -> Mode:
    """In this process on a CPU, where a process an engine takes half a minute to start; but what steps in one process steps in
    turn, and vLLM's GPU backend keeps one engine a process. On a cluster each device has a process of its own, and Ray gives
    it a GPU of its own."""
    beside = section.cluster is None and devices > 1
    if beside and section.backend == "cuda":
        raise ScenarioError(f"engines on {devices} GPUs need runtime.cluster: ray, on one machine, too")
    if beside and section.mode == "in_process":
        raise ScenarioError(f"runtime.mode: engines on {devices} devices need processes; leave mode out")
    return section.mode or ("processes" if beside or section.backend == "cuda" else "in_process")


def engine_config(
    name: str,
    files: ModelFiles,
    folder: Path,
    scenario: Scenario,
    limit_bytes: int | None = None,
    gpus: tuple[int, ...] = (),
) -> EngineConfig:
    config = EngineConfig(
        name=name,
        model=folder / files.path,
        dtype=files.dtype,
        quantization=files.quantization,
        kv_cache_dtype=files.kv_cache_dtype,
        block_tokens=scenario.engine.block_tokens,
        max_model_len=files.max_model_len,
        max_sequences=scenario.engine.max_sequences,
        max_batched_tokens=scenario.engine.token_budget,
        prefix_caching=files.prefix_caching,
        kv_limit_bytes=limit_bytes,
        gpus=gpus,
        stages=files.stages * _stages(scenario),
        embeds=files.embeds,
        swaps=isinstance(scenario.system.memory, SwapPoolsSpec),
        lookahead=_lookahead(scenario),
    )
    return in_memory(config, scenario.system.memory, folder / files.path)


def _lookahead(scenario: Scenario) -> LookaheadMode | None:
    execution = scenario.system.execution
    return execution.lookahead if execution and execution.microbatches == "lookahead" else None


def _limits(
    scenario: Scenario, region_bytes: int, names: Sequence[str], demands: Mapping[str, ModelDemand]
) -> dict[str, int | None]:
    """How much of the region each engine may lease: all of it where memory is shared, or one model's at a time. Where pools are
    private, its share, as the simulator divides them: KV equally or by demand, or memory in proportion to footprints, less what
    the engine takes beside KV."""
    memory = scenario.system.memory
    system = scenario.system
    in_turn = system.drop is not None or isinstance(system.residency, QlmResidencySpec)
    if isinstance(memory, SHARED | SwapPoolsSpec) or in_turn:
        return dict.fromkeys(names)
    if isinstance(memory, ContiguousSpec):
        memory = PrivatePoolsSpec()
    assert isinstance(memory, PrivatePoolsSpec)
    if memory.split == "equal":
        return {name: region_bytes // len(names) for name in names}
    if memory.split == "demand":
        asked = {number: demands[name] for number, name in enumerate(names)}
        shares = {
            number: Share(demand.rate_per_s * demand.token_bytes, memory.least_tokens * demand.token_bytes)
            for number, demand in asked.items()
        }
        return {names[number]: part for number, part in split_bytes(region_bytes, shares).items()}
    footprints = {name: base_footprint(demands[name], len(scenario.gpus)).footprint_bytes for name in names}
    usable = region_bytes + sum(demands[name].weight_bytes for name in names)
    return {
        name: int(usable * footprints[name] / sum(footprints.values())) - demands[name].weight_bytes for name in names
    }


def _step_times(
    file: RuntimeFile, hosts: Mapping[int, EngineHost], relays: Mapping[int, Relay]
) -> dict[str, tuple[MeasuredStep, ...]]:
    found: dict[str, tuple[MeasuredStep, ...]] = {}
    for gpu, host in hosts.items():
        for model, rows in measure(host, relays[gpu]).items():
            found.setdefault(model, rows)
    if file.section.step_times is not None:
        found |= read_table(file.folder / file.section.step_times)
    return found


def _core_spec(
    file: RuntimeFile,
    scenario: Scenario,
    placement: Placement,
    hosts: Mapping[int, EngineHost],
    measured: Mapping[str, tuple[MeasuredStep, ...]],
) -> CoreSpec:
    engines = [handle for host in hosts.values() for handle in host.engines.values()]
    handles = {handle.config.name: handle for handle in engines if not handle.config.borrows}
    weights = {name: handle.stats().weight_bytes for name, handle in handles.items()}
    models = [
        model_facts(
            handles[served.id],
            served.rate_per_s,
            served.ttft_slo_s,
            measured[served.id],
            load=_load_facts(served, scenario.engine.max_sequences),
            contiguous=isinstance(scenario.system.memory, ContiguousSpec),
        )
        for served in scenario.models
    ]
    return CoreSpec(
        placement=scenario.system.placement,
        scheduler=scenario.system.scheduler,
        residency=scenario.system.residency,
        dispatch=scenario.system.dispatch,
        migration=scenario.system.migration,
        drop=scenario.system.drop,
        layers=None if scenario.system.drop is None else _layer_facts(scenario, engines),
        token_budget=scenario.engine.token_budget,
        shares_memory=isinstance(scenario.system.memory, SHARED),
        gpus=tuple(
            GpuFacts(id=gpu, memory_bytes=_memory_bytes(host, gpu, weights))
            for host in hosts.values()
            for gpu in host.config.gpus
        ),
        models=tuple(models),
        stays=tuple(Stay(model=model, gpus=gpus) for model, gpus in resident(scenario, placement)),
    )


def _layer_facts(scenario: Scenario, engines: Sequence[EngineHandle]) -> LayerFacts:
    """``engines``: two instances and the pipeline over both."""
    (model,) = scenario.models
    *instances, pipeline = sorted(engines, key=lambda handle: handle.config.borrows)
    freed_bytes, tokens = instances[0].droppable_bytes(), scenario.engine.block_tokens
    return LayerFacts(
        layers=model.model.layers,
        copy_bytes=sum(each.droppable_bytes() for each in instances),
        block_bytes=instances[0].block_bytes,
        base_bytes=instances[0].kv_capacity_tokens // tokens * instances[0].block_bytes,
        pair_tokens=pipeline.kv_capacity_tokens + freed_bytes // pipeline.block_bytes * tokens,
    )


def _load_facts(served: ServedModel, max_sequences: int) -> LoadFacts:
    return LoadFacts(
        prompt_tokens=served.mean_prompt_tokens,
        output_tokens=served.mean_output_tokens,
        max_sequences=max_sequences,
        tpot_slo_s=served.tpot_slo_s,
    )


def model_facts(
    handle: EngineHandle,
    rate_per_s: float,
    slo_s: float,
    measured: tuple[MeasuredStep, ...],
    *,
    load: LoadFacts | None = None,
    contiguous: bool = False,
) -> ModelFacts:
    """The facts of a model with an engine that is awake. ``contiguous``: its unit of KV is room for a whole sequence."""
    config = handle.config
    unit_tokens = config.max_model_len if contiguous else config.block_tokens
    return ModelFacts(
        id=config.name,
        rate_per_s=rate_per_s,
        slo_s=slo_s,
        tp=len(handle.gpus),
        weight_bytes=handle.stats().weight_bytes,
        token_bytes=handle.block_bytes // config.block_tokens,
        max_tokens=min(config.max_model_len, handle.kv_capacity_tokens),
        block_tokens=unit_tokens,
        measured=measured,
        load=load,
    )


def _memory_bytes(host: EngineHost, gpu: int, weights: Mapping[str, int]) -> int:
    """The region; and the weights beside it, where they are not in it."""
    if host.config.weights_in_region:
        return host.config.region_bytes
    here = [handle.config.name for handle in host.engines.values() if gpu in handle.gpus]
    return host.config.region_bytes + sum(weights[name] for name in here)
