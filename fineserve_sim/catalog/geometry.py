"""Bytes that a model occupies on each GPU of its TP group (systems.md 1.1).

Linear layers and the vocabulary are split over the group; norms and routers are replicated. KV heads are split, and
replicated once there are fewer of them than GPUs. Experts are split or spread (``architecture``), over the GPUs of all ranks
of attention in data parallel. Embeddings, lm_head, norms and biases keep 16 bits in every precision.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fineserve_sim.catalog.architecture import LinearAttention, ModelSpec, attention_layers, mlp_layers
from fineserve_sim.catalog.experts import MARLIN, data_ranks, expert_work, padded
from fineserve_sim.catalog.load import CatalogError
from fineserve_sim.catalog.specs import PrecisionSpec

BYTES_16BIT = 2
SORTED_LOGIT_BYTES = 2 + 4 + 4 + 8 + 4 + 4 + 1 + 4 + 4
"""Bytes a logit at the peak of vLLM's top-k/top-p sampling: 16-bit and fp32 logits, sorted values and their int64 indices,
softmax, cumulative sum, mask, logits scattered back and final probabilities. Counted, not fitted."""
EXPERT_CHUNK = 32768
"""Tokens whose experts vLLM computes at a time (``VLLM_FUSED_MOE_CHUNK_SIZE``)."""
CAPTURES, LARGEST_CAPTURE, CAPTURE_BYTES = 67, 512, 8 * 2**20
"""Batch sizes of which vLLM captures a CUDA graph, the largest, and the bytes of one beside the pool (assumed)."""


class Linear(NamedTuple):
    """One matrix product of a layer on one GPU: (tokens, inputs) x (inputs, outputs)."""

    inputs: int
    outputs: int

    @property
    def weights(self) -> int:
        return self.inputs * self.outputs


class Product(NamedTuple):
    """A matrix product that ``layers`` layers have; ``plain``: in 16 bits in every precision, or in 32 (``float32``)."""

    shape: Linear
    layers: int
    plain: bool = False
    float32: bool = False


def check_tp(model: ModelSpec, tp: int) -> None:
    """Raise CatalogError unless ``tp`` GPUs can share the model's heads, MLP and experts evenly."""
    heads_split = model.kv_heads % tp == 0 or tp % model.kv_heads == 0
    widths = [mlp.width for mlp in mlp_layers(model)]
    if tp < 1 or model.q_heads % tp or any(width % tp for width in widths) or not heads_split:
        raise CatalogError(
            f"model {model.name} cannot run at TP {tp}: {model.q_heads} query heads, {model.kv_heads} KV heads and "
            f"MLP width {' and '.join(str(width) for width in widths if width)} must split evenly"
        )
    experts, linear = model.experts, model.linear
    ranks = data_ranks(model)
    if experts and (experts.width if experts.spread == "split" else experts.count) % (tp * ranks):
        what = f"experts {experts.width} wide" if experts.spread == "split" else f"{experts.count} whole experts"
        where = f"TP {tp}" if ranks == 1 else f"TP {tp} in {ranks} data-parallel ranks"
        raise CatalogError(f"model {model.name} cannot run at {where}: {what} must split evenly")
    if linear and (linear.key_heads % tp or linear.value_heads % tp):
        heads = f"{linear.key_heads} key heads and {linear.value_heads} value heads of linear attention"
        raise CatalogError(f"model {model.name} cannot run at TP {tp}: {heads} must split evenly")


