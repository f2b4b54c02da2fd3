"""What is left for KV: the sum by hand, laws, and what vLLM's own start-up logs say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.latency.memory_budget import GIB, MemoryBudgetError, MemorySettings, predict_kv_blocks

H100 = gpu("h100-sxm")
LLAMA = model("llama-3.1-8b")
FP16 = precision("fp16")
EAGER = MemorySettings(token_budget=8192, max_sequences=256, graph_captures=0)


def test_by_hand() -> None:
    """8B FP16 on one H100, eager: 128 KiB a token, 2 MiB a block; the sampler's peak exceeds the layer's."""
    budget = predict_kv_blocks(LLAMA, FP16, 1, H100, 0.9, EAGER)
    usable = int(80 * 2**30 * (79.22 / 80) * 0.9)
    parameters = 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 2 * 128256 * 4096 + 4096
    layer = 8192 * (2 * 4096 + 28672 + 14336) * 2
    sampler = 8192 * 2 * 4096 * 2 + 256 * 128256 * 35
    assert sampler > layer
    left = usable - 2 * parameters - sampler - 2**29
    assert (budget.usable_bytes, budget.weight_bytes, budget.activation_bytes) == (usable, 2 * parameters, sampler)
    assert budget.kv_blocks == left // (16 * 128 * 1024)
    assert budget.kv_tokens == 16 * budget.kv_blocks


@given(
    name=st.sampled_from(["llama-3.1-8b", "qwen3-32b", "opt-13b", "llama-3.2-1b"]),
    fmt=st.sampled_from(["fp16", "fp8", "awq"]),
    tp=st.sampled_from([1, 2, 4]),
    share=st.floats(0.88, 0.98),
    sequences=st.integers(1, 512),
    tokens=st.integers(256, 16384),
    captures=st.integers(0, 80),
)
def test_laws(name: str, fmt: str, tp: int, share: float, sequences: int, tokens: int, captures: int) -> None:
    """The parts add up to what is usable; more memory, GPUs or fewer bits leave more blocks, larger steps fewer."""
    settings = MemorySettings(token_budget=tokens, max_sequences=sequences, graph_captures=captures)
    of = (model(name), precision(fmt), tp, H100)
    budget = predict_kv_blocks(*of, share, settings)
    parts = budget.weight_bytes + budget.activation_bytes + budget.cuda_graph_bytes + budget.context_bytes
    assert parts + budget.kv_bytes == budget.usable_bytes
    assert budget.kv_blocks * budget.block_bytes <= budget.kv_bytes < (budget.kv_blocks + 1) * budget.block_bytes
    assert predict_kv_blocks(*of, min(1.0, share + 0.02), settings).kv_blocks > budget.kv_blocks
    assert predict_kv_blocks(*of, share, replace(settings, token_budget=2 * tokens)).kv_blocks < budget.kv_blocks
    assert predict_kv_blocks(*of, share, replace(settings, graphs_charged=False)).kv_bytes == (
        budget.kv_bytes + budget.cuda_graph_bytes
    )
    assert predict_kv_blocks(model(name), precision(fmt), 2 * tp, H100, share, settings).kv_tokens > budget.kv_tokens
    assert predict_kv_blocks(of[0], precision("fp8"), tp, H100, share, settings).kv_tokens >= budget.kv_tokens


@pytest.mark.parametrize(("tp", "weights_gib"), [(1, 14.96), (2, 7.48)])
def test_against_vllm(tp: int, weights_gib: float) -> None:
    """Meta-Llama-3-8B on an H100 (79.22 GiB, utilization 0.9): vLLM 0.6.4 logs 71.29 GiB usable, these weights and an
    activation peak of 1.26 GiB whatever the TP degree (vllm-project/vllm pull request 10511)."""
    budget = predict_kv_blocks(model("llama-3-8b"), FP16, tp, H100, 0.9, EAGER)
    assert budget.usable_bytes / GIB == pytest.approx(71.29, abs=0.01)
    assert budget.weight_bytes / GIB == pytest.approx(weights_gib, rel=0.005)
    assert budget.activation_bytes / GIB == pytest.approx(1.26, rel=0.06)


def test_kv_against_vllm() -> None:
    """The same log leaves 53.29 GiB to KV at TP 1; it charged 1.79 GiB outside torch, where a later release counts 0.16 GiB
    (pull request 12126) and we assume 0.5 GiB."""
    budget = predict_kv_blocks(model("llama-3-8b"), FP16, 1, H100, 0.9, replace(EAGER, context_bytes=int(1.79 * GIB)))
    assert budget.kv_bytes / GIB == pytest.approx(53.29, rel=0.01)


def test_errors() -> None:
    with pytest.raises(MemoryBudgetError, match="leaves no KV memory on h100-sxm"):
        predict_kv_blocks(model("llama-3.1-70b"), FP16, 1, H100)
    with pytest.raises(ValueError, match="gpu_memory_utilization is"):
        predict_kv_blocks(LLAMA, FP16, 1, H100, 1.2)
    with pytest.raises(ValueError, match="max_sequences is 0"):
        MemorySettings(max_sequences=0)
