"""Attention latencies from measured grids.

* Decode: seconds of a batch are piecewise linear in the cached context, with the measured contexts as breakpoints. Between
  measured batch sizes they are interpolated log-log.
* Prefill: seconds are linear in the batch and in the work of a prompt, between measured ones. The work of a token is the
  number of keys it sees, and a constant for itself.
* Heads: attention runs in parallel over sequences and KV heads. So a head count that was not measured is read as a larger
  batch of fewer KV heads with the same group. For example, 32/32 heads at batch b count as 8/8 at batch 4b.
* On another GPU, the smallest measured latency (a launch) stays, and all beyond it takes ``slowdown`` times as long.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import inf
from typing import Final, NamedTuple

import numpy as np

from fineserve_sim.latency.tables.curves import isotonic
from fineserve_sim.latency.tables.grids import Floats, Grid, Ints

TOKEN_KEYS: Final = (
    1024.0  # weighs measured neighbours only; chosen by halving the bf16, head_dim 128 table (crossvalidation)
)


class HeadMatch(NamedTuple):
    """Measured latencies that stand for a pair of head counts: shape of one pair, for ``batch_factor`` x the batch."""

    latency_s: Floats
    batch_factor: int
    exact: bool


def match_heads(grid: Grid, q_heads: int, kv_heads: int) -> HeadMatch | None:
    """Latencies of ``q_heads`` query over ``kv_heads`` KV heads; None when nothing measured is near.

    Query heads between two measured ones at the same KV heads are interpolated in log space.
    """
    pairs = grid.axes["heads"]
    for factor in range(1, kv_heads + 1):
        if kv_heads % factor or q_heads % factor:
            continue
        q, kv = q_heads // factor, kv_heads // factor
        rows = np.flatnonzero(pairs[:, 1] == kv)
        measured = pairs[rows, 0]
        if not len(rows) or not measured.min() <= q <= measured.max():
            continue
        order = np.argsort(measured)
        rows, measured = rows[order], measured[order]
        high = int(np.searchsorted(measured, q))
        if measured[high] == q:
            return HeadMatch(grid.latency_s[rows[high]], factor, factor == 1)
        weight = float(np.log(q / measured[high - 1]) / np.log(measured[high] / measured[high - 1]))
        logs = np.log(grid.latency_s[rows[high - 1 : high + 1]])
        return HeadMatch(np.exp((1 - weight) * logs[0] + weight * logs[1]), factor, False)
    return None


class PiecewiseLinear:
    """A function of one number: ``value[i] + (x - start[i]) * slope[i]`` from ``start[i]`` on; scalars and vectors agree
    bit for bit."""

    __slots__ = ("_arrays", "slopes", "starts", "values")

    def __init__(self, starts: list[float], values: list[float], last_slope: float) -> None:
        self.starts, self.values = starts, values
        ends = zip(zip(starts, values, strict=True), zip(starts[1:], values[1:], strict=True), strict=False)
        self.slopes = [(v1 - v0) / (x1 - x0) for (x0, v0), (x1, v1) in ends] + [last_slope]
        self._arrays = tuple(np.array(part) for part in (starts, values, self.slopes))

    def scaled(self, factor: float) -> PiecewiseLinear:
        """``factor`` times the values."""
        return PiecewiseLinear(self.starts, [factor * value for value in self.values], factor * self.slopes[-1])

    def at_least(self, slope: float) -> PiecewiseLinear:
        """The larger of this and ``slope`` times the number, at every start."""
        if not slope:
            return self
        values = [max(value, start * slope) for start, value in zip(self.starts, self.values, strict=True)]
        return PiecewiseLinear(self.starts, values, max(self.slopes[-1], slope))

    def at(self, x: float) -> float:
        """Value at ``x >= starts[0]``."""
        i = bisect_right(self.starts, x) - 1
        return self.values[i] + (x - self.starts[i]) * self.slopes[i]

    def piece(self, x: float) -> tuple[float, float, float, float]:
        """Start, value and slope of the piece at ``x >= starts[0]``, and where the next one starts."""
        i = bisect_right(self.starts, x)
        return (
            self.starts[i - 1],
            self.values[i - 1],
            self.slopes[i - 1],
            self.starts[i] if i < len(self.starts) else inf,
        )

    def at_each(self, x: Ints) -> Floats:
        """Values at an array, by the operations of ``at``."""
        starts, values, slopes = self._arrays
        i = starts.searchsorted(x, side="right") - 1
        result: Floats = values[i] + (x - starts[i]) * slopes[i]
        return result


def _doubled_batches(latency_s: Floats) -> Floats:
    """Unmeasured long contexts of a batch take twice the seconds of half the batch (saturated). A single sequence takes twice
    the seconds of half its context; batches and contexts are powers of two."""
    filled = latency_s.copy()
    for context in range(1, filled.shape[1]):
        if np.isnan(filled[0, context]):
            filled[0, context] = 2 * filled[0, context - 1]
    for batch in range(1, len(filled)):
        filled[batch] = np.where(np.isnan(filled[batch]), 2 * filled[batch - 1], filled[batch])
    return filled


class DecodeTable:
    """Decode attention of one layer for one pair of head counts."""

    def __init__(self, grid: Grid, match: HeadMatch) -> None:
        self._match = match
        self._batch: Floats = grid.axes["batch"].astype(np.float64)
        self._context = grid.axes["context"].tolist()
        self._measured = ~np.isnan(match.latency_s)
        logs = np.log(_doubled_batches(match.latency_s))
        lines = np.array([isotonic(line) for line in logs])
        self._logs = np.maximum.accumulate(lines, axis=0)  # more sequences of the same context never take less

    @property
    def exact(self) -> bool:
        """Whether these head counts were measured themselves."""
        return self._match.exact

    def covers(self, batch: int, context: float) -> bool:
        """Whether the batch and its mean context lie within the measured range."""
        scaled = batch * self._match.batch_factor
        if scaled > self._batch[-1]:
            return False
        row = int(np.searchsorted(self._batch, scaled))
        longest = int(np.flatnonzero(self._measured[row])[-1])
        return context <= float(self._context[longest])

    def curve(self, batch: int, layers: int, slowdown: float) -> PiecewiseLinear:
        """Seconds of ``layers`` layers against the batch's summed context, the new tokens included."""
        scaled = batch * self._match.batch_factor
        position = np.interp(np.log(scaled), np.log(self._batch), np.arange(len(self._batch)))
        low = min(int(position), len(self._batch) - 2)
        weight = position - low
        seconds = np.exp((1 - weight) * self._logs[low] + weight * self._logs[low + 1])
        launch_s = float(np.exp(self._logs[0, 0]))
        seconds = (launch_s * (1 - slowdown) + seconds * slowdown) * (layers * max(scaled / self._batch[-1], 1.0))
        starts = [0.0, *(float(batch * context) for context in self._context)]
        values = [float(seconds[0]), *seconds.tolist()]
        return PiecewiseLinear(starts, values, values[-1] / starts[-1])


