"""Operators with measured tables inside: matrix products, attention and all-reduce.

What the tables lack stays as in ``operators``: the small kernels, and every operator of a format without rows.

* FP8 checkpoints use the per-tensor FP8 rows, as vLLM's CUTLASS kernel does.
* AWQ uses TensorRT-LLM's int4 weight-only rows, which stand in for vLLM's Marlin kernel, but never beats that kernel's
  compute rate (``kernels.yaml``: fitted on the FineServe authors' profile).
* QoQ has no rows at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fineserve_sim.catalog import Kind, Linear, gpu, linears
from fineserve_sim.catalog.specs import GpuSpec, ModelSpec, PrecisionSpec
from fineserve_sim.latency.operators import BYTES_16BIT, Cost, Floats, Operators
from fineserve_sim.latency.rates import Rates
from fineserve_sim.latency.tables import (
    DecodeTable,
    GemmTable,
    Line,
    PiecewiseLinear,
    PrefillTable,
    TableSet,
    isotonic,
    match_heads,
)

GEMM_DTYPE: Mapping[tuple[int, int], str] = {
    (16, 16): "bfloat16",
    (8, 8): "fp8",
    (4, 16): "int4_wo",
}  # weight, activation
KV_DTYPE: Mapping[int, str] = {16: "bfloat16", 8: "fp8"}


class TabledLinear(NamedTuple):
    """One matrix product by its table: the line over m, a floor of seconds a row, and where its seconds come from."""

    line: Line
    row_s: float
    launch_s: float
    inside: Kind
    covered: bool

    def seconds(self, rows: Floats) -> Floats:
        """Seconds of products with ``rows`` rows each (> 0)."""
        return np.maximum(self.line.at(rows), self.launch_s + rows * self.row_s if self.row_s else 0.0)

    def kind(self, rows: int) -> Kind:
        """Where the seconds of a product with ``rows`` rows come from."""
        if self.row_s and self.launch_s + rows * self.row_s > self.line.at(np.array([float(rows)]))[0]:
            return "fitted"
        return self.inside if self.covered and rows <= self.line.counts[-1] else "roofline"


@dataclass(frozen=True)
class TableOperators:
    """The operators of one GPU of an engine's TP group, by measured tables where there are any."""

    model: ModelSpec
    precision: PrecisionSpec
    tp: int
    gpu: GpuSpec
    rates: Rates
    tables: TableSet

    @cached_property
    def rooflines(self) -> Operators:
        """The same operators without tables."""
        return Operators(self.model, self.precision, self.tp, self.rates)

    @cached_property
    def reference(self) -> GpuSpec:
        """The GPU that the tables were measured on."""
        return gpu(self.tables.fingerprint["gpu"])

    @property
    def scaled(self) -> bool:
        """Whether the tables were measured on another GPU, and are scaled by the data sheets."""
        return self.gpu.name != self.reference.name

    @cached_property
    def products(self) -> dict[str, TabledLinear]:
        """The layer's matrix products that have a table."""
        dtype = GEMM_DTYPE.get((self.precision.weight_bits, self.precision.activation_bits), "none")
        if f"gemm/{dtype}" not in self.tables.grids:
            return {}
        return {name: self._product(dtype, shape) for name, shape in linears(self.model, self.tp).items()}

    @cached_property
    def head(self) -> TabledLinear:
        """The 16-bit lm_head."""
        return self._product("bfloat16", Linear(self.model.hidden_size, math.ceil(self.model.vocab_size / self.tp)))

    def _product(self, dtype: str, shape: Linear) -> TabledLinear:
        table = GemmTable(self.tables.grids[f"gemm/{dtype}"], dtype, self.reference)
        kernel = self.rates.gemm
        fitted = dtype == "int4_wo"
        return TabledLinear(
            line=table.line(shape.outputs, shape.inputs, self.gpu),
            row_s=2.0 * shape.inputs * shape.outputs / kernel.flops_per_s.value if fitted else 0.0,
            launch_s=kernel.launch_s.value if fitted else 0.0,
            inside="assumed" if fitted else "roofline" if self.scaled else "measured",
            covered=table.covers(shape.outputs, shape.inputs),
        )

    @cached_property
    def all_reduce(self) -> Line | None:
        """Seconds of one all-reduce against message bytes; None at TP 1, or where this group was not measured."""
        grid = self.tables.grids.get("all_reduce/bfloat16")
        if self.tp == 1 or grid is None or self.tp not in grid.axes["gpus"]:
            return None
        seconds = grid.latency_s[int(np.flatnonzero(grid.axes["gpus"] == self.tp)[0])]
        measured = ~np.isnan(seconds)
        line = np.exp(isotonic(np.log(seconds[measured])))
        rate = self.reference.peer_bytes_per_s / self.gpu.peer_bytes_per_s
        floor = line[0]
        return Line(grid.axes["message_bytes"][measured].astype(np.float64), floor + (line - floor) * rate)

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """Costs over all layers of what every batch token passes through; attention is not among them."""
        costs, layers = self.rooflines.by_tokens(tokens), self.model.layers
        del costs["attention_launch"]
        for name, product in self.products.items():
            costs[name] = _with_seconds(costs[name], layers * product.seconds(tokens))
        if self.all_reduce is not None:
            message_bytes = tokens * (self.model.hidden_size * BYTES_16BIT)
            costs["all_reduce"] = _with_seconds(costs["all_reduce"], 2 * layers * self.all_reduce.at(message_bytes))
        return costs

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        """Cost of the 16-bit lm_head over the rows that produce a token."""
        return {"lm_head": _with_seconds(self.rooflines.by_sampled(rows)["lm_head"], self.head.seconds(rows))}

    @cached_property
    def decode(self) -> DecodeTable | None:
        """Decode attention of a layer; None where nothing near was measured."""
        grid = self.tables.grids.get(f"decode_attention/{self._attention}")
        match = match_heads(grid, *self._heads) if grid else None
        return DecodeTable(grid, match) if grid and match else None

    @cached_property
    def prefill(self) -> PrefillTable | None:
        """Prefill attention of all layers; None where nothing near was measured."""
        grid = self.tables.grids.get(f"prefill_attention/{self._attention}")
        match = match_heads(grid, *self._heads) if grid else None
        ratio = self.reference.bf16_flops_per_s / self.gpu.bf16_flops_per_s
        return PrefillTable(grid, match, self.model.layers * ratio) if grid and match else None

    def decode_curve(self, batch: int) -> PiecewiseLinear:
        """Decode attention seconds of all layers against the batch's summed context, new tokens included."""
        if self.decode is None:
            launch_s = self.rates.attention.launch_s.value * self.model.layers
            return PiecewiseLinear([0.0], [launch_s], self.rooflines.kv_s)
        ratio = self.reference.memory_bytes_per_s / self.gpu.memory_bytes_per_s
        return self.decode.curve(batch, self.model.layers * ratio)

    @property
    def _attention(self) -> str:
        return f"{KV_DTYPE.get(self.precision.kv_bits, 'none')}/{self.model.head_dim}"

    @property
    def _heads(self) -> tuple[int, int]:
        return self.model.q_heads // self.tp, max(1, self.model.kv_heads // self.tp)


def _with_seconds(roofline: Cost, seconds: Floats) -> Cost:
    """Measured seconds; the busy times stay rooflines, and never exceed them."""
    return Cost(seconds, np.minimum(roofline.compute_s, seconds), np.minimum(roofline.memory_s, seconds))
