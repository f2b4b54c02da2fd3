"""What a measured set holds: cases of one engine setting and one load, with the measured TTFT and TPOT of their rows.

``with_...`` change a case: each is another reading of something that the set does not record.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
from fineserve_traces import arrivals
from numpy.typing import NDArray

from fineserve_sim.catalog import Deployment, GpuSpec, ModelSpec, PrecisionSpec, precision

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

PHASES = 8
"""Whether a request comes early or late in a step decides up to a step of its TTFT, and steps known to a few percent do not
tell after twenty of them."""


class Label(NamedTuple):
    """What errors are grouped by."""

    set: str
    backend: str
    model: str
    precision: str
    tp: int


@dataclass(frozen=True, slots=True)
class Serving:
    """One engine setting. ``memory_utilization`` is the share of the GPU that one engine may take; ``front_end_s`` what a
    request spends before the engine sees it; ``steps_ahead`` the steps that are already scheduled when it comes, which it
    waits for beside the running one."""

    model: ModelSpec
    precision: PrecisionSpec
    tp: int
    gpu: GpuSpec
    deployment: Deployment
    token_budget: int
    max_sequences: int
    memory_utilization: float = 0.9
    front_end_s: float = 0.0
    steps_ahead: int = 0


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """``batch`` equal prompts on an idle engine. They reach it one after another, so that it starts on the first alone, unless
    they come ``together``. An engine of ``whole_prompts`` prefills all that its token budget holds, group by group, before it
    decodes: the row's times are those of the first group."""

    batch: int
    prompt_tokens: int
    output_tokens: int
    together: bool = False
    whole_prompts: bool = False


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """``clients`` users, each sending its next request when its last one has ended, ``requests`` in all.

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


@dataclass(frozen=True, slots=True, eq=False)
class OpenLoop:
    """Recorded or stated arrivals, shape (n,), at ``models`` engines of one GPU, or at ``replicas`` of one model on GPUs of
    their own. ``shared_kv``: the engines draw on one memory. ``each``: rows are requests; else one row of means a model.
    ``sharing``: the law by which engines of one GPU slow each other (``fineserve_sim.latency.sharing``). ``starts_s``: when
    each model's client started, of runs whose throughput counts.

    ``conversation``, shape (n,): of two prompts of one conversation, the shorter begins the longer, and the engines cache
    prefixes. None: no prompts are known to begin alike. ``phases``: the runs whose mean predicts single requests, each with
    requests delayed by a random part of a step; one run has them at their times.
    """

    arrival_s: Floats
    model: Ints
    prompt_tokens: Ints
    output_tokens: Ints
    models: int = 1
    replicas: int = 1
    shared_kv: bool = False
    each: bool = True
    conversation: Ints | None = None
    phases: int = PHASES
    sharing: Literal["fluid", "time_slice"] = "fluid"
    starts_s: tuple[float, ...] = ()


Load = StaticBatch | ClosedLoop | OpenLoop


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One load on one setting. ``ttft_s`` and ``tpot_s``: measured, shape (rows,); NaN where a row has none. ``campaign``: the
    runs that share what is not recorded (engine and version), and the ``reading`` taken of it. ``throughput_per_s``: requests a
    second of each row, where it is reported; ``parts``: of each row, what it is reported under beside the label."""

    label: Label
    serving: Serving
    load: Load
    ttft_s: Floats
    tpot_s: Floats
    campaign: str = ""
    reading: str = ""
    throughput_per_s: Floats | None = None
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Another reading of what the set does not record."""

    what: str
    change: Callable[[Case], Case]


@dataclass(frozen=True, slots=True)
class MeasuredSet:
    """A file's cases, the rows that cannot be predicted by (backend, model, reason), and what was assumed.

    ``kind`` says whether constants come from the set's own rows: then only held-out rows are ``cases``. ``readings``: of what
    the set's closed loops do not record, by name; each is tried on every engine and version.
    """

    name: str
    cases: tuple[Case, ...]
    unsupported: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    assumptions: tuple[str, ...] = ()
    sensitivities: tuple[Sensitivity, ...] = ()
    readings: tuple[Sensitivity, ...] = ()
    shares_prefixes: bool = False
    kind: Literal["prediction", "fitted on part of the set"] = "prediction"


Change = Callable[[Case], Case]
SEED = 20240711


def with_budget(token_budget: int) -> Change:
    """Another token budget of a step."""
    return lambda case: replace(case, serving=replace(case.serving, token_budget=token_budget))


def with_rounds(requests_per_client: int) -> Change:
    """Another number of requests a client of a closed loop."""

    def change(case: Case) -> Case:
        if not isinstance(case.load, ClosedLoop):
            return case
        return replace(case, load=replace(case.load, requests=requests_per_client * case.load.clients))

    return change


def with_full_lengths(case: Case) -> Case:
    """Every request of a closed loop has the nominal lengths."""
    return replace(case, load=replace(case.load, shortest=1.0)) if isinstance(case.load, ClosedLoop) else case


def with_all_slots(case: Case) -> Case:
    """The engine of a closed loop runs as many requests as there are clients."""
    return replace(case, load=replace(case.load, max_running=None)) if isinstance(case.load, ClosedLoop) else case


def with_whole_batch(case: Case) -> Case:
    """The prompts of a static batch reach the engine together."""
    return replace(case, load=replace(case.load, together=True)) if isinstance(case.load, StaticBatch) else case


def with_tp(tp: int) -> Change:
    """Another TP degree."""
    return lambda case: replace(case, serving=replace(case.serving, tp=tp))


def with_8bit_kv(case: Case) -> Case:
    """FP8 checkpoints keep their KV in 8 bits, too."""
    if case.serving.precision.name != "W8A8":
        return case
    return replace(case, serving=replace(case.serving, precision=precision("W8A8KV8")))


def with_utilization(share: float) -> Change:
    """Another share of the GPU's memory."""
    return lambda case: replace(case, serving=replace(case.serving, memory_utilization=share))


