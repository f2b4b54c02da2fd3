"""Import of aiconfigurator-core: a small wheel of its layout, and the published rows where they lie beside the checkout."""

from __future__ import annotations

import csv
import gzip
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from fineserve_calibrate.cli import app
from fineserve_calibrate.compaction import compact
from fineserve_calibrate.importers import SYSTEMS
from fineserve_calibrate.importers.aiconfigurator import Folder, Wheel, import_tables, weight_only
from fineserve_calibrate.tables import Table, read_table
from fineserve_evidence.crossvalidation import curve
from typer.testing import CliRunner

from fineserve_sim.catalog import gpu
from fineserve_sim.latency.tables import TableError, TableSet, load, shipped

DEVICE = "NVIDIA H100 80GB HBM3"
H100 = gpu("h100-sxm")
PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "h100"
INT4 = PUBLISHED / "aic_gemm_trtllm_1.2.0rc5_weightonly.csv.gz"
REPOSITORY = PUBLISHED.parent / "tables_vllm"
PROFILES = REPOSITORY.parent / "fleets" / "llmservingsim_bench" / "profiler_tables.tar.gz"
needs_published = pytest.mark.skipif(not INT4.exists(), reason="the shared/ folder with the published tables is absent")
Change = Callable[[str, pa.Table], pa.Table]


def grid(**axes: list[object]) -> dict[str, list[object]]:
    """Columns of every combination, latency aside."""
    indices = np.meshgrid(*(np.arange(len(values)) for values in axes.values()), indexing="ij")
    return {name: [axes[name][i] for i in index.ravel()] for name, index in zip(axes, indices, strict=True)}


