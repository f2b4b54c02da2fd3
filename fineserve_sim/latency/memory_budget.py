"""What vLLM would resolve as ``num_gpu_blocks``: the memory left for KV after everything else, in blocks.

At start-up vLLM runs a dummy step of ``max_num_batched_tokens`` tokens and ``max_num_seqs`` sampled rows, and takes

    KV bytes = utilization * device memory - weights - peak of that step - memory outside torch - CUDA graphs
    blocks   = KV bytes // (block tokens * KV bytes of a token)                     on each GPU of the TP group

The step peaks either inside a layer (residual, normed input and the MLP's wide activations live together) or in the
sampler, which sorts full rows of the vocabulary in fp32 on every rank. The terms below count the tensors alive at each.
Engines that capture their graphs after they allocated KV do not charge them (``graphs_charged=False``).
"""

from __future__ import annotations

from dataclasses import dataclass

from fineserve_sim.catalog import GpuSpec, ModelSpec, PrecisionSpec, kv_token_bytes, linears, weight_bytes

MIB, GIB = 2**20, 2**30
BYTES_16BIT = 2

SAMPLER_LOGIT_BYTES = 2 + 4 + 4 + 8 + 4 + 4 + 1 + 4 + 4
"""Bytes a logit at the peak of top-k/top-p sampling: 16-bit and fp32 logits, sorted values and their int64 indices, softmax,
cumulative sum, mask, logits scattered back and final probabilities. Counted, not fitted."""

VISIBLE_OF_NOMINAL = 79.22 / 80
"""Memory that the driver reports of a card sold as N GiB: 79.22 GiB of an H100 80GB (vllm-project/vllm pull request 10511);
taken for the other GPUs."""

GRAPH_BYTES_PER_CAPTURE = 8 * MIB
"""Assumed, not measured: memory of one captured batch size beside the pool that all share."""


class MemoryBudgetError(ValueError):
    """The model does not fit: nothing is left for KV."""


@dataclass(frozen=True, slots=True)
class MemorySettings:
    """The engine arguments that move the KV budget: vLLM's ``max_num_batched_tokens``, ``max_num_seqs`` and ``block_size``;
    captured CUDA-graph batch sizes (0: eager), the largest of which has ``largest_capture`` tokens; bytes outside torch (CUDA
    context and libraries, assumed by systems.md 1.2)."""

    token_budget: int = 8192
    max_sequences: int = 1024
    block_tokens: int = 16
    graph_captures: int = 67
    largest_capture: int = 512
    graphs_charged: bool = True
    context_bytes: int = 512 * MIB

    def __post_init__(self) -> None:
        for name in ("token_budget", "max_sequences", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"memory settings: {name} is {getattr(self, name)}; give at least 1")
        for name in ("graph_captures", "largest_capture", "context_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"memory settings: {name} is {getattr(self, name)}; give 0 or more")


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Where each GPU's usable bytes go: ``usable = weight + activation + cuda_graph (if charged) + context + kv``."""

    usable_bytes: int
    weight_bytes: int
    activation_bytes: int
    cuda_graph_bytes: int
    context_bytes: int
    kv_bytes: int
    block_bytes: int
    block_tokens: int

    @property
    def kv_blocks(self) -> int:
        """vLLM's ``num_gpu_blocks``."""
        return self.kv_bytes // self.block_bytes

    @property
    def kv_tokens(self) -> int:
        """vLLM's "GPU KV cache size" in tokens."""
        return self.kv_blocks * self.block_tokens


def layer_peak_bytes(model: ModelSpec, tp: int, tokens: int) -> int:
    """Peak bytes of a step of ``tokens`` tokens inside a layer, on each GPU: residual and hidden states, and the widest
    matrix product's output together with what is computed from it (all 16 bits)."""
    shapes = linears(model, tp)
    mlp = shapes["gate_up"].outputs + shapes["down"].inputs
    attention = shapes["qkv"].outputs + shapes["o"].inputs
    return tokens * (2 * model.hidden_size + max(mlp, attention)) * BYTES_16BIT


def sampler_peak_bytes(model: ModelSpec, tokens: int, rows: int) -> int:
    """Peak bytes while ``rows`` sequences are sampled after a step of ``tokens`` tokens: the step's residual and hidden states,
    and full rows of logits (gathered: TP does not divide them)."""
    return tokens * 2 * model.hidden_size * BYTES_16BIT + rows * model.vocab_size * SAMPLER_LOGIT_BYTES


def predict_kv_blocks(
    model: ModelSpec,
    precision: PrecisionSpec,
    tp: int,
    gpu: GpuSpec,
    gpu_memory_utilization: float = 0.9,
    engine: MemorySettings | None = None,
) -> MemoryBudget:
    """The memory of each GPU of one engine, and with it ``kv_blocks``.

    Raises MemoryBudgetError when not even one block is left, ValueError for a utilization outside (0, 1] and CatalogError
    when the model does not split over ``tp`` GPUs.
    """
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization}; give a share above 0 and up to 1")
    engine = engine or MemorySettings()
    usable = int(gpu.memory_bytes * VISIBLE_OF_NOMINAL * gpu_memory_utilization)
    weights = weight_bytes(model, precision, tp)
    rows = min(engine.max_sequences, engine.token_budget)
    layer, sampler = (
        layer_peak_bytes(model, tp, engine.token_budget),
        sampler_peak_bytes(model, engine.token_budget, rows),
    )
    graphs = _graph_bytes(model, tp, engine)
    kv = usable - weights - max(layer, sampler) - engine.context_bytes - (graphs if engine.graphs_charged else 0)
    block = engine.block_tokens * kv_token_bytes(model, precision, tp)
    if kv < block:
        raise MemoryBudgetError(
            f"{model.name} {precision.name} at TP {tp} leaves no KV memory on {gpu.name}: {usable / GIB:.1f} GiB usable, "
            f"{weights / GIB:.1f} GiB weights, {max(layer, sampler) / GIB:.1f} GiB activations; raise tp or "
            "gpu_memory_utilization, or lower max_sequences"
        )
    return MemoryBudget(
        usable, weights, max(layer, sampler), graphs, engine.context_bytes, kv, block, engine.block_tokens
    )


def _graph_bytes(model: ModelSpec, tp: int, engine: MemorySettings) -> int:
    if engine.graph_captures == 0:
        return 0
    return layer_peak_bytes(model, tp, engine.largest_capture) + engine.graph_captures * GRAPH_BYTES_PER_CAPTURE
