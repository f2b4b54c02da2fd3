"""Interpolation that respects the shape of measured latencies.

* Latency never falls with more work. Measured lines do, by noise and tile effects. So a line is replaced by its isotonic
  regression in log space (pool adjacent violators, Barlow et al. 1972): steps up stay, dips are pooled.
* A matrix product computes whole tiles. So the time of a measured m holds to the end of its tile, and the time of the next
  measured m from the start of its own. A tile has ``TILE_ROWS`` rows, as a Hopper tensor-core instruction.
* Between shapes (n, k) the ratio to the roofline is interpolated in log space. Launch, tile and saturation losses change
  slowly with the shape; the roofline does not.
* Outside the measured range, a shape keeps the ratio to the roofline of the nearest measured shape; callers flag it.
* The same chip with slower memory (an A100 of 40 GB by the tables of one of 80) has the same kernels. One that leaves memory
  idle is not slowed until the slower memory is busy. So its time stays, or is what the memory takes at the best rate measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from fineserve_sim.catalog import GpuSpec
from fineserve_sim.catalog.specs import TensorCore
from fineserve_sim.latency.tables.grids import Floats, Grid, Ints

PEAK: Mapping[str, TensorCore] = MappingProxyType(
    {"bfloat16": "bf16", "fp8": "fp8", "int4_wo": "bf16", "fp8_wo": "bf16"}
)
WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "int4_wo": 0.5, "fp8_wo": 1.0}
INPUT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "int4_wo": 2.0, "fp8_wo": 2.0}
OUTPUT_BYTES = 2.0
TILE_ROWS = 64
SMALLEST_TILE = 16  # up to here kernels differ row by row
BEYOND_CACHE_BYTES = 100e6
"""Weights that no cache of a GPU holds: twice the L2 of an H100."""
SLOWER_ALONE: Mapping[tuple[str, str], float] = MappingProxyType({("h200-sxm", "fp8"): 0.1})
"""The part of a product's memory time that a profile counts and a served engine does not take, by GPU and table.

The H200's FP8 rows read 256 MB of weights at 77 % of the memory rate, its 16-bit rows at 83 %. Engines show none of it: the
excess of steps over those measured grows with the weights of a GPU. Fitted on TPOT of the odd rows of Llama-3.1-70B FP8 at
TP 1, 2, 4 and 8 under vLLM (silicon points of aiconfigurator-core 0.12.0, Apache-2.0); docs/fidelity.md has the experiment.
"""


def isotonic(values: Floats) -> Floats:
    """The non-decreasing sequence nearest to ``values`` in least squares, shape kept: pool adjacent violators."""
    means: list[float] = []
    counts: list[int] = []
    for value in values.tolist():
        mean, count = value, 1
        while means and means[-1] > mean:
            before = counts.pop()
            mean = (means.pop() * before + mean * count) / (before + count)
            count += before
        means.append(mean)
        counts.append(count)
    return np.repeat(np.array(means), counts)


def gemm_roofline_s(gpu: GpuSpec, dtype: str, m: Floats, n: Floats | float, k: Floats | float) -> Floats:
    """Seconds that no GEMM of this shape can beat on this GPU's data sheet: the larger of compute and memory time."""
    compute_s = 2.0 * m * n * k / gpu.peak_flops_per_s(PEAK[dtype])
    return np.maximum(compute_s, _moved_bytes(dtype, m, n, k) / gpu.memory_bytes_per_s)


def _moved_bytes(dtype: str, m: Floats, n: Floats | float, k: Floats | float) -> Floats:
    return n * k * WEIGHT_BYTES[dtype] + m * k * INPUT_BYTES[dtype] + m * n * OUTPUT_BYTES


def as_served(grid: Grid, dtype: str, gpu: GpuSpec) -> Grid:
    """Profiled products of a GPU as ``SLOWER_ALONE`` corrects them: never below the time to read the weights."""
    part = SLOWER_ALONE.get((gpu.name, dtype))
    if part is None:
        return grid
    n, k, m = np.meshgrid(*(grid.axes[axis].astype(float) for axis in ("n", "k", "m")), indexing="ij")
    read_s = n * k * WEIGHT_BYTES[dtype] / gpu.memory_bytes_per_s
    compute_s = 2.0 * m * n * k / gpu.peak_flops_per_s(PEAK[dtype])
    served_s = grid.latency_s - part * np.maximum(read_s - compute_s, 0.0)
    return Grid(grid.axes, np.maximum(served_s, np.minimum(grid.latency_s, read_s)))


def slower_memory(gpu: GpuSpec, reference: GpuSpec) -> bool:
    """Whether a GPU is the reference's chip with slower memory."""
    same = gpu.bf16_flops_per_s == reference.bf16_flops_per_s
    return same and gpu.memory_bytes_per_s < reference.memory_bytes_per_s


