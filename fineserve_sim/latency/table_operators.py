"""Operators with measured tables inside: matrix products, attention and all-reduce.

Operators without rows stay as in ``operators``: the small kernels, and every operator of a format that no table has.

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

from fineserve_sim.catalog import GemmKernel, GpuSpec, Kind, Linear, Product, expert_work, gpu, products
from fineserve_sim.latency.attention import Attention, TableAttention
from fineserve_sim.latency.cost import ASSUMED, EXTRAPOLATED, FITTED, MEASURED, ROOFLINE, Codes, Cost, Floats
from fineserve_sim.latency.experts import ExpertTables, TabledExperts
from fineserve_sim.latency.layered_attention import Behind, PerSequence
from fineserve_sim.latency.operators import BITS_4, BYTES_16BIT, NORM_REDUCE_BYTES, Operators
from fineserve_sim.latency.rates import Provenance
from fineserve_sim.latency.tables import (
    DEVICES,
    DecodeTable,
    GemmTable,
    Grid,
    HeadMatch,
    Line,
    PiecewiseLinear,
    PrefillTable,
    TableSet,
    as_served,
    isotonic,
    match_heads,
    shipped_layers,
    slower_memory,
)
from fineserve_sim.latency.tables.grids import Ints

GEMM_DTYPE: Mapping[tuple[int, int], str] = {
    (16, 16): "bfloat16",
    (8, 8): "fp8",
    (4, 16): "int4_wo",
}  # weight, activation
WEIGHT_ONLY = {(8, 16): "fp8_wo"}
"""Products in 16 bits on narrower weights: the 16-bit table's ratio to the roofline, with the bytes of these weights."""
KV_DTYPE: Mapping[int, str] = {16: "bfloat16", 8: "fp8"}
MODULE = ("qkv_a", "q_b", "kv_b", "o")
"""The products inside a module of latent attention."""
COMMON_HEAD_DIMS = (64, 128)
"""The operators of a GPU's first tables; others are beside them."""
STAND_IN = "int4_wo"  # another backend's kernel


def _through(counts: Ints, seconds: Floats) -> PiecewiseLinear:
    """A line through the measured points that never falls, beyond them in proportion."""
    known = ~np.isnan(seconds)
    values = np.maximum.accumulate(seconds[known]).tolist()
    starts = counts[known].astype(np.float64).tolist()
    return PiecewiseLinear([0.0, *starts], [values[0], *values], values[-1] / starts[-1])


class TabledLinear(NamedTuple):
    """One matrix product by its table.

    ``line`` gives seconds over m. ``launch_s`` and ``row_s`` are a fitted floor; 0: none. ``inside`` and ``beyond`` say where
    seconds come from, within the measured rows and above them.
    """

    line: Line
    row_s: float
    launch_s: float
    inside: int
    beyond: int

    def cost(self, roofline: Cost, rows: Floats, count: int) -> Cost:
        """``count`` products with ``rows`` rows each (> 0); ``roofline`` is the cost of as many."""
        tabled_s, floor_s = self.line.at(rows), (self.launch_s + rows * self.row_s) * (self.row_s > 0)
        source = np.where(rows <= self.line.counts[-1], self.inside, self.beyond)
        return roofline.with_seconds(
            count * np.maximum(tabled_s, floor_s), np.where(floor_s > tabled_s, FITTED, source)
        )


