"""What an operator profiles of an engine: its step times, what it reaches at each batch size, and what chunks cost. They depend
on geometry, precision, GPU, settings and mean lengths only, so they are computed once a process."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import product
from pathlib import Path

import numpy as np

from fineserve_sim.catalog import AttentionVariant, GpuSpec, ModelSpec, PrecisionSpec, attention_variant, deployment
from fineserve_sim.cluster.scenario import EngineSettings, ScenarioError, ServedModel
from fineserve_sim.latency import StepModel, measured_on, profile
from fineserve_sim.latency.tables import TableError
from fineserve_sim.policy.groups.microbatch import ChunkCost
from fineserve_sim.policy.interfaces import OperatingPoint

CHUNKS = (256, 512, 1024, 2048, 4096)
PREFIXES = (0, 2048, 8192, 16384)
COUNTS = (1, 2, 4)


def step_model(
    served: ServedModel, gpu: GpuSpec, settings: EngineSettings, kernel: AttentionVariant | None = None
) -> StepModel:
    """The step times of one engine of ``served`` on GPUs of this type, with today's attention kernel or another. Raises
    ScenarioError for a table of measured steps without such an engine."""
    alike = EngineSettings(deployment=settings.deployment, latency=settings.latency, step_times=settings.step_times)
    return _step_model(served.model, served.precision, served.tp, gpu, alike, kernel and kernel.name)


@lru_cache(maxsize=256)
def _step_model(
    model: ModelSpec, precision: PrecisionSpec, tp: int, gpu: GpuSpec, settings: EngineSettings, kernel: str | None
) -> StepModel:
    if settings.step_times is None:
        tables = measured_on(gpu) if settings.latency == "tables" else None
        variant = attention_variant(kernel) if kernel else None
        return StepModel(model, precision, tp, gpu, deployment(settings.deployment), tables, variant)
    from fineserve_sim.latency.measured_steps import load_step_model  # SciPy's optimizers take a while to import

    path = Path(settings.step_times.path)
    if tp != 1:
        raise ScenarioError(f"{path.name}: steps are measured at tp 1; model {model.name} has tp {tp}")
    try:
        return load_step_model(path, model, precision, gpu)
    except TableError as problem:
        raise ScenarioError(str(problem)) from None


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
