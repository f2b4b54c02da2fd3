"""Samples of the cluster over time, and the counters of a single-model cluster, by metric name:

* ``kv_demand_mean``, ``kv_demand_peak``: KV of running requests and of the heads of the queues (Llumnix's and KunServe's
  demand) over the KV memory without drop, until the last arrival.
* ``throttlings``: intervals in which demand is above the KV memory that there is then; less than 20 s apart they are one.
* ``drops``, ``restores``: engines that merged and that split; ``migrations``: requests that moved with their KV.
* ``exchange_mean_s``, ``exchange_max_s``, ``exchange_bytes``: KV exchanges after a drop, each from the remap to its last byte.
* ``bubble_fraction``: idle time of the stages of pipelines of two stages and more while requests wait for their prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.tp_group import TpGroup
from fineserve_sim.cluster.fleet.instances import Instances
from fineserve_sim.cluster.host import Cluster
from fineserve_sim.cluster.scenario import Ints, Timeline
from fineserve_sim.policy.memory.paged import GpuMemory

PER_COLUMN = ("waiting", "running", "kv_used_bytes")
PER_GPU = ("gpu_stranded_bytes", "gpu_free_bytes")
HANDED_ON = 64
"""Samples at a time."""
MERGE_GAP_S = 20.0
"""Throttled intervals that are closer count as one (an assumption: claim KS-2-events names no rule)."""
GOLDEN = (math.sqrt(5) - 1) / 2


def sample_time_s(number: int, every_s: float) -> float:
    """When sample ``number`` (0, 1, ...) is taken: one in each interval of ``every_s``, the place in it by the golden ratio.

    Equally spaced samples would all meet a trace with arrivals on whole seconds at one phase. The places
    ``number * GOLDEN`` modulo 1 fill the interval evenly (Weyl; discrepancy O(log n / n)). So the mean over n samples is as
    near to the mean over time, for a rhythm of any rational number of intervals (Koksma's inequality).
    """
    return (number + number * GOLDEN % 1.0) * every_s


class Samples:
    """Rows of a timeline, one a sample. Samples that are alike are kept once, with their times."""

    def __init__(self, models: Sequence[str], gpus: int) -> None:
        self._models = tuple(models)
        self._widths = dict.fromkeys(PER_COLUMN, len(self._models)) | dict.fromkeys(PER_GPU, gpus)
        self._only: Callable[[Timeline], None] | None = None
        self._rows: list[tuple[Sequence[float], dict[str, Ints]]] = []

    def add(self, times: Sequence[float], **rows: list[int]) -> None:
        self._rows.append((times, {name: np.array(row, dtype=np.int64) for name, row in rows.items()}))
        if self._only is not None and len(self._rows) >= HANDED_ON:
            self.hand_on(self._only)

    def hand_on(self, only: Callable[[Timeline], None]) -> None:
        """Hand the kept samples to ``only`` and forget them, and so with all samples to come."""
        self._only = only
        if self._rows:
            only(self.timeline())
        self._rows.clear()

    def timeline(self) -> Timeline:
        alike = [len(times) for times, _ in self._rows]
        tables = {
            name: np.array([rows[name] for _, rows in self._rows], dtype=np.int64).reshape(len(alike), width)
            for name, width in self._widths.items()
        }
        tables = {name: table.repeat(alike, axis=0) for name, table in tables.items()}
        time_s = np.array([now for times, _ in self._rows for now in times], dtype=np.float64)
        return Timeline(time_s=time_s, engine_models=self._models, **tables)


class Column(NamedTuple):
    """The parts that one column sums up: the present engines of ``model``, and the number of requests that wait for them."""

    model: str
    engines: Callable[[], Sequence[Engine]]
    queued: Callable[[], int]


class EngineSampler:
    """A column an engine, or a model; ``rows`` of a ``Timeline``."""

    def __init__(self, columns: Sequence[Column], managers: Sequence[GpuMemory]) -> None:
        self._columns = tuple(columns)
        self._managers = managers
        self.rows = Samples([column.model for column in columns], len(managers))

    def sample(self, times: Sequence[float]) -> None:
        """Note everything as it is at each of the times. Engines must be settled up to the first."""
        engines = [(column.engines(), column.queued()) for column in self._columns]
        ledgers = [manager.ledger() for manager in self._managers]
        self.rows.add(
            times,
            waiting=[queued + sum(e.waiting for e in here) for here, queued in engines],
            running=[sum(e.running for e in here) for here, _ in engines],
            kv_used_bytes=[sum(e.kv.used_bytes() for e in here) for here, _ in engines],
            gpu_stranded_bytes=[ledger.stranded_bytes for ledger in ledgers],
            gpu_free_bytes=[ledger.free_bytes for ledger in ledgers],
        )


class InstanceSampler:
    """A column for each instance of the one model. An engine's requests count for its first instance; KV counts for the
    instance that holds it.

    ``looks``, an entry a sample: its time, bytes of KV demand (running requests and the heads of the queues), bytes for KV, and
    how many engines there are.
    """

    def __init__(self, model: str, instances: Sequence[TpGroup], cluster: Cluster) -> None:
        self._instances, self._cluster = instances, cluster
        self._of_gpus = [instance for instance in instances for _ in instance.gpus]  # the instance of each GPU
        self.rows = Samples([model] * len(instances), len(self._of_gpus))
        self.looks: list[tuple[float, int, int, int]] = []

    def sample(self, times: Sequence[float]) -> None:
        """As ``EngineSampler.sample``."""
        instances, engines = self._instances, self._cluster.engines.values()
        waiting, running = [0] * len(instances), [0] * len(instances)
        demand_blocks = 0
        for engine in engines:
            waiting[engine.columns[0]] += engine.waiting
            running[engine.columns[0]] += engine.running
            demand_blocks += engine.kv.used_blocks() + sum(queue.head_blocks for queue in engine.queues)
        self.rows.add(
            times,
            waiting=waiting,
            running=running,
            kv_used_bytes=[instance.kv.used_bytes for instance in instances],
            gpu_stranded_bytes=[0] * len(self._of_gpus),
            gpu_free_bytes=[(at.kv.limit_bytes - at.kv.used_bytes) // len(at.gpus) for at in self._of_gpus],
        )
        capacity_bytes = sum(instance.kv.limit_bytes for instance in instances if instance.alive)
        demand_bytes = demand_blocks * instances[0].sizes.block_bytes
        self.looks += [(now, demand_bytes, capacity_bytes, len(engines)) for now in times]


Sampler = EngineSampler | InstanceSampler


def counters(fleet: Instances, sampler: InstanceSampler, last_arrival_s: float) -> dict[str, float]:
    """The counters of a finished run. Counters without a value in it (no exchange, no sample) are left out."""
    report = fleet.regrouping.report
    for engine in fleet.cluster.engines.values():
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
    """The number of maximal intervals of samples ``above``; intervals less than 20 s apart count as one."""
    at_s = time_s[above]
    return int(len(at_s) > 0) + int(np.sum(np.diff(at_s) >= MERGE_GAP_S))
