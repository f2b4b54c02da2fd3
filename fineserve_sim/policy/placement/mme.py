"""Marginal memory efficiency (FineServe, section 6.2): a model's gain from more KV memory.

mu = extra tokens that a model keeps in its KV cache for every extra byte of KV memory. The paper defines it by generated tokens
and plots cached tokens; this is the cached-token reading. While memory is what limits the batch, resident tokens grow linearly
with the pool, and mu is the slope; once all requests fit, the curve bends and flattens.

A GPU that would host several models has K_rem bytes left after their fixed footprints. Its score is K_rem x mean(mu) (eq. 3):
the tokens gained if all share K_rem equally. The best split (eq. 1 and 2) would give everything to the largest mu.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fineserve_sim.policy.interfaces import ModelDemand

_BEND = 0.5
"""A sweep is saturated from the point where its local slope falls under this share of its first slope. A model that is
limited by memory has a constant slope, one that is not has slope 0; half-way between tells them apart best."""


def mme_slope(pool_bytes: Sequence[int], resident_tokens: Sequence[float]) -> float:
    """Tokens per byte: least-squares slope of mean resident tokens against KV pool size, before the sweep saturates.

    Points may come in any order. Raises ValueError if the series differ in length, hold fewer than two points, repeat a
    pool size, or do not grow at the start.
    """
    points = sorted(zip(pool_bytes, resident_tokens, strict=True))
    if len(points) < 2:
        raise ValueError(f"a pool sweep needs at least two points to have a slope, not {len(points)}")
    if any(left[0] == right[0] for left, right in pairwise(points)):
        raise ValueError("a pool sweep has two points with the same pool size: average them first")
    slopes = [(right[1] - left[1]) / (right[0] - left[0]) for left, right in pairwise(points)]
    if slopes[0] <= 0:
        raise ValueError(
            f"resident tokens do not grow from {points[0][0]} to {points[1][0]} pool bytes: sweep smaller pools, "
            "where memory limits the batch"
        )
    bend = next((i for i, slope in enumerate(slopes) if slope < _BEND * slopes[0]), len(slopes))
    points = points[: bend + 1]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)


def marginal_efficiency(model: ModelDemand) -> float:
    """mu of one model in tokens per byte on each GPU of its group: its profiled slope, else one token per token's KV bytes."""
    return 1 / model.token_bytes if model.mme_tokens_per_byte is None else model.mme_tokens_per_byte


def score_mean(remaining_bytes: int, efficiencies: Sequence[float]) -> float:
    """Eq. 3: tokens gained by sharing ``remaining_bytes`` equally among the models."""
    return remaining_bytes * (sum(efficiencies) / len(efficiencies))
