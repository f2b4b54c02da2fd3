"""What one engine step runs, operator by operator, as rooflines over measured kernel rates.

An operator's kernel takes ``launch + max(flops / rate, bytes / rate)``. A cost here depends on the number of batch tokens
alone, or on the number of sampled rows alone. So a step model can tabulate it. What depends on context lengths is
``attention``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from fineserve_sim.catalog import (
    GemmKernel,
    GpuSpec,
    Linear,
    ModelSpec,
    PrecisionSpec,
    StreamKernel,
    kv_heads_per_gpu,
    kv_token_bytes,
    linears,
)
from fineserve_sim.latency.attention import Attention, RooflineAttention
from fineserve_sim.latency.cost import Cost, Floats, rate_code
from fineserve_sim.latency.rates import Provenance, Rates

BYTES_16BIT = 2
BITS_8 = 8
LINEARS = ("qkv", "o", "gate_up", "down")
"""The matrix products of a layer, as ``linears`` names them."""


def _gemm(kernel: GemmKernel, shape: Linear, rows: Floats, weight_bits: float, activation_bits: int) -> Cost:
    """A linear layer on ``rows`` rows: weights and activations are read, 16-bit outputs written."""
    weights = shape.inputs * shape.outputs
    compute_s = rows * (2 * weights / kernel.flops_per_s.value)
    row_bytes = shape.inputs * activation_bits / 8 + shape.outputs * BYTES_16BIT
    memory_s = (rows * row_bytes + weights * weight_bits / 8) / kernel.bytes_per_s.value
    source = np.where(compute_s > memory_s, rate_code(kernel.flops_per_s), rate_code(kernel.bytes_per_s))
    return Cost(kernel.launch_s.value + np.maximum(compute_s, memory_s), compute_s, memory_s, source)


def _stream(kernel: StreamKernel, row_elements: int, rows: Floats) -> Cost:
    """A kernel that moves ``row_elements`` 16-bit elements per row."""
    memory_s = rows * (row_elements * BYTES_16BIT / kernel.bytes_per_s.value)
    source = np.full(rows.shape, rate_code(kernel.bytes_per_s))
    return Cost(kernel.launch_s.value + memory_s, np.zeros_like(rows), memory_s, source)


class OperatorCosts(Protocol):
    """Where a step model takes its costs from."""

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """Costs by operator of what every batch token passes through, for steps with so many tokens (> 0)."""

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        """Cost of ``lm_head`` over the rows (> 0) that produce a token."""

    @property
    def attention(self) -> Attention:
        """Attention of a batch."""

    def provenance(self) -> list[Provenance]:
        """Every number behind these costs, with its source."""


@dataclass(frozen=True)
class FusedQuantisation:
    """Operators of an engine that quantises within the kernel before a matrix product, which then takes ``less_s`` less."""

    plain: OperatorCosts
    less_s: float
    layers: int

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """As ``plain``, matrix products sooner."""
        costs, less_s = self.plain.by_tokens(tokens), self.layers * self.less_s
        return {
            name: cost.with_seconds(np.maximum(cost.seconds - less_s, 0.0), cost.source) if name in LINEARS else cost
            for name, cost in costs.items()
        }

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        """As ``plain``: ``lm_head`` is not quantised."""
        return self.plain.by_sampled(rows)

    @property
    def attention(self) -> Attention:
        """As ``plain``."""
        return self.plain.attention

    def provenance(self) -> list[Provenance]:
        """As ``plain``."""
        return self.plain.provenance()


@dataclass(frozen=True)
class Operators:
    """The operators of one GPU of an engine's TP group, by roofline."""

    model: ModelSpec
    precision: PrecisionSpec
    tp: int
    gpu: GpuSpec
    rates: Rates

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """Costs over all layers of what every batch token passes through; attention is not among them."""
        model, layers = self.model, self.model.layers
        costs = {name: cost.times(layers) for name, cost in self._linears(tokens).items()}
        costs |= {name: cost.times(layers) for name, cost in self._elementwise(tokens).items()}
        costs["norm"] = _stream(self.rates.norm, 2 * model.hidden_size, tokens).times(2 * layers + 1)
        costs["embedding"] = _stream(self.rates.embedding, 2 * model.hidden_size, tokens)
        if self.rates.all_reduce is not None:
            costs["all_reduce"] = self._all_reduce(self.rates.all_reduce, tokens).times(2 * layers)
        return costs

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        """Cost of the 16-bit lm_head over the rows that produce a token."""
        shape = Linear(self.model.hidden_size, math.ceil(self.model.vocab_size / self.tp))
        return {"lm_head": _gemm(self.rates.lm_head, shape, rows, 16, 16)}

    @cached_property
    def attention(self) -> Attention:
        """Attention of a batch."""
        return RooflineAttention(*self._attention_work)

    def provenance(self) -> list[Provenance]:
        """Every number behind these costs, with its source."""
        return list(self.rates.provenance())

    @property
    def _attention_work(self) -> tuple[GemmKernel, int, int, int]:
        """Kernel, layers, FLOPs of a query-key pair (4 a head dimension), KV bytes of a token."""
        model = self.model
        pair_flops = model.layers * 4 * (model.q_heads // self.tp) * model.head_dim
        return self.rates.attention, model.layers, pair_flops, kv_token_bytes(model, self.precision, self.tp)

    def _linears(self, tokens: Floats) -> dict[str, Cost]:
        bits = self.precision.effective_weight_bits, self.precision.activation_bits
        shapes = linears(self.model, self.tp)
        return {name: _gemm(self.rates.gemm, shape, tokens, *bits) for name, shape in shapes.items()}

    def _elementwise(self, tokens: Floats) -> dict[str, Cost]:
        """The small kernels of one layer, besides its two norms."""
        model, rates = self.model, self.rates
        heads = model.q_heads // self.tp + kv_heads_per_gpu(model, self.tp)
        mlp_elements = (3 if model.gated_mlp else 2) * model.intermediate_size // self.tp
        costs = {
            "residual_add": _stream(rates.residual_add, 2 * 3 * model.hidden_size, tokens),
            "activation": _stream(rates.activation, mlp_elements, tokens),
        }
        if not model.learned_positions:
            costs["rope"] = _stream(rates.rope, 2 * heads * model.head_dim, tokens)
        if model.qk_norm:
            both = _stream(rates.norm, 2 * heads * model.head_dim, tokens)
            costs["qk_norm"] = both._replace(seconds=both.seconds + rates.norm.launch_s.value)
        return costs

    def _all_reduce(self, kernel: StreamKernel, tokens: Floats) -> Cost:
        """One ring all-reduce of the hidden states: the link is busy, compute units and memory count as idle."""
        message_bytes = tokens * (self.model.hidden_size * BYTES_16BIT)
        link_s = message_bytes * (2 * (self.tp - 1) / self.tp) / kernel.bytes_per_s.value
        idle = np.zeros_like(tokens)
        source = np.full(tokens.shape, rate_code(kernel.bytes_per_s))
        return Cost(kernel.launch_s.value + link_s, idle, idle, source)