def kv_heads_per_gpu(model: ModelSpec, tp: int) -> int:
    """KV heads that each GPU holds: ``max(1, kv_heads / tp)``."""
    return max(1, model.kv_heads // tp)


def products(model: ModelSpec, tp: int) -> dict[str, Product]:
    """The matrix products of the model's layers, apart from experts, as one GPU of the group computes them."""
    check_tp(model, tp)
    found: dict[str, Product] = {}
    for attention in attention_layers(model):
        shapes = {"grouped": _grouped, "latent": _indexed, "chosen": _latent, "linear": _linear}[attention.kind](
            model, tp
        )
        for name, shape in shapes.items():
            found[name] = Product(shape, attention.layers + (found[name].layers if name in found else 0))
    for mlp in mlp_layers(model):
        beside = "shared_" if mlp.experts else ""
        if mlp.experts:
            router = Linear(model.hidden_size, mlp.experts.count)
            found["router"] = Product(router, mlp.layers, plain=True, float32=model.float32_router)
        if mlp.width:
            width = mlp.width // tp
            gate_up = Linear(model.hidden_size, width * (2 if model.gated_mlp else 1))
            found[f"{beside}gate_up"] = Product(gate_up, mlp.layers)
            found[f"{beside}down"] = Product(Linear(width, model.hidden_size), mlp.layers)
    return found


def _grouped(model: ModelSpec, tp: int) -> dict[str, Linear]:
    q_width = model.q_heads // tp * model.head_dim
    kv_width = kv_heads_per_gpu(model, tp) * model.head_dim
    queries = q_width * (2 if model.output_gate else 1)
    return {"qkv": Linear(model.hidden_size, queries + 2 * kv_width), "o": Linear(q_width, model.hidden_size)}


def _latent(model: ModelSpec, tp: int) -> dict[str, Linear]:
    """Compressions are on every GPU, heads are split. ``kv_b`` unfolds K and V; decodes fold it into queries and outputs."""
    latent, heads = model.latent, model.q_heads // tp
    assert latent is not None
    head_width, kept = model.head_dim + latent.rope_dim, latent.kv_rank + latent.rope_dim
    return {
        "qkv_a": Linear(model.hidden_size, latent.q_rank + kept),
        "q_b": Linear(latent.q_rank or model.hidden_size, heads * head_width),
        "kv_b": Linear(latent.kv_rank, heads * (model.head_dim + latent.value_dim)),
        "o": Linear(heads * latent.value_dim, model.hidden_size),
    }


def _indexed(model: ModelSpec, tp: int) -> dict[str, Linear]:
    """Latent attention with its index, if it has one, which is whole on every GPU."""
    shapes, latent = _latent(model, tp), model.latent
    assert latent is not None
    if latent.index_tokens:
        shapes["index_q"] = Linear(latent.q_rank, latent.index_heads * latent.index_dim)
        shapes["index_k"] = Linear(model.hidden_size, latent.index_dim + latent.index_heads)
    return shapes


def _linear(model: ModelSpec, tp: int) -> dict[str, Linear]:
    linear = model.linear
    assert linear is not None
    keys, values = linear.key_heads * linear.key_dim // tp, linear.value_heads * linear.value_dim // tp
    return {
        "linear_in": Linear(model.hidden_size, 2 * keys + 2 * values),
        "linear_gates": Linear(model.hidden_size, 2 * linear.value_heads // tp),
        "linear_out": Linear(values, model.hidden_size),
    }


def linears(model: ModelSpec, tp: int) -> dict[str, Linear]:
    """The shapes of ``products``, in the order they run."""
    return {name: product.shape for name, product in products(model, tp).items()}


def drafted(model: ModelSpec, tp: int) -> tuple[ModelSpec, int] | None:
    """The draft model, and over how many of the GPUs it is split: all, or where it does not split, none."""
    if model.speculation is None:
        return None
    draft = model.speculation.draft
    try:
        check_tp(draft, tp)
    except CatalogError:
        return draft, 1
    return draft, tp


def _expert_weights(model: ModelSpec, tp: int, precision: PrecisionSpec | None = None) -> int:
    """Weights of the experts on a GPU, with what pads them for Marlin."""
    work = expert_work(model, tp)
    if work is None:
        return 0
    held = padded(work, precision) if precision and precision.name == MARLIN else work
    return held.layers * held.local * held.weights


def _extras(model: ModelSpec, tp: int) -> int:
    """Norm and bias parameters, sinks, convolutions and decays, over all layers."""
    shapes = products(model, tp)
    normed = (model.q_heads + model.kv_heads) // tp if model.norm_across_heads else 2
    norms = model.norms * model.hidden_size + (normed * model.head_dim if model.qk_norm else 0)
    if model.bias == "all":
        return model.layers * 2 * norms + sum(one.layers * one.shape.outputs for one in shapes.values())
    biased = {"none": (), "qkv": ("qkv",), "attention": ("qkv", "o")}[model.bias]
    total = model.layers * norms + sum(shapes[name].layers * shapes[name].shape.outputs for name in biased)
    if model.sinks:
        total += model.layers * model.q_heads // tp
    if model.latent:
        total += model.layers * (model.latent.q_rank + model.latent.kv_rank)
    if model.linear:
        total += model.linear.layers * (
            model.linear.conv * _convolved(model.linear, tp) + 2 * model.linear.value_heads // tp
        )
    work = expert_work(model, tp)
    if work and model.experts and model.experts.biases:
        wide = (work.matrices - 1) * work.width + work.hidden
        total += work.layers * (work.local * wide + work.experts)
    return total


def _convolved(linear: LinearAttention, tp: int) -> int:
    """Channels of the convolution before linear attention."""
    return (2 * linear.key_heads * linear.key_dim + linear.value_heads * linear.value_dim) // tp


def _outer_parameters(model: ModelSpec, tp: int) -> int:
    """Parameters outside the layers: embeddings, lm_head, positions, final norm, and those that no text passes through."""
    tables = 1 if model.tied_embeddings else 2
    final_norm = model.hidden_size * (2 if model.bias == "all" else 1)
    vocabulary = tables * math.ceil(model.vocab_size / tp) * model.hidden_size
    positions = model.learned_positions * model.hidden_size
    return vocabulary + positions + final_norm + math.ceil(model.other_parameters / tp)


def _product_weights(model: ModelSpec, tp: int, plain: bool) -> int:
    found = products(model, tp).values()
    return sum(product.layers * product.shape.weights for product in found if product.plain == plain)


def parameters(model: ModelSpec) -> int:
    """Number of parameters of the whole model."""
    matrices = sum(_product_weights(model, 1, plain) for plain in (False, True)) + _expert_weights(model, 1)
    return matrices + _extras(model, 1) + _outer_parameters(model, 1)


def active_parameters(model: ModelSpec) -> int:
    """Number of parameters that a token passes through: of its experts, the active ones alone."""
    work = expert_work(model, 1)
    idle = work.layers * (work.experts - work.active) * work.weights if work else 0
    return parameters(model) - idle


def weight_bytes(model: ModelSpec, precision: PrecisionSpec, tp: int) -> int:
    """Weight bytes on each GPU, with the scales and zero points of quantised groups.

    Raises CatalogError when the model does not split over ``tp`` GPUs.
    """
    linear, plain = (_product_weights(model, tp, plain) for plain in (False, True))
    narrow, wide = (linear, 0) if precision.scope == "linears" else (0, linear)
    quantised = (narrow + _expert_weights(model, tp, precision)) * precision.effective_weight_bits / 8
    plain += sum(
        one.layers * one.shape.weights for one in products(model, tp).values() if one.float32
    )  # twice as many bytes
    outer = wide + plain + _extras(model, tp) + _outer_parameters(model, tp)
    return math.ceil(quantised) + outer * BYTES_16BIT + _draft_bytes(model, tp)


def _draft_bytes(model: ModelSpec, tp: int) -> int:
    """Weights of the draft model on each GPU, in 16 bits. One of the same vocabulary and width shares the embeddings."""
    found = drafted(model, tp)
    if found is None:
        return 0
    draft, degree = found
    whole = sum(_product_weights(draft, degree, plain) for plain in (False, True)) + _expert_weights(draft, degree)
    shared = (draft.vocab_size, draft.hidden_size) == (model.vocab_size, model.hidden_size)
    return (whole + _extras(draft, degree) + (0 if shared else _outer_parameters(draft, degree))) * BYTES_16BIT


def kv_layer_bytes(model: ModelSpec, precision: PrecisionSpec, tp: int, kind: str = "grouped") -> int:
    """KV bytes of one token in one layer of this kind of attention on each GPU, quantisation parameters included.

    Latent attention keeps its vector on every GPU, and in layers with an index its key, 8-bit with a 4-byte scale.
    """
    if kind == "linear":
        return 0
    if model.latent:
        latent = model.latent
        index = latent.index_dim + 4 if latent.index_tokens and kind != "chosen" else 0
        return (latent.kv_rank + latent.rope_dim) * precision.kv_bits // 8 + precision.kv_quant_bytes + index
    return kv_heads_per_gpu(model, tp) * 2 * (model.head_dim * precision.kv_bits // 8 + precision.kv_quant_bytes)


def kv_token_bytes(model: ModelSpec, precision: PrecisionSpec, tp: int) -> int:
    """KV bytes that a token adds over all layers on each GPU, as long as no window is full."""
    check_tp(model, tp)
    kinds = attention_layers(model)
    own = sum(kind.layers * kv_layer_bytes(model, precision, tp, kind.kind) for kind in kinds)
    return own + draft_kv_bytes(model, precision, tp)


def draft_kv_bytes(model: ModelSpec, precision: PrecisionSpec, tp: int) -> int:
    """KV bytes of a token in the draft model on each GPU; 0 without one."""
    found = drafted(model, tp)
    return 0 if found is None else kv_token_bytes(found[0], precision, found[1])


def state_bytes(model: ModelSpec, tp: int) -> int:
    """Bytes of a sequence's state of linear attention over all layers on each GPU; inputs of the convolution in 16 bits."""
    linear = model.linear
    if linear is None:
        return 0
    state = linear.value_heads // tp * linear.key_dim * linear.value_dim * linear.state_bytes
    return linear.layers * (state + (linear.conv - 1) * _convolved(linear, tp) * BYTES_16BIT)


def kv_sequence_bytes(model: ModelSpec, precision: PrecisionSpec, tp: int, tokens: int) -> int:
    """Bytes that a sequence of ``tokens`` tokens keeps on each GPU: KV, behind a window no more than that, and state."""
    total = state_bytes(model, tp) + tokens * draft_kv_bytes(model, precision, tp)
    for kind in attention_layers(model):
        kept = tokens if kind.window is None or model.latent else min(tokens, kind.window)
        total += kind.layers * kept * kv_layer_bytes(model, precision, tp, kind.kind)
    return total


def grows_evenly(model: ModelSpec) -> bool:
    """Whether a sequence's KV is in proportion to its tokens: no windows, no state."""
    return model.window is None and model.linear is None


def graph_bytes(model: ModelSpec, tp: int) -> int:
    """Bytes on each GPU of the CUDA graphs that vLLM captures at its start: a pool that all share, and what is assumed of each.
    vLLM 0.32 takes them off its KV memory; earlier releases captured them outside of it.
    """
    return _layer_peak_bytes(model, tp, LARGEST_CAPTURE) + CAPTURES * CAPTURE_BYTES


def _layer_peak_bytes(model: ModelSpec, tp: int, tokens: int) -> int:
    """Inside a layer residual and hidden states live together with the widest product's output and what is computed from it,
    all in 16 bits. Experts keep both for each of a token's experts, and their outputs, for chunks of tokens."""
    shapes = linears(model, tp)
    widths = [
        shapes[wide].outputs + shapes[narrow].inputs
        for wide, narrow in (
            ("gate_up", "down"),
            ("shared_gate_up", "shared_down"),
            ("qkv", "o"),
            ("q_b", "o"),
            ("linear_in", "linear_out"),
        )
        if wide in shapes
    ]
    each = max(widths) * tokens
    if work := expert_work(model, tp):
        slots = min(tokens * data_ranks(model), EXPERT_CHUNK) * work.active
        each = max(each, slots * (work.matrices * work.width + work.hidden))
    return (tokens * 2 * model.hidden_size + each) * BYTES_16BIT


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
