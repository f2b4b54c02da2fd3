"""The experiment file, schema version 1: what may be written, of which type, in which range.

Types and ranges are here; what the names mean is for ``resolve``, whether the pieces fit together for the ``*checks``.
"""

from __future__ import annotations

import re
from math import isfinite
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.file.values import (
    MAX_GPUS,
    Burstiness,
    Count,
    CountOrZero,
    Fraction,
    ModelId,
    Name,
    NonNegative,
    Positive,
    Rate,
    Requests,
    RequestsOrZero,
    Scalar,
    Stem,
    Tokens,
)
from fineserve_sim.systems import Sharing

COMPARISON = re.compile(r"(<=|>=|<|>)\s*([-+]?\d+(?:\.\d+)?)")
"""How a claim without a number is written: ``> 1``."""


class Strict(BaseModel):
    """A part of the file. A key it does not have is an error that names the nearest one it has."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for key in value:
                if key not in cls.model_fields:
                    hint = nearest(key, cls.model_fields)
                    raise PydanticCustomError("unknown_key", "unknown key; {hint}", {"key": key, "hint": hint})
        return value


def _shape(value: Any) -> str:
    return "mapping" if isinstance(value, dict | BaseModel) else "name"


class Fault(Strict):
    """An instance of a single-model cluster, or a GPU of models that come and go, is lost at ``time_s``, and back after
    ``repair_s`` (never, without)."""

    time_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
    instance: CountOrZero | None = None
    gpu: CountOrZero | None = None
    repair_s: Positive | None = None

    @model_validator(mode="after")
    def _one_thing(self) -> Self:
        if (self.instance is None) == (self.gpu is None):
            raise PydanticCustomError("lost", "say what is lost: an instance of a single-model cluster, or a gpu")
        return self


class ConfigJson(Strict):
    """A model of the user's own: the path of its Hugging Face config.json, relative to the experiment file."""

    config: Name


class FixedLengths(Strict):
    """Every request alike."""

    prompt_tokens: Tokens
    output_tokens: Tokens


SharingItem = Annotated[
    Annotated[Sharing, Tag("one")] | Annotated[list[Sharing], Tag("each")],
    Discriminator(lambda value: "each" if isinstance(value, list) else "one"),
]


class Cluster(Strict):
    """``count`` GPUs of one kind: a catalog name, or the fields of a GPU of the user's own. ``network_bytes_per_s``:
    what each GPU sends to other nodes. ``sharing``: of every GPU, or of each one, before the systems' own; see
    ``fineserve_sim.systems.sharing`` for its words. ``usd_per_gpu_hour``: its price; the catalog's list price if not given."""

    gpu: str | dict[str, Any]
    count: Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)]
    gpus_per_node: Count = 8
    network_bytes_per_s: Positive = 25e9
    sharing: SharingItem | None = None
    usd_per_gpu_hour: Positive | None = None


class Node(Strict):
    """``count`` GPUs of one kind, in nodes of their own. ``mig``: the profiles of the slices into which each is divided.
    ``sharing``: of each, before the systems' own."""

    gpu: str | dict[str, Any]
    count: Annotated[int, Field(strict=True, ge=1, le=MAX_GPUS)] = 1
    mig: Annotated[list[Name], Field(min_length=1)] | None = None
    sharing: Sharing | None = None
    usd_per_gpu_hour: Positive | None = None


class MixedCluster(Strict):
    """GPUs of several kinds. ``gpus_per_node``: the most in a node, which has one kind."""

    nodes: Annotated[list[Node], Field(min_length=1)]
    gpus_per_node: Count = 8
    network_bytes_per_s: Positive = 25e9

    @model_validator(mode="before")
    @classmethod
    def _one_form(cls, value: Any) -> Any:
        for key in ("gpu", "count", "sharing", "usd_per_gpu_hour"):
            if isinstance(value, dict) and value.get(key) is not None:
                hint = f"not with nodes, each of which has its own: cluster.nodes.0.{key}"
                raise PydanticCustomError("unknown_key", "{hint}", {"key": key, "hint": hint})
        return value

    @property
    def count(self) -> int:
        """GPUs of all kinds."""
        return sum(node.count for node in self.nodes)


