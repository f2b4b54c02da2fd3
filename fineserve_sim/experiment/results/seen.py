"""What metrics need of a timeline, from some samples at a time: sums and extremes in the window, and no row a sample."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fineserve_sim.cluster import Timeline
from fineserve_sim.experiment.run.run_data import Ints


class Seen:
    """Takes the samples of one run; ``window_s`` are begin and end of what counts."""

    def __init__(self, window_s: tuple[float, float]) -> None:
        self._window_s = window_s
        self._samples = 0
        self._models: tuple[str, ...] = ()
        self._waiting_sum, self._waiting_max, self._used_max = (np.zeros(1, dtype=np.int64) for _ in range(3))
        self._used_sum = 0
        self._free_sum = self._free_min = np.zeros(0, dtype=np.int64)

    def add(self, timeline: Timeline) -> None:
        start_s, end_s = self._window_s
        rows = (timeline.time_s >= start_s) & (timeline.time_s <= end_s)
        if not rows.any():
            return
        waiting, used = (self._by_model(timeline, each[rows]) for each in (timeline.waiting, timeline.kv_used_bytes))
        free = timeline.gpu_free_bytes[rows]
        if not self._samples:
            self._waiting_sum, self._waiting_max, self._used_max = (np.zeros_like(waiting[0]) for _ in range(3))
            self._free_sum, self._free_min = np.zeros_like(free[0]), free[0]
        self._samples += len(free)
        self._waiting_sum = self._waiting_sum + waiting.sum(axis=0)
        self._waiting_max = np.maximum(self._waiting_max, waiting.max(axis=0))
        self._used_max = np.maximum(self._used_max, used.max(axis=0))
        self._used_sum += int(used[:, -1].sum())
        self._free_sum = self._free_sum + free.sum(axis=0)
        self._free_min = np.minimum(self._free_min, free.min(axis=0))

    def _by_model(self, timeline: Timeline, columns: Ints) -> Ints:
        """Sums over the engines of each model, and of all in the last column."""
        if not self._models:
            self._models = tuple(dict.fromkeys(timeline.engine_models))
        place = {name: number for number, name in enumerate(self._models)}
        found = np.zeros((len(columns), len(self._models) + 1), dtype=np.int64)
        for column, name in enumerate(timeline.engine_models):
            found[:, place[name]] += columns[:, column]
        found[:, -1] = columns.sum(axis=1)
        return found

    def values(self, name: str) -> dict[str, float]:
        """Waiting requests and used KV memory of a model, or of all (``""``), by the names of metrics."""
        if not self._samples:
            return {"waiting_mean": math.nan, "waiting_max": math.nan, "kv_used_peak_bytes": math.nan}
        if name and name not in self._models:
            return {"waiting_mean": 0.0, "waiting_max": 0.0, "kv_used_peak_bytes": 0.0}
        at = self._models.index(name) if name else -1
        return {
            "waiting_mean": int(self._waiting_sum[at]) / self._samples,
            "waiting_max": float(self._waiting_max[at]),
            "kv_used_peak_bytes": float(self._used_max[at]),
        }

    def used_bytes(self) -> tuple[float, float]:
        """Mean and peak of the cluster's KV memory in use; NaN where nothing was seen."""
        if not self._samples:
            return math.nan, math.nan
        return self._used_sum / self._samples, float(self._used_max[-1])

    def kv_left(self) -> Sequence[tuple[int, int]]:
        """Mean and least free KV bytes of each GPU with KV memory."""
        means = self._free_sum // max(1, self._samples)
        return list(zip(means.tolist(), self._free_min.tolist(), strict=True))
