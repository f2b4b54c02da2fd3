"""Bytes that a model occupies on each GPU of its TP group (systems.md 1.1).

Linear layers and the vocabulary are split over the group; norms are replicated. KV heads are split, and replicated once
there are fewer of them than GPUs. Embeddings, lm_head, norms and biases keep 16 bits in every precision.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fineserve_sim.catalog.load import CatalogError
from fineserve_sim.catalog.specs import ModelSpec, PrecisionSpec

BYTES_16BIT = 2
SORTED_LOGIT_BYTES = 2 + 4 + 4 + 8 + 4 + 4 + 1 + 4 + 4
"""Bytes a logit at the peak of vLLM's top-k/top-p sampling: 16-bit and fp32 logits, sorted values and their int64 indices,
softmax, cumulative sum, mask, logits scattered back and final probabilities. Counted, not fitted."""
CAPTURES, LARGEST_CAPTURE, CAPTURE_BYTES = 67, 512, 8 * 2**20
"""Batch sizes of which vLLM captures a CUDA graph, the largest, and the bytes of one beside the pool (assumed)."""


class Linear(NamedTuple):
    """One matrix product of a layer on one GPU: (tokens, inputs) x (inputs, outputs)."""

    inputs: int
    outputs: int


def check_tp(model: ModelSpec, tp: int) -> None:
    """Raise CatalogError unless ``tp`` GPUs can share the model's heads and MLP evenly."""
    heads_split = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    if tp < 1 or model.q_heads % tp or model.intermediate_size % tp or not heads_split:
        raise CatalogError(
            f"model {model.name} cannot run at TP {tp}: {model.q_heads} query heads, {model.kv_heads} KV heads and "
            f"MLP width {model.intermediate_size} must split evenly"
        )


def kv_heads_per_gpu(model: ModelSpec, tp: int) -> int:
    """KV heads that each GPU holds: ``max(1, kv_heads / tp)``."""
    return max(1, model.kv_heads // tp)


def linears(model: ModelSpec, tp: int) -> dict[str, Linear]:
    """The matrix products of one layer as one GPU of the group computes them, in the order they run."""
    check_tp(model, tp)
    q_width = model.q_heads // tp * model.head_dim
    kv_width = kv_heads_per_gpu(model, tp) * model.head_dim
    mlp_width = model.intermediate_size // tp
    return {
        "qkv": Linear(model.hidden_size, q_width + 2 * kv_width),
        "o": Linear(q_width, model.hidden_size),
        "gate_up": Linear(model.hidden_size, mlp_width * (2 if model.gated_mlp else 1)),
        "down": Linear(mlp_width, model.hidden_size),
    }


def _layer_weights(model: ModelSpec, tp: int) -> int:
    return sum(linear.inputs * linear.outputs for linear in linears(model, tp).values())


def _layer_extras(model: ModelSpec, tp: int) -> int:
    """Norm and bias parameters of one layer."""
    shapes = linears(model, tp)
    norms = 2 * model.hidden_size + (2 * model.head_dim if model.qk_norm else 0)
    if model.bias == "qkv":
        return norms + shapes["qkv"].outputs
    if model.bias == "all":
        return 2 * norms + sum(linear.outputs for linear in shapes.values())
    return norms


def _outer_parameters(model: ModelSpec, tp: int) -> int:
    """Parameters outside the layers: embeddings, lm_head, positions, final norm."""
    tables = 1 if model.tied_embeddings else 2
    final_norm = model.hidden_size * (2 if model.bias == "all" else 1)
    vocabulary = tables * math.ceil(model.vocab_size / tp) * model.hidden_size
    return vocabulary + model.learned_positions * model.hidden_size + final_norm


def parameters(model: ModelSpec) -> int:
    """Number of parameters of the whole model."""
    return model.layers * (_layer_weights(model, 1) + _layer_extras(model, 1)) + _outer_parameters(model, 1)


def weight_bytes(model: ModelSpec, precision: PrecisionSpec, tp: int) -> int:
    """Weight bytes on each GPU, with the scales and zero points of quantised groups.

    Raises CatalogError when the model does not split over ``tp`` GPUs.
    """
    quantised = model.layers * _layer_weights(model, tp) * precision.effective_weight_bits / 8
    plain = (model.layers * _layer_extras(model, tp) + _outer_parameters(model, tp)) * BYTES_16BIT
    return math.ceil(quantised) + plain


def kv_token_bytes(model: ModelSpec, precision: PrecisionSpec, tp: int) -> int:
    """KV bytes of one token over all layers on each GPU, quantisation parameters included."""
    check_tp(model, tp)
    head_bytes = 2 * (model.head_dim * precision.kv_bits // 8 + precision.kv_quant_bytes)
    return model.layers * kv_heads_per_gpu(model, tp) * head_bytes


def graph_bytes(model: ModelSpec, tp: int) -> int:
    """Bytes on each GPU of the CUDA graphs that vLLM captures at its start: a pool that all share, and what is assumed of each.
    vLLM 0.32 takes them off its KV memory; earlier releases captured them outside of it.
    """
    return _layer_peak_bytes(model, tp, LARGEST_CAPTURE) + CAPTURES * CAPTURE_BYTES


def _layer_peak_bytes(model: ModelSpec, tp: int, tokens: int) -> int:
    """Inside a layer residual and hidden states live together with the widest product's output and what is computed from it,
    all in 16 bits."""
    shapes = linears(model, tp)
    mlp = shapes["gate_up"].outputs + shapes["down"].inputs
    attention = shapes["qkv"].outputs + shapes["o"].inputs
    return tokens * (2 * model.hidden_size + max(mlp, attention)) * BYTES_16BIT


def activation_bytes(model: ModelSpec, tp: int, tokens: int, sampled: int, logit_bytes: int | None = None) -> int:
    """Peak activation bytes on each GPU of a step with ``tokens`` batch tokens and ``sampled`` rows of logits.

    The step peaks either inside a layer or in the sampler. The sampler takes ``logit_bytes`` for each entry of the vocabulary
    on every rank, by default as vLLM's, which sorts.

    vLLM finds the peak by a dummy step at its start. That step has as many requests as ``max_num_seqs`` and its tokens allow
    (``_dummy_run`` of vLLM 0.32), each with a row of logits. 1,024 is the default of ``max_num_seqs`` on large GPUs, not a
    bound. Llama-3-8B at 8,192 tokens and 256 rows takes 1.26 GiB at any TP degree (vllm-project/vllm pull request 10511; 1.20
    here).
    """
    sampler = tokens * 2 * model.hidden_size * BYTES_16BIT + sampled * model.vocab_size * (
        logit_bytes or SORTED_LOGIT_BYTES
    )
    return max(_layer_peak_bytes(model, tp, tokens), sampler)
