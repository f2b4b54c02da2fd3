"""Experts, windows, latent and linear attention: closed forms, brute force over tokens, and the tables that they come from."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fineserve_sim.catalog import (
    Deployment,
    deployment,
    expert_work,
    gpu,
    kernel_rates,
    model,
    padded,
    precision,
    with_experts,
)
from fineserve_sim.catalog.geometry import state_bytes
from fineserve_sim.latency import StepModel, measured_on
from fineserve_sim.latency.accounting import Batch, parts
from fineserve_sim.latency.experts import ExpertTables, roofline, touched
from fineserve_sim.latency.layered_attention import capped, summed, windowed_pairs
from fineserve_sim.latency.rates import resolve
from fineserve_sim.latency.table_operators import TableOperators
from fineserve_sim.latency.tables import PiecewiseLinear, shipped_layers

GRAPHS: Deployment = deployment("vllm-cudagraph")
H100, H200 = gpu("h100-sxm"), gpu("h200-sxm")
SHAPES = [
    "gpt-oss-120b",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "deepseek-v3.2",
    "glm-5.2",
    "gemma-3-27b",
    "qwen3.5-35b-a3b",
    "llama-4-scout",
]


def step_of(name: str, tp: int = 1, fmt: str = "checkpoint", on: str = "h200-sxm", tables: bool = True) -> StepModel:
    spec = model(name)
    chosen = precision(spec.checkpoint if fmt == "checkpoint" else fmt)
    return StepModel(spec, chosen, tp, gpu(on), GRAPHS, measured_on(gpu(on)) if tables else None)


# --- experts -----------------------------------------------------------------------------------------------------------


def test_distinct_experts_as_random_routing_touches_them() -> None:
    """2,000 draws of 16 tokens, each to 8 of 128 experts."""
    rng = np.random.default_rng(7)
    seen = [len(set(np.concatenate([rng.permutation(128)[:8] for _ in range(16)]).tolist())) for _ in range(2000)]
    assert float(touched(128, 128, 8, np.array([16.0]))[0]) == pytest.approx(np.mean(seen), rel=0.005)


@given(st.integers(1, 512), st.integers(1, 64), st.integers(1, 20_000))
def test_no_more_experts_than_there_are_or_tokens_ask_for(count: int, active: int, tokens: int) -> None:
    active = min(active, count)
    distinct = float(touched(count, count, active, np.array([float(tokens)]))[0])
    assert active * (1 - 1e-9) <= distinct <= min(count, active * tokens) * (1 + 1e-9)


def test_a_decode_of_one_reads_its_active_experts_by_hand() -> None:
    """Mixtral 8x7B: 2 of 8 experts of 3 x 4096 x 14336 weights in 16 bits; rows are 2 x (2 x 4096 + 3 x 14336) values."""
    work, kernel = expert_work(model("mixtral-8x7b"), 1), kernel_rates().experts["W16A16"]
    assert work is not None
    moved = 2 * 3 * 4096 * 14336 * 2 + 2 * 2 * (2 * 4096 + 3 * 14336)
    cost = roofline(work, kernel, 16.0, np.array([1.0]))
    assert cost.seconds[0] == pytest.approx(kernel.launch_s.value + moved / kernel.bytes_per_s.value)


def test_a_measured_shape_takes_its_measured_seconds() -> None:
    tables = shipped_layers("h200-sxm")
    grid = tables.grids["experts/w4a16_mxfp4_triton"]
    place = grid.axes["shape"].tolist().index([128, 4, 2880, 2880, 1, 1])
    work = expert_work(model("gpt-oss-120b"), 1)
    assert work is not None
    found = ExpertTables(tables, H200).find(work, precision("mxfp4-triton"), H200)
    assert found is not None and found.exact
    assert found.line.at(grid.axes["tokens"].astype(float)) == pytest.approx(grid.latency_s[place], rel=0.02)


def test_other_shapes_formats_and_gpus_stand_in_and_say_so() -> None:
    tables = ExpertTables(shipped_layers("h100-sxm"), H100)
    glm, oss = expert_work(model("glm-4.5"), 8), expert_work(model("gpt-oss-120b"), 1)
    assert glm is not None and oss is not None
    shape, format_ = tables.find(glm, precision("fp8-block"), H100), tables.find(oss, precision("mxfp4"), H100)
    other = tables.find(oss, precision("mxfp4-triton"), gpu("h100-pcie"))
    assert shape and format_ and other and not (shape.exact or format_.exact or other.exact)
    assert format_.table == "experts/int4_wo"
    mine = tables.find(oss, precision("mxfp4-triton"), H100)
    assert mine is not None and (other.line.seconds >= mine.line.seconds).all()  # a slower memory, and slower cores


def test_whole_experts_cost_a_gpu_its_share() -> None:
    """Spread over 4 GPUs, a quarter of the experts is read and a quarter of the rows computed, as if each were split."""
    spec = model("qwen3-30b-a3b")
    whole, split = expert_work(with_experts(spec, "whole"), 4), expert_work(spec, 4)
    assert whole is not None and split is not None
    kernel, tokens = kernel_rates().experts["W16A16"], np.array([1.0, 64.0])
    each, parts_ = roofline(whole, kernel, 16.0, tokens), roofline(split, kernel, 16.0, tokens)
    assert each.compute_s == pytest.approx(parts_.compute_s)
    assert each.memory_s == pytest.approx(parts_.memory_s, rel=0.25)  # rows of hidden states differ


# --- attention ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4000), st.integers(0, 4000), st.integers(1, 6), st.integers(1, 3000))
def test_pairs_inside_a_window_by_brute_force(chunk: int, prefix: int, chunks: int, window: int) -> None:
    pairs = chunks * (chunk * prefix + chunk * (chunk + 1) / 2)
    inside, _ = windowed_pairs(chunks * chunk, pairs, chunks * prefix, window)
    brute = chunks * np.minimum(np.arange(prefix + 1, prefix + chunk + 1), window).sum()
    assert inside == pytest.approx(brute, rel=2e-3, abs=chunks * (window + 1))


def test_capped_and_summed_curves() -> None:
    curve = PiecewiseLinear([0.0, 10.0], [1.0, 2.0], 0.5)
    low = capped(curve, 14.0)
    assert [low.at(x) for x in (0, 5, 10, 14, 100)] == [1.0, 1.5, 2.0, 4.0, 4.0]
    both = summed([curve, low])
    assert [both.at(x) for x in (0, 7, 12, 20)] == pytest.approx([2.0, 3.4, 6.0, 11.0])


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tables", [False, True])
def test_merged_steps_end_when_single_ones_do(name: str, tables: bool) -> None:
    step = step_of(name, 8, tables=tables)
    now, context = 3.0, 20 * 900
    for _ in range(40):
        now += step.step_s(20, context, 0, 0, 0, 20) * 1.25
        context += 20
    assert step.decode_ends_s(3.0, 20, 20 * 900, 40, 1.25)[-1] == now


@settings(max_examples=60)
@given(
    st.sampled_from(SHAPES),
    st.booleans(),
    st.integers(1, 200),
    st.integers(1, 30_000),
    st.integers(1, 4000),
    st.integers(0, 9000),
)
def test_more_work_never_takes_less(
    name: str, tables: bool, decodes: int, context: int, chunk: int, prefix: int
) -> None:
    step = _cached(name, tables)
    pairs = chunk * prefix + chunk * (chunk + 1) / 2
    seconds = step.step_s(decodes, decodes * context, chunk, pairs, prefix, decodes + 1)
    assert 0 < seconds < 60
    assert step.step_s(decodes, decodes * (context + 500), chunk, pairs, prefix, decodes + 1) >= seconds * (1 - 1e-9)
    longer = (chunk + 64) * prefix + (chunk + 64) * (chunk + 65) / 2
    assert step.step_s(decodes, decodes * context, chunk + 64, longer, prefix, decodes + 1) >= seconds * 0.98


_BUILT: dict[tuple[str, bool], StepModel] = {}


def _cached(name: str, tables: bool) -> StepModel:
    if (name, tables) not in _BUILT:
        _BUILT[name, tables] = step_of(name, 8, tables=tables)
    return _BUILT[name, tables]


@pytest.mark.parametrize("name", SHAPES)
def test_parts_sum_to_the_step(name: str) -> None:
    step = step_of(name, 8)
    batches = [
        Batch(16, 16 * 3000, 700, 700 * 800.0, 300, 17),
        Batch(0, 0, 2048, 2048 * 2049 / 2, 0, 1),
        Batch(3, 30, 0, 0, 0, 3),
    ]
    total = sum(part.seconds for part in parts(step, batches).values())
    assert total == pytest.approx([step.step_s(*batch) for batch in batches])


def test_a_window_makes_long_contexts_cheap() -> None:
    """gemma-3-27b: 52 of 62 layers see 1,024 tokens, so that a longer context costs 10 layers alone."""
    step = step_of("gemma-3-27b", tables=False, fmt="fp16")
    near, far, farther = (step.attention.decode(1).at(tokens) for tokens in (512, 4096, 8192))
    assert farther - far == pytest.approx(
        4096 * 10 * 2 * 16 * 128 * 2 / step.operators.rates.attention.bytes_per_s.value
    )
    assert far > near


def test_an_index_bounds_what_a_query_attends_to() -> None:
    dense, sparse = step_of("deepseek-v3", 8, tables=False), step_of("deepseek-v3.2", 8, tables=False)
    long = (16, 16 * 60_000, 0, 0, 0, 16)
    assert sparse.step_s(*long) < dense.step_s(*long)


def test_layers_that_share_an_index_differ_by_the_index_alone() -> None:
    """glm-5 has an index in each of 78 layers, glm-5.2 in 21: steps differ by 57 of 78 parts of what the index takes."""
    every, shared = (step_of(name, 8, "fp8-kv16", tables=False) for name in ("glm-5", "glm-5.2"))
    chosen, index = every.attention.kinds  # type: ignore[attr-defined]
    for batch, tokens in ((4, 4 * 9000), (64, 64 * 2048)):
        whole, part = (step.attention.decode(batch).at(tokens) for step in (every, shared))
        assert whole - part == pytest.approx(index.decode(batch).at(tokens) * 57 / 78, rel=1e-6)
    assert every.attention.decode(4).at(4 * 9000) == pytest.approx(
        chosen.decode(4).at(4 * 9000) + index.decode(4).at(4 * 9000)
    )


def test_sparse_attention_computes_64_heads_however_few_a_gpu_has() -> None:
    """deepseek-v3.2: 128 heads. At TP 8 a GPU has 16, and its prompts' attention takes as long as that of 64 at TP 2."""
    eighth, half = (step_of("deepseek-v3.2", tp, tables=False).attention.kinds[0] for tp in (8, 2))  # type: ignore[attr-defined]
    assert eighth.prefill_s(2048, 2048 * 8192, 0) == half.prefill_s(2048, 2048 * 8192, 0)
    near, far = eighth.prefill_s(100, 5050, 0), eighth.prefill_s(100, 5050 + 100 * 9000, 9000)
    assert near == far == 100 * 2048 * eighth.pair_s  # as many keys as may be chosen, also where there are fewer
    assert eighth.decode(4).at(4 * 100) == eighth.decode(4).at(4 * 9000)
    whole = step_of("deepseek-v3.2", 1, tables=False).attention.kinds[0]  # type: ignore[attr-defined]
    assert whole.pair_s == pytest.approx(2 * half.pair_s)