@dataclass(frozen=True)
class TableOperators(Operators):
    """The operators of one GPU of an engine's TP group, by measured tables where there are any."""

    tables: TableSet

    @cached_property
    def reference(self) -> GpuSpec:
        """The GPU that the tables were measured on."""
        return gpu(self.tables.fingerprint["gpu"])

    @property
    def scaled(self) -> bool:
        """Whether the tables were measured on another GPU, and are scaled by the data sheets."""
        return self.gpu.name != self.reference.name

    @property
    def _inside(self) -> int:
        return ROOFLINE if self.scaled else MEASURED

    @property
    def _beyond(self) -> int:
        return ROOFLINE if self.scaled else EXTRAPOLATED

    @cached_property
    def products(self) -> dict[str, TabledLinear]:
        """The layer's matrix products that have a table."""
        if f"gemm/{self._gemm}" not in self.tables.grids:
            return {}
        found = products(self.model, self.tp)
        return {name: self._product(*self._format_of(one), one.shape) for name, one in found.items() if not one.float32}

    def _format_of(self, product: Product) -> tuple[str, str | None]:
        """Its table, and what is unpacked in its kernel."""
        plain = product.plain or self.precision.scope == "experts"
        return ("bfloat16", None) if plain else (self._gemm, self._unpacked)

    @property
    def _bits(self) -> tuple[int, int]:
        """Of weights and activations of linear layers."""
        narrow = self.precision.scope == "linears"
        return (self.precision.weight_bits if narrow else 16), self.precision.activation_bits

    @property
    def _gemm(self) -> str:
        return "bfloat16" if self._unpacked else GEMM_DTYPE.get(self._bits, "none")

    @property
    def _unpacked(self) -> str | None:
        return WEIGHT_ONLY.get(self._bits)

    @property
    def _attention_names(self) -> tuple[str, str]:
        """Of the tables of decode and prefill attention."""
        variant = f"{KV_DTYPE.get(self.precision.kv_bits, 'none')}/{self.model.head_dim}"
        return f"decode_attention/{variant}", f"prefill_attention/{variant}"

    @property
    def _reduce(self) -> str:
        return "all_reduce/bfloat16" if self.tp > 1 or self.ranks > 1 else "none"

    @cached_property
    def head(self) -> TabledLinear:
        """The 16-bit lm_head."""
        return self._product(
            "bfloat16", None, Linear(self.model.hidden_size, math.ceil(self.model.vocab_size / self.tp))
        )

    def _product(self, dtype: str, unpacked: str | None, shape: Linear) -> TabledLinear:
        """``unpacked``: weights that become ``dtype`` within the kernel."""
        table = GemmTable(as_served(self.tables.grids[f"gemm/{dtype}"], dtype, self.reference), dtype, self.reference)
        kernel = self.rates.gemm
        fitted = dtype == STAND_IN
        inside = ASSUMED if fitted or unpacked else self._inside
        return TabledLinear(
            line=table.line(shape.outputs, shape.inputs, self.gpu, unpacked),
            row_s=2.0 * shape.inputs * shape.outputs / kernel.flops_per_s.value if fitted else 0.0,
            launch_s=kernel.launch_s.value if fitted else 0.0,
            inside=inside if table.covers(shape.outputs, shape.inputs) else self._beyond,
            beyond=self._beyond,
        )

    @cached_property
    def reduce_line(self) -> Line | None:
        """Seconds of one all-reduce against message bytes; None at TP 1, or where this group was not measured."""
        return self._reduce_among(self.tp) if self.tp > 1 else None

    @cached_property
    def exchange_line(self) -> Line | None:
        """As ``reduce_line``, among data-parallel ranks."""
        return self._reduce_among(self.ranks)

    def _reduce_among(self, gpus: int) -> Line | None:
        grid = self.tables.grids.get("all_reduce/bfloat16")
        if grid is None or gpus not in grid.axes["gpus"]:
            return None
        seconds = grid.latency_s[int(np.flatnonzero(grid.axes["gpus"] == gpus)[0])]
        measured = ~np.isnan(seconds)
        line = np.exp(isotonic(np.log(seconds[measured])))
        rate = self.reference.peer_bytes_per_s / self.gpu.peer_bytes_per_s
        floor = line[0]
        return Line(grid.axes["message_bytes"][measured].astype(np.float64), floor + (line - floor) * rate)

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        costs, layers, found = super().by_tokens(tokens), self.model.layers, products(self.model, self.tp)
        for name, product in self.products.items():
            costs[name] = product.cost(costs[name], tokens, found[name].layers)
        if self.reduce_line is not None:
            message_bytes = tokens * (self.model.hidden_size * BYTES_16BIT)
            source: Codes = np.where(message_bytes <= self.reduce_line.counts[-1], self._inside, self._beyond)
            seconds = 2 * layers * self.reduce_line.at(message_bytes)
            costs["all_reduce"] = costs["all_reduce"].with_seconds(seconds, source)
            if "norm_reduce" in costs:
                norms_s = layers * self.reduce_line.at(tokens * NORM_REDUCE_BYTES)
                costs["norm_reduce"] = costs["norm_reduce"].with_seconds(norms_s, source)
        return costs

    def _exchange(self, tokens: Floats) -> Cost:
        cost, line = super()._exchange(tokens), self.exchange_line
        if line is None:
            return cost
        message_bytes = tokens * (self.model.hidden_size * BYTES_16BIT)
        source: Codes = np.where(message_bytes <= line.counts[-1], self._inside, self._beyond)
        return cost.with_seconds(line.at(message_bytes), source)

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        return {"lm_head": self.head.cost(super().by_sampled(rows)["lm_head"], rows, 1)}

    @cached_property
    def layer_tables(self) -> TableSet:
        """The tables of layers that not every model has."""
        return shipped_layers(self.reference.name) if self.reference.name in DEVICES else self.tables

    @cached_property
    def expert_table(self) -> TabledExperts | None:
        """Experts by their table, if there are any."""
        work = expert_work(self.model, self.tp)
        return self._expert_tables.find(work, self.precision, self.gpu) if work else None

    @cached_property
    def _expert_tables(self) -> ExpertTables:
        """The GPU's own tables. If they lack a kernel of narrow weights, the tables of the GPU that has the nearest shape."""
        own, work = ExpertTables(self.layer_tables, self.reference), expert_work(self.model, self.tp)
        bits = self.precision.weight_bits
        narrow = bits == BITS_4 or bits < self.precision.activation_bits
        if work is None or not narrow or own.narrow(self.precision):
            return own
        others = [ExpertTables(shipped_layers(name), gpu(name)) for name in DEVICES]
        far = [one.distance(work, self.precision) for one in others]
        return others[far.index(min(far))] if math.isfinite(min(far)) else own

    def _experts(self, tokens: Floats) -> dict[str, Cost]:
        costs, table = super()._experts(tokens), self.expert_table
        if not costs or table is None:
            return costs
        seconds = table.line.at(tokens)
        inside = self._inside if table.exact else ASSUMED
        source: Codes = np.where(tokens <= table.line.counts[-1], inside, self._beyond)
        layers = self.model.layers - (self.model.experts.dense_layers if self.model.experts else 0)
        return {"experts": costs["experts"].with_seconds(layers * seconds, source)}

    def _grouped(self, layers: int) -> Attention:
        decode, prefill = map(self._attention_table, self._attention_names)
        return self._tabled(self._attention_work(layers), decode, prefill)

    def _tabled(
        self,
        work: tuple[GemmKernel, int, int, int],
        decode: tuple[Grid, HeadMatch] | None,
        prefill: tuple[Grid, HeadMatch] | None,
    ) -> TableAttention:
        compute = self.reference.bf16_flops_per_s / self.gpu.bf16_flops_per_s
        memory, read_s = self.reference.memory_bytes_per_s / self.gpu.memory_bytes_per_s, 0.0
        if slower_memory(self.gpu, self.reference):
            memory, read_s = 1.0, work[3] / (self._reached * self.gpu.memory_bytes_per_s)
        return TableAttention(
            *work,
            decode_table=DecodeTable(*decode) if decode else None,
            prefill_table=PrefillTable(*prefill, work[1], compute) if prefill else None,
            decode_slowdown=memory,
            read_s=read_s,
            inside=self._inside,
        )

    @cached_property
    def _reached(self) -> float:
        """The largest part of its memory rate at which the tables' GPU was seen to read."""
        return GemmTable(self.tables.grids["gemm/bfloat16"], "bfloat16", self.reference).reached

    def _compressed(self, work: tuple[GemmKernel, int, int, int], folded_s: float, unfold_s: float) -> Attention:
        """By the tables of modules, less their products, which ``by_tokens`` counts."""
        variant = KV_DTYPE.get(self.precision.kv_bits, "none")
        decode, prefill = (self._module(f"{phase}_latent/{variant}") for phase in ("decode", "prefill"))
        if decode is None and prefill is None:
            return super()._compressed(work, folded_s, unfold_s)
        return Behind(self._tabled(work, decode, prefill), None if decode else folded_s, unfold_s)

    def _module(self, name: str) -> tuple[Grid, HeadMatch] | None:
        """What a module takes beyond its products in 16 bits and beyond its smallest call, and a launch.

        The smallest call holds the module's norms, rotations and copies, which a step counts apart or replays from a graph.
        """
        grid = self.layer_tables.grids.get(name)
        match = match_heads(grid, self.model.q_heads // self.tp, 1) if grid else None
        if grid is None or match is None:
            return None
        (work,) = (axis for axis in grid.axes if axis in ("context", "new_tokens"))
        each = grid.axes[work] if work == "new_tokens" else np.ones_like(grid.axes[work])
        tokens = (grid.axes["batch"][:, None] * each[None, :]).astype(np.float64)
        lines = [self._product("bfloat16", None, products(self.model, self.tp)[one].shape).line for one in MODULE]
        left = match.latency_s - sum(line.at(tokens) for line in lines)
        launch_s = self.rates.attention.launch_s.value
        beyond = np.maximum(left - left[0, 0], 0.0) + launch_s
        return grid, match._replace(latency_s=np.where(np.isnan(left), np.nan, beyond))

    def _linear(self, layers: int) -> Attention:
        """By tables of the convolution and the delta rule for these heads; a step's prompts count as one."""
        linear = self.model.linear
        assert linear is not None
        heads = [linear.key_heads // self.tp, linear.value_heads // self.tp]
        found = [self.layer_tables.grids.get(f"{phase}_linear") for phase in ("decode", "prefill")]
        if self.scaled or not all(grid is not None and heads in grid.axes["heads"].tolist() for grid in found):
            return super()._linear(layers)
        decode, prefill = (grid for grid in found if grid is not None)
        by_batch = decode.latency_s[decode.axes["heads"].tolist().index(heads)]
        by_tokens = prefill.latency_s[prefill.axes["heads"].tolist().index(heads), 0]
        decodes = _through(decode.axes["batch"], layers * by_batch)
        prompts = _through(prefill.axes["new_tokens"], layers * by_tokens)
        return PerSequence(decodes, prompts, decodes.values[0], self._inside, self._copied_s)

    def _attention_table(self, name: str) -> tuple[Grid, HeadMatch] | None:
        """A grid, and its rows for these heads; None where nothing near was measured."""
        grid = self.tables.grids.get(name)
        if grid is None and self.model.head_dim not in COMMON_HEAD_DIMS:
            grid = self.layer_tables.grids.get(name)
        match = (
            match_heads(grid, self.model.q_heads // self.tp, max(1, self.model.kv_heads // self.tp)) if grid else None
        )
        return (grid, match) if grid and match else None

    def provenance(self) -> list[Provenance]:
        """Every number behind these costs that is not in the tables, with its source, and every table behind them."""
        plain = (f"gemm/{self._gemm}", "gemm/bfloat16", *self._attention_names, self._reduce)
        found = super().provenance()
        experts = [self.expert_table.table] if self.expert_table else []
        layers, theirs = (self._layer_names, self.layer_tables), (experts, self._expert_tables.tables)
        for names, tables in ((dict.fromkeys(plain), self.tables), theirs, layers):
            found += [self._table(name, tables) for name in names if name in tables.grids]
        return found

    @property
    def _layer_names(self) -> list[str]:
        """Of the tables of layers that not every model has."""
        kv = KV_DTYPE.get(self.precision.kv_bits, "none")
        names = [f"{phase}_latent/{kv}" for phase in ("decode", "prefill") if self.model.latent]
        names += [f"{phase}_linear" for phase in ("decode", "prefill") if self.model.linear]
        return names + [name for name in self._attention_names if self.model.head_dim not in COMMON_HEAD_DIMS]

    def _table(self, name: str, tables: TableSet) -> Provenance:
        rows = float(np.isfinite(tables.grids[name].latency_s).sum())
        operator = name.split("/", maxsplit=1)[0]
        experts_stand_in = operator == "experts" and not (self.expert_table and self.expert_table.exact)
        assumed = name == f"gemm/{STAND_IN}" or experts_stand_in
        kind: Kind = "assumed" if assumed else "roofline" if self.scaled else "measured"
        key = f"{operator}/{STAND_IN if name == f'gemm/{STAND_IN}' else 'all'}"
        origin = ", ".join(tables.fingerprint[f"{key} {what}"] for what in ("source", "backend", "licence"))
        return Provenance(f"table.{name}", rows, "rows", kind, origin)