def with_tile_edges(m: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """The points of a line over m, and between them the ends of full tiles with the seconds of the point in the same tile."""
    last = np.maximum(np.ceil(m / TILE_ROWS) * TILE_ROWS, m)
    first = np.minimum(last - TILE_ROWS + 1, m)
    large = m > SMALLEST_TILE
    ends = (large & (last > m) & (last < np.append(m[1:], m[-1])))[:-1]
    starts = (large & (first > np.append(0.0, last[:-1])) & (first < m))[1:]
    rows = np.concatenate([m, last[:-1][ends], first[1:][starts]])
    order = np.argsort(rows, kind="stable")
    return rows[order], np.concatenate([seconds, seconds[:-1][ends], seconds[1:][starts]])[order]


class _Bracket(NamedTuple):
    low: int
    high: int
    weight: float  # of ``high``


def _bracket(axis: Ints, value: float) -> _Bracket:
    """Neighbours of ``value`` on an axis and the log-space weight of the upper one; clamped at the ends."""
    high = int(np.searchsorted(axis, value))
    if high == 0 or high == len(axis) or axis[high] == value:
        edge = min(high, len(axis) - 1)
        return _Bracket(edge, edge, 0.0)
    low = high - 1
    return _Bracket(low, high, float(np.log(value / axis[low]) / np.log(axis[high] / axis[low])))


def _filled(log_ratio: Floats, n: Ints) -> Floats:
    """Ratios (n, k, m) with unmeasured shapes filled: between the measured n of the same k and m, or as at the nearest."""
    log_n = np.log(n)
    for k, m in np.argwhere(np.isnan(log_ratio).any(axis=0)):
        column = log_ratio[:, k, m]
        known = ~np.isnan(column)
        if known.any():
            log_ratio[:, k, m] = np.interp(log_n, log_n[known], column[known])
    return log_ratio


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds against a positive count, log-log between measured counts, in proportion beyond the largest."""

    counts: Floats
    seconds: Floats

    def at(self, counts: Floats) -> Floats:
        """Seconds at each count (> 0), non-decreasing; counts below the smallest measured take its seconds."""
        inside = np.exp(np.interp(np.log(counts), np.log(self.counts), np.log(self.seconds)))
        seconds: Floats = inside * np.maximum(counts / self.counts[-1], 1.0)
        return seconds


class GemmTable:
    """Lines of seconds over m for any (n, k), from a grid measured on ``reference``.

    On another GPU the same ratio to the roofline is kept (launch time unchanged), but on the same chip with slower memory.
    """

    def __init__(self, grid: Grid, dtype: str, reference: GpuSpec) -> None:
        self.dtype, self._n, self._k, self._reference = dtype, grid.axes["n"], grid.axes["k"], reference
        self.m: Floats = grid.axes["m"].astype(np.float64)
        n, k, m = np.meshgrid(self._n.astype(float), self._k.astype(float), self.m, indexing="ij")
        self._launch_s = float(np.nanmin(grid.latency_s))
        ideal_s = self._launch_s + gemm_roofline_s(reference, dtype, m, n, k)
        self._log_ratio = _filled(np.log(grid.latency_s / ideal_s), self._n)
        rate = _moved_bytes(dtype, m, n, k) / grid.latency_s / reference.memory_bytes_per_s
        large = n * k * WEIGHT_BYTES[dtype] >= BEYOND_CACHE_BYTES
        self.reached = min(float(np.nanmax(rate[large], initial=0.0)), 1.0) or 1.0
        """The largest part of the reference's memory rate at which weights were read."""

    def covers(self, n: int, k: int) -> bool:
        """Whether (n, k) lies within the measured range."""
        return bool(self._n[0] <= n <= self._n[-1] and self._k[0] <= k <= self._k[-1])

    def raw_s(self, n: int, k: int, gpu: GpuSpec, dtype: str | None = None) -> Floats:
        """Seconds at each measured m, noise included. ``dtype``: of the product, as ``line`` says."""
        i, j = _bracket(self._n, n), _bracket(self._k, k)
        ratio = self._log_ratio
        low = (1 - j.weight) * ratio[i.low, j.low] + j.weight * ratio[i.low, j.high]
        high = (1 - j.weight) * ratio[i.high, j.low] + j.weight * ratio[i.high, j.high]
        own, capped = dtype or self.dtype, slower_memory(gpu, self._reference)
        ideal_s = self._launch_s + gemm_roofline_s(self._reference if capped else gpu, own, self.m, n, k)
        seconds: Floats = ideal_s * np.exp((1 - i.weight) * low + i.weight * high)
        read_s = _moved_bytes(own, self.m, n, k) / (self.reached * gpu.memory_bytes_per_s)
        return np.maximum(seconds, read_s) if capped else seconds

    def line(self, n: int, k: int, gpu: GpuSpec, dtype: str | None = None) -> Line:
        """Seconds of an (m, k) x (k, n) product against m on ``gpu``; another ``dtype`` keeps the ratio to its own roofline."""
        return Line(*with_tile_edges(self.m, np.exp(isotonic(np.log(self.raw_s(n, k, gpu, dtype))))))
