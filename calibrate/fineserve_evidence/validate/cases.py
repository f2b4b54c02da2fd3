"""A measured set: cases of one engine setting and one load, with the measured TTFT and TPOT of their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fineserve_evidence.validate.front_end import NO_API, Api, FrontEnd
from fineserve_sim.catalog import Deployment, GpuSpec, ModelSpec, PrecisionSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Blocks = tuple[tuple[int, ...], ...]

BLOCK_TOKENS = 16
MOST_BLOCKS = 2**20
"""Blocks of a prompt. The limit keeps the names of blocks of conversations apart."""
SEED = 20240711
PHASES = 8
"""Runs whose mean predicts single requests. Early or late in a step makes up to a step of a request's TTFT. Steps known to a
few percent do not tell which, after twenty of them."""


class Label(NamedTuple):
    """The group under which errors are reported."""

    set: str
    backend: str
    model: str
    precision: str
    tp: int


@dataclass(frozen=True, slots=True)
class Serving:
    """One engine setting.

    ``memory_utilization`` is the share of the GPU's memory that one engine may take. ``api`` is what a request's
    TTFT holds beside the engine's; in a closed loop it also queues at the ``front_end``. ``steps_ahead`` counts the steps
    that are scheduled already when a request comes. The request waits for them beside the running one. ``mean_tokens`` is the
    length of a sequence midway through its output, which counts where KV grows unevenly; 0: not known. ``step_time_factor``:
    how many times as long steps take by what the set says of its engine.
    """

    model: ModelSpec
    precision: PrecisionSpec
    tp: int
    gpu: GpuSpec
    deployment: Deployment
    token_budget: int
    max_sequences: int
    memory_utilization: float = 0.9
    api: Api = NO_API
    batching: Literal["vllm", "sglang", "sglang_mixed"] = "vllm"
    front_end: FrontEnd | None = None
    steps_ahead: int = 0
    mean_tokens: int = 0
    step_time_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Apart:
    """Engines that decode what others have prefilled: ``prefill`` engines of the case's setting, and ``decode`` of ``serving``.

    Data-parallel ranks that share experts count as one engine. ``nodes``: KV goes over the network, not over the links of one
    node. Each transfer takes ``setup_s`` beside its bytes.
    """

    prefill: int
    decode: int
    serving: Serving
    nodes: bool = True
    setup_s: float = 4e-4


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """``batch`` equal prompts on an idle engine.

    The prompts reach the engine one after another, so that it starts on the first alone, unless they come ``together``. An
    engine of ``whole_prompts`` prefills all that its token budget holds, group by group, before it decodes. The row's times
    then belong to the first group.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int
    together: bool = False
    whole_prompts: bool = False


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``clients`` users send ``requests`` in all. Each user sends its next request when its last one has ended.

    Lengths are uniform between ``shortest`` times the nominal length and the nominal length. The engine runs at most
    ``max_running`` requests. Clients start ``start_gap_s`` one after another.
    """

    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shortest: float = 1.0
    max_running: int | None = None
    start_gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SharedLoop:
    """``clients`` users of each of ``models`` engines of one GPU, which take turns as in ``ClosedLoop``.

    They send ``requests`` to each engine, of which the first ``warmup`` are not measured. A row has medians over the measured
    requests of all engines, and their requests a second. ``sharing``: the law by which the engines slow each other
    (``fineserve_sim.latency.sharing``). ``sm_share``: the part of the SMs that each may take.
    """

    clients: int
    requests: int
    warmup: int
    prompt_tokens: int
    output_tokens: int
    models: int
    sharing: str
    sm_share: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class OpenLoop:
    """Recorded or stated arrivals, shape (n,), at ``models`` engines of one GPU, or at ``replicas`` on GPUs of their own.

    * ``shared_kv``: the engines draw on one memory.
    * ``each``: rows are requests; else one row of means a model.
    * ``blocks``: for each request, the names of the full KV blocks of its first tokens, as far as they are known. Blocks of
      one name hold the same tokens behind the same ones, and the engines cache prefixes. None: they cache nothing.
    * ``phases``: the number of runs whose mean predicts single requests. Each run delays requests by a random part of a step;
      a single run has them at their times.
    * ``sharing``: the law by which engines of one GPU slow each other (``fineserve_sim.latency.sharing``).
    * ``starts_s``: when each model's client started, for runs whose throughput counts.
    * ``most_under_way``: requests that the client sends at most without an answer; later ones wait with it. 0: any number.
    """

    arrival_s: Floats
    model: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    models: int = 1
    replicas: int = 1
    shared_kv: bool = False
    each: bool = True
    blocks: Blocks | None = None
    phases: int = PHASES
    sharing: Literal["fluid", "time_slice"] = "fluid"
    starts_s: tuple[float, ...] = ()
    most_under_way: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class BenchmarkRun:
    """A run of a benchmark client, judged as a whole: requests of given lengths, shape (n,), at one engine.

    They are sent ``gap_s`` one after another, at most ``clients`` at a time. ``whole`` says which seconds count: those from
    the first request to the last token, or the mean of what requests took. Where a ``burst_queues``, the front end takes the
    requests that come at once one by one, and the engine sees the first when the last is through.
    """

    prompt_tokens: Ints
    output_tokens: Ints
    clients: int
    gap_s: float
    whole: Literal["duration", "latency"]
    burst_queues: bool = False


Load = StaticBatch | ClosedLoop | SharedLoop | OpenLoop | BenchmarkRun


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One load on one setting, with what was measured.

    ``ttft_s`` and ``tpot_s`` have shape (rows,), with NaN where a row has no measurement. ``throughput_per_s`` holds requests
    a second where they are reported, ``parts`` what a row is reported under beside the label. Runs of one ``campaign`` (engine
    and version) share what is not recorded, and the ``reading`` taken of it. ``whole_s``: what a ``BenchmarkRun`` took.
    ``apart``: the engines that decode, where the setting is of engines that only prefill.
    """

    label: Label
    serving: Serving
    load: Load
    ttft_s: Floats
    tpot_s: Floats
    campaign: str = ""
    reading: str = ""
    throughput_per_s: Floats | None = None
    parts: tuple[str, ...] = ()
    whole_s: float | None = None
    apart: Apart | None = None


