"""The contract of one simulation: everything that determines it, and everything that comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from fineserve_traces import Requests, Trace
from numpy.typing import NDArray

from fineserve_sim.catalog import GpuSpec, ModelSpec, PrecisionSpec, data_ranks
from fineserve_sim.cluster.offloading import KVOffloading
from fineserve_sim.latency.cost import Source
from fineserve_sim.policy.fleet.sleepers import Tier
from fineserve_sim.policy.interfaces import TYPICAL_VARIANCE, Placement
from fineserve_sim.systems import Sharing, SystemSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class ScenarioError(ValueError):
    """A scenario that cannot run (a model fits on no GPU, say). The message is one line for the scenario's author."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as users see it: geometry, precision, TP degree, expected load and SLOs (of the time per token: if any).

    ``id`` names it in traces and results. The load is an operator's history, for profiles and placements, and never a single
    request: rate, its variance over its mean squared, mean lengths."""

    id: str
    model: ModelSpec
    precision: PrecisionSpec
    tp: int
    rate_per_s: float
    ttft_slo_s: float
    mean_prompt_tokens: float
    mean_output_tokens: float
    tpot_slo_s: float | None = None
    rate_variance: float = TYPICAL_VARIANCE

    @property
    def ranks(self) -> int:
        return data_ranks(self.model)  # TP groups in data parallel, which step together


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU of the cluster: its place in a node matters for TP groups. ``network_bytes_per_s``: its link to other
    nodes, in one direction (200 Gbit/s unless said otherwise). ``sharing``: of its SMs; by default as the system has it.
    ``board``: which GPU it is a slice of by MIG, or None where it is whole."""

    id: int
    node: int
    spec: GpuSpec
    network_bytes_per_s: float = 25e9
    sharing: Sharing | None = None
    board: int | None = None


def boards(gpus: Sequence[Gpu]) -> int:
    """How many GPUs these are, the slices of one counted once."""
    slices = [gpu.board for gpu in gpus if gpu.board is not None]
    return len(gpus) - len(slices) + len(set(slices))


@dataclass(frozen=True, slots=True)
class MeasuredSteps:
    """A table of measured engine steps, ``step.parquet`` of ``fineserve-calibrate``. ``digest``: SHA-256 of its contents."""

    path: str
    digest: str


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How every engine batches (systems.md 1.2, 1.3): vLLM's knobs under vLLM's meanings.

    ``latency``: step times by the measured tables that ship for the GPU (rooflines where none do), or by rooflines alone.
    ``step_times``: by steps of real engines instead, host time included, where GPU and ``deployment`` are out of the picture.
    ``step_time_factor``: every step takes so many times as long as predicted; a margin, or the error of the prediction.
    ``static_part``: ``memory_utilization`` is for weights and KV memory alone, as SGLang means it. All else an engine needs is
    outside. Without, all that an engine needs counts within it.
    """

    token_budget: int = 2048
    max_sequences: int = 256
    block_tokens: int = 16
    memory_utilization: float = 0.9
    context_bytes: int = 512 * 2**20
    deployment: str = "vllm-cudagraph"
    batching: Literal["vllm", "sglang", "sglang_mixed"] = "vllm"
    contention: Literal["composition", "step"] = "composition"
    latency: Literal["tables", "roofline"] = "tables"
    step_times: MeasuredSteps | None = None
    step_time_factor: float = 1.0
    static_part: bool = False
    kv_offloading: KVOffloading | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """A loss at ``time_s``, with all KV of the engines there: of instance ``number`` of a single-model cluster, or of a GPU of
    models that come and go. The instance or GPU is back ``repair_s`` later, if given, with empty memory."""

    time_s: float
    number: int
    repair_s: float | None = None
    what: Literal["instance", "gpu"] = "instance"


def wrong_fault(faults: Sequence[Fault], system: SystemSpec, instances: int, gpus: int) -> tuple[int, str] | None:
    """The first fault, by its place, that a cluster of this system with so many serving instances, or GPUs, cannot have, and
    why; else None."""
    if faults and system.dispatch is None and system.residency is None:
        kinds = "clusters of one model (systems with dispatch) and models that come and go (residency)"
        return 0, f"system {system.name} keeps its engines: faults are for {kinds}"
    of_instances = system.dispatch is not None
    what, there, named = ("instance", instances, "serving instance") if of_instances else ("gpu", gpus, "GPU")
    for index, fault in enumerate(faults):
        if fault.what != what:
            return index, f"system {system.name} loses one {what} at a time; say which by {what}, not by {fault.what}"
        if not 0 <= fault.number < there:
            return index, f"there is no {named} {fault.number}; expected 0 to {there - 1}"
        for other in faults:
            back_s = math.inf if other.repair_s is None else other.time_s + other.repair_s
            if other is not fault and other.number == fault.number and other.time_s <= fault.time_s < back_s:
                return index, f"{what} {fault.number} is lost at {other.time_s:g} s and not back at {fault.time_s:g} s"
    return None


@dataclass(frozen=True, slots=True)
class Clients:
    """Closed loops: ``of[i]`` clients of model i of the trace, each with one request at a time. A client sends its next request
    ``think_s[i]`` after the last one has ended, until ``requests`` were sent in all."""

    of: tuple[int, ...]
    think_s: tuple[float, ...]
    requests: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run.

    ``trace`` has its requests, whole or chunk by chunk. The models of the trace must be ids of ``models``. The timeline has a
    sample in each ``sample_s`` (0: none). ``exact_steps`` plans each engine iteration by itself and merges no equal ones: same
    results, slower. ``check`` verifies the KV memory of every GPU at every step. ``log`` receives each event and command as a
    JSON-able dict. ``tell`` hears now and then how many requests have ended, of how many. The run may go on for ``drain_s``
    after the last arrival. ``faults`` are for the systems that ``wrong_fault`` accepts. Where ``clients`` send the requests,
    the trace is whole: a model's clients send its rows in turn, and the rows' times mean nothing.
    """

    system: SystemSpec
    models: tuple[ServedModel, ...]
    gpus: tuple[Gpu, ...]
    trace: Requests
    engine: EngineSettings = field(default_factory=EngineSettings)
    sample_s: float = 1.0
    drain_s: float = 3600.0
    faults: tuple[Fault, ...] = ()
    exact_steps: bool = False
    check: bool = False
    log: Callable[[dict[str, object]], None] | None = None
    tell: Callable[[int, int], None] | None = None
    clients: Clients | None = None

    @property
    def whole_trace(self) -> Trace:
        """The trace. Raises ScenarioError where requests come chunk by chunk."""
        if isinstance(self.trace, Trace):
            return self.trace
        raise ScenarioError(f"{self.trace.source}: requests that stream in are at no time all there; read them first")


