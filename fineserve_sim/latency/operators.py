"""What one engine step runs, operator by operator, as rooflines over measured kernel rates.

An operator's kernel takes ``launch + max(flops / rate, bytes / rate)``. The costs here depend on the number of batch
tokens alone, or on the number of sampled rows alone, so that a step model can tabulate them; what depends on context
lengths (attention) is linear in running sums and comes as coefficients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.catalog import (
    GemmKernel,
    Linear,
    ModelSpec,
    PrecisionSpec,
    StreamKernel,
    kv_heads_per_gpu,
    kv_token_bytes,
    linears,
)
from fineserve_sim.latency.rates import Rates

Floats = NDArray[np.float64]
BYTES_16BIT = 2


class Cost(NamedTuple):
    """Arrays over batch sizes: seconds in all, and those during which compute units or memory bandwidth are needed."""

    seconds: Floats
    compute_s: Floats
    memory_s: Floats

    def times(self, count: int) -> Cost:
        """The cost of running the operator ``count`` times."""
        return Cost(count * self.seconds, count * self.compute_s, count * self.memory_s)


def total(costs: dict[str, Cost]) -> Cost:
    """Sum over operators, one after the other."""
    seconds, compute_s, memory_s = (sum(parts[1:], parts[0]) for parts in zip(*costs.values(), strict=True))
    return Cost(seconds, compute_s, memory_s)


def _gemm(kernel: GemmKernel, shape: Linear, rows: Floats, weight_bits: float, activation_bits: int) -> Cost:
    """A linear layer on ``rows`` rows: weights and activations are read, 16-bit outputs written."""
    weights = shape.inputs * shape.outputs
    compute_s = rows * (2 * weights / kernel.flops_per_s.value)
    row_bytes = shape.inputs * activation_bits / 8 + shape.outputs * BYTES_16BIT
    memory_s = (rows * row_bytes + weights * weight_bits / 8) / kernel.bytes_per_s.value
    return Cost(kernel.launch_s.value + np.maximum(compute_s, memory_s), compute_s, memory_s)


def _stream(kernel: StreamKernel, row_elements: int, rows: Floats) -> Cost:
    """A kernel that moves ``row_elements`` 16-bit elements per row."""
    memory_s = rows * (row_elements * BYTES_16BIT / kernel.bytes_per_s.value)
    return Cost(kernel.launch_s.value + memory_s, np.zeros_like(rows), memory_s)


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of one GPU of an engine's TP group."""

    model: ModelSpec
    precision: PrecisionSpec
    tp: int
    rates: Rates

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """Costs over all layers of what every batch token passes through, attention's launches included."""
        model, layers = self.model, self.model.layers
        costs = {name: cost.times(layers) for name, cost in self._linears(tokens).items()}
        costs |= {name: cost.times(layers) for name, cost in self._elementwise(tokens).items()}
        costs["norm"] = _stream(self.rates.norm, 2 * model.hidden_size, tokens).times(2 * layers + 1)
        costs["embedding"] = _stream(self.rates.embedding, 2 * model.hidden_size, tokens)
        launches = np.full_like(tokens, self.rates.attention.launch_s.value * layers)
        costs["attention_launch"] = Cost(launches, np.zeros_like(tokens), np.zeros_like(tokens))
        if self.rates.all_reduce is not None:
            costs["all_reduce"] = self._all_reduce(self.rates.all_reduce, tokens).times(2 * layers)
        return costs

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        """Cost of the 16-bit lm_head over the rows that produce a token."""
        shape = Linear(self.model.hidden_size, math.ceil(self.model.vocab_size / self.tp))
        return {"lm_head": _gemm(self.rates.lm_head, shape, rows, 16, 16)}

    @property
    def pair_s(self) -> float:
        """Attention seconds, over all layers, of one query-key pair of a prefill (4 flops per head dimension)."""
        heads = self.model.q_heads // self.tp
        return self.model.layers * 4 * heads * self.model.head_dim / self.rates.attention.flops_per_s.value

    @property
    def kv_s(self) -> float:
        """Seconds to read the KV of one cached token over all layers."""
        return kv_token_bytes(self.model, self.precision, self.tp) / self.rates.attention.bytes_per_s.value

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
        return Cost(kernel.launch_s.value + link_s, idle, idle)