def test_a_state_costs_the_same_at_every_length() -> None:
    step = step_of("qwen3.5-35b-a3b", tables=False)
    per_token = [step.attention.decode(8).at(tokens) for tokens in (8, 80_008, 160_008)]
    assert per_token[2] - per_token[1] == pytest.approx(per_token[1] - per_token[0])  # 10 layers of full attention


@pytest.mark.parametrize("tables", [False, True])
def test_beside_prompts_each_decode_fills_a_chunk_of_linear_attention(tables: bool) -> None:
    """Hand-worked, 8 decodes beside a prompt of 100: 512 tokens more for the prompts' kernel, and 4 times each state moved."""
    step = step_of("qwen3.5-35b-a3b", tables=tables, fmt="fp16")
    full, states = step.attention.kinds  # type: ignore[attr-defined]
    copied_s = 4 * state_bytes(step.model, 1) / step.operators.rates.attention.bytes_per_s.value
    chunked_s = states.prompts.at(100 + 8 * 64) - states.prompts.at(100)
    more_s = chunked_s + 8 * copied_s - (states.decode(8).at(0) - states.floor_s)
    decode_s, prefill_s = step.attention_s(8, 800, 100, 5050, 0)
    assert decode_s == step.attention.decode(8).at(808)
    assert prefill_s == pytest.approx(step.attention.prefill_s(100, 5050, 0) + more_s)
    batch = Batch(8, 800, 100, 5050, 0, 9)
    assert sum(float(part.seconds[0]) for part in parts(step, [batch]).values()) == pytest.approx(step.step_s(*batch))
    assert step.demand(*batch).step_s == pytest.approx(step.step_s(*batch))
    assert full.beside_prompts_s(8, 100) == 0.0
    alone_s = step.step_s(8, 800, 100, 5050, 0, 9)
    step.slow_down(2.0)
    assert step.step_s(8, 800, 100, 5050, 0, 9) == pytest.approx(2 * alone_s)


