"""The step model by measured tables: the laws of ``StepModel``, the tables behind it, and measured end-to-end results."""

from __future__ import annotations

import csv
import math
import time
from functools import cache
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency import StepModel, batch_prefill_s
from fineserve_sim.latency.table_model import TableStepModel
from fineserve_sim.latency.tables import (
    DecodeTable,
    GemmTable,
    Grid,
    PiecewiseLinear,
    PrefillTable,
    TableError,
    TableSet,
    isotonic,
    load,
    match_heads,
    save,
    shipped,
)

SHARED = Path(__file__).parents[3] / "shared" / "data"
AUTHORS = SHARED / "e2e" / "fineserve_authors_h100_8b.csv"
SUMS = ("decodes", "decode_context", "prefill_tokens", "prefill_pairs", "prefill_context", "sampled")
H100 = gpu("h100-sxm")


@cache
def engine(
    name: str = "llama-3.1-8b", fmt: str = "fp16", tp: int = 1, on: str = "h100-sxm", by: str = "vllm-cudagraph"
) -> TableStepModel:
    return TableStepModel(model(name), precision(fmt), tp, gpu(on), deployment(by))


def chunk(tokens: int, prefix: int = 0) -> tuple[int, int, int]:
    """Tokens, pairs and cached context of one prompt chunk."""
    return tokens, tokens * prefix + tokens * (tokens + 1) // 2, prefix if tokens else 0


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, int, int, int, int, int]:
    """Running sums of a batch that can exist: some decodes, and at most one prompt chunk after a prefix."""
    decodes = draw(st.integers(0, 300))
    context = draw(st.integers(0, 8000)) * decodes
    prompt = chunk(draw(st.integers(0, 3000)), draw(st.integers(0, 9000)))
    return decodes, context, *prompt, decodes + (1 if prompt[0] else 0)


engines = st.builds(
    engine,
    st.sampled_from(["llama-3.1-8b", "qwen3-32b", "opt-13b", "yi-34b", "llama-3.2-1b"]),
    st.sampled_from(["fp16", "fp8", "awq", "qoq"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["h100-sxm", "h200-sxm"]),
    st.sampled_from(["vllm-cudagraph", "vllm-0.9.1-authors"]),
)


# --- The pieces ---


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=40))
def test_isotonic_is_monotone_keeps_the_mean_and_leaves_monotone_lines_alone(values: list[float]) -> None:
    fitted = isotonic(np.array(values))
    assert np.all(np.diff(fitted) >= 0)
    assert fitted.mean() == pytest.approx(np.mean(values), abs=1e-9)
    assert isotonic(np.sort(values)).tolist() == sorted(values)


def test_isotonic_by_hand() -> None:
    assert isotonic(np.array([1.0, 4.0, 2.0, 3.0, 9.0])).tolist() == [1.0, 3.0, 3.0, 3.0, 9.0]


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=8), st.lists(st.integers(0, 20_000), min_size=1))
def test_piecewise_linear_scalar_and_vector_agree(gaps: list[int], xs: list[int]) -> None:
    starts = [0.0, *np.cumsum(gaps).astype(float).tolist()]
    line = PiecewiseLinear(starts, [math.sqrt(x + 1) for x in starts], 0.1)
    assert line.at_each(np.array(xs)).tolist() == [line.at(x) for x in xs]


def roofline_grid(launch_s: float, fraction: float) -> Grid:
    """GEMM latencies of a machine that takes a launch and reaches a fixed fraction of the H100's data sheet."""
    axes = {"n": [256, 1024, 8192], "k": [256, 2048, 8192], "m": [1, 64, 512, 8192]}
    n, k, m = np.meshgrid(*(np.array(axis, dtype=float) for axis in axes.values()), indexing="ij")
    ideal = np.maximum(2 * m * n * k / 9.89e14, 2 * (n * k + m * k + m * n) / 3.35e12)
    return Grid({name: np.array(axis) for name, axis in axes.items()}, launch_s + ideal / fraction)


def test_a_machine_at_a_fixed_fraction_of_the_roofline_is_predicted_between_its_shapes() -> None:
    table = GemmTable(roofline_grid(1e-9, 0.5), "bfloat16", H100)
    seconds = table.line(3000, 5000, H100).at(np.array([1.0, 8192.0]))
    moved, flops = 2 * (3000 * 5000 + 3000 + 5000), 2 * 8192 * 3000 * 5000
    assert seconds[0] == pytest.approx(moved / 3.35e12 / 0.5, rel=0.02)
    assert seconds[1] == pytest.approx(flops / 9.89e14 / 0.5, rel=0.02)
    assert table.covers(3000, 5000) and not table.covers(128256, 4096)