ClusterItem = Annotated[
    Annotated[Cluster, Tag("one kind")] | Annotated[MixedCluster, Tag("several kinds")],
    Discriminator(lambda value: "several kinds" if _has_nodes(value) else "one kind"),
]


def _has_nodes(value: Any) -> bool:
    return isinstance(value, MixedCluster) or (isinstance(value, dict) and "nodes" in value)


class KVOffloading(Strict):
    """KV of prefixes in host memory, ``size_gib`` for each engine over all its GPUs; see
    ``fineserve_sim.cluster.scenario.KVOffloading``."""

    size_gib: NonNegative
    bytes_per_s: Positive | None = None
    store_s_per_gib: NonNegative = 0.0


class Engine(Strict):
    """The settings of every engine, as ``fineserve_sim.cluster.scenario.EngineSettings`` explains them. ``step_times``: the
    table of ``fineserve-calibrate`` or ``fineserve-run steps``, relative to the experiment file."""

    token_budget: Count = 2048
    max_sequences: Count = 256
    block_tokens: Count = 16
    memory_utilization: Annotated[float, Field(strict=True, gt=0, le=1)] = 0.9
    context_bytes: CountOrZero = 512 * 2**20
    deployment: str = "vllm-cudagraph"
    batching: Literal["vllm", "sglang", "sglang_mixed"] = "vllm"
    contention: Literal["composition", "step"] = "composition"
    latency: Literal["tables", "roofline"] = "tables"
    step_times: str | None = None
    step_time_factor: Positive = 1.0
    kv_offloading: KVOffloading | None = None


class Phase(Strict):
    """A stretch of time with one arrival rate at rate scale 1."""

    duration_s: Positive
    rate_per_s: NonNegative


Degree = Annotated[
    Annotated[Count, Tag("number")] | Annotated[Literal["auto"], Tag("word")],
    Discriminator(lambda value: "word" if value == "auto" else "number"),
]


Accepted = Annotated[float, Field(strict=True, ge=0, le=1)]


class Speculative(Strict):
    """A draft proposes ``tokens`` tokens a round. ``acceptance``: the accepted share of all, or of the first, second, ... one.
    ``draft``: a model of the catalog or a config.json; without one, a head of one layer as EAGLE's."""

    tokens: Count
    acceptance: Annotated[
        Annotated[Accepted, Tag("number")] | Annotated[Annotated[list[Accepted], Field(min_length=1)], Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "number"),
    ]
    draft: (
        Annotated[
            Annotated[str, Tag("name")] | Annotated[ConfigJson, Tag("mapping")],
            Discriminator(_shape),
        ]
        | None
    ) = None


class Model(Strict):
    """One served model and its load: a share of the load's total rate, a rate of its own, phases, or clients. Clients wait for
    their answers, and think for ``think_s`` before they ask again. ``tp: auto``: the degree that carries its rate within its
    TTFT limit, of those that hold it. ``precision: checkpoint``: that in which the model is published. ``experts``: each split
    over the TP group, or whole ones spread over it. ``dp``: so many TP groups step together as ranks of attention in data
    parallel, and the experts are over the GPUs of all."""

    id: ModelId
    model: Annotated[
        Annotated[str, Tag("name")] | Annotated[ConfigJson, Tag("mapping")],
        Discriminator(_shape),
    ]
    precision: str
    tp: Degree = 1
    dp: Count | None = None
    experts: Literal["split", "whole"] | None = None
    speculative: Speculative | None = None
    share: Positive | None = None
    rate_per_s: Rate | None = None
    phases: list[Phase] | None = Field(default=None, min_length=1)
    clients: Count | None = None
    think_s: NonNegative | None = None
    ttft_slo_s: Positive | None = None

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.dp or 1