@dataclass(frozen=True, slots=True)
class _Rate:
    """Seconds beyond the floor for each token of a prompt: ``rest / length + slope * (length + TOKEN_KEYS)`` between two
    measured lengths. It is least at ``lowest``; beyond the longer one it is ``beyond`` or more."""

    rest: float
    slope: float
    lowest: float
    beyond: float

    def at(self, length: float) -> float:
        """The least of this length and of all longer ones, which never falls."""
        length = length if length > self.lowest else self.lowest
        rate_s = self.rest / length + self.slope * (length + TOKEN_KEYS)
        return rate_s if rate_s < self.beyond else self.beyond


def _rates(line: PiecewiseLinear, lengths: list[float], floor_s: float) -> list[_Rate]:
    """By measured length, the rate from there on; ``line`` has the seconds by work."""
    rates: list[_Rate] = []
    beyond = inf
    pieces = zip(line.starts, line.values, line.slopes, lengths, [*lengths[1:], inf], strict=True)
    for work, value, slope, start, end in reversed([*pieces]):
        rest = value - floor_s - work * slope
        lowest = start if rest <= 0 else min(max(start, (rest / slope) ** 0.5 if slope else end), end)
        rates.append(_Rate(rest, slope, lowest, beyond))
        beyond = rates[-1].at(start)
    return rates[::-1]


