"""Small scenarios on real catalog entries, and the laws that every run obeys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import EngineSettings, Fate, Gpu, RunResult, Scenario, ServedModel, Visits, simulate
from fineserve_sim.cluster.compose import profiling
from fineserve_sim.cluster.compose.memory import geometry, peak_activation_bytes, resident_bytes
from fineserve_sim.latency import StepModel
from fineserve_sim.systems import SystemSpec

H100 = gpu("h100-sxm")
Row = tuple[float, int, int] | tuple[float, int, int, int]
"""arrival_s, prompt tokens, output tokens, and the index of the model (0 if left out)."""


def served(
    id: str = "m",
    name: str = "llama-3.2-1b",
    fmt: str = "fp16",
    *,
    tp: int = 1,
    rate_per_s: float = 1.0,
    slo_s: float = 10.0,
    prompt: float = 64,
    output: float = 16,
) -> ServedModel:
    return ServedModel(id, model(name), precision(fmt), tp, rate_per_s, slo_s, prompt, output)


def gpus(number: int) -> tuple[Gpu, ...]:
    """H100s of one node."""
    return tuple(Gpu(id=i, node=0, spec=H100) for i in range(number))


def trace_of(rows: Sequence[Row], models: Sequence[str] = ("m",)) -> Trace:
    return Trace(
        arrival_s=np.array([row[0] for row in rows]),
        model=np.array([row[3] if len(row) == 4 else 0 for row in rows], dtype=np.int32),
        prompt_tokens=np.array([row[1] for row in rows]),
        output_tokens=np.array([row[2] for row in rows]),
        models=tuple(models),
        source="test",
    )


def system(
    placement: object, scheduler: str = "fcfs", memory: object = "private", sharing: object = "mps"
) -> SystemSpec:
    """A system that is in no file: each axis is the name of a policy, or its options, or (placement) pinned GPU groups."""
    axes = {"placement": placement, "scheduler": scheduler, "memory": memory}
    axes = {axis: {"policy": choice} if isinstance(choice, str) else choice for axis, choice in axes.items()}
    named = {"name": "inline", "title": "Inline", "summary": "For a test", "sharing": sharing}
    return SystemSpec.model_validate(named | axes)


def pinned(groups: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, object]:
    return {"policy": "pinned", "groups": groups}


def fixed_bytes(models: Sequence[ServedModel], settings: EngineSettings) -> int:
    """What engines of these models take of a GPU before any KV."""
    return sum(resident_bytes(m, settings) + peak_activation_bytes(m, settings) for m in models)


def with_kv_blocks(
    models: Sequence[ServedModel], blocks: int, settings: EngineSettings | None = None
) -> EngineSettings:
    """Settings under which a GPU that hosts one engine of each of ``models`` has KV memory for ``blocks`` blocks of the model
    with the largest ones."""
    settings = settings or EngineSettings()
    block_bytes = max(geometry(m, settings).block_bytes for m in models)
    return with_usable_bytes(fixed_bytes(models, settings) + blocks * block_bytes, settings)


def with_usable_bytes(usable_bytes: int, settings: EngineSettings) -> EngineSettings:
    # Half a byte more, so that the product with the GPU's memory rounds down to the bytes that are meant.
    return replace(settings, memory_utilization=(usable_bytes + 0.5) / H100.memory_bytes)


def step_model(m: ServedModel, settings: EngineSettings | None = None) -> StepModel:
    return profiling.step_model(m, H100, settings or EngineSettings())


def solo(
    rows: Sequence[Row],
    settings: EngineSettings | None = None,
    *,
    m: ServedModel | None = None,
    scheduler: str = "fcfs",
    memory: object = "private",
    **options: Any,
) -> Scenario:
    """One engine on one GPU."""
    m = m or served()
    spec = system(pinned({m.id: [range(m.tp)]}), scheduler, memory)
    return Scenario(spec, (m,), gpus(m.tp), trace_of(rows, [m.id]), settings or EngineSettings(), **options)


class Logged(NamedTuple):
    """A run and its decision log, without the spans that say when engines compute."""

    result: RunResult
    log: list[dict[str, Any]]

    @property
    def commands(self) -> list[dict[str, Any]]:
        return [line for line in self.log if "command" in line]


def logged(scenario: Scenario, **changes: Any) -> Logged:
    log: list[dict[str, Any]] = []
    result = simulate(replace(scenario, log=log.append, **changes))
    return Logged(result, [line for line in log if "span" not in line])


def assert_lawful(scenario: Scenario, run: Logged) -> None:
    """Requests are conserved, each ends once, and effects follow causes."""
    result, arrival_s = run.result, scenario.trace.arrival_s
    fates = Counter(Fate(fate) for fate in result.fate.tolist())
    assert sum(fates.values()) == len(arrival_s)
    decided = Counter(line["command"] for line in run.commands)
    assert fates[Fate.REJECTED] == decided["Reject"] and fates[Fate.DROPPED] == decided["Drop"]
    ids = Counter(line["request_id"] for line in run.commands)
    assert max(ids.values(), default=0) <= 1
    finished = np.isin(result.fate, (Fate.FINISHED, Fate.CUT))
    assert finished.sum() <= decided["Dispatch"] <= len(arrival_s) - decided["Reject"] - decided["Drop"]
    assert np.array_equal(np.isfinite(result.finish_s), finished)
    refused = (result.fate == Fate.DROPPED) | (result.fate == Fate.REJECTED)
    assert not np.isfinite(result.first_token_s[refused]).any()
    assert np.isfinite(result.first_token_s[finished]).all()
    assert (result.first_token_s[finished] <= result.finish_s[finished]).all()
    started = np.isfinite(result.first_token_s)
    assert (result.first_token_s[started] > arrival_s[started] + _shortest_step_s(scenario)).all()
    assert (result.engine[finished] >= 0).all()
    models = {engine: instance.model for engine, instance in enumerate(result.placement.instances)}
    for request in np.flatnonzero(result.engine >= 0):
        assert models[result.engine[request]] == scenario.trace.models[scenario.trace.model[request]]


def _shortest_step_s(scenario: Scenario) -> float:
    """No iteration that yields a token is shorter than one with a single token and no context, without contention."""
    return min(step_model(m, scenario.engine).step_s(0, 0, 1, 1, 0, 1) for m in scenario.models) * (1 - 1e-12)


def assert_memory_returned(scenario: Scenario, result: RunResult) -> None:
    """Nobody holds KV memory while no request is in an engine, and nobody ever more than there is. The last arrival must be so
    late that the cluster stands empty before it."""
    timeline = result.timeline
    in_flight = np.zeros(len(timeline.time_s), dtype=bool)
    for arrival_s, finish_s in zip(scenario.trace.arrival_s, result.finish_s, strict=True):
        in_flight |= (arrival_s <= timeline.time_s) & (timeline.time_s <= finish_s)
    empty = ~in_flight & (timeline.time_s > scenario.trace.arrival_s[0])
    assert empty.any() and not empty.all()
    assert (timeline.kv_used_bytes[empty] == 0).all() and (timeline.gpu_stranded_bytes[empty] == 0).all()
    assert (timeline.gpu_free_bytes[empty] == timeline.gpu_free_bytes.max(axis=0)).all()
    hosts = sorted({gpu for instance in result.placement.instances for gpu in instance.gpus})
    capacity = dict(zip(hosts, result.kv_capacity_bytes, strict=True))
    for column, host in enumerate(hosts):
        held = timeline.gpu_stranded_bytes[:, column] + timeline.gpu_free_bytes[:, column]
        for engine, instance in enumerate(result.placement.instances):
            if host in instance.gpus:
                held = held + timeline.kv_used_bytes[:, engine] // len(instance.gpus)
        assert (held <= capacity[host]).all()


def assert_same(one: RunResult, other: RunResult) -> None:
    """Bit for bit, but for the number of events."""
    for name in ("first_token_s", "finish_s", "fate", "preemptions", "engine"):
        first, second = getattr(one, name), getattr(other, name)
        assert first.dtype == second.dtype and first.tobytes() == second.tobytes(), name
    for name in Visits.COLUMNS:
        first, second = getattr(one.visits, name), getattr(other.visits, name)
        assert first.dtype == second.dtype and first.tobytes() == second.tobytes(), name
    for name in ("time_s", "waiting", "running", "kv_used_bytes", "gpu_stranded_bytes", "gpu_free_bytes"):
        first, second = getattr(one.timeline, name), getattr(other.timeline, name)
        assert first.shape == second.shape and first.tobytes() == second.tobytes(), name
    for name in (
        "placement",
        "kv_capacity_bytes",
        "end_s",
        "iterations",
        "step_times",
        "step_samples",
        "counters",
        "gpu_use",
    ):
        assert getattr(one, name) == getattr(other, name), name
    assert one.timeline.engine_models == other.timeline.engine_models
