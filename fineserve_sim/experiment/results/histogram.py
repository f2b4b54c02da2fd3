"""Percentiles without the values: counts in bins that grow by a constant factor.

A value lies in the bin [b^i, b^(i+1)) and is told as the number in it whose relative distance to both ends is the same. With
b = (1 + e) / (1 - e) no value is told more than e off (the mapping of DDSketch: Masson, Rim and Lee, VLDB 2019). Order
statistics, and percentiles as straight lines between two of them, are therefore right to ``RELATIVE_ERROR``; so are sums of
counts of several histograms. Values below ``LEAST_S`` count as ``LEAST_S``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.experiment.run.run_data import Floats, Ints

RELATIVE_ERROR = 0.005
LEAST_S, MOST_S = 1e-6, 1e8
_LOG_BASE = math.log1p(RELATIVE_ERROR) - math.log1p(-RELATIVE_ERROR)
_FIRST = math.floor(math.log(LEAST_S) / _LOG_BASE)
BINS = math.ceil(math.log(MOST_S) / _LOG_BASE) - _FIRST


class Histograms:
    """One histogram a row. ``due``: values that there should be, (rows,); those that never came are infinite."""

    def __init__(self, rows: int) -> None:
        self.due = np.zeros(rows, dtype=np.int64)
        self._counts = np.zeros((rows, BINS), dtype=np.int32)

    def add(self, row: NDArray[np.int32], value_s: Floats) -> None:
        """Values of rows, (n,) each; NaN for one that never came."""
        self.due += np.bincount(row, minlength=len(self.due))
        known = np.isfinite(value_s)
        with np.errstate(divide="ignore"):
            place = np.floor(np.log(np.maximum(value_s[known], LEAST_S)) / _LOG_BASE).astype(np.int64) - _FIRST
        np.add.at(self._counts, (row[known], np.clip(place, 0, BINS - 1)), 1)

    def percentiles(self, row: int | None, percents: Sequence[float]) -> list[float]:
        """Percentiles of one row, or of all together; infinite where they fall on or beside a value that never came, NaN
        without values."""
        counts = (self._counts.sum(axis=0, dtype=np.int64) if row is None else self._counts[row]).cumsum(dtype=np.int64)
        due = int(self.due.sum() if row is None else self.due[row])
        return [_percentile(counts, due, percent) for percent in percents]


def _percentile(upto: Ints, due: int, percent: float) -> float:
    """The percentile of values whose counts up to each bin are ``upto``."""
    if not due:
        return math.nan
    rank = (due - 1) * percent / 100
    low, high = math.floor(rank), math.ceil(rank)
    if high >= upto[-1]:
        return math.inf
    low_s, high_s = (_told(int(np.searchsorted(upto, at, side="right"))) for at in (low, high))
    return low_s + (high_s - low_s) * (rank - low)


def _told(place: int) -> float:
    """The number that stands for a bin: 2 b^(i+1) / (b + 1)."""
    base = math.exp(_LOG_BASE)
    return 2 * base ** (place + _FIRST + 1) / (base + 1)