def with_steps_ahead(steps: int) -> Change:
    """Another number of steps scheduled ahead."""
    return lambda case: replace(case, serving=replace(case.serving, steps_ahead=steps))


def with_sharing(law: Literal["fluid", "time_slice"]) -> Change:
    """Another law of sharing a GPU."""
    return lambda case: replace(case, load=replace(case.load, sharing=law)) if isinstance(case.load, OpenLoop) else case


def with_replicas(replicas: int, utilization: float) -> Change:
    """Another number of engines that share the requests, with another share of their GPUs' memory."""

    def change(case: Case) -> Case:
        if not isinstance(case.load, OpenLoop):
            return case
        return with_utilization(utilization)(replace(case, load=replace(case.load, replicas=replicas)))

    return change


def with_one_run(case: Case) -> Case:
    """Requests come exactly when the record says."""
    return replace(case, load=replace(case.load, phases=1)) if isinstance(case.load, OpenLoop) else case


def with_poisson_arrivals(case: Case) -> Case:
    """Arrivals of an open loop at random, at the same mean rate."""
    if not isinstance(case.load, OpenLoop):
        return case
    times = case.load.arrival_s
    rate_per_s = (len(times) - 1) / float(times[-1] - times[0])
    drawn = arrivals.poisson(np.random.default_rng(SEED), rate_per_s, len(times))
    return replace(case, load=replace(case.load, arrival_s=drawn))


def without_prefix_cache(case: Case) -> Case:
    """No prompt is found in a cache."""
    return replace(case, load=replace(case.load, conversation=None)) if isinstance(case.load, OpenLoop) else case


def with_cached_prefix(share: float) -> Change:
    """This share of every prompt is found in a prefix cache: only the rest is computed."""

    def change(case: Case) -> Case:
        if isinstance(case.load, ClosedLoop):
            rest_of_one = max(1, int(case.load.prompt_tokens * (1 - share)))
            return replace(case, load=replace(case.load, prompt_tokens=rest_of_one))
        if not isinstance(case.load, OpenLoop):
            return case
        rest = np.maximum(1, (case.load.prompt_tokens * (1 - share)).astype(np.int64))
        return replace(case, load=replace(case.load, prompt_tokens=rest))

    return change