Change = Callable[[Case], Case]


def with_serving(**changed: Any) -> Change:
    """Change the engine setting: fields of ``Serving`` by name."""
    return lambda case: replace(case, serving=replace(case.serving, **changed))


def with_load(kind: type[Load], **changed: Any) -> Change:
    """Change loads of one kind: fields by name. Cases with another kind of load stay as they are."""
    return lambda case: replace(case, load=replace(case.load, **changed)) if isinstance(case.load, kind) else case


without_prefix_cache = with_load(OpenLoop, blocks=None)


def blocks_of_conversations(conversation: Ints, prompt_tokens: Ints) -> Blocks:
    """Name the blocks of prompts, shape (n,), where the shorter of two prompts of one conversation begins the longer."""
    first = (conversation * MOST_BLOCKS).tolist()
    counts = (prompt_tokens // BLOCK_TOKENS).tolist()
    return tuple(tuple(range(name, name + count)) for name, count in zip(first, counts, strict=True))


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Another reading of something that the set does not record."""

    what: str
    change: Change


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """A file's cases, its rows that cannot be predicted by (backend, model, reason), and the assumptions.

    ``fitted`` counts the rows that gave constants of the engine: then only held-out rows are ``cases``. ``readings`` are named
    readings of what closed loops do not record. Each is tried on every engine and version.
    """

    name: str
    cases: tuple[Case, ...]
    unsupported: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    assumptions: tuple[str, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    readings: tuple[Sensitivity, ...] = ()
    shares_prefixes: bool = False
    fitted: int = 0
