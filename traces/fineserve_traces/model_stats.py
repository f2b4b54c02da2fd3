"""What the traffic of each model of a trace looks like: the statistics by which Prism describes its traces (section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fineserve_traces.schema import FloatArray, Trace

IDLE_S = 10.0
"""Prism counts gaps longer than this as idle intervals (Fig. 2c)."""


@dataclass(frozen=True, slots=True)
class ModelStats:
    """One model within a trace. ``idle_per_hour`` and ``median_idle_s`` are about gaps between requests longer than 10 s (None
    if there is none). ``cv_per_minute`` is the coefficient of variation of the requests in whole minutes. ``swing`` is the
    largest ratio of the highest to the lowest rate within any minute, in bins of 10 s. A bin without requests counts as one
    with a single request. All are None where the trace is too short to tell."""

    model: str
    requests: int
    per_hour: float
    idle_per_hour: float
    median_idle_s: float | None
    cv_per_minute: float | None
    swing: float | None


def model_stats(trace: Trace, duration_s: float) -> list[ModelStats]:
    """Every model of ``trace`` over [0, duration_s), by falling number of requests, then by name."""
    stats = [_of(trace.arrival_s[trace.model == index], name, duration_s) for index, name in enumerate(trace.models)]
    return sorted(stats, key=lambda model: (-model.requests, model.model))


def tail_share(requests: list[int], models_fraction: float = 0.6) -> float:
    """The part of all requests that goes to the least popular models, this fraction of them (rounded to whole models)."""
    counts = sorted(requests)
    return sum(counts[: round(models_fraction * len(counts))]) / sum(counts)


def rate_variance(arrival_s: FloatArray, window_s: float, duration_s: float) -> float:
    """How much a rate changes from one window to the next: its variance over its mean squared, without what Poisson arrivals of
    one rate have. 0 where there are too few to tell."""
    counts = _counts(arrival_s, window_s, duration_s)
    if not counts.any():
        return 0.0
    return max(0.0, float((counts.var() - counts.mean()) / counts.mean() ** 2))


def _of(arrival_s: FloatArray, name: str, duration_s: float) -> ModelStats:
    hours = duration_s / 3600
    gaps = np.diff(arrival_s)
    idle = gaps[gaps > IDLE_S]
    return ModelStats(
        model=name,
        requests=arrival_s.size,
        per_hour=arrival_s.size / hours,
        idle_per_hour=idle.size / hours,
        median_idle_s=float(np.median(idle)) if idle.size else None,
        cv_per_minute=_cv(_counts(arrival_s, 60.0, duration_s)),
        swing=_swing(_counts(arrival_s, 10.0, duration_s)),
    )


def _counts(arrival_s: FloatArray, bin_s: float, duration_s: float) -> FloatArray:
    """Requests in each whole bin."""
    bins = int(duration_s // bin_s)
    inside = arrival_s[arrival_s < bins * bin_s]
    return np.bincount((inside // bin_s).astype(np.int64), minlength=bins).astype(np.float64)


def _cv(counts: FloatArray) -> float | None:
    return float(counts.std() / counts.mean()) if counts.size and counts.any() else None


def _swing(counts: FloatArray) -> float | None:
    """Over all windows of six bins, so that a minute may begin at any of them."""
    if counts.size < 6:
        return None
    windows = np.lib.stride_tricks.sliding_window_view(np.maximum(counts, 1), 6)
    return float((windows.max(axis=1) / windows.min(axis=1)).max())