def with_latency(columns: dict[str, list[object]], seconds: Callable[..., float]) -> pa.Table:
    """A table of the package: device and milliseconds added."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return pa.table({**columns, "device": [DEVICE] * len(rows), "latency": [seconds(row) * 1e3 for row in rows]})


def small_files() -> dict[str, pa.Table]:
    """A machine at 60 % of the H100's data sheet, in the package's columns."""

    def gemm_s(row: dict[str, int]) -> float:
        m, n, k = row["m"], row["n"], row["k"]
        return 3e-6 + max(2 * m * n * k / 9.89e14, 2 * (n * k + m * k + m * n) / 3.35e12) / 0.6

    def prefill_s(row: dict[str, int]) -> float:
        window = row["window_size"] or row["isl"]
        return 1e-5 + 4 * row["batch_size"] * row["num_heads"] * 128 * row["isl"] * min(window, row["isl"]) / 2 / 5e14

    def decode_s(row: dict[str, int]) -> float:
        return 1e-5 + row["batch_size"] * (row["step"] + 1) * row["num_key_value_heads"] * 512 / 2e12

    def all_reduce_s(row: dict[str, int]) -> float:
        return 5e-6 * (4 if "eager" in str(row["kernel_source"]) else 1) + row["message_size"] * 2 / 2e11

    heads = {"num_heads": [8, 32], "num_key_value_heads": [8], "head_dim": [128]}
    dtypes = {"attn_dtype": ["bfloat16"], "kv_cache_dtype": ["bfloat16"], "window_size": [0, 128]}
    sizes = {"batch_size": [1, 2, 4, 8]}
    prefill = grid(**dtypes, **heads, **sizes, isl=[1, 64, 512, 4096], step=[0])
    decode = grid(**dtypes, **heads, **sizes, isl=[1], step=[0, 1, 3, 255, 16383])
    widths = [256, 4096, 16384]
    gemm = grid(gemm_dtype=["bfloat16"], m=[1, 8, 64, 512, 4096], n=widths, k=widths)
    kernels = ["vLLM_custom_graph", "vLLM_custom_eager"]
    reduce = grid(
        kernel_source=kernels, allreduce_dtype=["bfloat16"], num_gpus=[2, 4], message_size=[128, 2**16, 2**24]
    )
    return {
        "gemm/vllm/0.9.0/gemm_perf": with_latency(gemm, lambda row: 2 * gemm_s(row)),
        "gemm/vllm/0.24.0/gemm_perf": with_latency(gemm, gemm_s),
        "attention/vllm/0.24.0/context_attention_perf": with_latency(prefill, prefill_s),
        "attention/vllm/0.24.0/generation_attention_perf": with_latency(decode, decode_s),
        "comm/vllm/0.24.0/custom_allreduce_perf": with_latency(reduce, all_reduce_s),
    }


def wheel(folder: Path, files: dict[str, pa.Table], change: Change = lambda name, table: table) -> Path:
    """A wheel with these tables, changed on the way."""
    path = folder / "aiconfigurator_core-0.12.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("aiconfigurator_core-0.12.0.dist-info/METADATA", "Name: aiconfigurator-core\n")
        for name, table in files.items():
            sink = pa.BufferOutputStream()
            pq.write_table(change(name, table), sink)
            member = f"aiconfigurator_core/systems/data/h100_sxm/{name}.parquet"
            archive.writestr(member, sink.getvalue().to_pybytes())
    return path


def by_operator(tables: list[Table]) -> dict[str, Table]:
    return {table.operator: table for table in tables}


def test_a_small_wheel(tmp_path: Path) -> None:
    tables = by_operator(import_tables(Wheel(wheel(tmp_path, small_files())), "h100_sxm", "vllm"))
    gemm = tables["gemm"]
    row = next(i for i in range(len(gemm)) if [int(gemm.columns[x][i]) for x in "mnk"] == [1, 4096, 4096])
    assert gemm.columns["latency_s"][row] == pytest.approx(3e-6 + 2 * (4096**2 + 8192) / 3.35e12 / 0.6)  # of 0.24.0
    assert gemm.fingerprint.backend == "vllm 0.24.0" and gemm.fingerprint.licence == "Apache-2.0"
    assert gemm.fingerprint.source.startswith("aiconfigurator-core 0.12.0, h100_sxm/gemm/vllm/0.24.0")
    assert gemm.fingerprint.driver == "unknown"
    assert len(tables["prefill_attention"]) == 2 * 4 * 4  # windowed rows stay behind
    assert sorted(set(tables["decode_attention"].columns["context"].tolist())) == [1, 2, 4, 256, 16384]
    reduce = tables["all_reduce"]
    assert len(reduce) == 6 and reduce.columns["message_bytes"].max() == 2**25  # graph rows; elements of two bytes
    assert reduce.columns["latency_s"].min() < 6e-6


def drop(column: str) -> Change:
    return lambda name, table: table.drop_columns([column]) if column in table.column_names else table


def scaled(factor: float) -> Change:
    def change(name: str, table: pa.Table) -> pa.Table:
        at = table.column_names.index("latency")
        return table.set_column(at, "latency", pa.array(table["latency"].to_numpy() * factor))

    return change


def other_device(name: str, table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("device"), "device", pa.array(["NVIDIA H20"] * len(table)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (drop("latency"), r"gemm_perf\.parquet: no column latency; found gemm_dtype, m, n, k, device"),
        (drop("num_key_value_heads"), r"context_attention_perf\.parquet: no column num_key_value_heads"),
        (scaled(1000.0), "gemm: .*milliseconds"),
        (scaled(0.001), "gemm: .*faster than the data sheet"),
        (scaled(float("nan")), "gemm: latency_s of row 0 is nan"),
        (other_device, "gemm: measured on NVIDIA H20, not on NVIDIA H100 80GB HBM3"),
    ],
)
def test_a_package_with_other_contents_is_refused(tmp_path: Path, change: Change, text: str) -> None:
    with pytest.raises(TableError, match=text):
        import_tables(Wheel(wheel(tmp_path, small_files(), change)), "h100_sxm", "vllm")


def test_older_attention_tables_have_no_windows(tmp_path: Path) -> None:
    full = {
        name: table.filter(pa.array(np.arange(len(table)) < len(table) // 2)) for name, table in small_files().items()
    }
    files = {**small_files(), **{name: table for name, table in full.items() if name.startswith("attention")}}
    tables = by_operator(import_tables(Wheel(wheel(tmp_path, files, drop("window_size"))), "h100_sxm", "vllm"))
    assert len(tables["prefill_attention"]) == 2 * 4 * 4


def test_unknown_systems_backends_and_files_are_named(tmp_path: Path) -> None:
    source = Wheel(wheel(tmp_path, small_files()))
    with pytest.raises(TableError, match="unknown system 'h300'; known: h100_sxm"):
        import_tables(source, "h300", "vllm")
    with pytest.raises(TableError, match=r"aiconfigurator-core 0\.12\.0: no gemm/sglang"):
        import_tables(source, "h100_sxm", "sglang")
    (tmp_path / "x.whl").write_text("nothing")
    with pytest.raises(TableError, match="not a wheel"):
        Wheel(tmp_path / "x.whl")
    with zipfile.ZipFile(tmp_path / "y.whl", "w") as archive:
        archive.writestr("other-1.0.dist-info/METADATA", "")
    with pytest.raises(TableError, match="not a wheel of aiconfigurator-core"):
        Wheel(tmp_path / "y.whl")


def test_a_folder_of_systems_holds_what_a_wheel_does(tmp_path: Path) -> None:
    root = tmp_path / "systems"
    for name, table in small_files().items():
        operator, backend, version, file = name.split("/")
        path = root / "h100_sxm" / operator / f"{backend}_{version}" / f"{file}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table, path)
    (root / "README.md").write_text("ai-dynamo/aiconfigurator @ 0123abc (2026)", encoding="utf-8")
    found = by_operator(import_tables(Folder(root), "h100_sxm", "vllm"))
    for name, table in by_operator(import_tables(Wheel(wheel(tmp_path, small_files())), "h100_sxm", "vllm")).items():
        assert found[name].columns["latency_s"].tolist() == table.columns["latency_s"].tolist()
    assert found["gemm"].fingerprint.source.startswith("ai-dynamo/aiconfigurator @ 0123abc, h100_sxm/gemm/vllm/0.24.0")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match=r"empty: no SYSTEM/OPERATOR/BACKEND_VERSION"):
        Folder(tmp_path / "empty")


def test_int4_rows_come_from_a_csv_file(tmp_path: Path) -> None:
    path = tmp_path / "gemm.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(
            [["gemm_dtype", "m", "n", "k", "latency"], ["int4_wo", 1, 256, 512, 0.02], ["sq", 1, 256, 512, 0.5]]
        )
    table = weight_only(path, DEVICE)
    assert table.columns["latency_s"].tolist() == [2e-5] and table.columns["dtype"].tolist() == ["int4_wo"]
    path.write_text("gemm_dtype,m,n,k,latency\nsq,1,2,3,4\n", encoding="utf-8")
    with pytest.raises(TableError, match="no rows of gemm_dtype int4_wo"):
        weight_only(path, DEVICE)
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(TableError, match="no column gemm_dtype, m, n, k, latency; found a, b"):
        weight_only(path, DEVICE)


def test_the_command_writes_both_forms_and_explains_what_it_cannot(tmp_path: Path) -> None:
    out, full = tmp_path / "h100.npz", tmp_path / "full"
    path = str(wheel(tmp_path, small_files()))
    asked = ["import", "aiconfigurator", "--wheel", path, "--out", str(out)]
    done = CliRunner().invoke(app, [*asked, "--full", str(full)])
    assert done.exit_code == 0, done.output
    assert load(out, device=DEVICE).grids["gemm/bfloat16"].latency_s.shape[:2] == (3, 3)
    assert {file.name for file in full.iterdir()} == {
        f"{name}.parquet" for name in ("gemm", "prefill_attention", "decode_attention", "all_reduce")
    }
    assert len(read_table(full / "gemm.parquet")) == 5 * 9
    refused = CliRunner().invoke(app, [*asked, "--system", "h300"])
    assert isinstance(refused.exception, TableError) and "unknown system 'h300'" in str(refused.exception)
    table = CliRunner().invoke(app, ["cross-validate", "--wheel", path])
    assert table.exit_code == 0 and "gemm/bfloat16" in table.output


# --- The published rows ---


def reduced(file: str, extra: dict[str, object], rename: dict[str, str]) -> pa.Table:
    """A reduced file of the published tables back in the package's columns."""
    with gzip.open(PUBLISHED / file, "rb") as stream:
        table = pyarrow.csv.read_csv(stream)
    table = table.rename_columns([rename.get(name, name) for name in table.column_names])
    for name, value in {"device": DEVICE, **extra}.items():
        table = table.append_column(name, pa.array([value] * len(table)))
    return table


