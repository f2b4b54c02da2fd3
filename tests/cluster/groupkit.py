"""Small clusters of one model whose instances may form pipelines, and the laws that every run of them obeys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fineserve_traces import Trace
from simkit import H100, Row, served, trace_of, with_kv_blocks

from fineserve_sim.cluster import EngineSettings, Fate, Gpu, Scenario
from fineserve_sim.cluster.fleet.instances import Instances
from fineserve_sim.cluster.fleet.regroup import Report
from fineserve_sim.cluster.samples import InstanceSampler
from fineserve_sim.cluster.scenario import Fault, Ints, RunResult
from fineserve_sim.cluster.simulation import prepare
from fineserve_sim.systems import SystemSpec, load_systems

GROUP_SYSTEMS = (
    "vllm-dp",
    "vllm-pp",
    "infercept",
    "llumnix",
    "kunserve-drop",
    "kunserve-exchange",
    "kunserve",
    "kunserve-norestore",
)


@dataclass(frozen=True)
class GroupRun:
    """A finished run with what only clusters of one model have. Per sample of the timeline, shape (T,): ``demand_bytes`` of KV
    (running requests and the heads of the queues), ``capacity_bytes`` for KV, and how many engines there are (``groups``)."""

    result: RunResult
    report: Report
    demand_bytes: Ints
    capacity_bytes: Ints
    groups: list[int]
    migrations: int


def simulate_groups(scenario: Scenario) -> GroupRun:
    run = prepare(scenario)
    run.to_the_end()
    fleet, sampler = run.parts.cluster.fleet, run.parts.sampler
    assert isinstance(fleet, Instances) and isinstance(sampler, InstanceSampler)
    _, demand_bytes, capacity_bytes, engines = np.array(sampler.looks).reshape(-1, 4).T.astype(np.int64)
    moved, report = fleet.migrations.moved, fleet.regrouping.report
    return GroupRun(run.result(), report, demand_bytes, capacity_bytes, engines.tolist(), moved)


def system(name: str, **axes: Any) -> SystemSpec:
    """A built-in system with some axes replaced by specs, or (a mapping) with some of their options."""
    spec = load_systems()[name]
    changed = {
        axis: getattr(spec, axis).model_copy(update=value) if isinstance(value, dict) else value
        for axis, value in axes.items()
    }
    return spec.model_copy(update=changed)


def cluster(
    spec: str | SystemSpec,
    rows: Sequence[Row] | Trace,
    *,
    instances: int = 4,
    blocks: int = 100,
    per_node: int = 1,
    network_bytes_per_s: float = 25e9,
    settings: EngineSettings | None = None,
    **options: Any,
) -> Scenario:
    """``instances`` of a 1B model with memory for ``blocks`` KV blocks each; every run checks its ledgers."""
    m = served()
    trace = rows if isinstance(rows, Trace) else trace_of(rows)
    gpus = tuple(Gpu(i, i // per_node, H100, network_bytes_per_s) for i in range(instances))
    chosen = system(spec) if isinstance(spec, str) else spec
    engine = with_kv_blocks([m], blocks, settings or EngineSettings(token_budget=256))
    return Scenario(chosen, (m,), gpus, trace, engine, **{"check": True, "sample_s": 0.01, **options})


def burst(requests: int, prompt: int, output: int, gap_s: float = 1e-3) -> list[Row]:
    return [(i * gap_s, prompt, output) for i in range(requests)]


def lawful(scenario: Scenario, faults: Sequence[Fault] = ()) -> GroupRun:
    """Run it and assert the laws: every request ends, once, effects follow causes, all memory is given back."""
    log: list[dict[str, object]] = []
    run = simulate_groups(replace(scenario, log=log.append, faults=tuple(faults)))
    result, arrival_s = run.result, scenario.trace.arrival_s
    assert (result.fate != Fate.UNFINISHED).all()
    finished = result.fate == Fate.FINISHED
    assert np.array_equal(np.isfinite(result.finish_s), finished)
    assert np.isfinite(result.first_token_s[finished]).all()
    assert (result.first_token_s[finished] <= result.finish_s[finished]).all()
    started = np.isfinite(result.first_token_s)
    assert (result.first_token_s[started] > arrival_s[started]).all()
    assert (result.engine[finished] >= 0).all()
    refused = {entry["request_id"] for entry in log if entry.get("command") in ("Reject", "Drop")}
    assert refused == set(np.flatnonzero(~finished).tolist())
    dispatched = {entry["request_id"] for entry in log if entry.get("command") == "Dispatch"}
    assert set(np.flatnonzero(finished).tolist()) <= dispatched
    assert len(result.timeline.time_s) == len(run.demand_bytes) == len(run.capacity_bytes)
    return run


def ttft_s(scenario: Scenario, run: GroupRun) -> Any:
    return run.result.first_token_s - scenario.trace.arrival_s
