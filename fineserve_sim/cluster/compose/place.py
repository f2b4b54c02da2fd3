"""Where a scenario's models go, and what placement knows of them, taken offline as FineServe does: by profile tables.

Marginal memory efficiency is measured, not derived: one engine alone, saturated with requests of mean length, is simulated with
KV pools of several sizes, and the mean number of resident tokens is fitted against the pool (FineServe Fig. 3), once a process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.catalog import GpuSpec
from fineserve_sim.cluster.compose.memory import (
    fixed_bytes,
    geometry,
    peak_activation_bytes,
    resident_bytes,
    usable_bytes,
)
from fineserve_sim.cluster.compose.models import Placed, compose, slots_of
from fineserve_sim.cluster.compose.policies import build_placement
from fineserve_sim.cluster.compose.profiling import operating_points, sharing_of, typical
from fineserve_sim.cluster.run import Run
from fineserve_sim.cluster.scenario import EngineSettings, Gpu, Scenario, ScenarioError, ServedModel
from fineserve_sim.policy.interfaces import GpuSlot, Instance, ModelDemand, Placement
from fineserve_sim.policy.memory.ledger import MemoryLedger
from fineserve_sim.policy.placement import tp_groups
from fineserve_sim.policy.placement.mme import mme_slope
from fineserve_sim.systems import load_systems
from fineserve_sim.systems.spec import PrismResidencySpec

SWEEP_REQUESTS = 32
"""Largest KV pool of the sweep, in requests of mean length that fit at once: far from what saturates an engine."""

SAMPLE_S = 0.1
SAMPLES_A_REQUEST = 8
"""Of the sweep: no more than ``SAMPLE_S`` apart, and at least so many while a request alone is computed."""


def place(scenario: Scenario) -> Placed:
    """The system's placement, and the demand of each model that led to it. Raises ScenarioError when a model fits on no GPU
    (group) of the empty cluster, a pinned placement is impossible, or two engines are on an exclusive GPU."""
    slots, spec = slots_of(scenario), scenario.system.placement
    slope = getattr(spec, "mme", None) == "slope"
    demands = {
        model.id: demand_of(model, scenario.gpus[0].spec, scenario.engine, slope=slope) for model in scenario.models
    }
    for demand in demands.values():
        _check_fits_somewhere(demand, slots)
    try:
        placement = build_placement(spec).place(list(demands.values()), slots)
    except ValueError as error:
        raise ScenarioError(f"system {scenario.system.name}: {error}") from error
    _check_exclusive(scenario, placement.instances)
    return placement, demands


def _check_fits_somewhere(demand: ModelDemand, slots: Sequence[GpuSlot]) -> None:
    groups = tp_groups(slots, demand.tp)
    if not groups:
        raise ScenarioError(
            f"model {demand.id} needs {demand.tp} GPUs of one node (tp); the cluster has {len(slots)} GPUs"
        )
    empty = MemoryLedger.of(slots)
    if not any(empty.has_room(group, demand.engine_bytes) for group in groups):
        largest = max(slot.memory_bytes for slot in slots) / 2**30
        raise ScenarioError(
            f"model {demand.id} fits on no GPU: its engine takes {demand.engine_bytes / 2**30:.1f} GiB beside KV at "
            f"tp={demand.tp}, a GPU has {largest:.1f} GiB usable; raise its tp or choose a smaller precision"
        )


def _check_exclusive(scenario: Scenario, instances: Iterable[Instance]) -> None:
    """Raises ScenarioError when two engines are on a GPU that is for one, or will be."""
    here: dict[int, str] = {}
    alone = {gpu.id for gpu in scenario.gpus if sharing_of(gpu, scenario).mode == "exclusive"}
    if alone and isinstance(scenario.system.residency, PrismResidencySpec):
        raise ScenarioError(
            f"system {scenario.system.name} brings several models to a GPU: it cannot run with sharing exclusive"
        )
    for instance in instances:
        for gpu in alone.intersection(instance.gpus):
            if other := here.get(gpu):
                raise ScenarioError(
                    f"system {scenario.system.name} puts {other} and {instance.model} on GPU {gpu}, whose sharing is "
                    f"exclusive; share it (mps, time_slice) or take another placement or more GPUs"
                )
            here[gpu] = instance.model


def demand_of(served: ServedModel, gpu: GpuSpec, settings: EngineSettings, *, slope: bool) -> ModelDemand:
    """The model as placement sees it. ``slope`` measures the marginal memory efficiency by a sweep; else it is left open."""
    return ModelDemand(
        id=served.id,
        rate_per_s=served.rate_per_s,
        slo_s=served.ttft_slo_s,
        tp=served.tp,
        weight_bytes=resident_bytes(served, settings),
        token_bytes=geometry(served, settings).token_bytes,
        profile=operating_points(typical(served), gpu, settings),
        mme_tokens_per_byte=_measured_mme(typical(served), gpu, settings) if slope else None,
        tokens_per_request=served.mean_prompt_tokens + served.mean_output_tokens,
        tpot_slo_s=served.tpot_slo_s,
        activation_bytes=peak_activation_bytes(served, settings),
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
    """Mean cached tokens of one engine with ``pool_bytes`` of KV memory on each of its GPUs, while requests wait for it. At
    time 0 all wait and nothing is cached yet: that sample says nothing of the engine."""
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
    used_bytes = timeline.kv_used_bytes[(timeline.waiting[:, 0] > 0) & (timeline.time_s > 0), 0].mean()
    return float(used_bytes) / (geometry(served, settings).token_bytes * served.tp)


def _sample_s(served: ServedModel, gpu: GpuSpec, settings: EngineSettings) -> float:
    smallest = operating_points(served, gpu, settings)[0]
    batch_s = smallest.batch / smallest.throughput_per_s
    return min(SAMPLE_S, batch_s / SAMPLES_A_REQUEST)
