"""The policy core as the runtime puts it together, from data that goes into the first line of its decision log.

Everything that decides is in here: the core's controller with its local schedulers and its residency policy, and the
step-time models by which they predict. It is driven by events alone, so ``Core(spec)`` fed with a log's events gives
the log's commands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

from fineserve_runtime.step_times import MeasuredStep, StepTimes
from fineserve_sim.cluster.compose.policies import EngineFactsheet, build_residency, build_schedulers
from fineserve_sim.latency.profile import profile_of
from fineserve_sim.policy import events
from fineserve_sim.policy.commands import Command
from fineserve_sim.policy.controller import Controller
from fineserve_sim.policy.fleet.controller import FleetController
from fineserve_sim.policy.fleet.roster import EngineBinding, FleetModel
from fineserve_sim.policy.fleet.views import FleetView, ResidencyPolicy, Start, Status
from fineserve_sim.policy.groups.controller import GroupController, GroupModel
from fineserve_sim.policy.groups.dispatch import LlumnixMigration, Phase, dispatcher
from fineserve_sim.policy.groups.drop_plan import KunServeDrop
from fineserve_sim.policy.interfaces import GpuSlot, Instance, LocalScheduler, ModelDemand, OperatingPoint
from fineserve_sim.systems.spec import (
    DispatchSpec,
    KunServeDropSpec,
    LlumnixMigrationSpec,
    PlacementSpec,
    ResidencySpec,
    SchedulerSpec,
)


class StepMeasured(NamedTuple):
    """An engine of ``model`` computed prompt tokens in a step and took so long: news for the model's step times."""

    model: str
    prefill_tokens: int
    decodes: int
    duration_s: float