def test_unmeasured_shapes_are_filled_from_their_neighbours() -> None:
    whole = roofline_grid(1e-9, 0.5)
    holes = whole.latency_s.copy()
    holes[1, 1] = holes[2, 2] = np.nan
    seconds = GemmTable(Grid(whole.axes, holes), "bfloat16", H100).line(1024, 2048, H100).seconds
    assert seconds == pytest.approx(whole.latency_s[1, 1], rel=0.1)


def test_beyond_the_measured_rows_latency_grows_in_proportion() -> None:
    line = GemmTable(roofline_grid(1e-6, 0.5), "bfloat16", H100).line(4096, 4096, H100)
    assert line.at(np.array([32768.0]))[0] == pytest.approx(4 * line.at(np.array([8192.0]))[0], rel=1e-12)


def attention_grid(work: str, per_token_s: float) -> Grid:
    """One layer of 32/8 heads that takes 10 us and a fixed time per unit of work; long big batches unmeasured."""
    batch, tokens = 2 ** np.arange(6), 2 ** np.arange(1, 11)
    square = tokens * (tokens + 1024.0) if work == "new_tokens" else tokens.astype(float)
    latency = 1e-5 + batch[:, None] * square * per_token_s
    latency[batch[:, None] * tokens > 8192] = np.nan
    axes = {"heads": np.array([[8, 8], [32, 8]]), "batch": batch, work: tokens}
    return Grid(axes, np.stack([latency, latency]))


def test_decode_attention_is_linear_in_context_and_saturates_in_batch() -> None:
    grid = attention_grid("context", 1e-9)
    match = match_heads(grid, 32, 8)
    assert match is not None and match.exact
    table = DecodeTable(grid, match)
    for batch, context in ((1, 700), (4, 1024), (32, 200)):
        assert table.curve(batch, 1.0).at(batch * context) == pytest.approx(1e-5 + batch * context * 1e-9, rel=1e-9)
    assert table.covers(32, 256) and not table.covers(32, 257) and not table.covers(33, 2)
    assert table.curve(32, 1.0).at(32 * 1024) == pytest.approx(4 * (1e-5 + 8192e-9), rel=1e-9)  # twice half the batch


def test_heads_that_were_not_measured_are_a_larger_batch_of_fewer() -> None:
    grid = attention_grid("context", 1e-9)
    match = match_heads(grid, 32, 32)
    assert match is not None and match.batch_factor == 4 and not match.exact
    assert DecodeTable(grid, match).curve(2, 1.0).at(2 * 512) == pytest.approx(1e-5 + 8 * 512e-9, rel=1e-9)
    assert match_heads(grid, 7, 1) is None


def test_prefill_attention_between_measured_lengths_and_batches() -> None:
    grid = attention_grid("new_tokens", 1e-12)
    match = match_heads(grid, 32, 8)
    assert match is not None
    table = PrefillTable(grid, match, 2.0)
    for batch, length in ((1, 300), (3, 600), (8, 1024), (5, 70)):
        expected = 2 * (1e-5 + batch * length * (length + 1024) * 1e-12)
        got = table.floor_s + table.beyond_floor_s(batch * length, batch * length * (length + 1) / 2)
        assert got == pytest.approx(expected, rel=1e-9)


# --- The model ---


def test_matrix_products_are_the_tables() -> None:
    """QKV of Llama-3.1-8B at TP 1 is a measured shape: (m, 4096) x (4096, 6144)."""
    grid = shipped().grids["gemm/bfloat16"]
    i, j = grid.axes["n"].tolist().index(6144), grid.axes["k"].tolist().index(4096)
    measured = np.exp(isotonic(np.log(grid.latency_s[i, j])))
    for m, seconds in zip(grid.axes["m"].tolist(), measured, strict=True):
        assert engine().breakdown(0, 0, *chunk(m), 1)["qkv"] == pytest.approx(32 * seconds, rel=1e-9)


def test_decode_attention_is_the_table() -> None:
    """Batch 16 at 1,024 tokens of context, 32/8 heads, bf16: 36.1 us a layer in the published table."""
    parts = engine().breakdown(16, 16 * 1023, 0, 0, 0, 16)
    assert parts["decode_attention"] == pytest.approx(32 * 36.1e-6, rel=0.002)


