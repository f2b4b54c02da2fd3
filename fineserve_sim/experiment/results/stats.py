"""Interval estimates: a mean and the half-width of its 95 % confidence interval.

Two estimators, one for each kind of number:

* a number a run (a throughput, a quantile): Student's t over the runs, which differ by their seed alone.
* a share of requests (attainment): requests of one run are not independent, since one burst makes its neighbours late
  together, so the binomial formula would give intervals far too narrow. Batch means (Law, Simulation Modeling and
  Analysis, ch. 9): cut each run into batches of consecutive requests, take each batch's share as one observation, pool
  the batches of all seeds, Student's t over them. Batches longer than the memory of the queue are nearly independent,
  and 20 a run keep them as long as possible. Where batches do not differ, since nearly all requests met their limit, that
  interval has no width. n requests cannot show so much: without a miss the share of misses may still be 3 / n. So it is
  at least as wide as Wilson's for n independent requests (Wilson, JASA 22, 1927), told from its farther end, and no wider
  than shares can be.

**Comparisons are of pairs** where both sides remember as many observations: runs of one seed serve the same requests under
every system (common random numbers; Law, ch. 11), so that what a hard seed does to one system it does to the other too. A
difference has the interval of the differences run by run, or batch by batch; a ratio the interval of each pair's deviation
from it. Intervals added as for independent numbers would hide what every single run shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

BATCHES = 20
LEVEL = 0.95


class Batched(Protocol):
    """Requests of one run in batches in arrival order: how many were hits, of how many. (batches,) each, none of them empty."""

    @property
    def met(self) -> NDArray[np.int64]: ...

    @property
    def of(self) -> NDArray[np.int64]: ...


class Estimate(NamedTuple):
    """``half_width`` is NaN where fewer than two observations give no interval, ``mean`` where there is no value."""

    mean: float
    half_width: float

    @property
    def relative(self) -> float:
        """Half-width as a fraction of the mean; 0 for an exact zero, infinite for an uncertain one."""
        if self.half_width == 0:
            return 0.0
        return abs(self.half_width / self.mean) if self.mean else math.inf


class Sample(Estimate):
    """An estimate that remembers its ``observations``, a number a run or a batch in the order of the runs."""

    observations: tuple[float, ...]

    @classmethod
    def of(cls, mean: float, half_width: float, observations: Sequence[float]) -> Sample:
        """The same estimate with its observations."""
        sample = cls(mean, half_width)
        sample.observations = tuple(observations)
        return sample


def over_runs(values: Sequence[float]) -> Sample:
    """Mean over runs with Student's interval; runs without a value (NaN) make the whole estimate NaN."""
    observations = np.asarray(values, dtype=np.float64)
    return Sample.of(float(np.mean(observations)), _half_width(observations), observations.tolist())


def of_share(runs: Sequence[Batched]) -> Sample:
    """Share of hits over all requests of all runs, with its batch-means interval or Wilson's, whichever is wider."""
    total = sum(int(run.of.sum()) for run in runs)
    if total == 0:
        return Sample.of(math.nan, math.nan, ())
    means = np.concatenate([run.met / run.of for run in runs])
    share = sum(int(run.met.sum()) for run in runs) / total
    half_width = max(_half_width(means), _wilson(share, total))  # NaN first: of one request there is none
    return Sample.of(share, min(half_width, max(share, 1 - share)), means.tolist())


def _wilson(share: float, requests: int) -> float:
    """From a share of independent requests to the farther end of its interval; z^2 / (n + z^2) for all of them or none."""
    z2 = float(ndtri(0.5 + LEVEL / 2)) ** 2
    spread = math.sqrt(z2 * share * (1 - share) / requests + (z2 / (2 * requests)) ** 2)
    return (abs(0.5 - share) * z2 / requests + spread) / (1 + z2 / requests)


def _half_width(observations: NDArray[np.float64]) -> float:
    count = len(observations)
    if count < 2 or not np.isfinite(observations).all():
        return math.nan
    spread = float(np.std(observations, ddof=1))
    return float(stdtrit(count - 1, 0.5 + LEVEL / 2)) * spread / math.sqrt(count)


def difference(of: Estimate, over: Estimate) -> Estimate:
    """``of - over``, in pairs where both are samples of as many runs; else the half-widths add as for independent numbers."""
    mean = of.mean - over.mean
    pairs = _pairs(of, over)
    if pairs is not None:
        return Estimate(mean, _half_width(pairs[0] - pairs[1]))
    return Estimate(mean, math.hypot(of.half_width, over.half_width))


def ratio(of: Estimate, over: Estimate) -> Estimate:
    """``of / over``, half-width by the delta method, in pairs as in ``difference``. NaN over zero."""
    if over.mean == 0:
        return Estimate(math.nan, math.nan)
    value = of.mean / over.mean
    pairs = _pairs(of, over)
    if pairs is not None:
        return Estimate(value, _half_width((pairs[0] - value * pairs[1]) / over.mean))
    return Estimate(value, abs(value) * math.hypot(of.relative, over.relative))


def _pairs(of: Estimate, over: Estimate) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """The observations of both, where they are comparable one by one."""
    if not (isinstance(of, Sample) and isinstance(over, Sample)) or len(of.observations) != len(over.observations):
        return None
    return np.array(of.observations), np.array(over.observations)
