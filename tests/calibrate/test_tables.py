"""Full tables, the checks that they pass, their compaction and their cross-validation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fineserve_calibrate.compaction import compact, dense, kept_m, rounded
from fineserve_calibrate.tables import COLUMNS, Fingerprint, Table, check, despiked, read_table, write_table
from fineserve_evidence.crossvalidation import curve, draw_curve
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.catalog import gpu
from fineserve_sim.latency.tables import TableError, load, save
from fineserve_sim.latency.tables.curves import with_tile_edges

DEVICE = "NVIDIA H100 80GB HBM3"
H100 = gpu("h100-sxm")
FINGERPRINT = Fingerprint(DEVICE, "test 1", "made up", "none")
M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
WIDTHS = (256, 1024, 4096, 16384)


def product(**axes: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Columns of every combination of the axes."""
    grids = np.meshgrid(*(np.array(values) for values in axes.values()), indexing="ij")
    return {name: grid.ravel() for name, grid in zip(axes, grids, strict=True)}


def gemm() -> Table:
    """An H100 that takes 3 us and reaches 70 % of its data sheet."""
    columns = product(m=M, n=WIDTHS, k=WIDTHS)
    m, n, k = (columns[name].astype(float) for name in "mnk")
    ideal = np.maximum(2 * m * n * k / 9.89e14, 2 * (n * k + m * k + m * n) / 3.35e12)
    dtype = np.full(len(m), "bfloat16")
    return Table("gemm", {"dtype": dtype, **columns, "latency_s": 3e-6 + ideal / 0.7}, FINGERPRINT)


def attention(operator: str) -> Table:
    """The same machine's attention of one layer with 32/8 heads."""
    work = "context" if operator == "decode_attention" else "new_tokens"
    columns = product(batch=(1, 2, 4, 8, 16, 32), work=tuple(2**i for i in range(13)))
    batch, tokens = columns["batch"].astype(float), columns["work"].astype(float)
    flops = 4 * batch * 32 * 128 * tokens**2 / 2 / 5e14
    seconds = 1e-5 + (batch * tokens * 2 * 8 * 128 * 2 / 2.5e12 if work == "context" else flops)
    count = len(seconds)
    heads = {"q_heads": 32, "kv_heads": 8, "head_dim": 128}
    named = {
        **{name: np.full(count, "bfloat16") for name in ("dtype", "kv_dtype")},
        **{name: np.full(count, value) for name, value in heads.items()},
        "batch": columns["batch"],
        work: columns["work"],
    }
    cached = {} if work == "context" else {"cached_tokens": np.zeros(count, dtype=np.int64)}
    return Table(operator, {**named, **cached, "latency_s": seconds}, FINGERPRINT)


def all_reduce() -> Table:
    columns = product(gpus=(2, 4, 8), message_bytes=tuple(2**i for i in range(10, 28)))
    share = 2 * (columns["gpus"] - 1) / columns["gpus"]
    seconds = 5e-6 + columns["message_bytes"] * share / 3.5e11
    return Table(
        "all_reduce", {"dtype": np.full(len(seconds), "bfloat16"), **columns, "latency_s": seconds}, FINGERPRINT
    )


TABLES = [gemm(), attention("prefill_attention"), attention("decode_attention"), all_reduce()]


def changed(table: Table, column: str, row: int, value: float) -> Table:
    values = table.columns[column].astype(np.float64).copy()
    values[row] = value
    return Table(table.operator, {**table.columns, column: values}, table.fingerprint)


def slowed(table: Table, factor: float) -> Table:
    return Table(table.operator, {**table.columns, "latency_s": table.columns["latency_s"] * factor}, table.fingerprint)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.operator)
def test_a_sound_table_passes_and_survives_its_file(table: Table, tmp_path: Path) -> None:
    check(table, DEVICE, H100)
    write_table(table, tmp_path / "x.parquet")
    back = read_table(tmp_path / "x.parquet")
    assert back.operator == table.operator and back.fingerprint == table.fingerprint
    assert all(np.array_equal(back.columns[name], table.columns[name]) for name in COLUMNS[table.operator])
    assert back.fingerprint.clocks == "unknown"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.operator)