@given(engines, batches())
def test_breakdown_sums_to_the_step(step: TableStepModel, batch: tuple[int, int, int, int, int, int]) -> None:
    parts = step.breakdown(*batch)
    assert sum(parts.values()) == pytest.approx(step.step_s(*batch), rel=1e-9)
    assert parts["host"] > -1e-12


@given(engines, st.integers(1, 600), st.integers(0, 2_000_000), st.integers(0, 40))
def test_vector_and_scalar_agree_bit_for_bit(step: TableStepModel, decodes: int, context: int, steps: int) -> None:
    one_by_one = [step.step_s(decodes, context + i * decodes, 0, 0, 0, decodes) for i in range(steps)]
    assert step.decode_steps_s(decodes, context, steps).tolist() == one_by_one
    now, ends = 5.0, []
    for seconds in one_by_one:
        now += seconds * 1.25
        ends.append(now)
    assert step.decode_ends_s(5.0, decodes, context, steps, 1.25) == ends


def test_long_runs_of_decodes_agree_too() -> None:
    step = engine(fmt="fp8")
    whole = step.decode_ends_s(1.0, 37, 12_345, 500, 1.0)
    first = step.decode_ends_s(1.0, 37, 12_345, 20, 1.0)
    assert whole[:20] == first
    assert step.decode_ends_s(first[-1], 37, 12_345 + 20 * 37, 480, 1.0) == whole[20:]


@given(engines, st.integers(1, 400), st.integers(0, 8000), st.integers(0, 4000), st.integers(1, 500))
def test_no_step_gets_shorter_with_more_work(
    step: TableStepModel, decodes: int, context: int, tokens: int, more: int
) -> None:
    def seconds(decodes: int, context: int, tokens: int, sampled: int = 0) -> float:
        return step.step_s(decodes, decodes * context, *chunk(tokens), decodes + sampled)

    least = seconds(decodes, context, tokens)
    assert seconds(decodes, context + more, tokens) >= least
    assert seconds(decodes + more, context, tokens) >= least * (1 - 1e-12)
    assert seconds(decodes, context, tokens + more) >= least * (1 - 1e-12)
    assert seconds(decodes, context, tokens, sampled=more) >= least
    longer_prefix = step.step_s(decodes, decodes * context, *chunk(tokens)[:2], more, decodes)
    assert longer_prefix >= least


@given(engines, st.integers(0, 20_000), st.integers(0, 3000), st.integers(0, 300), st.sampled_from([256, 512, 2048]))
def test_prefill_prediction_never_falls(
    step: TableStepModel, tokens: int, more: int, decoding: int, budget: int
) -> None:
    assert step.prefill_s(tokens + more, decoding, budget) >= step.prefill_s(tokens, decoding, budget)


@given(engines, batches())
def test_shares_are_fractions(step: TableStepModel, batch: tuple[int, int, int, int, int, int]) -> None:
    assert all(0.0 <= share <= 1.0 for share in step.shares(*batch))


@given(engines, batches())
def test_provenance_shares_are_a_whole(step: TableStepModel, batch: tuple[int, int, int, int, int, int]) -> None:
    shares = step.provenance_shares(*batch)
    assert sum(shares.values()) == pytest.approx(1.0, rel=1e-9)
    assert all(share > -1e-9 for share in shares.values())


def test_provenance_tells_the_measured_from_the_rest() -> None:
    decode = (32, 32_000, 0, 0, 0, 32)
    measured = engine().provenance_shares(*decode)
    assert measured["measured"] > 0.85 and 0 < measured["roofline"] < 0.1  # lm_head is wider than any measured product
    assert engine(on="h200-sxm").provenance_shares(*decode)["measured"] == 0
    assert engine(fmt="awq").provenance_shares(*decode)["assumed"] > 0.5
    assert engine(fmt="qoq").provenance_shares(*decode)["measured"] < 0.2
    assert engine(fmt="qoq").kinds(*decode)["down"] == "assumed"
    assert engine(fmt="qoq").kinds(0, 0, *chunk(2048), 1)["down"] == "fitted"
    assert engine(by="vllm-0.9.1-authors").provenance_shares(1, 0, 0, 0, 0, 1)["measured"] > 0.9
    assert engine().kinds(4, 4 * 200_000, 0, 0, 0, 4)["decode_attention"] == "roofline"
    assert engine().kinds(0, 0, *chunk(40_000), 1)["qkv"] == "roofline"
    assert engine().kinds(0, 0, *chunk(512), 1)["prefill_attention"] == "measured"
    assert engine().kinds(0, 0, *chunk(512, 512), 1)["prefill_attention"] == "assumed"


