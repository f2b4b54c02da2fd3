"""Arrival times: renewal processes (Poisson, Gamma, Weibull), piecewise-constant Poisson rates, replay, rescaling.

All return float64 seconds, shape (n,), non-decreasing, and draw from the generator that they are given. Gaps are never
clipped: a clipped tail would raise the mean rate (Poisson gaps cut at three times their mean: by 5 %).

For a renewal process the coefficient of variation (cv) of the gaps sets its burstiness: 1 is Poisson, above 1 is
bursty. Gamma and Weibull are the two families that fit production clients in ServeGen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from fineserve_traces.schema import FloatArray, arrival_column

Gaps = Callable[[int], FloatArray]
"""The next so many gaps between arrivals, in seconds."""


def poisson_gaps(rng: Generator, rate_per_s: float) -> Gaps:
    """Exponential gaps."""
    _check_positive(rate_per_s=rate_per_s)
    return lambda n: rng.exponential(1 / rate_per_s, n)


def gamma_gaps(rng: Generator, rate_per_s: float, cv: float) -> Gaps:
    """Gamma gaps of mean 1/rate and coefficient of variation ``cv`` (shape 1/cv^2)."""
    _check_positive(rate_per_s=rate_per_s, cv=cv)
    return lambda n: rng.gamma(1 / cv**2, cv**2 / rate_per_s, n)


def weibull_gaps(rng: Generator, rate_per_s: float, cv: float) -> Gaps:
    """Weibull gaps of mean 1/rate and coefficient of variation ``cv`` (see `weibull_shape`)."""
    _check_positive(rate_per_s=rate_per_s)
    shape = weibull_shape(cv)
    mean_of_unit_scale = math.gamma(1 + 1 / shape)
    return lambda n: rng.weibull(shape, n) / (mean_of_unit_scale * rate_per_s)


def renewals(gaps: Gaps, n: int) -> Iterator[FloatArray]:
    """Arrivals without end, ``n`` at a time, the first of them a gap after time 0. The bits do not depend on ``n``."""
    _check_positive(n=n)
    last_s = 0.0
    while True:
        arrival_s = np.cumsum(np.concatenate([[last_s], gaps(n)]))[1:]
        yield arrival_s
        last_s = arrival_s[-1]


def poisson(rng: Generator, rate_per_s: float, n: int) -> FloatArray:
    """``n`` arrivals of a Poisson process; the first comes one exponential gap after time 0."""
    return next(renewals(poisson_gaps(rng, rate_per_s), n))


def gamma(rng: Generator, rate_per_s: float, cv: float, n: int) -> FloatArray:
    """``n`` arrivals with Gamma gaps (see `gamma_gaps`)."""
    return next(renewals(gamma_gaps(rng, rate_per_s, cv), n))


def weibull(rng: Generator, rate_per_s: float, cv: float, n: int) -> FloatArray:
    """``n`` arrivals with Weibull gaps (see `weibull_gaps`)."""
    return next(renewals(weibull_gaps(rng, rate_per_s, cv), n))


@cache
def weibull_shape(cv: float) -> float:
    """The Weibull shape k with this coefficient of variation: cv^2 + 1 = Gamma(1 + 2/k) / Gamma(1 + 1/k)^2.

    Raises ValueError outside 0.01 <= cv <= 100.
    """
    if not 0.01 <= cv <= 100:
        raise ValueError(f"cv is {cv}; a Weibull process needs 0.01 <= cv <= 100")
    from scipy.optimize import brentq

    def excess(log_shape: float) -> float:
        inverse = math.exp(-log_shape)
        return math.lgamma(1 + 2 * inverse) - 2 * math.lgamma(1 + inverse) - math.log1p(cv**2)

    # cv(k) falls from 1e5 at k = 0.05 to 1.3e-3 at k = 1000, so the bracket holds every accepted cv.
    return math.exp(brentq(excess, math.log(0.05), math.log(1000), xtol=1e-12))


def piecewise(rng: Generator, segments: Sequence[tuple[float, float]]) -> FloatArray:
    """A Poisson process whose rate is constant in each (duration_s, rate_per_s) segment, one after the other from time
    0.

    Exact: the count of a segment is Poisson, and given the count its arrivals are uniform. A rate may be 0; the number
    of arrivals is random and may be 0.
    """
    return np.concatenate([np.empty(0), *segment_by_segment(rng, segments)])


def segment_by_segment(rng: Generator, segments: Sequence[tuple[float, float]]) -> Iterator[FloatArray]:
    """The arrivals of `piecewise`, a segment at a time."""
    start_s = 0.0
    for duration_s, rate_per_s in segments:
        _check_positive(duration_s=duration_s)
        if not 0 <= rate_per_s < math.inf:
            raise ValueError(f"rate_per_s is {rate_per_s}; give a finite rate >= 0")
        count = rng.poisson(rate_per_s * duration_s)
        yield np.sort(rng.uniform(start_s, start_s + duration_s, count))
        start_s += duration_s


def replay(arrival_s: npt.ArrayLike) -> FloatArray:
    """Recorded times, as they are. Raises TraceError when they are negative, out of order or no numbers."""
    return arrival_column(arrival_s, "replay").copy()


def scale_rate(arrival_s: npt.ArrayLike, factor: float) -> FloatArray:
    """The same arrivals on a clock that runs ``factor`` times as fast: every rate times ``factor``, the span divided by
    it.

    The temporal pattern (order, ratios of gaps, cv) stays. To raise the rate within the same span, see `upscale`.
    """
    _check_positive(factor=factor)
    return arrival_column(arrival_s, "scale_rate") / factor


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name} is {value}; give a finite number > 0")