class PrefillTable:
    """Prefill attention of one pair of head counts over ``layers`` layers.

    Seconds at the measured batches and lengths never fall with either. Between them they are linear in the batch and in the
    work of a prompt, length * (length + TOKEN_KEYS). Beyond the longest prompt and the largest batch they are in proportion.
    """

    __slots__ = ("_batch", "_factor", "_pieces", "_rates", "_work", "exact", "floor_s", "longest")

    def __init__(self, grid: Grid, match: HeadMatch, layers: int, slowdown: float) -> None:
        lengths = grid.axes["new_tokens"]
        logs = np.array([isotonic(line) for line in np.log(_doubled_batches(match.latency_s))])
        seconds = np.exp(np.maximum.accumulate(logs, axis=0))
        seconds = (seconds[0, 0] * (1 - slowdown) + seconds * slowdown) * layers
        self._work: list[float] = (lengths * (lengths + TOKEN_KEYS)).tolist()
        lines = [PiecewiseLinear(self._work, line, line[-1] / self._work[-1]) for line in seconds.tolist()]
        self._pieces: list[list[tuple[float, float]]] = [  # at a length, for each batch: value and slope from there on
            [(line.values[place], line.slopes[place]) for line in lines] for place in range(len(self._work))
        ]
        self._batch: list[int] = grid.axes["batch"].tolist()
        self._factor = match.batch_factor
        self.exact, self.longest = match.exact, int(lengths[-1])
        self.floor_s: float = lines[0].values[0]
        # At a length, for each batch: the rate from there on.
        self._rates = [*zip(*(_rates(line, lengths.tolist(), self.floor_s) for line in lines), strict=True)]

    def beyond_floor_s(self, tokens: int, pairs: float, context: int = 0) -> float:
        """Seconds beyond ``floor_s`` of prompt chunks with ``tokens`` tokens and ``pairs`` query-key pairs in all, behind
        ``context`` cached tokens.

        They count as equal chunks with as many keys per query, 2 * pairs / tokens - 1, which is the length of a prompt
        without a prefix. A chunk behind a prefix takes its tokens' share of the whole prompt's seconds, and at least its
        seconds without the prefix.
        """
        length = 2.0 * pairs / tokens - 1.0
        length = length if length > 1.0 else 1.0
        if not context:
            return self._alone_s(tokens * self._factor / length, length)
        chunks = (2.0 * context + tokens) / length
        chunks = chunks if chunks > 1.0 else 1.0
        return self._behind_s(chunks * self._factor, tokens / chunks, length)

    def _alone_s(self, batch: float, length: float) -> float:
        """Of ``batch`` prompts without a prefix."""
        work = length * (length + TOKEN_KEYS)
        place = bisect_right(self._work, work) - 1
        more, pieces = work - self._work[place], self._pieces[place]
        if batch <= 1.0:
            value, slope = pieces[0]
            return (value + more * slope - self.floor_s) * batch
        row = bisect_right(self._batch, batch) - 1
        value, slope = pieces[row]
        low_s = value + more * slope
        if row + 1 == len(pieces):
            return low_s * (batch / self._batch[-1]) - self.floor_s
        value, slope = pieces[row + 1]
        weight = (batch - self._batch[row]) / (self._batch[row + 1] - self._batch[row])
        return low_s + (value + more * slope - low_s) * weight - self.floor_s

    def _behind_s(self, batch: float, each: float, length: float) -> float:
        """Of ``batch`` chunks, one or more, of ``each`` tokens that see the keys of prompts of this length: the rate of such
        prompts, and at least what the chunks take without a prefix."""
        rates = self._rates[bisect_right(self._work, length * (length + TOKEN_KEYS)) - 1]
        row = bisect_right(self._batch, batch) - 1
        rate_s = rates[row].at(length)
        if row + 1 == len(rates):
            rate_s *= batch / self._batch[-1]
        elif batch > self._batch[row]:
            weight = (batch - self._batch[row]) / (self._batch[row + 1] - self._batch[row])
            rate_s += (rates[row + 1].at(length) - rate_s) * weight
        behind_s, alone_s = rate_s * each, self._alone_s(batch, each)
        return behind_s if behind_s > alone_s else alone_s
