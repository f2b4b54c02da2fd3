"""Experts of a layer: seconds by a roofline that knows how many distinct experts a batch touches, or by measured tables.

A token goes to ``active`` of ``count`` experts. ``tokens`` tokens touch

    distinct = local * (1 - (1 - active / count) ** tokens)

of the ``local`` experts of a GPU, if routing is uniform and tokens are independent. Their weights are read once. Products have
``tokens * active / spread`` rows, a GPU's share of all where whole experts are spread over the group.

A table has the seconds of one layer by shape and tokens. Another shape, format or GPU keeps the ratio to its own roofline of
the nearest shape that was measured. A GPU whose tables have no kernel of narrow weights takes that of the GPU with the nearest
shape: on an A100, experts in FP8 or MXFP4 are Marlin's, which an L40S measures in the shape of gpt-oss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fineserve_sim.catalog import ExpertWork, GemmKernel, GpuSpec, PrecisionSpec, padded, precision
from fineserve_sim.latency.cost import Cost, Floats, rate_code
from fineserve_sim.latency.rates import resolve
from fineserve_sim.latency.tables import Grid, Line, TableSet, isotonic
from fineserve_sim.latency.tables.grids import Ints

FORMAT_BITS: Mapping[str, float] = {
    "bfloat16": 16.0,
    "fp8_block": 8.0,
    "fp8": 8.0,
    "int4_wo": 4.5,
    "w4a16_mxfp4": 4.25,
    "w4a16_mxfp4_triton": 4.25,
    "nvfp4": 4.5,
}
"""Bits of a weight by the tables' formats."""
FORMAT_PRECISION: Mapping[str, str] = {
    "bfloat16": "W16A16",
    "fp8_block": "W8A8-block",
    "fp8": "W8A8-block",
    "int4_wo": "W4A16-experts",
    "w4a16_mxfp4": "W4A16-MXFP4",
    "w4a16_mxfp4_triton": "W4A16-MXFP4-Triton",
    "nvfp4": "W4A4-NVFP4",
}
"""The precision whose roofline a format has."""

MARLIN = ("w4a16_mxfp4", "int4_wo")
"""The formats of Marlin's experts, which multiply narrower weights in 16 bits."""

ALIGNED_KERNELS = 8
"""Quantise, count, permute, product, activation with quantisation, product, gather and reduce, routing."""
LEAST_ALIGNED_OUTPUTS = 512
"""vLLM takes DeepGEMM where an expert's first product is wider (``_valid_deep_gemm``)."""

FAR = 100.0
"""A distance that only what has no other neighbour goes."""
MOST_MISSING = 0.5
"""The part of a shape's batches that may be missing. Eight shapes of Llama 4 on a B200 were measured up to four tokens."""


def touched(local: Floats | float, count: Floats | float, active: Floats | float, tokens: Floats) -> Floats:
    """Distinct experts among ``local`` of ``count`` that so many tokens touch."""
    distinct: Floats = local * -np.expm1(tokens * np.log1p(-np.minimum(active / count, 1 - 1e-12)))
    return distinct


def roofline(work: ExpertWork, kernel: GemmKernel, weight_bits: float, tokens: Floats) -> Cost:
    """One layer's experts on ``tokens`` tokens (> 0)."""
    rows = tokens * (work.active / work.spread)
    compute_s = rows * (2.0 * work.weights / kernel.flops_per_s.value)
    read_bytes = touched(work.local, work.experts, work.active, tokens) * (work.weights * weight_bits / 8)
    row_bytes = 2.0 * (2 * work.hidden + work.matrices * work.width)
    memory_s = (read_bytes + rows * row_bytes) / kernel.bytes_per_s.value
    source = np.where(compute_s > memory_s, rate_code(kernel.flops_per_s), rate_code(kernel.bytes_per_s))
    return Cost(kernel.launch_s.value + np.maximum(compute_s, memory_s), compute_s, memory_s, source)


def aligned(work: ExpertWork, kernel: GemmKernel, rows_each: int, tokens: Floats) -> Cost:
    """One layer's 8-bit experts in a layout that pads the rows of every expert to ``rows_each`` (DeepGEMM, contiguous).

    All padded rows are computed and moved, also for experts without a token: hidden states are gathered, and the
    product's output, its activation and the second output are written and read. ``kernel``: of an 8-bit product.
    """
    rows = tokens * (work.active / work.spread) + work.local * (rows_each - 1)
    compute_s = rows * (2.0 * work.weights / kernel.flops_per_s.value)
    memory_s = rows * ((4.0 * work.hidden + 10.0 * work.width) / kernel.bytes_per_s.value)
    seconds = ALIGNED_KERNELS * kernel.launch_s.value + compute_s + memory_s
    return Cost(seconds, compute_s, memory_s, np.full(tokens.shape, rate_code(kernel.flops_per_s)))


