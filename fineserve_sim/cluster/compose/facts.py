"""The facts about a scenario's models for placement, found before anything is placed, as FineServe does offline by profile
tables.

Marginal memory efficiency is measured, not derived. The sweep simulates one engine alone, saturated with requests of mean
length, with KV pools of several sizes. It then fits the mean number of resident tokens against the pool (FineServe Fig. 3). It
runs once a process for each model, GPU type and engine settings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.catalog import GpuSpec
from fineserve_sim.cluster.compose.memory import (
    fixed_bytes,
    geometry,
    kinds_of,
    peak_activation_bytes,
    resident_bytes,
    usable_bytes,
)
from fineserve_sim.cluster.compose.models import compose
from fineserve_sim.cluster.compose.profiling import busy_parts, operating_points, typical
from fineserve_sim.cluster.run import Run
from fineserve_sim.cluster.scenario import EngineSettings, Gpu, Scenario, ServedModel
from fineserve_sim.policy.interfaces import Instance, KindFacts, ModelDemand, OperatingPoint, Placement
from fineserve_sim.policy.placement.mme import mme_slope
from fineserve_sim.systems import load_systems

SWEEP_REQUESTS = 32
"""Largest KV pool of the sweep, in requests of mean length that fit at once: far from what saturates an engine."""

SAMPLE_S = 0.1
SAMPLES_A_REQUEST = 8
"""Samples of the sweep are at most ``SAMPLE_S`` apart, and at least so many while a request alone is computed."""


def demands_of(scenario: Scenario) -> dict[str, ModelDemand]:
    """The demand of each model by its id: all facts that a placement may ask for."""
    slope = getattr(scenario.system.placement, "mme", None) == "slope"
    kinds = [*kinds_of(scenario.gpus)]
    return {model.id: demand_on(model, kinds, scenario.engine, slope=slope) for model in scenario.models}


def demand_on(served: ServedModel, kinds: Sequence[GpuSpec], settings: EngineSettings, *, slope: bool) -> ModelDemand:
    """The model as placement sees it in a cluster of these kinds of GPU, in the order of their numbers."""
    each = [demand_of(served, gpu, settings, slope=slope) for gpu in kinds]
    if len(each) == 1:
        return each[0]
    facts = tuple(
        KindFacts(demand.profile, demand.mme_tokens_per_byte, demand.prefill, demand.decode) for demand in each
    )
    return replace(each[0], by_kind=facts)


def demand_of(served: ServedModel, gpu: GpuSpec, settings: EngineSettings, *, slope: bool) -> ModelDemand:
    """The model as placement sees it. ``slope`` measures the marginal memory efficiency by a sweep; else it is left open."""
    prefill, decode = busy_parts(typical(served), gpu, settings)
    return ModelDemand(
        id=served.id,
        rate_per_s=served.rate_per_s,
        slo_s=served.ttft_slo_s,
        tp=served.tp * served.ranks,
        weight_bytes=resident_bytes(served, settings),
        token_bytes=geometry(served, settings).token_bytes,
        profile=_of_all_ranks(operating_points(typical(served), gpu, settings), served.ranks),
        mme_tokens_per_byte=_measured_mme(typical(served), gpu, settings) if slope else None,
        tokens_per_request=served.mean_prompt_tokens + served.mean_output_tokens,
        tpot_slo_s=served.tpot_slo_s,
        activation_bytes=peak_activation_bytes(served, settings),
        decode_tokens=served.mean_output_tokens,
        prefill=prefill,
        decode=decode,
        rate_variance=served.rate_variance,
    )


def _of_all_ranks(points: tuple[OperatingPoint, ...], ranks: int) -> tuple[OperatingPoint, ...]:
    """Turn the operating points of one data-parallel rank into points of the group, in which all ranks have equal batches."""
    if ranks == 1:
        return points
    return tuple(
        point._replace(batch=ranks * point.batch, throughput_per_s=ranks * point.throughput_per_s) for point in points
    )


@lru_cache(maxsize=256)
def _measured_mme(served: ServedModel, gpu: GpuSpec, settings: EngineSettings) -> float | None:
    """Tokens per byte: the slope of mean resident tokens against the bytes of the KV pool, one engine alone. None when memory
    does not limit it: its batch limit leaves no two pools to compare, or it computes too little a step to fill the larger."""
    largest = min(SWEEP_REQUESTS, settings.max_sequences)
    requests = sorted({max(1, largest // part) for part in (8, 4, 2, 1)})
    if len(requests) < 2:
        return None
    block = geometry(served, settings)
    request_tokens = int(served.mean_prompt_tokens + served.mean_output_tokens)
    request_bytes = block.blocks_for_tokens(request_tokens) * block.block_bytes
    pools = [count * request_bytes for count in requests]
    resident_tokens = [_mean_resident_tokens(served, gpu, settings, pool) for pool in pools]
    return mme_slope(pools, resident_tokens) if resident_tokens[1] > resident_tokens[0] else None


def _mean_resident_tokens(served: ServedModel, gpu: GpuSpec, settings: EngineSettings, pool_bytes: int) -> float:
    """Mean cached tokens of one engine with ``pool_bytes`` of KV memory on each of its GPUs, while requests wait for it. The
    sample at time 0 does not count: all requests wait and nothing is cached yet. NaN where none can be served."""
    requests = 4 * SWEEP_REQUESTS
    trace = Trace(
        arrival_s=np.zeros(requests),
        model=np.zeros(requests, dtype=np.int32),
        prompt_tokens=np.full(requests, int(served.mean_prompt_tokens)),
        output_tokens=np.full(requests, int(served.mean_output_tokens)),
        models=(served.id,),
        source="profile sweep",
    )
    gpus = tuple(Gpu(id, 0, gpu) for id in range(served.tp))
    beside_bytes = usable_bytes(gpus[0], settings) - fixed_bytes(served, settings) - pool_bytes
    alone = replace(settings, context_bytes=settings.context_bytes + beside_bytes, contention="composition")
    scenario = Scenario(
        load_systems()["dedicated"], (served,), gpus, trace, alone, sample_s=_sample_s(served, gpu, settings)
    )
    instance = Instance(served.id, 0, tuple(range(served.tp)), 1.0, footprint_bytes=1)
    run = Run(scenario, compose(scenario, (Placement((instance,)), {})))
    run.to_the_end()
    timeline = run.parts.sampler.rows.timeline()
    used_bytes = timeline.kv_used_bytes[(timeline.waiting[:, 0] > 0) & (timeline.time_s > 0), 0]
    if not len(used_bytes):  # a mean request is longer than the model's context
        return math.nan
    return float(used_bytes.mean()) / (geometry(served, settings).token_bytes * served.tp)


def _sample_s(served: ServedModel, gpu: GpuSpec, settings: EngineSettings) -> float:
    smallest = operating_points(served, gpu, settings)[0]
    batch_s = smallest.batch / smallest.throughput_per_s
    return min(SAMPLE_S, batch_s / SAMPLES_A_REQUEST)
