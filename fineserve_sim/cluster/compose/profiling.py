"""An operator's profile of an engine: its step times, its throughput at each batch size, the cost of chunks, the SMs that it
needs. It depends on geometry, precision, GPU, settings and expected load only, so it is computed once a process."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache, partial
from itertools import product
from pathlib import Path

import numpy as np

from fineserve_sim.catalog import AttentionVariant, GpuSpec, ModelSpec, PrecisionSpec, attention_variant, deployment
from fineserve_sim.cluster.scenario import EngineSettings, Gpu, Scenario, ScenarioError, ServedModel
from fineserve_sim.latency import StepModel, measured_on, profile, step_model_of
from fineserve_sim.latency.sharing import under_cap
from fineserve_sim.latency.tables import TableError
from fineserve_sim.policy.groups.microbatch import ChunkCost
from fineserve_sim.policy.interfaces import Busy, OperatingPoint
from fineserve_sim.systems import Sharing

CHUNKS = (256, 512, 1024, 2048, 4096)
PREFIXES = (0, 2048, 8192, 16384)
COUNTS = (1, 2, 4)
"""The equal chunks of a step, as the chunk cost is fitted to."""

PERCENTS = range(30, 101, 10)
"""Parts of the SMs that MuxServe profiles (hao-ai-lab/MuxServe @ 223148033454, examples/placement/llama.json)."""


def step_model(
    served: ServedModel,
    gpu: GpuSpec,
    settings: EngineSettings,
    kernel: AttentionVariant | None = None,
    copied_s: float = 0.0,
) -> StepModel:
    """The step times of one engine of ``served`` on GPUs of this type, with today's attention kernel or another. ``copied_s``:
    seconds a token that copies of its KV add. Raises ScenarioError for a table of measured steps without such an engine."""
    alike = EngineSettings(
        deployment=settings.deployment,
        latency=settings.latency,
        step_times=settings.step_times,
        step_time_factor=settings.step_time_factor,
    )
    engine = served.model, served.precision, served.tp
    return _step_model(*engine, gpu, alike, kernel and kernel.name, copied_s)


@lru_cache(maxsize=256)
def _step_model(
    model: ModelSpec,
    precision: PrecisionSpec,
    tp: int,
    gpu: GpuSpec,
    settings: EngineSettings,
    kernel: str | None,
    copied_s: float,
) -> StepModel:
    step = _as_predicted(model, precision, tp, gpu, settings, kernel)
    if copied_s:
        step.copy_tokens(copied_s)
    if settings.step_time_factor != 1.0:
        step.slow_down(settings.step_time_factor)
    return step


def _as_predicted(
    model: ModelSpec, precision: PrecisionSpec, tp: int, gpu: GpuSpec, settings: EngineSettings, kernel: str | None
) -> StepModel:
    if settings.step_times is None:
        tables = measured_on(gpu) if settings.latency == "tables" else None
        variant = attention_variant(kernel) if kernel else None
        return step_model_of(model, precision, tp, gpu, deployment(settings.deployment), tables, variant)
    from fineserve_sim.latency.measured_steps import load_step_model  # SciPy's optimizers take a while to import

    path = Path(settings.step_times.path)
    if model.speculation is not None:
        raise ScenarioError(
            f"{path.name}: measured steps know no draft model; model {model.name} has speculative decoding"
        )
    if tp != 1:
        raise ScenarioError(f"{path.name}: steps are measured at tp 1; model {model.name} has tp {tp}")
    try:
        return load_step_model(path, model, precision, gpu)
    except TableError as problem:
        raise ScenarioError(str(problem)) from None


def slowest(served: ServedModel, gpus: Iterable[GpuSpec], settings: EngineSettings) -> GpuSpec:
    """The type among ``gpus`` on which an engine of the model, alone, serves the fewest requests per second. The other ranks of
    a TP group wait for it at every layer."""
    types = list(dict.fromkeys(gpus))
    return types[0] if len(types) == 1 else min(types, key=partial(_most_per_s, served, settings))


def fastest(served: ServedModel, gpus: Iterable[GpuSpec], settings: EngineSettings) -> GpuSpec:
    """As ``slowest``, the type on which it serves the most."""
    types = list(dict.fromkeys(gpus))
    return types[0] if len(types) == 1 else max(types, key=partial(_most_per_s, served, settings))


def _most_per_s(served: ServedModel, settings: EngineSettings, gpu: GpuSpec) -> float:
    return max(point.throughput_per_s for point in operating_points(typical(served), gpu, settings))


def mean_lengths(served: ServedModel) -> tuple[int, int]:
    """Prompt and output tokens of a mean request, rounded up."""
    return max(1, math.ceil(served.mean_prompt_tokens)), max(1, math.ceil(served.mean_output_tokens))


def typical(served: ServedModel) -> ServedModel:
    """The same model as far as its profiles depend on it: one for all with equal engines and mean lengths."""
    return ServedModel("profiled", served.model, served.precision, served.tp, 1.0, 1.0, *mean_lengths(served))


@lru_cache(maxsize=256)
def operating_points(served: ServedModel, gpu: GpuSpec, settings: EngineSettings) -> tuple[OperatingPoint, ...]:
    """The profile of a ``typical`` model."""
    step = step_model(served, gpu, settings)
    return profile(step, *mean_lengths(served), settings.token_budget, settings.max_sequences)


@lru_cache(maxsize=256)
def busy_parts(served: ServedModel, gpu: GpuSpec, settings: EngineSettings) -> tuple[Busy, Busy]:
    """How busy a GPU is while a ``typical`` model computes a prompt, and while one request of it decodes."""
    step = step_model(served, gpu, settings)
    prompt, output = mean_lengths(served)
    chunk = min(prompt, settings.token_budget)
    prefill = step.demand(0, 0, chunk, chunk * (chunk + 1) / 2, 0, 1)
    decode = step.demand(1, prompt + output // 2, 0, 0, 0, 1)
    return Busy(prefill.compute, prefill.bandwidth), Busy(decode.compute, decode.bandwidth)


@lru_cache(maxsize=256)
def chunk_cost(step: StepModel) -> ChunkCost:
    """What lookahead plans with (KunServe eq. 1): alpha, beta, gamma and the shared part by least squares of relative errors,
    over steps of 1, 2 and 4 equal chunks."""
    rows, seconds = [], []
    for count, chunk, prefix in product(COUNTS, CHUNKS, PREFIXES):
        pairs = chunk * prefix + chunk * (chunk + 1) // 2
        seconds.append(step.step_s(0, 0, count * chunk, count * pairs, count * prefix, count))
        rows.append((count * pairs, count * chunk, count, 1 - count))
    measured_s = np.array(seconds)
    scaled = np.array(rows, dtype=np.float64) / measured_s[:, None]
    found, *_ = np.linalg.lstsq(scaled, np.ones(len(seconds)), rcond=None)
    alpha, beta, gamma, shared = (max(0.0, float(value)) for value in found)
    return ChunkCost(alpha, beta, gamma, min(shared, gamma))


def sharing_of(gpu: Gpu, scenario: Scenario) -> Sharing:
    """How the engines on this GPU share it."""
    return gpu.sharing or scenario.system.sharing


def sm_share(scenario: Scenario, served: ServedModel, gpus: Iterable[Gpu]) -> float:
    """The part of the SMs, in (0, 1], that an engine of the model may take of each of its GPUs: the least of theirs."""
    shares = []
    for gpu in gpus:
        percent = sharing_of(gpu, scenario).percent or {}
        if percent == "by_rate":
            shares.append(_least_share(served, gpu.spec, scenario.engine))
        else:
            shares.append(percent.get(served.id, 100) / 100)
    return min(shares)


@lru_cache(maxsize=256)
def _least_share(served: ServedModel, gpu: GpuSpec, settings: EngineSettings) -> float:
    """The smallest part of the SMs with which one engine meets the model's rate, alone; all of them if none does."""
    step = step_model(served, gpu, settings)
    prompt, output = mean_lengths(served)
    chunk = min(prompt, settings.token_budget)
    prefill = step.demand(0, 0, chunk, chunk * (chunk + 1) / 2, 0, 1)
    points = operating_points(typical(served), gpu, settings)
    decodes = [step.demand(p.batch, p.batch * (prompt + output // 2), 0, 0, 0, p.batch) for p in points]
    for share in (percent / 100 for percent in PERCENTS):
        for point, decode in zip(points, decodes, strict=True):  # a batch is prefilled together, and then decoded
            decode_s = max(0.0, point.batch / point.throughput_per_s - point.ttft_s)
            prefill_s = point.ttft_s * under_cap(prefill._replace(sm_share=share))
            if point.batch / (prefill_s + decode_s * under_cap(decode._replace(sm_share=share))) >= served.rate_per_s:
                return share
    return 1.0