class Fate(IntEnum):
    """How a request ended. Everything but FINISHED is an SLO miss (systems.md 1.4). CUT: its output ended before it was as
    long as asked."""

    UNFINISHED = 0
    FINISHED = 1
    DROPPED = 2
    REJECTED = 3
    CUT = 4


class Cause(IntEnum):
    """Why a request was cut or rejected, or was dropped.

    MEMORY: its engine (any engine of its model, if rejected) cannot hold so many tokens. CONTEXT: the model's context ends
    there. PLACEMENT: its model has no engine. DEADLINE: its scheduler gave it up.
    """

    NONE = 0
    MEMORY = 1
    CONTEXT = 2
    PLACEMENT = 3
    DEADLINE = 4


class Left(IntEnum):
    """Why a request left an engine.

    OPEN: it is there when the run ends; FINISHED, CUT: it ended there; MIGRATED: it went on elsewhere with its KV; REGROUPED:
    engines merged or split; EVICTED: the engine left its GPUs; FAILED: the engine was lost; RESIZED: the engine's memory became
    too small for it.
    """

    OPEN = 0
    FINISHED = 1
    CUT = 2
    MIGRATED = 3
    REGROUPED = 4
    EVICTED = 5
    FAILED = 6
    RESIZED = 7


LAST = (Left.OPEN, Left.FINISHED, Left.CUT)
"""A visit that ended so is the last one of its request."""


class Visit(NamedTuple):
    """A request at an engine, from its dispatch there until it left, with the tokens that the engine generated for it.

    ``engine`` is the engine's number in the decision log. ``stages`` are the instances that the engine ran on, one a stage, in
    a cluster of one model; elsewhere the engine alone.
    """

    engine: int
    stages: tuple[int, ...]
    from_s: float
    to_s: float
    tokens: int
    left: Left


@dataclass(frozen=True, slots=True, eq=False)
class Visits:
    """Visits of many requests, in columns (v,) as in ``Visit``; ``stages`` by engine. The visits of a whole run
    are sorted by request, and by time within one. The tokens of a request that finished or was cut add up to its
    ``generated_tokens``. A visit that is still open when the run ends has no tokens."""

    request: Ints
    engine: NDArray[np.int32]
    from_s: Floats
    to_s: Floats
    tokens: Ints
    left: NDArray[np.int8]
    stages: Mapping[int, tuple[int, ...]]

    COLUMNS: ClassVar[tuple[str, ...]] = ("request", "engine", "from_s", "to_s", "tokens", "left")

    @classmethod
    def of_columns(cls, columns: Iterable[Any], stages: Mapping[int, tuple[int, ...]]) -> Visits:
        """The visits in these columns, which come in the order of ``COLUMNS``."""
        request, engine, from_s, to_s, tokens, left = columns
        return cls(request, engine, from_s, to_s, tokens, left, stages)

    @classmethod
    def joined(cls, parts: Sequence[Visits]) -> Visits:
        """All of these, by request; the visits of a request must be in the order of their times."""
        dtypes = (np.int64, np.int32, np.float64, np.float64, np.int64, np.int8)
        columns = [
            np.concatenate([np.empty(0, dtype), *(getattr(part, name) for part in parts)])
            for name, dtype in zip(cls.COLUMNS, dtypes, strict=True)
        ]
        order = np.argsort(columns[0], kind="stable")
        stages = {engine: stages for part in parts for engine, stages in part.stages.items()}
        return cls.of_columns((column[order] for column in columns), stages)

    def of(self, request: int) -> list[Visit]:
        """The visits of one request, the first one first."""
        first, end = np.searchsorted(self.request, (request, request + 1)).tolist()
        rows = zip(*(getattr(self, name)[first:end].tolist() for name in self.COLUMNS[1:]), strict=True)
        return [
            Visit(engine, self.stages[engine], from_s, to_s, tokens, Left(left))
            for engine, from_s, to_s, tokens, left in rows
        ]

    def moved(self) -> Visits:
        """The visits of requests that had more than one."""
        _, number, visits = np.unique(self.request, return_inverse=True, return_counts=True)
        several = visits[number] > 1
        return Visits.of_columns((getattr(self, name)[several] for name in self.COLUMNS), self.stages)


