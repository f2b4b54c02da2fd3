"""One engine step, operator by operator, as rooflines over measured kernel rates.

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
    ExpertWork,
    GemmKernel,
    GpuSpec,
    Linear,
    ModelSpec,
    PrecisionSpec,
    StreamKernel,
    attention_layers,
    data_ranks,
    expert_work,
    kv_heads_per_gpu,
    kv_layer_bytes,
    mlp_layers,
    padded,
    products,
    state_bytes,
)
from fineserve_sim.catalog.architecture import AttentionLayers
from fineserve_sim.latency import experts
from fineserve_sim.latency.attention import Attention, RooflineAttention
from fineserve_sim.latency.cost import ASSUMED, Cost, Floats, rate_code
from fineserve_sim.latency.layered_attention import COPIES, Behind, Chosen, PerSequence, Summed, Windowed
from fineserve_sim.latency.rates import Provenance, Rates, resolve
from fineserve_sim.latency.tables import PiecewiseLinear

BYTES_16BIT = 2
BITS_4, BITS_8 = 4, 8
NORM_REDUCE_BYTES = 2 * 4
"""A token's norms across heads are a 32-bit sum of squares of Q, and one of K."""
SPARSE_HEADS = (64, 128)
"""Heads that FlashMLA's sparse kernel computes at least: on Hopper, and on Blackwell."""
GROUP_COSTS = ("experts", "exchange")
"""What depends on the tokens of all data-parallel ranks together."""
INPUT_S = 10.3e-9
"""Seconds that a product in 32 bits takes for each input, beside its FLOPs: a tile adds up one input after another. Measured
with cuBLAS on a GB200, 6,144 inputs to 256 outputs, 32 to 128 rows (vLLM pull request 47973). There, 256 to 1,024 rows come
out within 15 %."""
FEW_ROWS, FEW_ROWS_INPUT_S = 16, 3.2e-9
"""Up to so many rows cuBLAS splits the inputs over SMs: the mean of 4, 8 and 16 rows there."""
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


def float32_product(shape: Linear, rows: Floats, flops_per_s: float) -> Cost:
    """A linear layer in 32 bits on ``rows`` rows, by cuBLAS on CUDA cores with this peak."""
    compute_s = rows * (2.0 * shape.inputs * shape.outputs / flops_per_s)
    depth_s = shape.inputs * np.where(rows <= FEW_ROWS, FEW_ROWS_INPUT_S, INPUT_S)
    return Cost(depth_s + compute_s, compute_s, np.zeros_like(rows), np.full(rows.shape, ASSUMED))


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
class Adjusted:
    """The operators of ``plain``; a subclass changes the costs of some."""

    plain: OperatorCosts

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """See ``OperatorCosts``."""
        return self.plain.by_tokens(tokens)

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        """See ``OperatorCosts``."""
        return self.plain.by_sampled(rows)

    @property
    def attention(self) -> Attention:
        """See ``OperatorCosts``."""
        return self.plain.attention

    def provenance(self) -> list[Provenance]:
        """See ``OperatorCosts``."""
        return self.plain.provenance()


@dataclass(frozen=True)
class FusedQuantisation(Adjusted):
    """Operators of an engine that quantises within the kernel before a matrix product, which then takes ``less_s`` less."""

    less_s: float
    layers: int

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """As ``plain``, matrix products sooner."""
        costs, less_s = self.plain.by_tokens(tokens), self.layers * self.less_s
        return {
            name: cost.with_seconds(np.maximum(cost.seconds - less_s, 0.0), cost.source) if name in LINEARS else cost
            for name, cost in costs.items()
        }


@dataclass(frozen=True)
class AlignedExperts(Adjusted):
    """Operators of an engine that pads the rows of every 8-bit expert; else as ``plain``."""

    work: ExpertWork
    kernel: GemmKernel
    rows_each: int
    ranks: int = 1

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """As ``plain``, experts with padded rows."""
        cost = experts.aligned(self.work, self.kernel, self.rows_each, tokens * self.ranks).times(self.work.layers)
        return self.plain.by_tokens(tokens) | {"experts": cost}