@pytest.mark.parametrize("fmt", ["W8A8", "W8A8-block"])
@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b"])
def test_experts_in_fp8_on_an_a100_are_unpacked_by_marlin(name: str, fmt: str) -> None:
    """A batch that touches all experts reads half of what 16 bits take; Marlin computes no faster than 4-bit weights let it."""
    wide, narrow, four = (step_of(name, 4, one, on="a100-80gb").operators for one in ("W16A16", fmt, "W4A16-experts"))
    assert all(isinstance(one, TableOperators) and one.expert_table for one in (wide, narrow, four))
    tokens = np.array([64.0, 8192.0])
    seconds = [one.expert_table.line.at(tokens) for one in (wide, narrow, four)]
    assert 0.5 < seconds[1][0] / seconds[0][0] < 0.65
    assert seconds[1][1] == pytest.approx(seconds[2][1], rel=0.01)
    assert wide.expert_table.exact and not narrow.expert_table.exact


def test_nvfp4_experts_without_fp4_cores_compute_as_marlins() -> None:
    """Not at the rates of FP8 products, which the format has where nothing unpacks it."""
    rates, marlin = (resolve(H100, precision(fmt), 1, True).experts for fmt in ("nvfp4", "W4A16-experts"))
    assert rates is not None and marlin is not None
    assert rates.flops_per_s.value == marlin.flops_per_s.value and rates.flops_per_s.kind == "assumed"
    assert marlin.flops_per_s.kind == "measured"


