"""What a system is: one choice on each policy axis, as data.

A system of the papers is a short YAML file beside this module. Each axis names a policy and its options, so that two
systems that differ in one policy differ in one line. ``SystemSpec`` validates the file; ``fineserve_sim.cluster.compose``
turns it into policy objects.

An option is either what makes a system itself, or a reading of what a paper leaves open, with a default (``readings.yaml``).
What one text settles is a constant of its policy, with its source.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, field_validator, model_validator
from pydantic_core import PydanticCustomError

from fineserve_sim.systems.sharing import Sharing


class Spec(BaseModel):
    """A frozen piece of configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FineServePlacementSpec(Spec):
    """Algorithm 1 of FineServe: largest footprint first, best marginal-memory-efficiency score."""

    policy: Literal["fineserve"] = "fineserve"
    score: Literal["mean", "exact"] = "mean"
    mme: Literal["slope", "token_bytes"] = "slope"
    colocation: Literal["avoid", "forbid", "allow"] = "avoid"
    replicas: Literal["slo", "rate"] = "slo"
    turns: Literal["first_places", "literal"] = "first_places"
    unmet: Literal["rate", "spread"] = "rate"
    order: Literal["model", "gpu"] = "model"


class KvprPlacementSpec(Spec):
    """Prism's greedy placement by KV pressure ratio (request rate over SLO, per byte left for KV).

    ``tau`` and ``threshold`` matter where models may move. A model moves to a ratio that is below tau times its own
    (``relative``), or lower by more than tau (``absolute``). ``charges``: KV memory is what the weights leave, or what whole
    engines leave. ``replicas``: each model is placed once, or as many times as FineServe's Algorithm 1 replicates it.
    """

    policy: Literal["kvpr"] = "kvpr"
    evaluate: Literal["pre", "post"] = "pre"
    weight: Literal["req_rate", "token_rate"] = "req_rate"
    tau: Annotated[float, Field(ge=0)] = 0.8
    threshold: Literal["relative", "absolute"] = "relative"
    charges: Literal["weights", "engine"] = "weights"
    replicas: Literal["one", "slo", "rate"] = "one"


class PinnedPlacementSpec(Spec):
    """A given placement: for each model id, the GPUs of each of its replicas."""

    policy: Literal["pinned"] = "pinned"
    groups: dict[str, tuple[tuple[int, ...], ...]] = Field(min_length=1)


class DedicatedPlacementSpec(Spec):
    """Each model alone on its own GPU or TP group."""

    policy: Literal["dedicated"] = "dedicated"


class FcfsSpec(Spec):
    """First come, first served, as vLLM does it."""

    policy: Literal["fcfs"] = "fcfs"


class AdaptiveSpec(Spec):
    """Algorithm 2 of FineServe: EDF with adaptive batches, one queue a model."""

    policy: Literal["adaptive"] = "adaptive"
    when_prefilling: Literal["skip", "union"] = "skip"


class MooreHodgsonSpec(Spec):
    """Algorithm 2 of Prism: Moore-Hodgson over the shared queue of a GPU, with admission control."""

    policy: Literal["moore_hodgson"] = "moore_hodgson"
    late: Literal["defer", "drop"] = "defer"
    late_start: Literal["after_all", "beside_blocked"] = "after_all"
    clock: Literal["dispatched", "now"] = "dispatched"
    reserve: Literal["fraction", "page"] = "fraction"
    reserve_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02


class ClairvoyantSpec(Spec):
    """A bound on all schedulers, and no scheduler: the most requests in time by one that knows the future.

    The simulator alone computes it. Only its TTFT attainment is a bound; no decode, memory or neighbour takes time.
    ``engines``: each model has an engine on every GPU ("everywhere"), or where the placement put it ("placed").
    """

    policy: Literal["clairvoyant"] = "clairvoyant"
    engines: Literal["everywhere", "placed"] = "everywhere"


class KvSlabSpec(Spec):
    """One shared KV region for each GPU, carved into slabs."""

    policy: Literal["kv_slab"] = "kv_slab"
    slab_cap_bytes: PositiveInt = 64 * 2**20
    slab_multiple: PositiveInt = 1


class PrivatePoolsSpec(Spec):
    """One paged pool for each engine; ``split`` says how the memory of a shared GPU is divided.

    ``demand`` divides it in proportion to request rate times bytes per token; each pool holds a request of ``least_tokens``.
    Where models come and go, it divides what is free among the engines that load at once on a GPU. ``prefix_cache`` keeps
    full blocks of sequences that ended. ``attention`` is today's kernel or one of the legacy table.
    """

    policy: Literal["private"] = "private"
    split: Literal["footprint", "equal", "demand"] = "footprint"
    least_tokens: PositiveInt = 4096
    prefix_cache: bool = False
    attention: Literal["current", "fa_paged", "paged_attention_v0.4.2"] = "current"


