"""Import of LLMServingSim's profiles: a small one of its layout, and the published one where it lies beside the checkout."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from fineserve_calibrate.cli import app
from fineserve_calibrate.importers.servingsim import import_profiles, with_decodes
from typer.testing import CliRunner

from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency import StepModel, measured_on
from fineserve_sim.latency.tables import TableError, load, shipped

PUBLISHED = Path(__file__).parents[3] / "shared" / "data" / "fleets" / "llmservingsim_bench" / "profiler_tables.tar.gz"
needs_published = pytest.mark.skipif(not PUBLISHED.exists(), reason="the shared/ folder with the profiles is absent")
FOLDER = "profiler/perf/RTX4090/meta-llama/Llama-3.1-8B/bf16"
SHAPES = {"qkv_proj": (6144, 4096), "o_proj": (4096, 4096), "gate_up_proj": (28672, 4096), "down_proj": (4096, 14336)}
TOKENS, CHUNKS, CONTEXTS = (1, 64, 256, 2048), (16, 256, 2048), (16, 1024, 16384)


def product_us(m: int, n: int, k: int) -> float:
    """At 70 % of the data sheet."""
    return 2 + 1e6 * max(2 * m * n * k / 1.652e14, 2 * (n * k + m * k + m * n) / 1.008e12) / 0.7


def write_profile(root: Path) -> Path:
    folder = root / FOLDER
    (folder / "tp1").mkdir(parents=True)
    meta = {"vllm_version": "0.19.0", "gpu": "NVIDIA GeForce RTX 4090", "cuda_version": "12.8", "profiled_at": "today"}
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta), encoding="utf-8")
    dense = [(name, m, product_us(m, *shape)) for name, shape in SHAPES.items() for m in TOKENS]
    pd.DataFrame(dense, columns=["layer", "tokens", "time_us"]).to_csv(folder / "tp1/dense.csv", index=False)
    heads = [("lm_head", m, product_us(m, 128256, 4096)) for m in (1, 64, 256)]
    pd.DataFrame(heads, columns=["layer", "sequences", "time_us"]).to_csv(folder / "tp1/per_sequence.csv", index=False)
    rows = [(chunk, 0, 0, 0, 8 + 4e-5 * chunk**2) for chunk in CHUNKS]
    rows += [(0, 0, n, kv, 8 + 4096 * n * kv / 1.008e6) for n in (1, 16, 256) for kv in CONTEXTS]
    rows += [(256, 0, 16, 1024, 1e6), (256, 1024, 0, 0, 1e6)]  # a mixed batch, and a chunk behind a prefix: left out
    columns = ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]
    pd.DataFrame(rows, columns=columns).to_csv(folder / "tp1/attention.csv", index=False)
    return root


def test_a_profile_becomes_tables_of_its_shapes(tmp_path: Path) -> None:
    tables = import_profiles(write_profile(tmp_path), "rtx-4090")
    gemm = tables.grids["gemm/bfloat16"]
    assert gemm.axes["n"].tolist() == [4096, 6144, 28672, 128256] and gemm.axes["k"].tolist() == [4096, 14336]
    for (n, k), measured in zip(SHAPES.values(), ([1, 0], [0, 0], [2, 0], [0, 1]), strict=True):
        assert gemm.latency_s[*measured, -1] == pytest.approx(product_us(2048, n, k) * 1e-6, rel=1e-3)
    prefill, decode = (tables.grids[f"{phase}_attention/bfloat16/128"] for phase in ("prefill", "decode"))
    assert prefill.axes["heads"].tolist() == decode.axes["heads"].tolist() == [[32, 8]]
    assert prefill.latency_s[0, 0] == pytest.approx([(8 + 4e-5 * chunk**2) * 1e-6 for chunk in CHUNKS], rel=1e-3)
    assert decode.axes["context"].tolist() == list(CONTEXTS) and np.isfinite(decode.latency_s).all()
    assert tables.fingerprint["gemm/all licence"] == "MIT" and FOLDER in tables.fingerprint["gemm/all source"]


def test_a_tar_file_is_read_like_its_folder(tmp_path: Path) -> None:
    root = write_profile(tmp_path / "profile")
    with tarfile.open(tmp_path / "profile.tar.gz", "w:gz") as archive:
        archive.add(root / "profiler", "profiler")
    out = tmp_path / "tables.npz"
    done = CliRunner().invoke(app, ["import", "llmservingsim", str(tmp_path / "profile.tar.gz"), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert load(out).fingerprint == import_profiles(root, "rtx-4090").fingerprint


@pytest.mark.parametrize(
    ("name", "gpu_name", "problem"),
    [
        ("", "l40s", "no profiler/perf/GPU/OWNER/MODEL/bf16 of l40s"),
        ("", "l4", "no tables of l4"),
        ("none.tar", "rtx-4090", "neither a folder nor a tar file"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, name: str, gpu_name: str, problem: str) -> None:
    with pytest.raises(TableError, match=problem):
        import_profiles(write_profile(tmp_path) / name if not name else tmp_path / name, gpu_name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (write_profile(tmp_path) / FOLDER / "tp1/attention.csv").unlink()
    with pytest.raises(TableError, match=r"bf16/tp1/attention\.csv: not there"):
        import_profiles(tmp_path, "rtx-4090")


def test_decodes_take_the_place_of_a_kernel_called_alone(tmp_path: Path) -> None:
    """At the points that both have, 16 decodes of 1,024 tokens among them; beyond them, and prompts and products, stay."""
    root = write_profile(tmp_path)
    meta = root / FOLDER / "meta.yaml"
    meta.write_text(meta.read_text(encoding="utf-8") + "tp_degrees: [1]\n", encoding="utf-8")
    whole = shipped("rtx-4090")
    made = with_decodes(root, whole)
    name = "decode_attention/bfloat16/128"
    kept = [
        np.array_equal(grid.latency_s, whole.grids[key].latency_s, equal_nan=True) for key, grid in made.grids.items()
    ]
    assert [key for key, same in zip(made.grids, kept, strict=True) if not same] == [name]
    axes, before, after = whole.grids[name].axes, whole.grids[name].latency_s, made.grids[name].latency_s
    place = 0, axes["batch"].tolist().index(16), axes["context"].tolist().index(1024)
    assert after[place] == pytest.approx((8 + 4096 * 16 * 1024 / 1.008e6) * 1e-6, rel=1e-3) != before[place]
    assert (after != before).sum() == 9 and "; 9 points: " in made.fingerprint["decode_attention/all source"]


@needs_published
def test_the_shipped_tables_are_those_of_the_command() -> None:
    fresh, ours = import_profiles(PUBLISHED, "rtx-4090"), shipped("rtx-4090")
    assert fresh.fingerprint == ours.fingerprint
    for name, grid in fresh.grids.items():
        assert ours.grids[name].latency_s == pytest.approx(grid.latency_s, rel=1e-6, nan_ok=True)


def test_llama_8b_on_an_rtx_4090_takes_what_its_layers_took() -> None:
    """A layer's products at 64 tokens: 532.4 us; attention of 64 decodes with 256 keys each: 113.6 us."""
    spec = gpu("rtx-4090")
    step = StepModel(model("llama-3.1-8b"), precision("fp16"), 1, spec, deployment("vllm-cudagraph"), measured_on(spec))
    costs = step.operators.by_tokens(np.array([64.0]))
    products_us = sum(float(costs[name].seconds[0]) for name in ("qkv", "o", "gate_up", "down")) / 32 * 1e6
    assert products_us == pytest.approx(532.4, rel=0.01)
    assert step.attention_s(64, 64 * 255, 0, 0, 0)[0] / 32 * 1e6 == pytest.approx(113.6, rel=0.01)
