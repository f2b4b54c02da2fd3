"""Engines of catalog entries, by rooflines or by tables, and batches for them."""

from __future__ import annotations

from functools import cache

from hypothesis import strategies as st

from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency import Batch, StepModel
from fineserve_sim.latency.accounting import parts
from fineserve_sim.latency.tables import shipped


@cache
def engine(
    name: str = "llama-3.1-8b",
    fmt: str = "fp16",
    tp: int = 1,
    on: str = "h100-sxm",
    by: str = "vllm-cudagraph",
    latency: str = "roofline",
) -> StepModel:
    tables = shipped() if latency == "tables" else None
    return StepModel(model(name), precision(fmt), tp, gpu(on), deployment(by), tables)


def chunk(tokens: int, prefix: int = 0) -> tuple[int, int, int]:
    """Tokens, pairs and cached context of one prompt chunk."""
    return tokens, tokens * prefix + tokens * (tokens + 1) // 2, prefix if tokens else 0


def part_s(step: StepModel, *batch: float) -> dict[str, float]:
    """Seconds by part of one step."""
    return {name: float(part.seconds[0]) for name, part in parts(step, [Batch(*batch)]).items()}  # type: ignore[arg-type]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Running sums of a batch that can exist: some decodes, and at most one prompt chunk after a prefix."""
    decodes = draw(st.integers(0, 300))
    context = draw(st.integers(0, 8000)) * decodes
    prompt = chunk(draw(st.integers(0 if decodes else 1, 3000)), draw(st.integers(0, 9000)))
    return Batch(decodes, context, *prompt, decodes + (1 if prompt[0] else 0))


engines = st.builds(
    engine,
    st.sampled_from(["llama-3.1-8b", "qwen3-32b", "opt-13b", "yi-34b", "llama-3.2-1b"]),
    st.sampled_from(["fp16", "fp8", "awq", "qoq"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["h100-sxm", "h200-sxm", "a100-80gb"]),
    st.sampled_from(["vllm-cudagraph", "vllm-0.9.1-authors", "vllm-0.16"]),
    st.sampled_from(["roofline", "tables"]),
)