# Single-model clusters: instances of one model, alone or as pipelines (KunServe and what it is compared with).


class ReplicasPlacementSpec(Spec):
    """One replica of the model on every GPU or TP group that holds it."""

    policy: Literal["replicas"] = "replicas"


class SwapPoolsSpec(Spec):
    """One paged pool for each instance. Out of memory, KV is swapped to the host while others compute (InferCept)."""

    policy: Literal["swap"] = "swap"
    host_bytes_per_s: Annotated[float, Field(gt=0)] = 25e9


class RoundRobinDispatchSpec(Spec):
    """Each new request goes to the next group of instances."""

    policy: Literal["round_robin"] = "round_robin"


class LeastLoadedDispatchSpec(Spec):
    """Each new request goes to the group with the smallest KV demand an instance, or relative to the group's capacity."""

    policy: Literal["least_loaded"] = "least_loaded"
    queued: Literal["all", "head"] = "all"
    per: Literal["capacity", "instance"] = "instance"


class LeastQueuedDispatchSpec(Spec):
    """Each new request goes to the group with the fewest queued prompt tokens an instance, if its memory has room."""

    policy: Literal["least_queued"] = "least_queued"


class FreenessDispatchSpec(Spec):
    """Each new request goes to the group with the most free KV memory a running request (Llumnix)."""

    policy: Literal["freeness"] = "freeness"
    queued: Literal["all", "head"] = "head"


class LlumnixMigrationSpec(Spec):
    """Running requests move from the fullest to the freest instance; thresholds in KV blocks a running request."""

    policy: Literal["llumnix"] = "llumnix"
    out_blocks: float = 3.0
    in_blocks: float = 3.0


class KunServeDropSpec(Spec):
    """Instances out of KV memory drop layers that others hold, and run as one pipeline until demand has fallen.

    ``exchange``: KV of ongoing requests moves in chunks, activations first, or in bulk, first come first served.
    ``restore_usage``: a pipeline is split again when the usage of the cluster, or its own, is under half of the base.
    """

    policy: Literal["kunserve_drop"] = "kunserve_drop"
    exchange: Literal["coordinated", "bulk"] = "coordinated"
    restore: bool = True
    trigger: Annotated[float, Field(gt=0, le=1)] = 0.95
    restore_usage: Literal["cluster", "group"] = "cluster"
    required: Literal["net", "gross"] = "gross"
    max_group: PositiveInt | None = None


class PipelineSpec(Spec):
    """How groups of several instances run: how many stages from the start, and how microbatches are formed.

    ``microbatches``: ``token_count`` is chunked prefill within the token budget. ``lookahead`` cuts all that waits into parts
    of equal cost. A part has about ``min_tokens`` tokens (by default the token budget), or up to twice as many. The budget does
    not bound it, nor does it in the paper's listing (section 4.3).

    ``queues``: each microbatch in flight has its own queue (vLLM's virtual engines), or all share one. Lookahead always shares.
    """

    policy: Literal["pipeline"] = "pipeline"
    stages: PositiveInt = 1
    microbatches: Literal["token_count", "lookahead"] = "token_count"
    lookahead: Literal["balanced", "literal", "direct"] = "balanced"
    queues: Literal["shared", "own"] = "shared"
    min_tokens: PositiveInt | None = None


class SpareInstancesSpec(Spec):
    """Instances that are started when KV demand goes on growing after layers were dropped, ``start_s`` each."""

    policy: Literal["spares"] = "spares"
    instances: PositiveInt = 1
    start_s: Annotated[float, Field(ge=0)] = 30.0
    growing_samples: PositiveInt = 50


class DisaggregatedSpec(Spec):
    """Prefill and decode on different instances, so many of one to so many of the other.

    Dispatch chooses among the instances that prefill. A prefilled request goes to the one of the others with the most free KV
    memory. Its KV takes its link, and ``setup_s``. The prefill yields the ``first_token``, as in DistServe. Or the decoding
    instance computes the last token of the prompt again, which yields it, as with vLLM's connectors.
    """

    policy: Literal["disaggregated"] = "disaggregated"
    prefill: PositiveInt = 1
    decode: PositiveInt = 1
    first_token: Literal["prefill", "decode"] = "prefill"
    setup_s: Annotated[float, Field(ge=0)] = 0.0


# KV memory by virtual memory, and attention kernels of 2024 (kvcached, vTensor, and what they are compared with).


class KvCachedSpec(Spec):
    """KV memory mapped page by page under virtual tensors, shared by the engines of a GPU (Prism's kvcached).

    ``mode`` says what a page growth costs:

    * ``sync``: a driver call for every layer's K and V delays the step.
    * ``buffered``: a thread maps 5 to 10 pages of each engine ahead, as kvcached does by default.
    * ``contiguous``: no buffer, one call for all layers.
    """

    policy: Literal["kvcached"] = "kvcached"
    mode: Literal["sync", "buffered", "contiguous"] = "buffered"
    page_bytes: PositiveInt = 2 * 2**20