class _Facts(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LoadFacts(_Facts):
    """The load that a file expects of a model, for which it is profiled: mean lengths, and the most requests in a batch."""

    prompt_tokens: float
    output_tokens: float
    max_sequences: int
    tpot_slo_s: float | None = None


class ModelFacts(_Facts):
    """A model as the core knows it, on ``tp`` devices. ``weight_bytes`` is what an engine takes beside KV on each of them,
    ``token_bytes`` KV of one token; ``measured``: steps timed before it served anybody. ``load`` None: nothing is known of
    its requests, so that it has no profile."""

    id: str
    rate_per_s: float
    slo_s: float
    tp: int = 1
    weight_bytes: int
    token_bytes: int
    max_tokens: int
    block_tokens: int
    measured: tuple[MeasuredStep, ...]
    load: LoadFacts | None = None


class ModelAdded(NamedTuple):
    """One more model, to be resident on ``gpu``; None where residency is the policy's business."""

    facts: ModelFacts
    gpu: int | None


class ModelRemoved(NamedTuple):
    """A model without requests is no more, nor are its engines."""

    model: str


RuntimeEvent = events.Event | StepMeasured | ModelAdded | ModelRemoved
EVENTS: dict[str, type] = {
    kind.__name__: kind for kind in (*get_args(events.Event), StepMeasured, ModelAdded, ModelRemoved)
}
"""The events of a decision log by name."""


class GpuFacts(_Facts):
    """A device: ``memory_bytes`` for weights and KV."""

    id: int
    memory_bytes: int


class Stay(_Facts):
    """An engine that is resident from the start."""

    model: str
    gpus: tuple[int, ...]


class LayerFacts(_Facts):
    """What KunServe's memory manager knows of instances that drop layers: the weights of one copy of the ``layers``, a KV block
    of the whole model, the KV memory of an instance with all weights, and what a pipeline of two can hold."""

    layers: int
    copy_bytes: int
    block_bytes: int
    base_bytes: int
    pair_tokens: int


class CoreSpec(_Facts):
    """All that determines a core, as JSON-able data. Engines are 0, 1, ... in the order of ``stays``. Without ``residency``
    they stay, and one that dies is started again; how soon is the driver's business. With ``dispatch`` they are instances of
    the one model, whose requests wait in the engines' own queues; with ``migration`` they move between them. With
    ``drop`` two engines become a pipeline and two again, by what ``layers`` says."""

    placement: PlacementSpec
    scheduler: SchedulerSpec
    residency: ResidencySpec | None = None
    dispatch: DispatchSpec | None = None
    migration: LlumnixMigrationSpec | None = None
    drop: KunServeDropSpec | None = None
    layers: LayerFacts | None = None
    token_budget: int
    shares_memory: bool
    gpus: tuple[GpuFacts, ...]
    models: tuple[ModelFacts, ...]
    stays: tuple[Stay, ...]


class Core:
    """Turns events into commands. Raises ValueError for a model without a measured step."""

    def __init__(self, spec: CoreSpec) -> None:
        self._spec = spec
        self._models = {model.id: model for model in spec.models}
        self._step_times = {model.id: StepTimes(spec.token_budget, model.measured) for model in spec.models}
        instances = [Instance(stay.model, 0, stay.gpus, self._models[stay.model].rate_per_s, 0) for stay in spec.stays]
        self._seats = [(instance.model, instance.gpus) for instance in instances]
        self._slots = [GpuSlot(gpu.id, 0, gpu.memory_bytes) for gpu in spec.gpus]
        self._fleet = None if spec.dispatch else self._fleet_controller(instances)
        self.controller: Controller = self._fleet or _group_controller(spec)

    def handle(self, now: float, event: RuntimeEvent) -> list[Command]:
        if isinstance(event, StepMeasured):
            row = MeasuredStep(event.prefill_tokens, event.decodes, event.duration_s)
            self._step_times[event.model].observe(row)
            return []
        if isinstance(event, ModelAdded):
            self._add(event.facts, event.gpu)
            return []
        if isinstance(event, ModelRemoved):
            self._remove(event.model)
            return []
        return self.controller.handle(now, event)

    def _fleet_controller(self, instances: Sequence[Instance]) -> FleetController:
        spec = self._spec
        return FleetController(
            {model.id: self._fleet_model(model) for model in spec.models},
            self._slots,
            instances,
            self._residency(),
            self._schedulers,
            tick_s=spec.residency.tick_s if spec.residency else 1.0,
        )

    def scope_of(self, engine: int) -> tuple[int, ...]:
        """The engines that share the scheduler of this one; empty where requests wait in the engine itself."""
        return self._fleet.scope_of(engine) if self._fleet else ()

    def status(self, engine: int) -> Status | None:
        """The state of an engine; None for one that is gone or never was."""
        if self._fleet:
            return self._fleet.status(engine)
        assert isinstance(self.controller, GroupController)
        return _STATUS.get(self.controller.phase(engine))

    def _add(self, facts: ModelFacts, gpu: int | None) -> None:
        fleet = self._known_fleet()
        self._models[facts.id] = facts
        self._step_times[facts.id] = StepTimes(self._spec.token_budget, facts.measured)
        if gpu is not None:
            self._seats.append((facts.id, (gpu,)))
        fleet.add_model(facts.id, self._fleet_model(facts), self._residency())

    def _remove(self, model: str) -> None:
        fleet = self._known_fleet()
        del self._models[model]
        self._seats = [seat for seat in self._seats if seat[0] != model]
        fleet.remove_model(model, self._residency())
        del self._step_times[model]

    def _known_fleet(self) -> FleetController:
        """Raises ValueError where engines are instances of one model."""
        if self._fleet is None:
            raise ValueError("a system with dispatch serves one model: none can come or go")
        return self._fleet

    def _residency(self) -> ResidencyPolicy:
        """A policy that knows the models of now. When models come or go it begins anew: since when they are where they are, it
        forgets."""
        spec = self._spec
        if spec.residency is None:
            return KeepResident(self._seats)
        demands = {id: self._demand(model) for id, model in self._models.items()}
        return build_residency(spec.residency, spec.placement, demands, self._slots)

    def _fleet_model(self, model: ModelFacts) -> FleetModel:
        return FleetModel(self._demand(model), model.max_tokens)

    def _demand(self, model: ModelFacts) -> ModelDemand:
        """What residency knows of a model, with a profile from the steps that were measured."""
        known = ModelDemand(model.id, model.rate_per_s, model.slo_s, model.tp, model.weight_bytes, model.token_bytes)
        if (load := model.load) is None:
            return known
        return replace(
            known,
            profile=measured_profile(model, load, self._step_times[model.id], self._spec.token_budget),
            tokens_per_request=load.prompt_tokens + load.output_tokens,
            tpot_slo_s=load.tpot_slo_s,
            decode_tokens=load.output_tokens,
        )

    def _schedulers(self, engines: Sequence[EngineBinding]) -> Mapping[tuple[int, ...], LocalScheduler | None]:
        return build_schedulers(self._spec.scheduler, [self._factsheet(binding) for binding in engines])

    def _factsheet(self, binding: EngineBinding) -> EngineFactsheet:
        model, step_times, budget = (
            self._models[binding.model],
            self._step_times[binding.model],
            self._spec.token_budget,
        )
        return EngineFactsheet(
            engine=binding.engine,
            gpu=binding.gpus[0],
            slo_s=model.slo_s,
            prefill=step_times,
            prefill_tokens_per_s=budget / step_times(budget, 0),
            kv_capacity_tokens=binding.kv_tokens,
            block_tokens=model.block_tokens,
            shares_memory=self._spec.shares_memory,
        )


class KeepResident:
    """The residency of systems without such a policy: an engine that is missing from its place is started again there."""

    def __init__(self, seats: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        self._seats = tuple(seats)

    def suggest(self, now: float, view: FleetView) -> list[Start]:
        present = {(engine.model, engine.gpus) for engine in view.engines}
        return [Start(model, gpus) for model, gpus in self._seats if (model, gpus) not in present]


_STATUS: Mapping[Phase | None, Status] = {
    Phase.LOADING: Status.LOADING,
    Phase.SERVING: Status.RESIDENT,
    Phase.RESTORING: Status.RESIDENT,
    Phase.CHANGING: Status.LOADING,
    Phase.DRAINING: Status.DRAINING,
}


def _group_controller(spec: CoreSpec) -> GroupController:
    """Each stay is an instance that serves alone. Raises ValueError for more than one model."""
    if len(spec.models) != 1 or spec.dispatch is None:
        raise ValueError(f"a system with dispatch serves one model; here are {len(spec.models)}")
    (model,), layers = spec.models, spec.layers

    def holds_tokens(instances: tuple[int, ...]) -> int:
        return layers.pair_tokens if layers and len(instances) > 1 else model.max_tokens

    return GroupController(
        GroupModel(model.id, layers.layers if layers else 1, model.max_tokens, model.block_tokens, holds_tokens),
        [stay.gpus for stay in spec.stays],
        dispatcher(**spec.dispatch.model_dump()),
        drop=_drop(spec),
        migration=_migration(spec.migration),
        scale_out=None,
        stages=1,
        spares=0,
    )


def _drop(spec: CoreSpec) -> KunServeDrop | None:
    if spec.drop is None or spec.layers is None:
        return None
    instances, layers = range(len(spec.stays)), spec.layers
    base_bytes, node_of = dict.fromkeys(instances, layers.base_bytes), dict.fromkeys(instances, 0)
    options = spec.drop.model_dump(exclude={"policy", "exchange"})
    return KunServeDrop(layers.copy_bytes, layers.block_bytes, base_bytes, node_of, **options)


def _migration(spec: LlumnixMigrationSpec | None) -> LlumnixMigration | None:
    return None if spec is None else LlumnixMigration(spec.out_blocks, spec.in_blocks)


class _Alone(NamedTuple):
    """Steps as profiles ask for them. Their times know no context, which measured steps do not tell."""

    times: StepTimes

    def step_s(
        self, decodes: int, _decode_context: int, new: int, _pairs: float, _context: int, _sampled: int
    ) -> float:
        return self.times.step_s(new, decodes)


def measured_profile(
    model: ModelFacts, load: LoadFacts, times: StepTimes, token_budget: int
) -> tuple[OperatingPoint, ...]:
    """The throughput and TTFT of an engine at each batch size, as in the simulator's profiles. KV is in whole blocks;
    activations are in no region, so they count for nothing."""

    def bytes_of(batch: int, context: int) -> tuple[int, int]:
        return 0, batch * -(-context // model.block_tokens) * model.block_tokens * model.token_bytes

    lengths = load.prompt_tokens, load.output_tokens
    return profile_of(_Alone(times), bytes_of, *lengths, token_budget, load.max_sequences)