def test_shapes_that_were_hardly_measured_stand_for_none() -> None:
    """A B200 has Llama 4's experts in 16 bits at TP 4 for one token alone: a prompt is not that many times a decode."""
    prompt = (0, 0, 2048, 2048 * 2049 / 2, 0, 1)
    older, newer = (step_of("llama-4-scout", 4, "W16A16", on=on).step_s(*prompt) for on in ("h200-sxm", "b200"))
    assert newer < older


def test_experts_in_4_bits_on_an_a100_are_those_of_the_gpu_that_measures_their_shape() -> None:
    """An A100 has tables of 16-bit experts alone, an L40S of Marlin's in the shape of gpt-oss, which keep their ratio."""
    found = step_of("gpt-oss-20b", on="a100-80gb").operators
    assert isinstance(found, TableOperators)
    assert found.expert_table is not None and found.expert_table.table == "experts/w4a16_mxfp4"
    assert any(one.quantity == "table.experts/w4a16_mxfp4" for one in found.provenance())
    plain, tokens = expert_work(model("gpt-oss-20b"), 1), np.array([2048.0])
    assert plain is not None
    work = padded(plain, precision("mxfp4"))
    theirs, ours = (
        roofline(work, rates, 4.25, tokens).seconds[0]
        for rates in (resolve(gpu(name), precision("mxfp4"), 1, True).experts for name in ("l40s", "a100-80gb"))
        if rates is not None
    )
    l40s = step_of("gpt-oss-20b", on="l40s").operators
    assert isinstance(l40s, TableOperators) and l40s.expert_table is not None
    expected_s = l40s.expert_table.line.at(tokens)[0] * ours / theirs
    assert found.expert_table.line.at(tokens)[0] == pytest.approx(expected_s)
