"""What a system is: one choice on each policy axis, as data.

A system of the papers is a short YAML file beside this module. Each axis names a policy and its options; an option is
a recommended reading of the specification with its default, so that two systems that differ in one policy differ in one
line. ``SystemSpec`` validates them; ``fineserve_sim.cluster.compose`` turns them into policy objects.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class Spec(BaseModel):
    """A frozen piece of configuration that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class FineServePlacementSpec(Spec):
    """Algorithm 1 of FineServe: largest footprint first, best marginal-memory-efficiency score."""

    policy: Literal["fineserve"] = "fineserve"
    score: Literal["mean", "exact"] = "mean"
    mme: Literal["slope", "token_bytes"] = "slope"
    colocation: Literal["avoid", "forbid", "allow"] = "avoid"
    replicas: Literal["literal", "yield", "one"] = "literal"


class KvprPlacementSpec(Spec):
    """Prism's greedy placement by KV pressure ratio (request rate over SLO, per byte left for KV)."""

    policy: Literal["kvpr"] = "kvpr"
    evaluate: Literal["pre", "post"] = "pre"


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
    clock: Literal["dispatched", "now"] = "dispatched"
    reserve: Literal["fraction", "page"] = "fraction"
    reserve_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.02


class KvSlabSpec(Spec):
    """One shared KV region a GPU, carved into slabs."""

    policy: Literal["kv_slab"] = "kv_slab"
    slab_cap_bytes: PositiveInt = 64 * 2**20
    slab_multiple: PositiveInt = 1
    reserved_slabs: Annotated[int, Field(ge=0)] = 0


class PrivatePoolsSpec(Spec):
    """One paged pool an engine; ``split`` says how the memory of a shared GPU is divided."""

    policy: Literal["private"] = "private"
    split: Literal["footprint", "equal"] = "footprint"


PlacementSpec = Annotated[
    FineServePlacementSpec | KvprPlacementSpec | PinnedPlacementSpec | DedicatedPlacementSpec,
    Field(discriminator="policy"),
]
SchedulerSpec = Annotated[FcfsSpec | AdaptiveSpec | MooreHodgsonSpec, Field(discriminator="policy")]
MemorySpec = Annotated[KvSlabSpec | PrivatePoolsSpec, Field(discriminator="policy")]


class SystemSpec(Spec):
    """One system: where models go, which request starts next, and how KV memory is shared."""

    name: str
    title: str
    summary: str
    placement: PlacementSpec
    scheduler: SchedulerSpec
    memory: MemorySpec