class Poisson(Strict):
    process: Literal["poisson"] = "poisson"


class Gamma(Strict):
    """``cv``: coefficient of variation of the gaps between arrivals."""

    process: Literal["gamma"]
    cv: Burstiness


class Weibull(Strict):
    """``cv``: coefficient of variation of the gaps between arrivals."""

    process: Literal["weibull"]
    cv: Burstiness


class Replay(Strict):
    """The arrivals of ``workload.trace``."""

    process: Literal["replay"]


class ManyModels(Strict):
    """Every model on and off by itself for ``duration_s``. The pattern follows Prism's traces, like a provider's or like
    Chatbot Arena's (``fineserve_traces.prism``), or of a client of ServeGen, whose day passes in it
    (``fineserve_traces.servegen``). The first model of the file is the most popular. ``scale`` and a rate scale multiply
    requests and leave the times on and off."""

    process: Literal["provider", "arena", "servegen"]
    duration_s: Positive
    scale: Positive = 1.0


class Conversations(Strict):
    """Every drawn request opens a conversation: ``turns`` turns, ``gap_s`` apart, each with as many new tokens, after
    ``shared_tokens`` that begin every prompt."""

    turns: Requests = 1
    gap_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.0
    shared_tokens: CountOrZero = 0


class Workload(Strict):
    """Requests a run: drawn from a length source and an arrival process, or read from a trace."""

    lengths: (
        Annotated[
            Annotated[str, Tag("name")] | Annotated[FixedLengths, Tag("mapping")],
            Discriminator(_shape),
        ]
        | None
    ) = None
    data_dir: str | None = None
    arrivals: Annotated[Poisson | Gamma | Weibull | ManyModels | Replay, Field(discriminator="process")] | None = None
    trace: str | None = None
    assign: Literal["share"] | None = None
    requests: Requests | None = None
    warmup_requests: RequestsOrZero = 0
    conversations: Conversations | None = None


class Reference(Strict):
    """The runs from which a base SLO is taken: a quantile of a model's TTFT under ``system``, the best of several.

    Each request is ``isolated``, or all models have the ``same`` arrivals, or each model is ``alone`` with its own at rate
    scale 1. A quantile below ``least_s`` counts as this: what a front end takes that is not simulated."""

    system: Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v), Field(min_length=1)]
    load: Literal["isolated", "same", "alone"]
    metric: Literal["ttft_s"] = "ttft_s"
    quantile: Fraction
    least_s: NonNegative = 0.0


class TtftSlo(Strict):
    """Base SLO from reference cells, times a scale."""

    reference: Reference
    scale: Positive


class TpotReference(Strict):
    """As ``Reference``, of the time per token; isolated requests have one token, so they have none."""

    system: Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v), Field(min_length=1)]
    load: Literal["same", "alone"]
    quantile: Fraction


class TpotSlo(Strict):
    """Base TPOT SLO from reference cells, times ``scale``; without one, times the slo_scale axis."""

    reference: TpotReference
    scale: Positive | None = None


class Slo(Strict):
    """TTFT limits, absolute or derived (times the slo_scale axis either way); TPOT limits, absolute or derived; an absolute
    limit from arrival to the last token. ``cut``: what an output counts as that ends before it is as long as asked, at the end
    of an engine's KV memory or of the model's context."""

    ttft_s: Positive | None = None
    ttft: TtftSlo | None = None
    tpot_s: Positive | None = None
    tpot: TpotSlo | None = None
    e2e_s: Positive | None = None
    cut: Literal["missed", "whole"] = "missed"


