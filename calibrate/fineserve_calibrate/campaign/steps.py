"""Steps of engines that run side by side: which of them count, and their statistics."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Steps = Sequence[tuple[float, float]]
"""(end, seconds) of each step, ascending, on one clock."""
ROUNDING_S = 1e-6


def stretches(steps: Steps) -> list[tuple[float, float]]:
    """(start, end) of the spans in which one step follows the other without a pause."""
    spans: list[tuple[float, float]] = []
    for end, seconds in steps:
        start = end - seconds
        if spans and start <= spans[-1][1] + ROUNDING_S:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((start, end))
    return spans


def steady(engines: Sequence[Steps], from_s: float, until_s: float) -> list[list[float]]:
    """Seconds of each engine's steps that lie wholly between ``from_s`` and ``until_s`` and wholly within stretches of
    every other engine: while it ran, the others did what they were asked to, too."""
    spans = [stretches(steps) for steps in engines]
    return [
        [
            seconds
            for end, seconds in steps
            if end - seconds >= from_s
            and end <= until_s
            and all(_within(end - seconds, end, other) for place, other in enumerate(spans) if place != mine)
        ]
        for mine, steps in enumerate(engines)
    ]


def _within(start: float, end: float, spans: Sequence[tuple[float, float]]) -> bool:
    return any(first - ROUNDING_S <= start and end <= last + ROUNDING_S for first, last in spans)


def statistics(seconds: Sequence[float]) -> dict[str, float | int]:
    """Median, mean, 90th percentile, spread (interquartile range / median) and number of some positive times.

    Where engines take turns the median of a short step says little of its throughput; the mean does.
    """
    values = np.array(seconds)
    low, median, high, late = np.quantile(values, [0.25, 0.5, 0.75, 0.9]).tolist()
    return {
        "latency_s": median,
        "mean_s": float(values.mean()),
        "p90_s": late,
        "spread": (high - low) / median,
        "repeats": len(values),
    }
