"""The step model by rooflines and by measured tables: closed forms, monotonicity, scalar and vector alike, shares, scaling,
sources."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepkit import batches, chunk, engine, engines, part_s

from fineserve_sim.catalog import deployment, gpu, kv_token_bytes, model, precision, weight_bytes
from fineserve_sim.latency import Batch, StepModel, batch_prefill_s
from fineserve_sim.latency.attention import TableAttention
from fineserve_sim.latency.rates import resolve
from fineserve_sim.latency.step import INITIAL_ENTRIES
from fineserve_sim.latency.table_operators import TableOperators
from fineserve_sim.latency.tables import isotonic, measured_on, shipped

FP8_70B = (model("llama-3.1-70b"), precision("fp8"), 4, gpu("h100-sxm"), deployment("vllm-cudagraph"), shipped())
PRECISIONS = ["W16A16", "W8A8KV8", "W8A8", "W4A16", "W4A8KV4"]


# --- By roofline ---


def test_one_decode_streams_the_weights() -> None:
    """At batch 1 a step costs the weights over the measured bandwidth plus launches: closed form by hand."""
    step = engine()
    linear_bytes, head_bytes = 32 * 218_103_808 * 2, 128256 * 4096 * 2
    stream_s = (linear_bytes + head_bytes) / 2.819e12
    launches_s = 129 * 3.1e-6 + 32 * 11.6e-6 + 65 * 2.3e-6 + 32 * (2.1e-6 + 2.1e-6) + 4e-6
    kv_s = 1001 * 128 * 1024 / 2.714e12
    assert step.step_s(1, 1000, 0, 0, 0, 1) == pytest.approx(5e-4 + stream_s + launches_s + kv_s, rel=2e-3)


def test_a_large_chunk_is_bound_by_flops() -> None:
    found = part_s(engine(), 0, 0, *chunk(4096), 1)
    flops_s = 2 * 4096 * 32 * 218_103_808 / 7.87e14
    gemm_s = sum(found[name] for name in ("qkv", "o", "gate_up", "down"))
    assert gemm_s == pytest.approx(flops_s + 128 * 3.1e-6, rel=1e-9)
    pairs_s = 32 * 4 * 32 * 128 * (4096 * 4097 // 2) / 5.79e14
    assert found["prefill_attention"] == pytest.approx(32 * 11.6e-6 + pairs_s, rel=1e-9)


def test_a_short_chunk_after_a_long_prefix_is_bound_by_reading_kv() -> None:
    attention_s = part_s(engine(), 0, 0, *chunk(1, 100_000), 1)["prefill_attention"]
    assert attention_s == pytest.approx(32 * 11.6e-6 + 100_001 * 128 * 1024 / 2.714e12, rel=1e-12)


def test_tensor_parallelism_pays_two_all_reduces_a_layer() -> None:
    found = part_s(engine("llama-3.1-70b", tp=4), 0, 0, *chunk(1000), 1)
    message_s = 1000 * 8192 * 2 * (2 * 3 / 4) / 3.5e11
    assert found["all_reduce"] == pytest.approx(2 * 80 * (4.6e-6 + message_s), rel=1e-9)
    assert "all_reduce" not in part_s(engine(), 1, 1, 0, 0, 0, 1)


# --- By tables ---


def test_matrix_products_are_the_tables() -> None:
    """QKV of Llama-3.1-8B at TP 1 is a measured shape: (m, 4096) x (4096, 6144)."""
    grid = shipped().grids["gemm/bfloat16"]
    i, j = grid.axes["n"].tolist().index(6144), grid.axes["k"].tolist().index(4096)
    measured = np.exp(isotonic(np.log(grid.latency_s[i, j])))
    for m, seconds in zip(grid.axes["m"].tolist(), measured, strict=True):
        qkv_s = part_s(engine(latency="tables"), 0, 0, *chunk(m), 1)["qkv"]
        assert qkv_s == pytest.approx(32 * seconds, rel=1e-9)


def test_decode_attention_is_the_table() -> None:
    """Batch 16 at 1,024 tokens of context, 32/8 heads, bf16: 36.1 us a layer in the published table."""
    found = part_s(engine(latency="tables"), 16, 16 * 1023, 0, 0, 0, 16)
    assert found["decode_attention"] == pytest.approx(32 * 36.1e-6, rel=0.002)


def test_all_reduce_is_the_table() -> None:
    """8,192 tokens of 8,192 numbers among 4 GPUs: 128 MiB, a measured message."""
    grid = shipped().grids["all_reduce/bfloat16"]
    gpus, message = (grid.axes[axis].tolist().index(value) for axis, value in (("gpus", 4), ("message_bytes", 2**27)))
    found = part_s(engine("llama-3.1-70b", tp=4, latency="tables"), 0, 0, *chunk(8192), 1)
    assert found["all_reduce"] == pytest.approx(2 * 80 * grid.latency_s[gpus, message], rel=1e-6)


def test_a_prefix_costs_at_least_its_reading_and_no_more_than_computing_it() -> None:
    step = engine(latency="tables")
    after_prefix = part_s(step, 0, 0, *chunk(512, 8192), 1)["prefill_attention"]
    whole = part_s(step, 0, 0, *chunk(8704), 1)["prefill_attention"]
    alone = part_s(step, 0, 0, *chunk(512), 1)["prefill_attention"]
    assert alone < after_prefix < whole
    one = part_s(step, 0, 0, *chunk(1, 100_000), 1)["prefill_attention"]
    assert one >= 100_001 * 128 * 1024 / 3.35e12


def test_one_launch_of_attention_serves_decodes_and_prompts() -> None:
    """A prompt beside long decodes costs its own attention only, beside short ones what is left of the floor."""
    step = engine(latency="tables")
    alone = part_s(step, 0, 0, *chunk(100), 1)["prefill_attention"]
    beside_long = part_s(step, 64, 64 * 4000, *chunk(100), 65)["prefill_attention"]
    assert 0 < beside_long == pytest.approx(alone - step.attention.floor_s)


def test_awq_prefill_takes_about_twice_fp16() -> None:
    """The FineServe authors' profile: 1 / 0.518 of the BF16 time where compute binds."""
    fp16, awq = (engine(fmt=fmt, latency="tables").step_s(0, 0, *chunk(8192), 1) for fmt in ("fp16", "awq"))
    assert 1.5 < awq / fp16 < 2.0