@dataclass(frozen=True)
class Operators:
    """The operators of one GPU of an engine's TP group, by roofline."""

    model: ModelSpec
    precision: PrecisionSpec
    tp: int
    gpu: GpuSpec
    rates: Rates

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """Costs over all layers of what every batch token passes through; attention is not among them. Each data-parallel
        rank has ``tokens`` tokens. The experts compute the tokens of all ranks (``GROUP_COSTS``)."""
        model, layers = self.model, self.model.layers
        costs = self._linears(tokens)
        costs |= self._elementwise(tokens)
        costs["norm"] = _stream(self.rates.norm, 2 * model.hidden_size, tokens).times(model.norms * layers + 1)
        costs["embedding"] = _stream(self.rates.embedding, 2 * model.hidden_size, tokens)
        if self.rates.all_reduce is not None:
            hidden_bytes = model.hidden_size * BYTES_16BIT
            costs["all_reduce"] = self._all_reduce(self.rates.all_reduce, tokens, hidden_bytes).times(2 * layers)
            if model.norm_across_heads:
                norms = self._all_reduce(self.rates.all_reduce, tokens, NORM_REDUCE_BYTES)
                costs["norm_reduce"] = norms.times(layers)
        return costs | self._experts(tokens) if self.ranks == 1 else costs | self._of_all_ranks(tokens * self.ranks)

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return data_ranks(self.model)

    def _of_all_ranks(self, tokens: Floats) -> dict[str, Cost]:
        """Experts on the tokens of all data-parallel ranks, and the exchange around them: hidden states are gathered from all
        ranks, and outputs summed and scattered to them. Each moves half as many bytes over the links as an all-reduce."""
        layers = mlp_layers(self.model)[-1].layers
        return self._experts(tokens) | {"exchange": self._exchange(tokens / 2).times(2 * layers)}

    def _exchange(self, tokens: Floats) -> Cost:
        """One all-reduce of the hidden states of so many tokens among the ranks."""
        kernel = resolve(self.gpu, self.precision, self.ranks).all_reduce
        assert kernel is not None
        return self._all_reduce(kernel, tokens, self.model.hidden_size * BYTES_16BIT, self.ranks)

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        """Cost of the 16-bit lm_head over the rows that produce a token."""
        shape = Linear(self.model.hidden_size, math.ceil(self.model.vocab_size / self.tp))
        return {"lm_head": _gemm(self.rates.lm_head, shape, rows, 16, 16)}

    @cached_property
    def attention(self) -> Attention:
        """Attention of a batch: the sum over the model's kinds."""
        kinds = [self._attention_of(kind) for kind in attention_layers(self.model)]
        return kinds[0] if len(kinds) == 1 else Summed(tuple(kinds))

    def _attention_of(self, kind: AttentionLayers) -> Attention:
        if kind.kind == "linear":
            return self._linear(kind.layers)
        if kind.kind in ("latent", "chosen"):
            return self._latent(kind)
        full = self._grouped(kind.layers)
        return full if kind.window is None else Windowed(full, kind.window)

    def _grouped(self, layers: int) -> Attention:
        """Attention of so many layers with full attention."""
        return RooflineAttention(*self._attention_work(layers))

    def provenance(self) -> list[Provenance]:
        """Every number behind these costs, with its source."""
        among = resolve(self.gpu, self.precision, self.ranks).provenance() if self.ranks > 1 else ()
        exchange = [one for one in among if one.quantity.startswith("all_reduce.")]
        return [*self.rates.provenance(), *(one._replace(quantity=f"exchange.{one.quantity}") for one in exchange)]

    def _attention_work(self, layers: int) -> tuple[GemmKernel, int, int, int]:
        """Kernel, layers, FLOPs of a query-key pair (4 a head dimension), KV bytes of a token."""
        model = self.model
        pair_flops = layers * 4 * (model.q_heads // self.tp) * model.head_dim
        return self.rates.attention, layers, pair_flops, layers * kv_layer_bytes(model, self.precision, self.tp)

    def _latent(self, kind: AttentionLayers) -> Attention:
        """Compressed K and V. Decodes score against and sum the compressed vector; prompts unfold it, that of a prefix as well.

        With an index, decodes and prompts see the tokens that it chooses, all of them compressed; the index sees every token.
        The kernel computes full groups of ``SPARSE_HEADS`` heads and as many tokens as may be chosen, however few there are
        (``flashmla_sparse`` of vLLM 0.11 to 0.17, and FlashMLA's sparse prefill).
        """
        latent, heads, layers = self.model.latent, self.model.q_heads // self.tp, kind.layers
        assert latent is not None
        kept = latent.kv_rank + latent.rope_dim
        folded, unfold = 2 * heads * (kept + latent.kv_rank), 2 * latent.kv_rank
        token_bytes = layers * kept * self.precision.kv_bits // 8
        plain = 2 * heads * (self.model.head_dim + latent.rope_dim + latent.value_dim)
        unfold *= heads * (self.model.head_dim + latent.value_dim)
        kernel = self.rates.attention
        if kind.window is None:
            whole = (kernel, layers, layers * plain, token_bytes)
            return self._compressed(whole, self._flops_s(layers * folded), self._flops_s(layers * unfold))
        group = SPARSE_HEADS[self.gpu.fp4_flops_per_s is not None]
        folded = folded // heads * (-(-heads // group) * group)
        seen = RooflineAttention(kernel, layers, layers * folded, token_bytes)
        chosen = Chosen(Behind(seen, self._flops_s(layers * folded), 0.0), kind.window)
        if kind.kind == "chosen":
            return chosen
        index_flops = layers * 2 * latent.index_heads * latent.index_dim
        index = RooflineAttention(kernel, layers, index_flops, layers * (latent.index_dim + 4))
        return Summed((chosen, index))

    def _compressed(self, work: tuple[GemmKernel, int, int, int], folded_s: float, unfold_s: float) -> Attention:
        return Behind(RooflineAttention(*work), folded_s, unfold_s)

    def _flops_s(self, flops: int) -> float:
        return flops / self.rates.attention.flops_per_s.value

    def _linear(self, layers: int) -> Attention:
        """A decode reads and writes its state. A prompt's chunks of 64 tokens do so, too, beside products of the chunk."""
        linear = self.model.linear
        assert linear is not None
        kernel, heads = self.rates.attention, linear.value_heads // self.tp
        moved_s = 2 * state_bytes(self.model, self.tp) / kernel.bytes_per_s.value
        chunk_flops = 2 * heads * (3 * linear.key_dim * linear.value_dim + 64 * (2 * linear.key_dim + linear.value_dim))
        floor_s = 2 * kernel.launch_s.value * layers
        decodes = PiecewiseLinear([0.0], [floor_s], moved_s)
        prompts = PiecewiseLinear([0.0], [moved_s], self._flops_s(layers * chunk_flops))
        return PerSequence(decodes, prompts, floor_s, rate_code(kernel.bytes_per_s), self._copied_s)

    @property
    def _copied_s(self) -> float:
        """Seconds to copy a sequence's state out of the cache and back."""
        return COPIES * state_bytes(self.model, self.tp) / self.rates.attention.bytes_per_s.value

    def _linears(self, tokens: Floats) -> dict[str, Cost]:
        """The matrix products over all layers; products in 16 bits have the rates of ``lm_head``."""
        quantised = self.precision.effective_weight_bits, self.precision.activation_bits
        costs = {}
        for name, one in products(self.model, self.tp).items():
            plain = one.plain or self.precision.scope == "experts"
            kernel, bits = (self.rates.lm_head, (16, 16)) if plain else (self.rates.gemm, quantised)
            cost = self._float32(one.shape, tokens) if one.float32 else _gemm(kernel, one.shape, tokens, *bits)
            costs[name] = cost.times(one.layers)
        return costs

    def _float32(self, shape: Linear, tokens: Floats) -> Cost:
        """A product in 32 bits, behind a kernel that widens its input."""
        product = float32_product(shape, tokens, self.gpu.cuda_core_flops_per_s)
        widened = _stream(self.rates.activation, 3 * shape.inputs, tokens)
        return product._replace(seconds=product.seconds + widened.seconds, memory_s=widened.memory_s)

    def _experts(self, tokens: Floats) -> dict[str, Cost]:
        """The experts of all layers, where there are any."""
        work, kernel = expert_work(self.model, self.tp), self.rates.experts
        if work is None or kernel is None:
            return {}
        work = padded(work, self.precision)
        return {
            "experts": experts.roofline(work, kernel, self.precision.effective_weight_bits, tokens).times(work.layers)
        }

    def _elementwise(self, tokens: Floats) -> dict[str, Cost]:
        """The small kernels of all layers, besides norms. Experts have their own activation."""
        model, rates, layers = self.model, self.rates, self.model.layers
        heads = model.q_heads // self.tp + kv_heads_per_gpu(model, self.tp)
        costs = {"residual_add": _stream(rates.residual_add, 2 * 3 * model.hidden_size, tokens).times(layers)}
        for mlp in mlp_layers(model):
            if mlp.width:
                elements = (3 if model.gated_mlp else 2) * mlp.width // self.tp
                name = "shared_activation" if mlp.experts else "activation"
                costs[name] = _stream(rates.activation, elements, tokens).times(mlp.layers)
        attending = sum(kind.layers for kind in attention_layers(model) if kind.kind != "linear")
        if not model.learned_positions:
            turned = model.latent.rope_dim if model.latent else model.head_dim
            costs["rope"] = _stream(rates.rope, 2 * heads * turned, tokens).times(attending)
        if model.qk_norm:
            both = _stream(rates.norm, 2 * heads * model.head_dim, tokens)
            costs["qk_norm"] = both._replace(seconds=both.seconds + rates.norm.launch_s.value).times(attending)
        return costs

    def _all_reduce(self, kernel: StreamKernel, tokens: Floats, token_bytes: int, members: int = 0) -> Cost:
        """One ring all-reduce of so much a token among ``members`` GPUs, by default the TP group: the link is busy, compute
        units and memory count as idle."""
        message_bytes, members = tokens * token_bytes, members or self.tp
        link_s = message_bytes * (2 * (members - 1) / members) / kernel.bytes_per_s.value
        idle = np.zeros_like(tokens)
        source = np.full(tokens.shape, rate_code(kernel.bytes_per_s))
        return Cost(kernel.launch_s.value + link_s, idle, idle, source)
