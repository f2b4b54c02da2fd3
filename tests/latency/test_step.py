"""The step model: closed forms, monotonicity, scalar and vector alike, shares, scaling, sources."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.catalog import deployment, gpu, kv_token_bytes, model, precision, weight_bytes
from fineserve_sim.latency import StepModel

PRECISIONS = ["W16A16", "W8A8KV8", "W8A8", "W4A16", "W4A8KV4"]
SUMS = ("decodes", "decode_context", "prefill_tokens", "prefill_pairs", "prefill_context", "sampled")


@cache
def engine(
    name: str = "llama-3.1-8b", fmt: str = "fp16", tp: int = 1, on: str = "h100-sxm", by: str = "vllm-cudagraph"
) -> StepModel:
    return StepModel(model(name), precision(fmt), tp, gpu(on), deployment(by))


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, int, int, int, int]:
    """Running sums of a batch that can exist: some decodes, and at most one prompt chunk after a prefix."""
    decodes = draw(st.integers(0, 300))
    context = draw(st.integers(0, 8000)) * decodes
    chunk, prefix = draw(st.integers(0, 3000)), draw(st.integers(0, 9000))
    pairs = chunk * prefix + chunk * (chunk + 1) // 2
    return decodes, context, chunk, pairs, prefix if chunk else 0, decodes + (1 if chunk else 0)


engines = st.builds(
    engine,
    st.sampled_from(["llama-3.1-8b", "qwen3-32b", "opt-13b"]),
    st.sampled_from(["fp16", "fp8", "awq", "qoq"]),
    st.sampled_from([1, 2, 4]),
    st.just("h100-sxm"),
    st.sampled_from(["vllm-cudagraph", "vllm-0.9.1-authors"]),
)


def test_one_decode_streams_the_weights() -> None:
    """At batch 1 a step costs the weights over the measured bandwidth plus launches: closed form by hand."""
    step = engine()
    linear_bytes, head_bytes = 32 * 218_103_808 * 2, 128256 * 4096 * 2
    stream_s = (linear_bytes + head_bytes) / 2.819e12
    launches_s = 129 * 3.1e-6 + 32 * 11.6e-6 + 65 * 6e-6 + 32 * (3e-6 + 4e-6) + 4e-6
    kv_s = 1001 * 128 * 1024 / 2.714e12
    assert step.step_s(1, 1000, 0, 0, 0, 1) == pytest.approx(5e-4 + stream_s + launches_s + kv_s, rel=2e-3)


def test_a_large_chunk_is_bound_by_flops() -> None:
    parts = engine().breakdown(0, 0, 4096, 4096 * 4097 // 2, 0, 1)
    flops_s = 2 * 4096 * 32 * 218_103_808 / 7.87e14
    gemm_s = sum(parts[name] for name in ("qkv", "o", "gate_up", "down"))
    assert gemm_s == pytest.approx(flops_s + 128 * 3.1e-6, rel=1e-9)
    assert parts["prefill_attention"] == pytest.approx(32 * 4 * 32 * 128 * (4096 * 4097 // 2) / 5.79e14, rel=1e-9)


def test_a_short_chunk_after_a_long_prefix_is_bound_by_reading_kv() -> None:
    parts = engine().breakdown(0, 0, 1, 100_001, 100_000, 1)
    assert parts["prefill_attention"] == pytest.approx(100_001 * 128 * 1024 / 2.714e12, rel=1e-12)


def test_tensor_parallelism_pays_two_all_reduces_a_layer() -> None:
    parts = engine("llama-3.1-70b", tp=4).breakdown(0, 0, 1000, 500_500, 0, 1)
    message_s = 1000 * 8192 * 2 * (2 * 3 / 4) / 3.5e11
    assert parts["all_reduce"] == pytest.approx(2 * 80 * (4.6e-6 + message_s), rel=1e-9)
    assert "all_reduce" not in engine().breakdown(1, 1, 0, 0, 0, 1)


@given(engines, batches())
def test_breakdown_sums_to_the_step(step: StepModel, batch: tuple[int, int, int, int, int, int]) -> None:
    parts = step.breakdown(*batch)
    assert sum(parts.values()) == pytest.approx(step.step_s(*batch), rel=1e-9)
    assert parts["host"] > -1e-12


@given(engines, batches(), st.sampled_from(SUMS), st.integers(1, 2000))
def test_no_step_gets_shorter_with_more_work(
    step: StepModel, batch: tuple[int, int, int, int, int, int], what: str, more: int
) -> None:
    larger = dict(zip(SUMS, batch, strict=True))
    larger[what] += more
    assert step.step_s(**larger) >= step.step_s(*batch)


@given(engines, st.integers(1, 600), st.integers(0, 2_000_000), st.integers(0, 40))
def test_vector_and_scalar_agree_bit_for_bit(step: StepModel, decodes: int, context: int, steps: int) -> None:
    one_by_one = [step.step_s(decodes, context + i * decodes, 0, 0, 0, decodes) for i in range(steps)]
    assert step.decode_steps_s(decodes, context, steps).tolist() == one_by_one


def test_splitting_a_run_of_decodes_changes_no_bit() -> None:
    step = engine(fmt="qoq")
    whole = step.decode_steps_s(37, 12_345, 500).tolist()
    parts = step.decode_steps_s(37, 12_345, 123).tolist() + step.decode_steps_s(37, 12_345 + 123 * 37, 377).tolist()
    assert parts == whole


def test_tables_grown_on_demand_equal_those_grown_at_once() -> None:
    fresh = [
        StepModel(model("yi-6b"), precision("fp8"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph")) for _ in "ab"
    ]
    fresh[0].step_s(0, 0, 9000, 0, 0, 0)
    for tokens in (600, 3000, 7000, 9000):
        assert fresh[1].step_s(0, 0, tokens, 0, 0, 0) == fresh[0].step_s(0, 0, tokens, 0, 0, 0)


@given(engines, batches())
def test_shares_are_fractions(step: StepModel, batch: tuple[int, int, int, int, int, int]) -> None:
    assert all(0.0 <= share <= 1.0 for share in step.shares(*batch))


def test_decode_needs_bandwidth_and_prefill_compute() -> None:
    compute, memory = engine().shares(8, 8000, 0, 0, 0, 8)
    assert compute < 0.1 and memory > 0.7
    compute, memory = engine().shares(0, 0, 4096, 4096 * 4097 // 2, 0, 1)
    assert compute > 0.7 and memory < 0.5


def test_host_time_needs_neither() -> None:
    batch = (1, 100, 0, 0, 0, 1)
    free, bound = engine(fmt="fp8"), engine(fmt="fp8", by="vllm-0.9.1-authors")
    assert bound.step_s(*batch) == 0.0102
    assert bound.shares(*batch)[1] == pytest.approx(free.shares(*batch)[1] * free.step_s(*batch) / 0.0102, rel=1e-12)


@given(engines, st.integers(0, 20_000), st.integers(0, 3000), st.integers(0, 300), st.sampled_from([256, 512, 2048]))
def test_prefill_prediction_never_falls(step: StepModel, tokens: int, more: int, decoding: int, budget: int) -> None:
    assert step.prefill_s(tokens + more, decoding, budget) >= step.prefill_s(tokens, decoding, budget)


def test_prefill_prediction_never_falls_token_by_token() -> None:
    step = engine(fmt="fp8", by="vllm-0.9.1-authors")  # host-bound: chunks of any size cost the same
    predictions = [step.prefill_s(tokens, 13, 50) for tokens in range(2000)]
    assert predictions == sorted(predictions)


def test_prefill_prediction_counts_chunks() -> None:
    step = engine()
    chunk_s = step.step_s(12, 0, 500, 500 * 501 // 2, 0, 13)
    rest_s = step.step_s(12, 0, 200, 200 * 201 // 2, 0, 13)
    assert step.prefill_s(1700, 12, 512) == rest_s + 3 * chunk_s
    assert step.prefill_s(0, 12, 512) == 0.0
    assert step.prefill_s(1, 512, 512) == math.inf


def test_other_gpus_keep_the_fraction_of_peak() -> None:
    rates = {line.quantity: line for line in engine(on="a100-80gb").provenance()}
    assert rates["gemm.flops_per_s"].value == pytest.approx(7.87e14 / 9.89e14 * 3.12e14)
    assert rates["attention.bytes_per_s"].value == pytest.approx(2.714e12 / 3.35e12 * 2.039e12)
    assert rates["gemm.flops_per_s"].kind == "roofline"
    assert rates["gemm.launch_s"].kind == "assumed"
    reduce = {line.quantity: line for line in engine(tp=2, on="l40s").provenance()}["all_reduce.bytes_per_s"]
    assert reduce.value == pytest.approx(3.18e11 / 4.5e11 * 3.2e10)  # PCIe: the L40S has no NVLink


@pytest.mark.parametrize("fmt", PRECISIONS)
def test_every_number_has_unit_kind_and_source(fmt: str) -> None:
    lines = engine(fmt=fmt, tp=2).provenance()
    assert {line.unit for line in lines} == {"s", "B/s", "FLOP/s"}
    assert all(line.source and line.kind in ("measured", "fitted", "roofline", "assumed") for line in lines)
    assert len({line.quantity for line in lines}) == len(lines)


def test_lower_precision_decodes_faster_when_weights_bind() -> None:
    seconds = [engine("llama-3.1-70b", fmt, tp=4).step_s(1, 1000, 0, 0, 0, 1) for fmt in ("fp16", "fp8", "awq")]
    assert seconds == sorted(seconds, reverse=True)


@given(st.sampled_from(["llama-3.1-8b", "yi-34b", "llama-2-7b"]), st.sampled_from(PRECISIONS), st.integers(1, 64))
def test_no_step_beats_the_data_sheet(name: str, fmt: str, decodes: int) -> None:
    """A decode step reads at least the weights (but one embedding table) and the KV at the peak memory bandwidth."""
    spec, form = model(name), precision(fmt)
    table_bytes = spec.vocab_size * spec.hidden_size * 2
    least = weight_bytes(spec, form, 1) - table_bytes + decodes * 500 * kv_token_bytes(spec, form, 1)
    assert engine(name, fmt).step_s(decodes, decodes * 500, 0, 0, 0, decodes) > least / 3.35e12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"on": "a100-80gb", "fmt": "fp8"}, "a100-80gb has no fp8 tensor cores"),
        ({"fmt": "W8A8", "by": "vllm-0.9.1-authors"}, "no host floor for precision W8A8; measured: W16A16"),
        ({"name": "opt-13b", "tp": 5}, "TP 5 has no all-reduce rate; known: 1, 2, 4, 8"),
        ({"tp": 3}, "TP 3"),
    ],
)
def test_engines_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**change)