class SystemVariant(Strict):
    """A built-in system with some axes changed."""

    base: str
    name: Name
    title: str | None = None
    placement: dict[str, Any] | None = None
    scheduler: dict[str, Any] | None = None
    memory: dict[str, Any] | None = None
    sharing: Sharing | None = None
    residency: dict[str, Any] | None = None
    dispatch: dict[str, Any] | None = None
    execution: dict[str, Any] | None = None
    drop: dict[str, Any] | None = None
    migration: dict[str, Any] | None = None
    scaling: dict[str, Any] | None = None
    roles: dict[str, Any] | None = None


SystemItem = Annotated[
    Annotated[str, Tag("name")] | Annotated[SystemVariant, Tag("mapping")],
    Discriminator(_shape),
]


class Load(Strict):
    """A named total base rate over all models that have a share, at rate scale 1."""

    rate_per_s: Rate
    reason: str = ""


class Sweep(Strict):
    """The product of ``axes``; what is not an axis is ``at`` a value; ``systems`` restricts the sweep to some."""

    name: Stem
    axes: dict[str, Annotated[list[Scalar], Field(min_length=1)]] = {}
    at: dict[str, Scalar] = {}
    systems: list[str] | None = None


class AnswerPlace(Strict):
    """Where the answer is read: ``at`` values of axes. Open axes are read at the place where the systems part."""

    at: Annotated[dict[str, Scalar], Field(min_length=1)]


class Assumption(Strict):
    """A question that the paper leaves open, the value taken, and why."""

    what: str
    value: Any
    why: str

    @model_serializer
    def _whole(self) -> dict[str, Any]:
        """``value`` stays where it is nothing."""
        return {"what": self.what, "value": self.value, "why": self.why}


class Figure(Strict):
    """A figure of a sweep over ``x``, or of the timeline of one point."""

    name: Stem
    title: str | None = None
    sweep: str | None = None
    x: str | None = None
    columns: str | None = None
    timeline: dict[str, Scalar] | None = None
    panels: Annotated[list[str], Field(min_length=1)]
    systems: list[str] | None = None


def _paper(value: Any) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if number or (isinstance(value, str) and COMPARISON.fullmatch(value)):
        return value
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise PydanticCustomError("paper", 'must be a number, a comparison such as "> 1", or a list such as ["A:0", "B:1"]')


SINGLE = ("value", "ratio", "difference")
"""Measures of one cell, or one against another."""


class Claim(Strict):
    """A sentence of a paper as a comparison of cells (``results.claims`` defines the measures).

    ``at`` names a sweep (key ``sweep``) and values of its axes. ``calibration``: the number was used to set the load.
    """

    id: Name
    paper: Annotated[Any, BeforeValidator(_paper)]
    measure: Literal["value", "ratio", "mean_ratio", "difference", "max_difference", "order", "placement"]
    metric: str | None = None
    of: str
    over: str | None = None
    model: str | None = None
    at: dict[str, Scalar]
    over_at: dict[str, Scalar] = {}
    tolerance: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = 0.2
    calibration: bool = False
    note: str = ""


class ExperimentFile(Strict):
    """The whole file. ``folder``: where its relative paths start, its own folder if not given. ``runtime`` is for
    ``fineserve-run``, which checks it; a simulation does without."""

    fineserve: Literal[1]
    title: Name
    folder: Name | None = None
    cluster: ClusterItem
    engine: Engine = Engine()
    models: Annotated[list[Model], Field(min_length=1)]
    workload: Workload
    slo: Slo
    systems: Annotated[list[SystemItem], Field(min_length=1)]
    loads: dict[str, Load] = {}
    faults: list[Fault] = []
    sweeps: list[Sweep] = []
    seeds: Annotated[int, Field(strict=True, ge=1, le=1000)] = 3
    quick: dict[str, Any] = {}
    assumptions: list[Assumption] = []
    figures: list[Figure] = []
    claims: list[Claim] = []
    answer: AnswerPlace | None = None
    runtime: dict[str, Any] = {}
