"""The geometry of a decoder-only transformer whose layers may differ.

A model has ``layers`` layers. Each has one kind of attention and one kind of MLP. ``attention_layers`` and ``mlp_layers`` list
the kinds with their numbers; weights, KV and step times are sums over these lists. A dense model with full attention has one
kind of each.

* Grouped attention keeps K and V of every token. Behind a window it keeps the last tokens' alone.
* Latent attention (DeepSeek-V2, section 2.1) keeps one compressed vector a token for all heads. With an index, each query
  attends to the tokens that the index chooses (DeepSeek-V3.2).
* Linear attention (gated delta net) keeps a state of constant size for each sequence.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from fineserve_sim.catalog.specs import Spec


class Experts(Spec):
    """The MLP of a mixture: ``active`` of ``count`` experts for each token, and beside them an MLP that all tokens share.

    ``dense_layers`` keep an MLP of the model's ``intermediate_size``. A TP group splits every expert (``split``), or gives each
    GPU ``whole`` ones (expert parallelism). ``ranks``: so many TP groups, each with all weights of attention, share the experts
    (attention in data parallel).
    """

    count: int = Field(gt=0)
    active: int = Field(gt=0)
    width: int = Field(gt=0)
    shared_width: int = Field(default=0, ge=0)
    dense_layers: int = Field(default=0, ge=0)
    biases: bool = False
    spread: Literal["split", "whole"] = "split"
    ranks: int = Field(default=1, gt=0)


class Window(Spec):
    """``layers`` of the model attend to the last ``tokens`` tokens alone."""

    layers: int = Field(gt=0)
    tokens: int = Field(gt=0)


class LatentAttention(Spec):
    """Ranks of the compressed queries (0: not compressed) and of K and V; widths of a head's rotated part and of its value.

    The model's ``head_dim`` is the part of a head that is not rotated. ``index_tokens``: tokens that a query attends to, chosen
    by an index of ``index_heads`` heads; 0: all. ``index_layers``: layers that have an index. The others attend to the tokens
    that the last such layer chose. None: all layers have one.
    """

    q_rank: int = Field(ge=0)
    kv_rank: int = Field(gt=0)
    rope_dim: int = Field(gt=0)
    value_dim: int = Field(gt=0)
    index_tokens: int = Field(default=0, ge=0)
    index_heads: int = Field(default=0, ge=0)
    index_dim: int = Field(default=0, ge=0)
    index_layers: int | None = Field(default=None, gt=0)


class LinearAttention(Spec):
    """``layers`` of the model keep a state of ``value_heads`` x ``key_dim`` x ``value_dim`` numbers, and the last inputs of a
    convolution of ``conv`` tokens."""

    layers: int = Field(gt=0)
    key_heads: int = Field(gt=0)
    value_heads: int = Field(gt=0)
    key_dim: int = Field(gt=0)
    value_dim: int = Field(gt=0)
    conv: int = Field(gt=0)
    state_bytes: int = Field(default=4, gt=0)


class ModelSpec(Spec):
    """Geometry of a decoder-only transformer; without the optional parts it is dense, with full attention.

    ``bias``: on no linear layer, on Q, K and V, on those and the output of attention, or on all layers and norms.
    ``output_gate``: queries come with a gate as wide. ``norms``: of one layer. ``other_parameters``: a vision tower, 16-bit.
    ``norm_across_heads``: Q and K are normed over all heads, which takes a TP group a collective more.
    ``float32_router``: engines compute its router in 32 bits.
    ``checkpoint``: the precision in which its makers publish it.
    """

    name: str
    layers: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    q_heads: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    max_context_tokens: int = Field(gt=0)
    tied_embeddings: bool = False
    gated_mlp: bool = True
    bias: Literal["none", "qkv", "attention", "all"] = "none"
    qk_norm: bool = False
    learned_positions: int = Field(default=0, ge=0)
    norms: int = Field(default=2, gt=0)
    sinks: bool = False
    output_gate: bool = False
    norm_across_heads: bool = False
    float32_router: bool = False
    other_parameters: int = Field(default=0, ge=0)
    experts: Experts | None = None
    window: Window | None = None
    latent: LatentAttention | None = None
    linear: LinearAttention | None = None
    checkpoint: str = "W16A16"
    source: str
    speculation: Speculation | None = None

    @model_validator(mode="after")
    def _layers_are_there(self) -> Self:
        """Parts have no more layers than the model."""
        windowed, linear = (part.layers if part else 0 for part in (self.window, self.linear))
        parts = {
            "window and linear attention": windowed + linear,
            "latent attention's index": (self.latent and self.latent.index_layers) or 0,
            "dense layers beside experts": self.experts.dense_layers if self.experts else 0,
        }
        for part, layers in parts.items():
            if layers > self.layers:
                raise ValueError(f"{part}: {layers} layers, where the model has {self.layers}")
        return self


class Speculation(Spec):
    """Speculative decoding: a ``draft`` model, in 16 bits, proposes ``tokens`` tokens a round. On average ``accepted`` of them
    are kept. The model checks all of them in one step, and adds a token of its own."""

    draft: ModelSpec
    tokens: int = Field(gt=0)
    accepted: float = Field(ge=0)

    @property
    def round_tokens(self) -> float:
        """Tokens that a sequence gets of a round, on average."""
        return 1.0 + self.accepted


ModelSpec.model_rebuild()


class AttentionLayers(NamedTuple):
    """``layers`` with one kind of attention; ``window``: tokens that a query sees at most, None: all.

    Layers of ``chosen`` latent attention have no index; an earlier layer chose their tokens.
    """

    kind: Literal["grouped", "latent", "chosen", "linear"]
    layers: int
    window: int | None = None


class MlpLayers(NamedTuple):
    """``layers`` whose tokens all pass through an MLP of ``width`` (0: none) and, where there are ``experts``, theirs."""

    layers: int
    width: int
    experts: Experts | None = None


def attention_layers(model: ModelSpec) -> tuple[AttentionLayers, ...]:
    """The kinds of attention of a model, each with its layers."""
    if model.latent is not None:
        window = model.latent.index_tokens or None
        indexed = model.latent.index_layers or model.layers
        kinds = [AttentionLayers("latent", indexed, window), AttentionLayers("chosen", model.layers - indexed, window)]
        return tuple(kind for kind in kinds if kind.layers)
    linear = model.linear.layers if model.linear else 0
    windowed = model.window.layers if model.window else 0
    kinds = [AttentionLayers("grouped", model.layers - linear - windowed)]
    if model.window:
        kinds.append(AttentionLayers("grouped", windowed, model.window.tokens))
    if model.linear:
        kinds.append(AttentionLayers("linear", linear))
    return tuple(kind for kind in kinds if kind.layers)


def mlp_layers(model: ModelSpec) -> tuple[MlpLayers, ...]:
    """The kinds of MLP of a model, each with its layers."""
    experts = model.experts
    if experts is None:
        return (MlpLayers(model.layers, model.intermediate_size),)
    kinds = (
        MlpLayers(experts.dense_layers, model.intermediate_size),
        MlpLayers(model.layers - experts.dense_layers, experts.shared_width, experts),
    )
    return tuple(kind for kind in kinds if kind.layers)