@pytest.mark.parametrize(
    ("value", "shown"), [(float("nan"), "nan"), (-1e-6, "-1e-06"), (0.0, "0.0"), (float("inf"), "inf")]
)
def test_impossible_latencies_are_named(table: Table, value: float, shown: str) -> None:
    with pytest.raises(TableError, match=rf"{table.operator}: latency_s of row 7 is {shown}; positive numbers"):
        check(changed(table, "latency_s", 7, value), DEVICE, H100)


def test_holes_and_zeros_in_other_columns_are_named_after_reading(tmp_path: Path) -> None:
    write_table(changed(gemm(), "n", 3, float("nan")), tmp_path / "x.parquet")
    with pytest.raises(TableError, match="n of row 3 is nan"):
        check(read_table(tmp_path / "x.parquet"), DEVICE, H100)
    with pytest.raises(TableError, match="m of row 0 is 0"):
        check(changed(gemm(), "m", 0, 0), DEVICE, H100)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.operator)
def test_milliseconds_taken_for_seconds_are_caught(table: Table) -> None:
    with pytest.raises(TableError, match=f"{table.operator}: .*these look like milliseconds"):
        check(slowed(table, 1000), DEVICE, H100)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.operator)
def test_seconds_too_short_for_the_data_sheet_are_caught(table: Table) -> None:
    with pytest.raises(TableError, match=r"faster than the data sheet of h100-sxm"):
        check(slowed(table, 1 / 1000), DEVICE, H100)


def test_falling_latencies_are_caught_and_noise_is_not() -> None:
    rng = np.random.default_rng(5)
    noisy = gemm()
    noise = rng.uniform(0.8, 1.25, len(noisy))
    check(Table("gemm", {**noisy.columns, "latency_s": noisy.columns["latency_s"] * noise}, FINGERPRINT), DEVICE, H100)
    reversed_m = {**noisy.columns, "m": noisy.columns["m"].max() + 1 - noisy.columns["m"]}
    with pytest.raises(TableError, match=r"gemm: \d+ of 224 rows take less than .* latencies must grow with m"):
        check(Table("gemm", reversed_m, FINGERPRINT), DEVICE, H100)


def test_a_single_failed_measurement_is_forgiven_and_many_are_not() -> None:
    seconds = gemm().columns["latency_s"]
    once = changed(gemm(), "latency_s", 100, 5 * seconds[100])
    check(once, DEVICE, H100)
    for row in (20, 40, 60, 80):
        once = changed(once, "latency_s", row, 5 * seconds[row])
    with pytest.raises(TableError, match="or are spikes"):
        check(once, DEVICE, H100)


def test_the_table_of_another_gpu_is_refused() -> None:
    other = Table("gemm", gemm().columns, replace(FINGERPRINT, device="NVIDIA A100-SXM4-80GB"))
    with pytest.raises(TableError, match="measured on NVIDIA A100-SXM4-80GB, not on NVIDIA H100"):
        check(other, DEVICE, H100)


def test_other_columns_and_other_files_are_named(tmp_path: Path) -> None:
    columns = {name: values for name, values in gemm().columns.items() if name != "k"}
    with pytest.raises(TableError, match="gemm: no column k; found dtype, m, n, latency_s"):
        check(Table("gemm", columns, FINGERPRINT), DEVICE, H100)
    write_table(Table("gemm", columns, FINGERPRINT), tmp_path / "x.parquet")
    with pytest.raises(TableError, match=r"x\.parquet: no column k"):
        read_table(tmp_path / "x.parquet")
    pq.write_table(pa.table({"m": [1]}), tmp_path / "y.parquet")
    with pytest.raises(TableError, match=r"y\.parquet: no fingerprint"):
        read_table(tmp_path / "y.parquet")
    (tmp_path / "z.parquet").write_text("m,n,k")
    with pytest.raises(TableError, match=r"z\.parquet: not a Parquet file"):
        read_table(tmp_path / "z.parquet")