def formats(format_: PrecisionSpec) -> tuple[tuple[str, ...], ...]:
    """The tables' formats that stand for a precision: groups of one kind of kernel, the nearest first, its own at the start."""
    if format_.name == FORMAT_PRECISION["w4a16_mxfp4_triton"]:
        return ("w4a16_mxfp4_triton",), ("int4_wo",), ("bfloat16",)
    if format_.name == FORMAT_PRECISION["w4a16_mxfp4"]:
        return MARLIN, ("bfloat16",)
    known = {
        (4, 16): (MARLIN[::-1], ("bfloat16",)),
        (8, 8): (("fp8_block",), ("fp8",), ("bfloat16",)),
        (8, 16): (MARLIN, ("bfloat16",)),
        (4, 4): (("nvfp4",), ("int4_wo",), ("bfloat16",)),
    }
    return known.get((format_.weight_bits, format_.activation_bits), (("bfloat16",),))


class TabledExperts(NamedTuple):
    """Seconds of one layer's experts over tokens. ``exact``: measured in this shape, format and on this GPU."""

    line: Line
    exact: bool
    table: str


@dataclass(frozen=True)
class ExpertTables:
    """The tables of experts that were measured on ``reference``."""

    tables: TableSet
    reference: GpuSpec

    def narrow(self, format_: PrecisionSpec) -> bool:
        """Whether any kernel of the format was measured but that of 16-bit weights."""
        return any(f"experts/{name}" in self.tables.grids for group in formats(format_)[:-1] for name in group)

    def distance(self, work: ExpertWork, format_: PrecisionSpec) -> float:
        """How far the nearest shape is that was measured in the format's own kernels; infinite without such a kernel."""
        grids = [self.tables.grids.get(f"experts/{name}") for name in formats(format_)[0]]
        return min((_nearest(grid, work)[1] for grid in grids if grid), default=math.inf)

    def find(self, work: ExpertWork, format_: PrecisionSpec, gpu: GpuSpec) -> TabledExperts | None:
        """The seconds of experts on ``gpu``; None without any table."""
        grids = self.tables.grids
        groups = [[name for name in group if f"experts/{name}" in grids] for group in formats(format_)]
        group = next((group for group in groups if group), None)
        if group is None:
            return None
        nearest = {name: _nearest(grids[f"experts/{name}"], work) for name in group}
        name = min(group, key=lambda name: nearest[name][1])
        (place, distance), grid = nearest[name], grids[f"experts/{name}"]
        measured = ~np.isnan(grid.latency_s[place])
        tokens = grid.axes["tokens"][measured].astype(np.float64)
        seconds = np.exp(isotonic(np.log(grid.latency_s[place][measured])))
        theirs = self._ideal_s(
            _work(grid.axes["shape"][place], work), precision(FORMAT_PRECISION[name]), self.reference, tokens
        )
        whole = padded(work, format_)
        ours = self._ideal_s(whole, format_, gpu, tokens)
        own = distance == 0 and whole == work and gpu == self.reference
        same = own and name == formats(format_)[0][0] and format_.weight_bits == int(FORMAT_BITS[name])
        return TabledExperts(Line(tokens, seconds if same else seconds * ours / theirs), same, f"experts/{name}")

    @staticmethod
    def _ideal_s(work: ExpertWork, format_: PrecisionSpec, gpu: GpuSpec, tokens: Floats) -> Floats:
        on_gpu = format_.on(gpu)
        kernel = resolve(gpu, on_gpu, 1, experts=True).experts
        assert kernel is not None
        return roofline(work, kernel, on_gpu.effective_weight_bits, tokens).seconds


def _work(shape: Ints, like: ExpertWork) -> ExpertWork:
    count, active, hidden, width, split, spread = shape.tolist()
    return ExpertWork(like.layers, count, active, hidden, width // split, like.matrices, spread, split)


def _nearest(grid: Grid, work: ExpertWork) -> tuple[int, float]:
    """The measured shape nearest in the logarithms of what a GPU holds and does, and how far it is.

    Whole experts are measured on the GPU that gets most tokens; such rows stand for whole experts alone. A shape of which most
    sizes of batch could not be measured stands for none.
    """
    count, active, hidden, width, split, spread = grid.axes["shape"].astype(np.float64).T
    there = np.array([count / spread, active / spread, count, hidden, width / split])
    mine = np.array([work.local, work.active / work.spread, work.experts, work.hidden, work.width], dtype=np.float64)
    distances = np.abs(np.log(there) - np.log(mine)[:, None]).sum(axis=0)
    distances += 1e-9 * (split != work.split)  # the same work, split otherwise
    distances += FAR * ((spread > 1) != (work.spread > 1))
    distances[np.isnan(grid.latency_s).mean(axis=1) > MOST_MISSING] = np.inf
    place = int(distances.argmin())
    return place, 0.0 if distances[place] < 1e-6 else float(distances[place])
