"""What placement knows of a model, taken offline as FineServe does: profile tables and marginal memory efficiency.

The efficiency is measured, not derived: one engine alone, saturated with requests of mean length, is simulated with KV pools
of several sizes, and the mean number of resident tokens is fitted against the pool (FineServe Fig. 3). Profiles depend on
geometry, precision, GPU, settings and mean lengths only, so they are computed once a process.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from fineserve_traces import Trace, totals

from fineserve_sim.catalog import AttentionVariant, GpuSpec, ModelSpec, PrecisionSpec, attention_variant, deployment
from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.compose.memory import geometry, peak_activation_bytes, resident_bytes
from fineserve_sim.cluster.compose.parts import Parts
from fineserve_sim.cluster.engine.kv import CountedBlocks
from fineserve_sim.cluster.engine.lone import LoneEngine
from fineserve_sim.cluster.engine.seat import Seat
from fineserve_sim.cluster.gpu_use import looks_at
from fineserve_sim.cluster.host import Cluster, Scope
from fineserve_sim.cluster.run import Run
from fineserve_sim.cluster.samples import Column, EngineSampler
from fineserve_sim.cluster.scenario import EngineSettings, ScenarioError, ServedModel
from fineserve_sim.cluster.sharing.contention import Contention
from fineserve_sim.cluster.sharing.domain import PrivateDomain
from fineserve_sim.cluster.sharing.wakeups import Wakeups
from fineserve_sim.cluster.step_times import StepTimes
from fineserve_sim.latency import StepModel, measured_on, profile
from fineserve_sim.latency.sharing import LAWS
from fineserve_sim.latency.tables import TableError
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.interfaces import Instance, ModelDemand, OperatingPoint, Placement
from fineserve_sim.policy.memory.paged import PrivatePools
from fineserve_sim.policy.placement.mme import mme_slope

SWEEP_REQUESTS = 32
"""Largest KV pool of the sweep, in requests of mean length that fit at once: far from what saturates an engine."""


class _Shape(NamedTuple):
    """All that step times depend on: a model on GPUs of one type."""

    model: ModelSpec
    precision: PrecisionSpec
    tp: int
    gpu: GpuSpec
    settings: EngineSettings


def _shape(served: ServedModel, gpu: GpuSpec, settings: EngineSettings) -> _Shape:
    return _Shape(served.model, served.precision, served.tp, gpu, settings)


@lru_cache(maxsize=256)
def _step_model(shape: _Shape, kernel: str | None = None) -> StepModel:
    model, precision, tp, gpu, settings = shape
    if settings.step_times is not None:
        return _measured_steps(model, precision, tp, gpu, Path(settings.step_times.path))
    tables = measured_on(gpu) if settings.latency == "tables" else None
    variant = attention_variant(kernel) if kernel else None
    return StepModel(model, precision, tp, gpu, deployment(settings.deployment), tables, variant)


def _measured_steps(model: ModelSpec, precision: PrecisionSpec, tp: int, gpu: GpuSpec, path: Path) -> StepModel:
    """Raises ScenarioError for a table without such an engine."""
    from fineserve_sim.latency.measured_steps import load_step_model  # SciPy's optimizers take a while to import

    if tp != 1:
        raise ScenarioError(f"{path.name}: steps are measured at tp 1; model {model.name} has tp {tp}")
    try:
        return load_step_model(path, model, precision, gpu)
    except TableError as problem:
        raise ScenarioError(str(problem)) from None


def step_model(
    served: ServedModel, gpu: GpuSpec, settings: EngineSettings, kernel: AttentionVariant | None = None
) -> StepModel:
    """The step times of one engine of ``served`` on GPUs of this type, with today's attention kernel or another."""
    return _step_model(_shape(served, gpu, settings), kernel and kernel.name)


def demand_of(served: ServedModel, gpu: GpuSpec, settings: EngineSettings, *, slope: bool) -> ModelDemand:
    """The model as placement sees it. ``slope`` measures the marginal memory efficiency by a sweep; else it is left open."""
    prompt, output = mean_lengths(served)
    shape = _shape(served, gpu, settings)
    return ModelDemand(
        id=served.id,
        rate_per_s=served.rate_per_s,
        slo_s=served.ttft_slo_s,
        tp=served.tp,
        weight_bytes=resident_bytes(served, settings),
        token_bytes=geometry(served, settings).token_bytes,
        profile=_profile(shape, prompt, output),
        mme_tokens_per_byte=_measured_mme(shape, prompt, output) if slope else None,
        tokens_per_request=served.mean_prompt_tokens + served.mean_output_tokens,
        tpot_slo_s=served.tpot_slo_s,
        activation_bytes=peak_activation_bytes(served, settings),
    )


