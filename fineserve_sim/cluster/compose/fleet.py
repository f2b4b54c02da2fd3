"""From a scenario whose system has residency to a fleet that stands ready: as ``compose``, for engines that come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from fineserve_sim.catalog import weight_bytes
from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.compose.instances import factsheet, place, seat_on
from fineserve_sim.cluster.compose.memory import (
    build_manager,
    fixed_bytes,
    geometry,
    legacy_kernel,
    tenants_on,
    usable_bytes,
    virtual_kv,
)
from fineserve_sim.cluster.compose.parts import Parts, cluster_of
from fineserve_sim.cluster.compose.policies import (
    EngineFactsheet,
    build_activation_cost,
    build_residency,
    build_schedulers,
)
from fineserve_sim.cluster.compose.profiling import step_model
from fineserve_sim.cluster.compose.sharing import SmShares, contention_of
from fineserve_sim.cluster.engine.spans import SpanEngine
from fineserve_sim.cluster.fleet.fleet import EngineBytes, ModelFleet
from fineserve_sim.cluster.fleet.loader import Loader
from fineserve_sim.cluster.fleet.memory import FleetMemory
from fineserve_sim.cluster.host import Cluster
from fineserve_sim.cluster.samples import Column, EngineSampler
from fineserve_sim.cluster.scenario import EngineSettings, Scenario, ScenarioError, ServedModel
from fineserve_sim.cluster.sharing.wakeups import Wakeups
from fineserve_sim.cluster.step_times import StepTimes
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.fleet.controller import FleetController
from fineserve_sim.policy.fleet.facts import EngineBinding, FleetModel
from fineserve_sim.policy.interfaces import GpuSlot, Instance, LocalScheduler, ModelDemand, Placement
from fineserve_sim.systems.spec import KvCachedSpec, PrismResidencySpec, PrivatePoolsSpec


def compose_fleet(scenario: Scenario) -> Parts:
    """Models that the placement finds no room for stay in host memory. Raises ScenarioError as ``compose`` does."""
    placement, demands = place(scenario)
    parts = _Builder(scenario, placement, demands)
    controller = parts.controller(placement.instances)
    cluster = cluster_of(scenario, parts.clock, controller, contention_of(scenario))
    fleet = ModelFleet(
        cluster,
        controller,
        parts.memory,
        Loader(build_activation_cost(parts.residency), {gpu.id: gpu.node for gpu in scenario.gpus}),
        parts.bytes_of,
        partial(parts.build_engine, cluster),
    )
    fleet.begin([(instance.model, instance.gpus) for instance in placement.instances])
    managers = tuple(parts.memory.managers[gpu] for gpu in sorted(parts.memory.managers))
    columns = [Column(id, partial(fleet.engines_of, id), partial(fleet.queued_for, id)) for id in parts.served]
    usable = tuple(slot.memory_bytes for slot in parts.slots)
    return Parts(cluster, EngineSampler(columns, managers), StepTimes(cluster.engines.values), usable, placement)


class _Builder:
    """What engines, schedulers and the controller of a fleet are built from."""

    def __init__(self, scenario: Scenario, placement: Placement, demands: dict[str, ModelDemand]) -> None:
        assert scenario.system.residency is not None
        self.residency = scenario.system.residency
        self.clock = Clock()
        self.served = {model.id: model for model in scenario.models}
        self._scenario = scenario
        self.slots = [GpuSlot(gpu.id, gpu.node, usable_bytes(gpu, scenario.engine)) for gpu in scenario.gpus]
        memory = scenario.system.memory
        if not isinstance(memory, KvCachedSpec | PrivatePoolsSpec):
            raise ScenarioError(f"a system with residency needs memory kvcached or private, not {memory.policy}")
        self.bytes_of = {id: _engine_bytes(served, scenario.engine, memory) for id, served in self.served.items()}
        self.memory = self._build_memory(memory, placement.instances, demands)
        self._models = {
            id: FleetModel(
                replace(demand, weight_bytes=self.bytes_of[id].fixed_bytes, activation_bytes=0),
                self.served[id].model.max_context_tokens,
            )
            for id, demand in demands.items()
        }
        self._wakeups = {slot.id: Wakeups(self.clock) for slot in self.slots}
        self._gpus = {gpu.id: gpu.spec for gpu in scenario.gpus}
        self._sm_shares = SmShares(scenario)

    def _build_memory(
        self, spec: KvCachedSpec | PrivatePoolsSpec, placed: Sequence[Instance], demands: dict[str, ModelDemand]
    ) -> FleetMemory:
        """Of the engines that are there from the start, as in a cluster where they stay."""
        scenario = self._scenario
        tenants = tenants_on(scenario, placed, demands)
        usable = {slot.id: slot.memory_bytes for slot in self.slots}
        fixed = {gpu: sum(tenant.fixed_bytes for tenant in tenants.get(gpu, ())) for gpu in usable}
        managers = {
            gpu: build_manager(spec, bytes, tenants.get(gpu, ()), virtual=bytes) for gpu, bytes in usable.items()
        }
        return FleetMemory(usable, fixed, managers)

    def _step(self, model: str, gpu: int) -> StepModel:
        """The step times of a model on a GPU of this kind."""
        kernel = legacy_kernel(self._scenario.system.memory)
        return step_model(self.served[model], self._gpus[gpu], self._scenario.engine, kernel)

    def controller(self, instances: Sequence[Instance]) -> FleetController:
        demands = {id: model.demand for id, model in self._models.items()}
        residency = build_residency(self.residency, self._scenario.system.placement, demands, self.slots)
        window_s = self.residency.rate_window_s if isinstance(self.residency, PrismResidencySpec) else 60.0
        return FleetController(
            self._models,
            self.slots,
            instances,
            residency,
            self._schedulers,
            tick_s=self.residency.tick_s,
            rate_window_s=window_s,
        )

    def build_engine(self, cluster: Cluster, engine: int, model: str, gpus: tuple[int, ...]) -> SpanEngine:
        cluster.contention.join(engine, gpus, self._sm_shares.of(model, gpus))
        served, spec = self.served[model], self._gpus[gpus[0]]
        seat = seat_on(self._scenario, engine, served, spec, [self.memory.managers[gpu] for gpu in gpus])
        return SpanEngine(seat, cluster, self._wakeups[gpus[0]], shares_gpu=True)

    def _schedulers(self, bindings: Sequence[EngineBinding]) -> Mapping[tuple[int, ...], LocalScheduler | None]:
        return build_schedulers(self._scenario.system.scheduler, [self._factsheet(binding) for binding in bindings])

    def _factsheet(self, binding: EngineBinding) -> EngineFactsheet:
        step = self._step(binding.model, binding.gpus[0])
        block_tokens = self._scenario.engine.block_tokens
        return factsheet(self._scenario, self.served[binding.model], binding, step, block_tokens)


def _engine_bytes(
    served: ServedModel, settings: EngineSettings, memory: KvCachedSpec | PrivatePoolsSpec
) -> EngineBytes:
    block = geometry(served, settings)
    return EngineBytes(
        weight_bytes(served.model, served.precision, served.tp),
        fixed_bytes(served, settings),
        virtual_kv(memory, block) if isinstance(memory, KvCachedSpec) else block.block_bytes,
        served.model.max_context_tokens,
    )