# --- Compaction ---


@given(st.floats(1e-7, 10.0))
def test_rounding_keeps_twelve_bits(seconds: float) -> None:
    assert rounded(np.array([seconds]))[0] == pytest.approx(seconds, rel=2.0**-12)
    assert np.float32(rounded(np.array([seconds]))[0]) == rounded(np.array([seconds]))[0]


def test_a_dense_grid_takes_the_median_of_repeats_and_marks_what_is_missing() -> None:
    grid = dense({"m": np.array([4, 1, 4, 4]), "n": np.array([8, 8, 8, 8])}, np.array([3.0, 1.0, 9.0, 4.0]))
    assert grid.axes["m"].tolist() == [1, 4] and grid.latency_s.tolist() == [[1.0], [4.0]]
    holes = dense({"m": np.array([1, 4]), "n": np.array([8, 9])}, np.array([1.0, 2.0])).latency_s
    assert np.isnan(holes).tolist() == [[False, True], [True, False]]


def test_spikes_become_their_neighbours_mean() -> None:
    line, spikes = despiked(np.array([1.0, 1.0, 9.0, 4.0, 8.0, 16.1]))
    assert line.tolist() == [1.0, 1.0, 2.0, 4.0, 8.0, 16.1] and spikes == 1


def test_thinning_keeps_the_ends_and_the_corners_of_a_line() -> None:
    m = 2.0 ** np.arange(9, dtype=np.float64)
    flat_then_proportional = np.maximum(16.0, m)[None, :]
    assert kept_m(m, flat_then_proportional).tolist() == [0, 4, 8]


def test_a_compact_set_predicts_its_full_tables_and_says_how_well(tmp_path: Path) -> None:
    tables = compact(TABLES, H100)
    assert set(tables.grids) == {
        "gemm/bfloat16",
        "prefill_attention/bfloat16/128",
        "decode_attention/bfloat16/128",
        "all_reduce/bfloat16",
    }
    assert len(tables.grids["gemm/bfloat16"].axes["m"]) < len(M)
    assert "median 0." in tables.fingerprint["compaction gemm/bfloat16"]
    assert tables.fingerprint["gemm/all licence"] == "none"
    save(tmp_path / "x.npz", tables)
    assert load(tmp_path / "x.npz", device=DEVICE).fingerprint == tables.fingerprint


def test_tables_of_two_devices_do_not_mix() -> None:
    other = Table("gemm", gemm().columns, replace(FINGERPRINT, device="another"))
    with pytest.raises(TableError, match="several devices"):
        compact([*TABLES, other], H100)


def test_a_machine_at_a_fixed_fraction_of_the_roofline_survives_halving() -> None:
    found = list(curve(compact(TABLES, H100, thin=False), H100, (2,)))
    assert {(row.table.split("/")[0], row.axis) for row in found} >= {("gemm", axis) for axis in "mnk"}
    for row in found:
        print(row)
        assert row.median < 0.05, row
        assert row.rows > 0 and row.rows_kept > 0


def test_the_error_curve_is_drawn_with_a_line_a_table_and_axis(tmp_path: Path) -> None:
    found = list(curve(compact([gemm(), all_reduce()], H100, thin=False), H100, (2, 4)))
    paths = draw_curve(found, tmp_path / "curve")
    assert {path.suffix for path in paths} == {".png", ".svg"} and all(path.stat().st_size > 1000 for path in paths)


def test_a_measured_row_holds_to_the_end_of_its_tile() -> None:
    """65 rows take two tiles of 64: the time of m = 256 holds from 193 on, that of m = 257 to 320."""
    m, seconds = with_tile_edges(np.array([8.0, 16.0, 256.0, 257.0, 512.0]), np.array([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert m.tolist() == [8, 16, 193, 256, 257, 320, 449, 512]
    assert seconds.tolist() == [1, 2, 3, 3, 4, 4, 5, 5]