def test_a_prefix_costs_at_least_its_reading_and_no_more_than_computing_it() -> None:
    step = engine()
    after_prefix = step.breakdown(0, 0, *chunk(512, 8192), 1)["prefill_attention"]
    whole = step.breakdown(0, 0, *chunk(8704), 1)["prefill_attention"]
    alone = step.breakdown(0, 0, *chunk(512), 1)["prefill_attention"]
    assert alone < after_prefix < whole
    one = step.breakdown(0, 0, *chunk(1, 100_000), 1)["prefill_attention"]
    assert one >= 100_001 * 128 * 1024 / 3.35e12


def test_construction_is_quick_and_sources_are_named() -> None:
    args = (model("llama-3.1-70b"), precision("fp8"), 4, H100, deployment("vllm-cudagraph"))
    TableStepModel(*args)
    start = time.perf_counter()
    step = TableStepModel(*args)
    assert time.perf_counter() - start < 0.05
    lines = [line for line in step.provenance() if line.quantity.startswith("table.")]
    assert {line.quantity for line in lines} >= {"table.gemm/fp8", "table.decode_attention/fp8/128"}
    assert all("Apache-2.0" in line.source and "aiconfigurator" in line.source for line in lines)


# --- The file ---


def test_tables_survive_saving_and_the_same_tables_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = tmp_path / "a.npz", tmp_path / "b.npz"
    save(first, shipped())
    save(second, load(first))
    assert first.read_bytes() == second.read_bytes()
    assert first.stat().st_size < 1_500_000


@pytest.mark.parametrize(
    ("tables", "text"),
    [
        (TableSet({"device": "NVIDIA A100"}, {}), "measured on NVIDIA A100"),
        (TableSet({"device": "X"}, {"gemv/x": roofline_grid(1, 1)}), "unknown operator"),
        (TableSet({"device": "X"}, {"gemm/x": roofline_grid(-9, 1)}), "positive seconds"),
        (TableSet({"device": "X"}, {"gemm/x": Grid({"m": np.array([1])}, np.ones(1))}), "lacks n, k"),
        (TableSet({"device": "X"}, {"gemm/x": Grid(roofline_grid(1, 1).axes, np.ones((1, 1, 1)))}), "shape"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, tables: TableSet, text: str) -> None:
    save(tmp_path / "bad.npz", tables)
    with pytest.raises(TableError, match=text):
        load(tmp_path / "bad.npz", device="X")


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_text("no table")
    with pytest.raises(TableError, match=r"x\.npz: not a latency table set"):
        load(tmp_path / "x.npz")


# --- Against measurements ---


def errors(cls: type[StepModel], fmt: str) -> dict[str, list[float]]:
    """Relative errors over batch 1-32, inputs 256 and 512, at 100 % of the SMs of the authors' profile."""
    step = cls(
        model("llama-3.1-8b"), precision({"org": "fp16"}.get(fmt, fmt)), 1, H100, deployment("vllm-0.9.1-authors")
    )
    with AUTHORS.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["qformat"] == fmt and row["mps_percentage"] == "100"]
    found: dict[str, list[float]] = {"tpot": [], "ttft": []}
    for row in rows:
        batch, prompt, output = int(row["batch_size"]), int(row["input_len"]), int(row["output_len"])
        tpot_s = float(step.decode_steps_s(batch, batch * prompt, output - 1).mean())
        found["tpot"].append(tpot_s / float(row["tpot"]) - 1)
        found["ttft"].append(batch_prefill_s(step, batch, prompt, 16384) / float(row["ttft"]) - 1)
    return found


@pytest.mark.skipif(not AUTHORS.exists(), reason="the shared/ folder with the authors' profile is absent")
@pytest.mark.parametrize("fmt", ["org", "fp8_kv8", "awq"])
def test_authors_profile(fmt: str) -> None:
    middle = {cls: {x: median(map(abs, v)) for x, v in errors(cls, fmt).items()} for cls in (StepModel, TableStepModel)}
    for cls, found in middle.items():
        print(f"{cls.__name__} {fmt}: median |error| TPOT {found['tpot']:.1%}, TTFT {found['ttft']:.1%}")
    assert middle[TableStepModel]["tpot"] <= 0.08
    assert middle[TableStepModel]["ttft"] <= 0.13