@cache
def published(folder: Path) -> list[Table]:
    """The reduced vLLM 0.24.0 tables through the importer, as a wheel would hold them."""
    latency = {"latency_ms": "latency"}
    reduce = reduced("aic_custom_allreduce_vllm.csv.gz", {}, {**latency, "backend": "kernel_source"})
    files = {
        "gemm/vllm/0.24.0/gemm_perf": reduced("aic_gemm_vllm_0.24.0.csv.gz", {}, latency),
        "attention/vllm/0.24.0/context_attention_perf": reduced(
            "aic_attn_context_vllm_0.24.0.csv.gz", {"step": 0}, latency
        ),
        "attention/vllm/0.24.0/generation_attention_perf": reduced(
            "aic_attn_generation_vllm_0.24.0.csv.gz", {"isl": 1}, latency
        ),
        "comm/vllm/0.24.0/custom_allreduce_perf": reduce.filter(pa.compute.equal(reduce["version"], "0.24.0")),
    }
    return import_tables(Wheel(wheel(folder, files)), "h100_sxm", "vllm", INT4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("published")


@pytest.mark.slow
@needs_published
def test_the_shipped_tables_are_the_published_ones_compacted(folder: Path) -> None:
    made, ships = compact(published(folder), H100), shipped()
    assert set(made.grids) == set(ships.grids)
    for name, grid in ships.grids.items():
        assert all(np.array_equal(grid.axes[axis], made.grids[name].axes[axis]) for axis in grid.axes), name
        # The reduced files keep six digits, the shipped ones twelve bits: a row may round to the next.
        assert np.allclose(grid.latency_s, made.grids[name].latency_s, rtol=5e-4, atol=0, equal_nan=True), name
    assert ships.fingerprint["compaction gemm/fp8"] == made.fingerprint["compaction gemm/fp8"]


@pytest.mark.slow
@pytest.mark.skipif(not REPOSITORY.is_dir(), reason="the shared/ folder with the tables of more GPUs is absent")
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name != "h100_sxm"])
def test_the_command_makes_the_shipped_tables_of_other_gpus_again(system: str, tmp_path: Path) -> None:
    out = tmp_path / "tables.npz"
    commands = [["aiconfigurator", "--wheel", str(REPOSITORY), "--system", system]]
    if system == "rtx_pro_6000_server":
        commands.append(["llmservingsim", str(PROFILES), "--into", str(out)])
    for command in commands:
        done = CliRunner().invoke(app, ["import", *command, "--out", str(out)])
        assert done.exit_code == 0, done.output
    made, ships = load(out), shipped(SYSTEMS[system])
    assert made.fingerprint == ships.fingerprint and set(made.grids) == set(ships.grids)
    for name, grid in ships.grids.items():
        assert np.array_equal(grid.latency_s, made.grids[name].latency_s, equal_nan=True), name


@pytest.mark.slow
@needs_published
def test_tables_thinned_by_half_predict_the_other_half(folder: Path) -> None:
    """Medians below 5 %, but for m of TensorRT-LLM's int4 kernel: its 21 m are powers of two and their means, and the tile it
    picks changes between them."""
    whole: TableSet = compact(published(folder), H100, thin=False)
    bounds = {("gemm/int4_wo", "m"): 0.085}
    for row in curve(whole, H100, (2, 4, 8)):
        print(
            f"{row.table} {row.axis} 1/{row.keep_every}: {row.rows_kept} rows, median {row.median:.1%}, p95 {row.p95:.1%}"
        )
        if row.keep_every == 2:
            assert row.median < bounds.get((row.table, row.axis), 0.05), row
