"""Tables of layers that not every model has: from rows as the package has them to grids, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fineserve_calibrate.importers.layers import import_layers

from fineserve_sim.catalog import expert_work, gpu, model, precision
from fineserve_sim.latency.experts import ExpertTables
from fineserve_sim.latency.tables import DENSE_ALONE, DEVICES, TableError, load, save, shipped_layers

DEVICE = DEVICES["h200-sxm"]
TOKENS = [1, 8, 64, 512]


def experts(latency_ms: list[float], **other: object) -> pd.DataFrame:
    """Rows of one shape at ``TOKENS``."""
    row = {
        "device": DEVICE,
        "kernel_source": "triton",
        "moe_dtype": "bfloat16",
        "distribution": "power_law_1.01",
        "num_experts": 8,
        "topk": 2,
    }
    row |= {"hidden_size": 1024, "inter_size": 512, "moe_tp_size": 1, "moe_ep_size": 1} | other
    return pd.DataFrame([row | {"num_tokens": m, "latency": ms} for m, ms in zip(TOKENS, latency_ms, strict=True)])


def folder(root: Path, **files: pd.DataFrame) -> str:
    """A folder of one system, as ``Folder`` reads it."""
    for name, frame in files.items():
        place = root / "h200_sxm" / {"gdn": "linear_attention"}.get(name, name.split("_")[0]) / "vllm_0.24.0"
        place.mkdir(parents=True, exist_ok=True)
        frame.to_parquet(place / f"{name}_perf.parquet")
    return str(root)


def test_one_distribution_is_kept_and_no_row_beats_memory(tmp_path: Path) -> None:
    rows = pd.concat([experts([0.05, 0.1, 0.2, 0.4]), experts([9.0] * 4, distribution="balanced")])
    fast = experts([0.0001] * 4, hidden_size=2048)
    found = import_layers(folder(tmp_path, moe=pd.concat([rows, fast])), "h200_sxm", "vllm")
    grid = found.grids["experts/bfloat16"]
    shapes = grid.axes["shape"].tolist()
    kept = grid.latency_s[shapes.index([8, 2, 1024, 512, 1, 1])]
    assert kept == pytest.approx([0.05e-3, 0.1e-3, 0.2e-3, 0.4e-3], rel=3e-4)
    raised = grid.latency_s[shapes.index([8, 2, 2048, 512, 1, 1])]
    two_experts = 2 * 3 * 2048 * 512 * 2 / gpu("h200-sxm").memory_bytes_per_s
    assert raised[0] == pytest.approx(two_experts, rel=3e-4)
    assert "4 rows raised" in found.fingerprint["compaction experts/bfloat16"]


def test_modules_and_kernels_of_other_attention(tmp_path: Path) -> None:
    module = {"device": DEVICE, "gemm_type": "bfloat16", "kv_cache_dtype": "bfloat16", "num_heads": 16, "latency": 0.1}
    decode = pd.DataFrame([module | {"batch_size": b, "step": c, "isl": 1} for b in (1, 2) for c in (7, 15)])
    prefill = pd.DataFrame([module | {"batch_size": 1, "step": s, "isl": n} for s in (0, 64) for n in (16, 32)])
    kernels = [("conv", 0.001), ("rule", 0.002)]
    heads = {"device": DEVICE, "num_k_heads": 2, "num_v_heads": 4}
    linear = pd.DataFrame(
        [
            heads | {"phase": phase, "batch_size": b, "seq_len": n, "kernel_source": name, "latency": ms}
            for phase, n in (("context", 16), ("generation", 1))
            for b in (1, 2)
            for name, ms in kernels
        ]
    )
    files = {"mla_context_module": prefill, "mla_generation_module": decode, "gdn": linear}
    found = import_layers(folder(tmp_path, moe=experts([0.1] * 4), **files), "h200_sxm", "vllm")
    assert found.grids["decode_latent/bfloat16"].axes["context"].tolist() == [8, 16]
    assert found.grids["prefill_latent/bfloat16"].axes["new_tokens"].tolist() == [16, 32]  # without a prefix alone
    assert found.grids["decode_linear"].latency_s[0] == pytest.approx([0.003e-3, 0.003e-3], rel=3e-4)
    save(tmp_path / "layers.npz", found)
    again = load(tmp_path / "layers.npz", device=DEVICE)
    assert again.grids.keys() == found.grids.keys() and again.fingerprint == found.fingerprint


@pytest.mark.parametrize(
    ("change", "message"),
    [({"device": "NVIDIA A100"}, "measured on NVIDIA A100"), ({"latency": -1.0}, "a latency is not positive")],
)
def test_other_gpus_and_impossible_rows_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(TableError, match=message):
        import_layers(folder(tmp_path, moe=experts([0.1] * 4).assign(**change)), "h200_sxm", "vllm")


def test_a_system_without_experts_is_refused(tmp_path: Path) -> None:
    source = folder(tmp_path, gemm=pd.DataFrame({"device": [DEVICE]}))
    with pytest.raises(TableError, match=r"no moe_perf\.parquet for h200-sxm"):
        import_layers(source, "h200_sxm", "vllm")
    with pytest.raises(TableError, match="unknown system 'h300'"):
        import_layers(source, "h300", "vllm")


def test_every_gpu_ships_tables_of_experts_and_their_sources() -> None:
    work = expert_work(model("qwen3-30b-a3b"), 1)
    assert work is not None
    assert not shipped_layers(DENSE_ALONE).grids
    for name in DEVICES.keys() - {DENSE_ALONE}:
        tables = shipped_layers(name)
        assert tables.fingerprint["experts/all licence"] == "Apache-2.0"
        found = ExpertTables(tables, gpu(name)).find(work, precision("bf16"), gpu(name))
        assert found is not None and found.exact
        assert (np.diff(found.line.seconds) >= 0).all()