class VTensorSpec(Spec):
    """Chunks of 2 MB mapped behind each request's own virtual tensors, with a tree of finished prefixes (FlexInfer).

    ``extend``: rows are mapped ahead of the step that needs them, or in it.
    """

    policy: Literal["vtensor"] = "vtensor"
    chunk_bytes: PositiveInt = 2 * 2**20
    extend: Literal["ahead", "late"] = "ahead"
    trim_s: Annotated[float, Field(ge=0)] = 1.0
    prefix_cache: bool = True


class ContiguousSpec(Spec):
    """KV of the maximum length reserved for every request: no paging at all. ``max_tokens``: by default the model's."""

    policy: Literal["contiguous"] = "contiguous"
    max_tokens: PositiveInt | None = None


# Many models on few GPUs: placement by an offline optimiser, and models that come and go (Prism, MuxServe, QLM).


class MuxServePlacementSpec(Spec):
    """MuxServe's offline optimiser: meshes of GPUs, models to where they raise the estimated throughput most."""

    policy: Literal["muxserve"] = "muxserve"


class RoundRobinPlacementSpec(Spec):
    """Models by falling weights, each on the next GPU or TP group in turn that holds it."""

    policy: Literal["round_robin"] = "round_robin"


class SleepSpec(Spec):
    """vLLM's sleep levels: an evicted engine keeps its process on its GPUs.

    ``host_gib``: each node's host memory for the weights of sleeping engines (level 1). Weights without room there come from
    disk again (level 2). ``processes``: the most engines asleep on a GPU, without a limit by default. ``loader``: the family
    of the catalog's loaders that gives the rates from host and from disk.
    """

    host_gib: Annotated[float, Field(ge=0)]
    processes: NonNegativeInt | None = None
    loader: Literal["serverlessllm", "safetensors"] = "serverlessllm"


class ActivationSpec(Spec):
    """How long an engine takes to come. ``engine_pool`` and ``parallel_loading``: what makes activation fast in Prism;
    ``loader``: of the catalog, in place of Prism's rates; ``tick_s``: how often the whole state is looked at.

    Without a pool, the engine starts first. With ``sleep`` the pool are the engines asleep: one that sleeps on the GPUs where
    its model is wanted wakes there, any other starts first.
    """

    engine_pool: bool = True
    parallel_loading: bool = True
    loader: Literal["serverlessllm-host", "serverlessllm-disk", "safetensors-host", "safetensors-disk"] | None = None
    sleep: SleepSpec | None = None
    engine_start_s: Annotated[float, Field(ge=0)] = 30.0
    tick_s: Annotated[float, Field(gt=0)] = 1.0

    @model_validator(mode="after")
    def _sleeping_engines_are_the_pool(self) -> ActivationSpec:
        if self.sleep is None:
            return self
        if self.loader is not None:
            raise PydanticCustomError(
                "sleep_loader", "with sleep, weights come as sleep.loader says: leave loader out, or leave sleep out"
            )
        if not (self.engine_pool and self.parallel_loading):
            raise PydanticCustomError(
                "sleep_pool",
                "with sleep, the engines asleep are the pool, and sleep.loader says how weights come: leave engine_pool and "
                "parallel_loading out (sleep.processes 0 starts every engine anew)",
            )
        return self


class PrismResidencySpec(ActivationSpec):
    """Idle models leave GPUs under memory pressure, come back on their first request, and move by KV pressure ratio."""

    policy: Literal["prism"] = "prism"
    evict: bool = True
    move: bool = True
    idle_s: Annotated[float, Field(ge=0)] = 45.0
    pressure_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.1
    replace_s: Annotated[float, Field(gt=0)] = 10.0
    min_stay_s: Annotated[float, Field(ge=0)] = 30.0


class DriftingResidencySpec(ActivationSpec):
    """Our own: every ``replace_s`` seconds the change that spares most late requests by queueing, if it pays for its bytes
    within ``horizon_s``. A model that waits takes the place of idle ones."""

    policy: Literal["drifting"] = "drifting"
    idle_s: Annotated[float, Field(ge=0)] = 45.0
    replace_s: Annotated[float, Field(gt=0)] = 60.0
    horizon_s: Annotated[float, Field(gt=0)] = 600.0


class TimetableEntry(Spec):
    """From ``from_s`` on, engines of each model on these groups of GPUs."""

    from_s: Annotated[float, Field(ge=0)]
    groups: dict[str, tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]]


