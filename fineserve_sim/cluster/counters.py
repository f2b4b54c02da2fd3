"""What is counted of a single-model cluster beside the requests, by metric name.

* ``kv_demand_mean``, ``kv_demand_peak``: KV of running requests and of the heads of the queues (Llumnix's and KunServe's
  demand) over the KV memory without drop, until the last arrival.
* ``throttlings``: intervals in which demand is above the KV memory that there is then; less than 20 s apart they are one.
* ``drops``, ``restores``: engines that merged and that split; ``migrations``: requests that moved alive.
* ``exchange_mean_s``, ``exchange_max_s``, ``exchange_bytes``: KV exchanges after a drop, each from the remap to its last byte.
* ``bubble_fraction``: idle time of the stages of pipelines of two stages and more while requests wait for their prefill.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.cluster.engine.pipeline import PipelineEngine
from fineserve_sim.cluster.fleet.instances import Instances
from fineserve_sim.cluster.samples import InstanceSampler

MERGE_GAP_S = 20.0
"""Throttled intervals that are closer count as one (an assumption: claim KS-2-events names no rule)."""


def counters(fleet: Instances, sampler: InstanceSampler, last_arrival_s: float) -> dict[str, float]:
    """The counters of a finished run; those that have no value in it (no exchange, no sample) are left out."""
    report = fleet.regrouping.report
    for engine in fleet.cluster.engines.values():
        if isinstance(engine, PipelineEngine):
            report.count(engine)
    time_s, demand_bytes, capacity_bytes, _ = np.array(sampler.looks).reshape(-1, 4).T
    found: dict[str, float] = {
        "drops": len(report.drops),
        "restores": len(report.restores),
        "migrations": fleet.migrations.moved,
        "exchange_bytes": report.exchange_bytes,
    }
    loaded = time_s <= last_arrival_s
    if loaded.any():
        demand = demand_bytes[loaded] / capacity_bytes[0]
        found["kv_demand_mean"], found["kv_demand_peak"] = float(demand.mean()), float(demand.max())
        found["throttlings"] = throttlings(time_s, demand_bytes > capacity_bytes)
    if report.exchange_s:
        found["exchange_mean_s"] = float(np.mean(report.exchange_s))
        found["exchange_max_s"] = max(report.exchange_s)
    if report.pipelined_s:
        found["bubble_fraction"] = 1 - report.pipelined_busy_s / report.pipelined_s
    return found


def throttlings(time_s: NDArray[np.float64], above: NDArray[np.bool_]) -> int:
    """Maximal intervals of samples ``above``, those less than 20 s apart as one."""
    at_s = time_s[above]
    return int(len(at_s) > 0) + int(np.sum(np.diff(at_s) >= MERGE_GAP_S))