def mean_lengths(served: ServedModel) -> tuple[int, int]:
    """Prompt and output tokens of a mean request, rounded up."""
    return max(1, math.ceil(served.mean_prompt_tokens)), max(1, math.ceil(served.mean_output_tokens))


@lru_cache(maxsize=256)
def _profile(shape: _Shape, prompt: int, output: int) -> tuple[OperatingPoint, ...]:
    settings = shape.settings
    return profile(_step_model(shape), prompt, output, settings.token_budget, settings.max_sequences)


@lru_cache(maxsize=256)
def _measured_mme(shape: _Shape, prompt: int, output: int) -> float | None:
    """Tokens per byte: the slope of mean resident tokens against the bytes of the KV pool, one engine alone. None when memory
    does not limit it: its batch limit leaves no two pools to compare, or it computes too little a step to fill the larger."""
    gpu, settings = shape.gpu, shape.settings
    served = ServedModel("profiled", shape.model, shape.precision, shape.tp, 1.0, 1.0, prompt, output)
    largest = min(SWEEP_REQUESTS, settings.max_sequences)
    requests = sorted({max(1, largest // part) for part in (8, 4, 2, 1)})
    if len(requests) < 2:
        return None
    block = geometry(served, settings)
    request_bytes = block.blocks_for_tokens(prompt + output) * block.block_bytes
    pools = [count * request_bytes for count in requests]
    resident_tokens = [_mean_resident_tokens(served, gpu, settings, pool) for pool in pools]
    return mme_slope(pools, resident_tokens) if resident_tokens[1] > resident_tokens[0] else None


def _mean_resident_tokens(served: ServedModel, gpu: GpuSpec, settings: EngineSettings, pool_bytes: int) -> float:
    """Mean cached tokens of one engine with ``pool_bytes`` of KV memory on each GPU, while requests wait for it."""
    requests = 4 * SWEEP_REQUESTS
    trace = Trace(
        arrival_s=np.zeros(requests),
        model=np.zeros(requests, dtype=np.int32),
        prompt_tokens=np.full(requests, int(served.mean_prompt_tokens)),
        output_tokens=np.full(requests, int(served.mean_output_tokens)),
        models=(served.id,),
        source="profile sweep",
    )
    found = totals(trace)
    run = Run(
        trace,
        requests,
        _alone(served, gpu, settings, pool_bytes),
        sample_s=0.1,
        horizon_s=found.last_s + 3600.0,
        looks=looks_at(found, trace.models),
    )
    run.to_the_end()
    timeline = run.parts.sampler.rows.timeline()
    used_bytes = timeline.kv_used_bytes[timeline.waiting[:, 0] > 0, 0].mean()
    return float(used_bytes) / (geometry(served, settings).token_bytes * served.tp)


def _alone(served: ServedModel, gpu: GpuSpec, settings: EngineSettings, pool_bytes: int) -> Parts:
    """One engine that has its GPUs to itself."""
    gpus = tuple(range(served.tp))
    memories = [PrivatePools({0: (geometry(served, settings).block_bytes, pool_bytes)}) for _ in gpus]
    kv = CountedBlocks([memory.pool(0) for memory in memories], settings.block_tokens)
    max_tokens = min(served.model.max_context_tokens, kv.capacity_tokens())
    clock = Clock()
    contention = Contention(dict.fromkeys(gpus, LAWS["fluid"]))
    contention.join(0, gpus)
    route = Route(0, 1.0, max_tokens)
    controller = Controller({served.id: [route] if max_tokens > 1 else []})
    cluster = Cluster(clock, controller, contention)
    step = step_model(served, gpu, settings)
    engine = LoneEngine(Seat(0, served.id, step, kv, max_tokens, settings), cluster, Wakeups(clock))
    cluster.connect([engine], [PrivateDomain(engine, memories)], [Scope((0,))])
    column = Column(served.id, lambda: (engine,), lambda: 0)
    capacities = tuple(memory.ledger().total_bytes for memory in memories)
    sampler, placement = EngineSampler([column], memories), Placement((Instance(served.id, 0, gpus, 1.0, 0),))
    return Parts(cluster, sampler, StepTimes(tuple), capacities, placement)
