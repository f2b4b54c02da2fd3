"""Experts of a mixture: which of them a GPU of the group holds, and in which shape.

They are split over a TP group, each GPU with a part of every expert, or spread over it whole. Engines pad the parts to what
their kernels take. Padding is computed and read like weights. What pads experts for Marlin is held in memory, too: a server of
gpt-oss-120b has room for as many sequences less (vLLM 0.22's gauges). What pads FP8 experts is not counted: TensorRT-LLM holds
more than would fit beside it, and a precision does not know its engine.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from fineserve_sim.catalog.architecture import ModelSpec
from fineserve_sim.catalog.load import CatalogError
from fineserve_sim.catalog.specs import PrecisionSpec

MARLIN = "W4A16-MXFP4"
MARLIN_HIDDEN, MARLIN_WIDTH = 256, 128
"""Multiples to which vLLM pads MXFP4 experts for Marlin (``mxfp4_round_up_hidden_size_and_intermediate_size``)."""
FP8_BLOCK = 128
"""Multiple to which vLLM pads a GPU's part of an expert in FP8, whose scales are of blocks (``fused_moe/oracle/fp8.py``).
MiniMax-M2.5 at TP 8 computes 256 columns, where its experts have 192."""


class ExpertWork(NamedTuple):
    """The experts of ``layers`` layers as one GPU of the group holds them: ``local`` of ``experts``, ``width`` wide each."""

    layers: int
    experts: int
    active: int
    hidden: int
    width: int
    matrices: int
    spread: int
    split: int

    @property
    def local(self) -> int:
        return self.experts // self.spread

    @property
    def weights(self) -> int:
        """Weights of one expert here."""
        return self.matrices * self.hidden * self.width


def expert_work(model: ModelSpec, tp: int) -> ExpertWork | None:
    """The experts on one GPU of the group; None for a dense model."""
    experts = model.experts
    if experts is None:
        return None
    gpus = tp * experts.ranks
    spread, split = (1, gpus) if experts.spread == "split" else (gpus, 1)
    layers = model.layers - experts.dense_layers
    matrices = 3 if model.gated_mlp else 2
    shape = (experts.count, experts.active, model.hidden_size, experts.width // split)
    return ExpertWork(layers, *shape, matrices, spread, split)


def with_experts(model: ModelSpec, spread: Literal["split", "whole"]) -> ModelSpec:
    """The model with its experts each split over a TP group, or spread whole. Raises CatalogError for a dense model."""
    if model.experts is None:
        raise CatalogError(f"model {model.name} has no experts to spread")
    return model.model_copy(update={"experts": model.experts.model_copy(update={"spread": spread})})


def with_ranks(model: ModelSpec, ranks: int) -> ModelSpec:
    """The model in so many data-parallel ranks, over whose GPUs its experts are. Raises CatalogError for a dense model."""
    if model.experts is None:
        raise CatalogError(
            f"model {model.name} has no experts, so its replicas step apart; leave dp out and give it more GPUs"
        )
    return model.model_copy(update={"experts": model.experts.model_copy(update={"ranks": ranks})})


def data_ranks(model: ModelSpec) -> int:
    """TP groups that hold one copy of the model's experts together: 1 without attention in data parallel."""
    return 1 if model.experts is None else model.experts.ranks


def padded(work: ExpertWork, precision: PrecisionSpec) -> ExpertWork:
    """The experts as a precision's kernel takes them. The tables' kernels were called with shapes as they are."""
    if precision.name == MARLIN:
        return work._replace(hidden=_up(work.hidden, MARLIN_HIDDEN), width=_up(work.width, MARLIN_WIDTH))
    if (precision.weight_bits, precision.activation_bits) == (8, 8):
        return work._replace(width=_up(work.width, FP8_BLOCK))
    return work


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
