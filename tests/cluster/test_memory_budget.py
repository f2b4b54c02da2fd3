"""What is left for KV on a GPU: what vLLM's own start-up logs say, laws, and one budget for cluster and calibrator."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fineserve_evidence.validate import predict
from fineserve_evidence.validate.cases import Serving
from hypothesis import example, given
from hypothesis import strategies as st

from fineserve_sim.catalog import activation_bytes, deployment, gpu, model, precision
from fineserve_sim.cluster.compose.memory import peak_activation_bytes, resident_bytes, usable_bytes
from fineserve_sim.cluster.scenario import EngineSettings, Gpu, ServedModel

GIB = 2**30
H100 = Gpu(0, 0, gpu("h100-sxm"))
VLLM_064 = EngineSettings(token_budget=8192, max_sequences=256, deployment="vllm-eager")
"""It captured its graphs when the KV memory was taken: what it logs is without them."""


def served(name: str, fmt: str = "fp16", tp: int = 1) -> ServedModel:
    return ServedModel(name, model(name), precision(fmt), tp, 1.0, 1.0, 100.0, 100.0)


def kv_bytes(of: ServedModel, settings: EngineSettings) -> int:
    return usable_bytes(H100, settings) - resident_bytes(of, settings) - peak_activation_bytes(of, settings)


@pytest.mark.parametrize(("tp", "weights_gib"), [(1, 14.96), (2, 7.48)])
def test_against_vllm(tp: int, weights_gib: float) -> None:
    """Meta-Llama-3-8B on an H100 (79.22 GiB, utilization 0.9): vLLM 0.6.4 logs 71.29 GiB usable, these weights and an
    activation peak of 1.26 GiB whatever the TP degree (vllm-project/vllm pull request 10511)."""
    of = served("llama-3-8b", tp=tp)
    assert usable_bytes(H100, VLLM_064) / GIB == pytest.approx(71.29, abs=0.01)
    assert resident_bytes(of, replace(VLLM_064, context_bytes=0)) / GIB == pytest.approx(weights_gib, rel=0.005)
    assert peak_activation_bytes(of, VLLM_064) / GIB == pytest.approx(1.26, rel=0.06)


def test_kv_against_vllm() -> None:
    """The same log leaves 53.29 GiB to KV at TP 1; it charged 1.79 GiB outside torch, where a later release counts 0.16 GiB
    (pull request 12126) and we assume 0.5 GiB."""
    left = kv_bytes(served("llama-3-8b"), replace(VLLM_064, context_bytes=int(1.79 * GIB)))
    assert left / GIB == pytest.approx(53.29, rel=0.01)


@given(
    name=st.sampled_from(["llama-3.1-8b", "qwen3-32b", "opt-13b", "llama-3.2-1b"]),
    fmt=st.sampled_from(["fp16", "fp8", "awq"]),
    tp=st.sampled_from([1, 2, 4]),
    share=st.floats(0.88, 0.98),
    sequences=st.integers(1, 4096),
    tokens=st.integers(256, 16384),
    engine=st.sampled_from(["vllm-cudagraph", "vllm-eager"]),
)
@example(name="llama-3.1-8b", fmt="fp16", tp=1, share=0.9, sequences=2048, tokens=8192, engine="vllm-cudagraph")
def test_one_budget(name: str, fmt: str, tp: int, share: float, sequences: int, tokens: int, engine: str) -> None:
    """The calibrator predicts with the KV memory that the cluster gives, beyond vLLM's default number of sequences, too;
    more GPUs or memory leave more, larger steps and captured graphs less."""
    settings = EngineSettings(token_budget=tokens, max_sequences=sequences, memory_utilization=share, deployment=engine)
    of = served(name, fmt, tp)
    left = kv_bytes(of, settings)
    serving = Serving(
        of.model, of.precision, tp, H100.spec, deployment(engine), tokens, sequences, memory_utilization=share
    )
    assert left == predict.kv_bytes(serving)
    assert left < kv_bytes(of, replace(settings, memory_utilization=min(1.0, share + 0.02)))
    assert left < kv_bytes(served(name, fmt, 2 * tp), settings)
    assert left > kv_bytes(of, replace(settings, token_budget=2 * tokens))
    assert left <= kv_bytes(of, replace(settings, deployment="vllm-eager"))
    assert activation_bytes(of.model, tp, tokens, sequences) <= activation_bytes(of.model, tp, tokens, sequences + 1)