@dataclass(frozen=True, slots=True, eq=False)
class Ended:
    """Requests that have ended, in the order of their ends: their numbers in the order of arrival, and their outcomes as in
    ``RunResult``. Columns, (n,) each. ``visits``: the last visits of these requests, and visits that other requests have ended
    meanwhile."""

    request: Ints
    first_token_s: Floats
    finish_s: Floats
    fate: NDArray[np.int8]
    preemptions: Ints
    engine: NDArray[np.int32]
    cause: NDArray[np.int8]
    generated_tokens: Ints
    visits: Visits = field(default_factory=partial(Visits.joined, ()))


class EndedRequests(NamedTuple):
    """Ended requests with their columns of the trace, (n,) each."""

    ended: Ended
    model: NDArray[np.int32]
    arrival_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """Samples in time: ``time_s`` (T,); per engine (T, E): waiting and running requests, KV bytes used; per GPU (T, G):
    bytes stranded and free. ``engine_models`` names each engine's model."""

    time_s: Floats
    engine_models: tuple[str, ...]
    waiting: Ints
    running: Ints
    kv_used_bytes: Ints
    gpu_stranded_bytes: Ints
    gpu_free_bytes: Ints


COUNTERS = (
    *("kv_demand_mean", "kv_demand_peak", "throttlings", "drops", "restores", "migrations"),
    *("exchange_mean_s", "exchange_max_s", "exchange_bytes", "bubble_fraction"),
)
"""The counters of a single-model cluster (``samples.py``)."""

WAKES = {Tier.HOST: "wakes_from_host", Tier.DISK: "wakes_from_disk", Tier.GONE: "starts"}
"""The counters of a fleet whose engines sleep: activations, by where the weights were."""


OUTCOMES = ("first_token_s", "finish_s", "fate", "preemptions", "engine", "cause", "generated_tokens")
"""The columns with the outcome of each request."""


@dataclass(slots=True)
class GpuUse:
    """How one GPU was used, in fractions of all looks at it (``looks.py``); while the run goes on, in sums of looks."""

    gpu: int
    busy: float = 0.0
    compute: float = 0.0
    bandwidth: float = 0.0
    waiting: float = 0.0
    kv_short: float = 0.0
    slots_short: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class RunResult:
    """Per-request arrays in the order of the trace (NaN where a moment never came; of no length where requests stream in) and
    counters of the run. ``cause`` (``Cause``): why a request was cut, rejected or dropped. ``generated_tokens``: all that a
    finished request asked for, fewer for a cut one, 0 for others. ``engine``: the engine of the last visit, by its first
    stage; for a request that no engine ever had, the engine that it waited for. ``visits`` has all visits.

    ``iterations`` counts engine steps, ``events`` the processed events. ``step_times`` divides the engines' busy time:
    fractions by part of a step and source, over ``step_samples`` samples of steps in flight. ``counters`` are the other counts
    of a run, by name (``samples.py``). ``gpu_use`` is how busy each GPU was, and what kept requests waiting there, until the
    last arrival; empty without samples. ``loop_cpu_s`` is not deterministic and never enters result files. ``sent``: the
    requests, in the order of their arrivals, where clients sent them; else it is the trace of the scenario.
    """

    first_token_s: Floats
    finish_s: Floats
    fate: NDArray[np.int8]
    preemptions: Ints
    engine: NDArray[np.int32]
    cause: NDArray[np.int8]
    generated_tokens: Ints
    placement: Placement
    kv_capacity_bytes: tuple[int, ...]
    timeline: Timeline
    end_s: float
    iterations: int
    events: int
    loop_cpu_s: float
    step_times: Mapping[str, Mapping[Source, float]] = field(default_factory=dict)
    step_samples: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    gpu_use: tuple[GpuUse, ...] = ()
    visits: Visits = field(default_factory=partial(Visits.joined, ()))
    sent: Trace | None = None