def test_short_decodes_wait_for_the_host_of_an_eager_engine_alone() -> None:
    """FP8 decodes at 10 ms a token however small the batch on the authors' engine, not under CUDA graphs."""
    for batch, latency in itertools.product((1, 2, 8), ("tables", "roofline")):
        eager, graphs = (
            engine(fmt="fp8", by=by, latency=latency).step_s(batch, batch * 300, 0, 0, 0, batch)
            for by in ("vllm-0.9.1-authors", "vllm-cudagraph")
        )
        assert eager == pytest.approx(0.00177 + 0.00877) and graphs < 0.007


def test_tables_are_asked_in_whole_arrays_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new engine prices its first rows in two calls, and a number of decodes when it first comes."""
    asked: list[tuple[str, int]] = []

    def counted(kind: type, name: str) -> None:
        original = getattr(kind, name)

        def wrapped(self: object, rows: Any) -> Any:
            asked.append((name, np.size(rows)))
            return original(self, rows)

        monkeypatch.setattr(kind, name, wrapped)

    counted(TableOperators, "by_tokens")
    counted(TableOperators, "by_sampled")
    counted(TableAttention, "decode")
    step = StepModel(*FP8_70B)
    assert asked == [("by_tokens", INITIAL_ENTRIES), ("by_sampled", INITIAL_ENTRIES)]
    for context in (100, 200, 300):
        step.step_s(8, context, 0, 0, 0, 8)
    assert asked[2:] == [("decode", 1)]


def test_tables_name_their_source() -> None:
    step = StepModel(*FP8_70B)
    lines = [line for line in step.provenance() if line.quantity.startswith("table.")]
    used = ("gemm/fp8", "gemm/bfloat16", "decode_attention/fp8/128", "prefill_attention/fp8/128", "all_reduce/bfloat16")
    assert [line.quantity for line in lines] == [f"table.{name}" for name in used]
    assert all("Apache-2.0" in line.source and "aiconfigurator" in line.source for line in lines)


# --- By either ---


@given(engines, st.integers(1, 400), st.integers(0, 8000), st.integers(0, 4000), st.integers(1, 500))
def test_no_step_gets_shorter_with_more_work(
    step: StepModel, decodes: int, context: int, tokens: int, more: int
) -> None:
    def seconds(decodes: int, context: int, tokens: int, sampled: int = 0) -> float:
        return step.step_s(decodes, decodes * context, *chunk(tokens), decodes + sampled)

    least = seconds(decodes, context, tokens) * (1 - 1e-12)
    assert seconds(decodes, context + more, tokens) >= least
    assert seconds(decodes + more, context, tokens) >= least
    assert seconds(decodes, context, tokens + more) >= least
    assert seconds(decodes, context, tokens, sampled=more) >= least


@given(
    engines,
    st.integers(1, 64),
    st.integers(1, 3000),
    st.integers(0, 20_000),
    st.integers(1, 20_000) | st.integers(1, 20),
    st.integers(0, 100),
)
def test_a_longer_prefix_makes_no_step_shorter(
    step: StepModel, chunks: int, tokens: int, prefix: int, more: int, decodes: int
) -> None:
    """So many equal chunks, each behind its own prefix, beside decodes at 500 tokens."""

    def seconds(prefix: int) -> float:
        sums = (chunks * each for each in chunk(tokens, prefix))
        return step.step_s(decodes, 500 * decodes, *sums, decodes + chunks)

    assert seconds(0) * (1 - 1e-12) <= seconds(prefix) <= seconds(prefix + more) * (1 + 1e-12)


@given(engines, st.integers(1, 600), st.integers(0, 2_000_000), st.integers(0, 40))
def test_vector_and_scalar_agree_bit_for_bit(step: StepModel, decodes: int, context: int, steps: int) -> None:
    one_by_one = [step.step_s(decodes, context + i * decodes, 0, 0, 0, decodes) for i in range(steps)]
    assert step.decode_steps_s(decodes, context, steps).tolist() == one_by_one
    ends = list(itertools.accumulate((seconds * 1.25 for seconds in one_by_one), initial=5.0))[1:]
    assert step.decode_ends_s(5.0, decodes, context, steps, 1.25) == ends
    assert step.decode_span_s(5.0, decodes, context, steps, 1.25) == (ends, one_by_one)


@pytest.mark.parametrize("latency", ["roofline", "tables"])
def test_splitting_a_run_of_decodes_changes_no_bit(latency: str) -> None:
    step = engine(fmt="fp8", latency=latency)
    whole = step.decode_ends_s(1.0, 37, 12_345, 500, 1.0)
    first = step.decode_ends_s(1.0, 37, 12_345, 20, 1.0)
    assert whole[:20] == first
    assert step.decode_ends_s(first[-1], 37, 12_345 + 20 * 37, 480, 1.0) == whole[20:]


def test_tables_grown_on_demand_equal_those_grown_at_once() -> None:
    args = (model("yi-6b"), precision("fp8"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph"), shipped())
    fresh = [StepModel(*args) for _ in "ab"]
    fresh[0].step_s(0, 0, 9000, 0, 0, 0)
    for tokens in (600, 3000, 7000, 9000):
        assert fresh[1].step_s(0, 0, tokens, 0, 0, 0) == fresh[0].step_s(0, 0, tokens, 0, 0, 0)


@given(engines, batches())
def test_a_demand_is_of_fractions_of_its_step(step: StepModel, batch: Batch) -> None:
    need = step.demand(*batch)
    assert all(0.0 <= share <= 1.0 for share in need[:3])
    assert need.step_s == step.step_s(*batch)


@given(engines, batches())
def test_tables_lengthen_no_need_of_the_units(step: StepModel, batch: Batch) -> None:
    """An operator needs compute units and bandwidth for its roofline, and not longer than it takes."""
    roofline = StepModel(step.model, step.precision, step.tp, step.gpu, step.deployment)
    for share, most in zip(step.demand(*batch)[:2], roofline.demand(*batch)[:2], strict=True):
        assert share * step.step_s(*batch) <= most * roofline.step_s(*batch) * (1 + 1e-9)


def test_decode_needs_bandwidth_and_prefill_compute() -> None:
    compute, memory = engine().demand(8, 8000, 0, 0, 0, 8)[:2]
    assert compute < 0.1 and memory > 0.7
    compute, memory = engine().demand(0, 0, 4096, 4096 * 4097 // 2, 0, 1)[:2]
    assert compute > 0.7 and memory < 0.5


def test_host_time_needs_neither() -> None:
    batch = (1, 100, 0, 0, 0, 1)
    free, bound = engine(fmt="fp8"), engine(fmt="fp8", by="vllm-0.9.1-authors")
    assert bound.step_s(*batch) == pytest.approx(0.00177 + 0.00877)
    assert bound.demand(*batch).bandwidth == pytest.approx(
        free.demand(*batch).bandwidth * free.step_s(*batch) / 0.01054, rel=1e-12
    )


@given(engines, st.integers(0, 20_000), st.integers(0, 3000), st.integers(0, 300), st.sampled_from([256, 512, 2048]))
def test_prefill_prediction_never_falls(step: StepModel, tokens: int, more: int, decoding: int, budget: int) -> None:
    assert step.prefill_s(tokens + more, decoding, budget) >= step.prefill_s(tokens, decoding, budget)


@given(engines, st.lists(st.integers(1, 9000), min_size=2, max_size=30), st.integers(0, 300))
def test_prefill_prediction_never_falls_with_a_longer_prompt_more(
    step: StepModel, prompts: list[int], decoding: int
) -> None:
    """Prompts come into a set in the order of their lengths."""
    tokens = list(itertools.accumulate(sorted(prompts)))
    pairs = itertools.accumulate(prompt * (prompt + 1) // 2 for prompt in sorted(prompts))
    seconds = [step.prefill_s(each, decoding, 2048, some) for each, some in zip(tokens, pairs, strict=True)]
    assert seconds == sorted(seconds)


def test_prefill_prediction_never_falls_token_by_token() -> None:
    step = engine(fmt="fp8", by="vllm-0.9.1-authors")  # host-bound: chunks of any size cost the same
    predictions = [step.prefill_s(tokens, 13, 50) for tokens in range(2000)]
    assert predictions == sorted(predictions)


def test_prefill_prediction_counts_chunks() -> None:
    """Prompts shorter than a chunk count as one that fills it."""
    step = engine()
    chunk_s, rest_s = (step.step_s(12, 0, *chunk(size), 13) for size in (500, 200))
    assert step.prefill_s(1700, 12, 512, 17 * 5050) == rest_s + 3 * chunk_s
    assert step.prefill_s(0, 12, 512) == 0.0
    assert step.prefill_s(1, 512, 512) == math.inf


@pytest.mark.parametrize("budget", [512, 2048, 8192])
@pytest.mark.parametrize(("name", "fmt", "tp"), [("llama-3.1-8b", "fp16", 1), ("llama-3.1-70b", "fp8", 2)])
def test_prefill_prediction_is_what_prompts_take_on_an_idle_engine(name: str, fmt: str, tp: int, budget: int) -> None:
    """Prompts longer than a step, alone and several, whose later chunks attend to the earlier ones."""
    step = engine(name, fmt, tp, latency="tables")
    for prompts, tokens in ((1, 8192), (1, 32_768), (1, 65_536), (1, 131_072), (3, 10_000), (20, 9000)):
        takes_s, pairs = batch_prefill_s(step, prompts, tokens, budget), prompts * tokens * (tokens + 1) // 2
        assert step.prefill_s(prompts * tokens, 0, budget, pairs) == pytest.approx(takes_s, rel=0.01)
        if prompts == 1:
            assert step.prefill_s(tokens, 0, budget) == step.prefill_s(tokens, 0, budget, pairs)


def test_other_gpus_keep_the_fraction_of_peak() -> None:
    rates = {line.quantity: line for line in engine(on="a100-80gb").provenance()}
    assert rates["gemm.flops_per_s"].value == pytest.approx(7.87e14 / 9.89e14 * 3.12e14)
    assert rates["attention.bytes_per_s"].value == pytest.approx(2.714e12 / 3.35e12 * 2.039e12)
    assert rates["gemm.flops_per_s"].kind == "roofline"
    assert rates["gemm.launch_s"].kind == "assumed"
    reduce = {line.quantity: line for line in engine(tp=2, on="l40s").provenance()}["all_reduce.bytes_per_s"]
    assert reduce.value == pytest.approx(3.18e11 / 4.5e11 * 3.2e10)  # PCIe: the L40S has no NVLink


def test_awq_on_a_gpu_without_wgmma_computes_as_marlin_does() -> None:
    """Marlin reaches what mma.sync does: 62.9 % of an H100's peak, and all of an A100's."""
    h100, a100 = (resolve(gpu(name), precision("awq"), 1).gemm.flops_per_s.value for name in ("h100-sxm", "a100-80gb"))
    assert a100 == pytest.approx(h100 * 3.12e14 / (0.629 * 9.89e14))


def test_fp8_weights_without_fp8_cores_are_products_in_16_bits_on_half_the_bytes() -> None:
    """Few rows are bound by weights and take about half of FP16's time; many rows are bound by the same tensor cores."""
    spec = gpu("a100-80gb")
    shape = (model("llama-3.1-8b"), precision("fp8-kv16"), 1, spec, deployment("vllm-cudagraph"))
    half = (model("llama-3.1-8b"), precision("fp16"), *shape[2:])
    for tables in (None, measured_on(spec)):
        weight_only, full = StepModel(*shape, tables), StepModel(*half, tables)
        assert weight_only.precision.activation_bits == 16
        few = [part_s(step, 1, 100, 0, 0, 0, 1)["gate_up"] for step in (weight_only, full)]
        many = [part_s(step, 0, 0, *chunk(8192), 1)["gate_up"] for step in (weight_only, full)]
        assert 0.45 < few[0] / few[1] < 0.65
        assert many[0] == pytest.approx(many[1], rel=0.01)
        gemm = {line.quantity: line for line in weight_only.provenance()}["gemm.flops_per_s"]
        assert "8-bit weights unpacked to 16 bits" in gemm.source
    own = StepModel(model("llama-3.1-8b"), precision("fp8-kv16"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph"))
    assert own.precision.activation_bits == 8


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
        ({"fmt": "W8A8", "by": "vllm-0.9.1-authors"}, "no host floor for precision W8A8; measured: W16A16"),
        ({"name": "opt-13b", "tp": 5}, "TP 5 has no all-reduce rate; known: 1, 2, 4, 8"),
        ({"tp": 3}, "TP 3"),
    ],
)
def test_engines_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine(**change)