class TimetableResidencySpec(ActivationSpec):
    """Our own: placements by the clock, as a plan in time has them. The first entry is from 0 on."""

    policy: Literal["timetable"] = "timetable"
    entries: Annotated[tuple[TimetableEntry, ...], Field(min_length=1)]


class QlmResidencySpec(Spec):
    """One model at a time on a GPU: requests wait in groups by model, and a swap stops one engine and starts the next."""

    policy: Literal["qlm"] = "qlm"
    swap_s: Annotated[float, Field(ge=0)] = 30.0
    running: Literal["finish", "requeue"] = "finish"
    service: Literal["closes", "goes_on"] = "goes_on"
    tick_s: Annotated[float, Field(gt=0)] = 1.0


class BalancedPlacementSpec(Spec):
    """Our own: engines where the fewest requests are late by queueing, replicas only where that spares some."""

    policy: Literal["balanced"] = "balanced"


PlacementSpec = Annotated[
    FineServePlacementSpec
    | KvprPlacementSpec
    | PinnedPlacementSpec
    | DedicatedPlacementSpec
    | ReplicasPlacementSpec
    | MuxServePlacementSpec
    | RoundRobinPlacementSpec
    | BalancedPlacementSpec,
    Field(discriminator="policy"),
]
ResidencySpec = Annotated[
    PrismResidencySpec | QlmResidencySpec | DriftingResidencySpec | TimetableResidencySpec,
    Field(discriminator="policy"),
]
SchedulerSpec = Annotated[FcfsSpec | AdaptiveSpec | MooreHodgsonSpec | ClairvoyantSpec, Field(discriminator="policy")]
MemorySpec = Annotated[
    KvSlabSpec | PrivatePoolsSpec | SwapPoolsSpec | KvCachedSpec | VTensorSpec | ContiguousSpec,
    Field(discriminator="policy"),
]
DispatchSpec = Annotated[
    RoundRobinDispatchSpec | LeastLoadedDispatchSpec | LeastQueuedDispatchSpec | FreenessDispatchSpec,
    Field(discriminator="policy"),
]


class SystemSpec(Spec):
    """One system: where models go, which request starts next, and how KV memory is shared.

    ``sharing`` is how engines share the SMs of a GPU, unless the cluster says it. Without ``residency``, models stay where they
    were placed. A system with ``dispatch`` is a cluster of instances of one model; only such systems have the axes after it.
    """

    name: str
    title: str
    summary: str
    placement: PlacementSpec
    scheduler: SchedulerSpec
    memory: MemorySpec
    sharing: Sharing = Sharing(mode="mps")
    residency: ResidencySpec | None = None
    dispatch: DispatchSpec | None = None
    execution: PipelineSpec | None = None
    drop: KunServeDropSpec | None = None
    migration: LlumnixMigrationSpec | None = None
    scaling: SpareInstancesSpec | None = None
    roles: DisaggregatedSpec | None = None

    @field_validator("sharing")
    @classmethod
    def _whole_gpus(cls, sharing: Sharing) -> Sharing:
        if sharing.mode == "mig":
            raise PydanticCustomError("mig_system", "a system does not divide GPUs by MIG: say it in cluster.sharing")
        return sharing

    @model_validator(mode="after")
    def _one_engine_a_model(self) -> SystemSpec:
        placement = self.placement
        if self.residency and isinstance(placement, KvprPlacementSpec) and placement.replicas != "one":
            raise PydanticCustomError(
                "replicas_move", "residency moves a model as one: its placement needs replicas one"
            )
        return self

    @model_validator(mode="after")
    def _clusters_of_instances(self) -> SystemSpec:
        if self.dispatch is None:
            axes = "execution", "drop", "migration", "scaling", "roles"
            alone = [axis for axis in axes if getattr(self, axis) is not None]
            alone += ["memory swap"] if isinstance(self.memory, SwapPoolsSpec) else []
            if alone:
                raise PydanticCustomError("needs_dispatch", "{axis} needs dispatch, too", {"axis": alone[0]})
        return self


def add_choice(axis: Literal["placement", "scheduler"], spec: type[Spec]) -> None:
    """Add a policy to an axis of all systems. The ``policy`` field of ``spec`` has its name as the only value and default.

    From outside, call ``fineserve_sim.cluster.compose.policies``. Raises ValueError for a name that is taken or missing.
    """
    name = spec.model_fields["policy"].default if "policy" in spec.model_fields else None
    if not isinstance(name, str):
        raise ValueError(f'{spec.__name__} has no name: give it a field policy: Literal["NAME"] = "NAME"')
    field = SystemSpec.model_fields[axis]
    if any(kind.model_fields["policy"].default == name for kind in get_args(field.annotation)):
        raise ValueError(f"a {axis} policy is called {name} already: choose another name")
    field.annotation = field.annotation | spec  # type: ignore[assignment]
    SystemSpec.model_rebuild(force=True)
