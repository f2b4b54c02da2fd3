"""The tables behind the step model: interpolation, and the file that carries them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.catalog import gpu
from fineserve_sim.latency.tables import (
    DENSE_ALONE,
    DEVICES,
    DecodeTable,
    GemmTable,
    Grid,
    HeadMatch,
    PiecewiseLinear,
    PrefillTable,
    TableError,
    TableSet,
    as_served,
    isotonic,
    load,
    match_heads,
    measured_on,
    save,
    shipped,
)

H100 = gpu("h100-sxm")


@pytest.mark.parametrize("name", DEVICES)
def test_a_gpu_with_tables_takes_its_own(name: str) -> None:
    tables = measured_on(gpu(name))
    assert tables is shipped(name) and tables.fingerprint["gpu"] == name
    assert tables.fingerprint["device"] == DEVICES[name]
    assert {
        "gemm/bfloat16",
        "decode_attention/bfloat16/128",
        "prefill_attention/bfloat16/128",
        *(("all_reduce/bfloat16",) if name != DENSE_ALONE else ()),
    } <= set(tables.grids)


def test_other_gpus_take_the_tables_that_the_catalog_names_or_none() -> None:
    assert measured_on(gpu("l4")) is shipped("l40s")
    assert measured_on(gpu("a10")) is measured_on(gpu("a100-40gb")) is shipped("a100-80gb")
    assert measured_on(gpu("gh200")) is shipped() is measured_on(H100)
    assert measured_on(gpu("h800")) is None


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
    for x in xs:
        start, value, slope, end = line.piece(x)
        assert start <= x < end and value + (x - start) * slope == line.at(x)


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


@pytest.mark.parametrize(("memory", "longer"), [(1.0, 1.0), (0.75, 1.0), (0.5, 1.25), (0.25, 2.5)])
def test_slower_memory_slows_a_kernel_once_it_is_busy(memory: float, longer: float) -> None:
    """Kernels read at half the rate of the data sheet, the largest one at 80 %: so much can be had of slower memory, too."""
    grid = roofline_grid(1e-9, 0.5)
    latency_s = grid.latency_s.copy()
    latency_s[2, 2, 0] *= 0.5 / 0.8
    table = GemmTable(Grid(grid.axes, latency_s), "bfloat16", H100)
    assert table.reached == pytest.approx(0.8, rel=1e-3)
    slower = H100.model_copy(update={"memory_bytes_per_s": memory * H100.memory_bytes_per_s})
    here, there = (float(table.line(1024, 8192, each).at(np.array([1.0]))[0]) for each in (H100, slower))
    assert there / here == pytest.approx(longer, rel=2e-3)
    most = slower.model_copy(
        update={"bf16_flops_per_s": H100.bf16_flops_per_s / 2}
    )  # another chip: the same part of its peak
    other = float(table.line(1024, 8192, most).at(np.array([1.0]))[0])
    assert other / here == pytest.approx(1 / memory, rel=0.02)


def test_unmeasured_shapes_are_filled_from_their_neighbours() -> None:
    whole = roofline_grid(1e-9, 0.5)
    holes = whole.latency_s.copy()
    holes[1, 1] = holes[2, 2] = np.nan
    seconds = (
        GemmTable(Grid(whole.axes, holes), "bfloat16", H100).line(1024, 2048, H100).at(whole.axes["m"].astype(float))
    )
    assert seconds == pytest.approx(whole.latency_s[1, 1], rel=0.1)


@pytest.mark.parametrize(("gpu_name", "dtype", "part"), [("h200-sxm", "fp8", 0.1), ("h200-sxm", "bfloat16", 0.0)])
def test_the_h200s_narrow_products_read_faster_in_an_engine(gpu_name: str, dtype: str, part: float) -> None:
    """By a tenth of the time to read the weights that products do not hide; by nothing where they compute longer."""
    of, grid = gpu(gpu_name), shipped(gpu_name).grids[f"gemm/{dtype}"]
    n, k = (int(grid.axes[axis][-3]) for axis in ("n", "k"))
    i, j = (int(np.flatnonzero(grid.axes[axis] == size)[0]) for axis, size in (("n", n), ("k", k)))
    seconds = GemmTable(as_served(grid, dtype, of), dtype, of).raw_s(n, k, of)
    read_s = n * k * (1 if dtype == "fp8" else 2) / of.memory_bytes_per_s
    computes_s = 2.0 * n * k * grid.axes["m"] / of.peak_flops_per_s("fp8" if dtype == "fp8" else "bf16")
    less_s = grid.latency_s[i, j] - seconds
    known = ~np.isnan(less_s)
    assert known.sum() > 10
    assert less_s[known] == pytest.approx((part * np.maximum(read_s - computes_s, 0.0))[known], rel=1e-9, abs=1e-15)


def test_a_corrected_product_never_beats_the_memory() -> None:
    of = gpu("h200-sxm")
    read_s = 4096.0 * 4096 / of.memory_bytes_per_s
    axes = {"n": np.array([4096]), "k": np.array([4096]), "m": np.array([1, 16])}
    for measured_s, corrected_s in ((1.05 * read_s, read_s), (2 * read_s, 1.9 * read_s), (0.9 * read_s, 0.9 * read_s)):
        table = GemmTable(as_served(Grid(axes, np.full((1, 1, 2), measured_s)), "fp8", of), "fp8", of)
        assert table.raw_s(4096, 4096, of)[0] == pytest.approx(corrected_s, rel=1e-3)


def test_beyond_the_measured_rows_latency_grows_in_proportion() -> None:
    line = GemmTable(roofline_grid(1e-6, 0.5), "bfloat16", H100).line(4096, 4096, H100)
    assert line.at(np.array([32768.0]))[0] == pytest.approx(4 * line.at(np.array([8192.0]))[0], rel=1e-12)


def test_attention_reads_no_faster_than_it_is_told() -> None:
    line = PiecewiseLinear([0.0, 10.0, 20.0], [5.0, 6.0, 7.0], 0.1)
    assert line.at_least(0.0) is line
    assert line.at_least(0.5).values == [5.0, 6.0, 10.0] and line.at_least(0.5).slopes[-1] == 0.5


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
        assert table.curve(batch, 1, 1.0).at(batch * context) == pytest.approx(1e-5 + batch * context * 1e-9, rel=1e-9)
    assert table.covers(32, 256) and not table.covers(32, 257) and not table.covers(33, 2)
    assert table.curve(32, 1, 1.0).at(32 * 1024) == pytest.approx(
        4 * (1e-5 + 8192e-9), rel=1e-9
    )  # twice half the batch


def test_a_launch_takes_as_long_on_any_gpu() -> None:
    """A GPU of a quarter of the bandwidth: four times the measured seconds but for the smallest row, which is a launch."""
    grid = attention_grid("context", 1e-9)
    match = match_heads(grid, 32, 8)
    assert match is not None
    launch_s = float(np.nanmin(match.latency_s))
    decode, layers = DecodeTable(grid, match), 3
    for batch, context in ((1, 2), (4, 1024)):
        here_s = decode.curve(batch, layers, 1.0).at(batch * context)
        there_s = decode.curve(batch, layers, 4.0).at(batch * context)
        assert there_s == pytest.approx(layers * launch_s + 4 * (here_s - layers * launch_s), rel=1e-9)
    squares = attention_grid("new_tokens", 1e-12)
    slow, same = (PrefillTable(squares, HeadMatch(squares.latency_s[1], 1, True), 3, by) for by in (4.0, 1.0))
    assert slow.floor_s == pytest.approx(same.floor_s)
    assert slow.beyond_floor_s(512, 512 * 513 / 2) == pytest.approx(4 * same.beyond_floor_s(512, 512 * 513 / 2))


def test_heads_that_were_not_measured_are_a_larger_batch_of_fewer() -> None:
    grid = attention_grid("context", 1e-9)
    match = match_heads(grid, 32, 32)
    assert match is not None and match.batch_factor == 4 and not match.exact
    assert DecodeTable(grid, match).curve(2, 1, 1.0).at(2 * 512) == pytest.approx(1e-5 + 8 * 512e-9, rel=1e-9)
    assert match_heads(grid, 7, 1) is None


def test_prefill_attention_between_measured_lengths_and_batches() -> None:
    grid = attention_grid("new_tokens", 1e-12)
    match = match_heads(grid, 32, 8)
    assert match is not None
    table = PrefillTable(grid, match, 2, 1.0)
    for batch, length in ((1, 300), (3, 600), (8, 1024), (5, 70)):
        expected = 2 * (1e-5 + batch * length * (length + 1024) * 1e-12)
        got = table.floor_s + table.beyond_floor_s(batch * length, batch * length * (length + 1) / 2)
        assert got == pytest.approx(expected, rel=1e-9)


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
