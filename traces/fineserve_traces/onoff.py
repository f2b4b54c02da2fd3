"""On/off arrivals (an interrupted Poisson process) and what they look like, in closed form.

A model is on for a while and off for a while, both exponentially distributed; while it is on, requests come as a Poisson
process. The gaps between requests are then hyperexponential of two phases (Kuczura 1973): with the rate r while on, and the
rates a = 1/on and b = 1/off of switching,

    P(gap > t) = p exp(-m1 t) + (1 - p) exp(-m2 t)       m1, m2 = (r + a + b +- sqrt((r + a + b)^2 - 4 r b)) / 2
                                                          p = (r - m2) / (m1 - m2)

and the number of requests in a time T, of mean n = rate T, has the squared coefficient of variation (Cox and Isham 1980)

    cv^2 = 1/n + (1 - d)/d * (2/x) (1 - (1 - exp(-x)) / x)        d = on / (on + off), x = (a + b) T
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator

from fineserve_traces.schema import FloatArray

PIECE = 8192
"""Requests that are drawn together."""


@dataclass(frozen=True, slots=True)
class OnOff:
    """Requests at ``rate_per_s`` on average, all in the part ``duty`` of the time that the model is on, ``on_s`` at a time on
    average. ``duty`` 1 is Poisson. Raises ValueError for a rate or time that is not positive and a duty outside (0, 1]."""

    rate_per_s: float
    duty: float = 1.0
    on_s: float = 60.0

    def __post_init__(self) -> None:
        if not (self.rate_per_s > 0 and self.on_s > 0 and 0 < self.duty <= 1):
            raise ValueError(f"{self}: rate and time on must be positive, the duty within (0, 1]")

    def arrivals(self, rng: Generator, duration_s: float, scale: float = 1.0) -> FloatArray:
        """Sorted arrival times in [0, duration_s), of a process that has gone on for ever before. ``scale`` multiplies the
        requests and leaves the times on and off as they are (given the same ``rng``)."""
        return np.concatenate([np.empty(0), *self.pieces(rng, duration_s, scale)])

    def pieces(self, rng: Generator, duration_s: float, scale: float = 1.0) -> Iterator[FloatArray]:
        """As ``arrivals``, for some times on at a time: of as many as have ``PIECE`` requests, or of one."""
        on = self._on_periods(rng, duration_s)
        length = on[:, 1] - on[:, 0]
        counts = rng.poisson(length * self.rate_per_s / self.duty * scale)
        upto, first = np.cumsum(counts), 0
        while first < len(on):
            before = upto[first] - counts[first]
            end = max(first + 1, int(np.searchsorted(upto, before + PIECE, side="right")))
            period = np.repeat(np.arange(first, end), counts[first:end])
            times = on[period, 0] + rng.random(period.size) * length[period]
            yield np.sort(times[times < duration_s])  # rounding may put one at the very end
            first = end

    def _on_periods(self, rng: Generator, duration_s: float) -> FloatArray:
        """(n, 2): begin and end of the times on within [0, duration_s]."""
        if self.duty == 1:
            return np.array([[0.0, duration_s]])
        off_s = self._off_s
        starts_on = rng.random() < self.duty
        switches = [0.0]
        while switches[-1] < duration_s:
            pairs = rng.exponential(1.0, 64) * np.tile([self.on_s, off_s] if starts_on else [off_s, self.on_s], 32)
            switches += (switches[-1] + np.cumsum(pairs)).tolist()
        edges = np.minimum(switches, duration_s)
        first = 0 if starts_on else 1
        periods = np.column_stack([edges[first:-1:2], edges[first + 1 :: 2]])
        kept: FloatArray = periods[periods[:, 1] > periods[:, 0]]
        return kept

    def gap_exceeds(self, seconds: float) -> float:
        """The probability that a gap between two requests is longer."""
        if self.duty == 1:
            return math.exp(-self.rate_per_s * seconds)
        burst_per_s, to_off, to_on = self.rate_per_s / self.duty, 1 / self.on_s, 1 / self._off_s
        total = burst_per_s + to_off + to_on
        root = math.sqrt(total**2 - 4 * burst_per_s * to_on)
        fast, slow = (total + root) / 2, (total - root) / 2
        part = (burst_per_s - slow) / (fast - slow)
        return part * math.exp(-fast * seconds) + (1 - part) * math.exp(-slow * seconds)

    def idle_per_hour(self, longer_than_s: float = 10.0) -> float:
        """Gaps longer than this, per hour."""
        return 3600 * self.rate_per_s * self.gap_exceeds(longer_than_s)

    def median_idle_s(self, longer_than_s: float = 10.0) -> float:
        """The median of the gaps that are longer than this."""
        half = self.gap_exceeds(longer_than_s) / 2
        low = high = longer_than_s
        while self.gap_exceeds(high) > half:
            low, high = high, 2 * high
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self.gap_exceeds(middle) > half else (low, middle)
        return high

    def cv_of_counts(self, window_s: float = 60.0) -> float:
        """The coefficient of variation of the requests in windows of this length."""
        poisson = 1 / (self.rate_per_s * window_s)
        if self.duty == 1:
            return math.sqrt(poisson)
        windows = (1 / self.on_s + 1 / self._off_s) * window_s
        switching = 2 / windows * (1 - -math.expm1(-windows) / windows)
        return math.sqrt(poisson + (1 - self.duty) / self.duty * switching)

    @property
    def _off_s(self) -> float:
        return self.on_s * (1 - self.duty) / self.duty
