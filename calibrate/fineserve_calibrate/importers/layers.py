"""Import tables of the layers that not every model has: experts, latent and linear attention, wide heads.

They come from the same package as ``aiconfigurator``, under vLLM, and go into a file beside the GPU's tables.

* **Experts**: a layer's routing and products, by the shape of the experts and their split over the group. Tokens are routed
  with a power law of 1.01, the mildest skew that every system has. It touches as many distinct experts as uniform random
  routing (128 experts, 8 active: 78 and 82 at 16 tokens); "balanced" rows touch all of them at once.
* **Latent attention**: a module with its products, by heads of one GPU, in 16 bits.
* **Linear attention**: the convolution and the gated delta rule, by key and value heads of one GPU.

No row beats the memory of the data sheet: a benchmark that repeats one layer may find its weights in the L2 cache.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq

from fineserve_calibrate.compaction import HEAD_DIMS, dense, rounded
from fineserve_calibrate.importers import SYSTEMS
from fineserve_calibrate.importers.aiconfigurator import LICENCE, Importer, Source, opened
from fineserve_sim.catalog import GpuSpec, gpu
from fineserve_sim.latency.experts import FORMAT_BITS, touched
from fineserve_sim.latency.tables import DEVICES, Grid, TableError, TableSet

ROUTING = "power_law_1.01"
WIDE_HEADS = (96, 192, 256)


def import_layers(wheel: str, system: str, backend: str) -> TableSet:
    """The compact tables of a system's layers. Raises TableError for an unknown system, other columns, or no experts."""
    if system not in SYSTEMS:
        raise TableError(f"unknown system {system!r}; known: {', '.join(SYSTEMS)}")
    spec = gpu(SYSTEMS[system])
    reader = _Reader(opened(wheel), system, backend)
    grids = _experts(reader, spec) | _latent(reader) | _linear(reader) | _wide(reader)
    fingerprint = {"device": DEVICES[spec.name], "gpu": spec.name} | reader.notes
    return TableSet(fingerprint, grids)


class _Reader:
    """Reads files of one system, and notes where each operator's rows come from."""

    def __init__(self, source: Source, system: str, backend: str) -> None:
        self._importer = Importer(source, system, backend)
        self.notes: dict[str, str] = {}

    def frame(self, folder: str, file: str, operator: str) -> pd.DataFrame:
        """The rows of a file with seconds; none where the system has no such file."""
        try:
            name, version = self._importer.find(folder, file, self._importer.backend)
        except TableError:
            return pd.DataFrame()
        frame: pd.DataFrame = pq.read_table(io.BytesIO(self._importer.source.read(name))).to_pandas()
        devices = set(frame["device"])
        if devices != {DEVICES[SYSTEMS[self._importer.system]]}:
            raise TableError(f"{name}: measured on {', '.join(sorted(devices))}")
        frame["latency_s"] = frame["latency"].astype(np.float64) / 1e3
        if not (np.isfinite(frame["latency_s"]) & (frame["latency_s"] > 0)).all():
            raise TableError(f"{name}: a latency is not positive")
        path = name.split("/data/", 1)[1]
        self.notes |= {
            f"{operator}/all backend": f"{self._importer.backend} {version}",
            f"{operator}/all source": f"{self._importer.source.label}, {path}",
            f"{operator}/all licence": LICENCE,
        }
        return frame


def _grid(frame: pd.DataFrame, axes: Mapping[str, Any], notes: dict[str, str], name: str) -> Grid:
    """A rounded grid."""
    grid = dense(dict(axes), frame["latency_s"].to_numpy())
    notes[f"compaction {name}"] = f"{len(frame)} rows; |error| of rounding below 0.03%"
    return Grid(grid.axes, rounded(grid.latency_s))


_SHAPE = ("num_experts", "topk", "hidden_size", "inter_size", "moe_tp_size", "moe_ep_size")


def _experts(reader: _Reader, spec: GpuSpec) -> dict[str, Grid]:
    frame = reader.frame("moe", "moe_perf.parquet", "experts")
    if frame.empty:
        raise TableError(f"no moe_perf.parquet for {spec.name}")
    frame = frame[(frame["distribution"] == ROUTING) & frame["moe_dtype"].isin(FORMAT_BITS)].copy()
    triton = (frame["moe_dtype"] == "w4a16_mxfp4") & frame["kernel_source"].str.contains("triton")
    frame.loc[triton, "moe_dtype"] = "w4a16_mxfp4_triton"
    grids = {}
    for dtype, rows in frame.groupby("moe_dtype"):
        count, active, hidden, width, split, spread = (rows[name].to_numpy(np.float64) for name in _SHAPE)
        distinct = touched(count / spread, count, active, rows["num_tokens"].to_numpy(np.float64))
        read_bytes = distinct * 3 * hidden * (width / split) * FORMAT_BITS[str(dtype)] / 8
        least_s = read_bytes / spec.memory_bytes_per_s
        raised = int((rows["latency_s"] < least_s).sum())
        slowed = rows.assign(latency_s=np.maximum(rows["latency_s"], least_s))
        axes = {"shape": rows[list(_SHAPE)].to_numpy(np.int64), "tokens": rows["num_tokens"].to_numpy(np.int64)}
        name = f"experts/{dtype}"
        grids[name] = _grid(slowed, axes, reader.notes, name)
        reader.notes[f"compaction {name}"] += f"; {raised} rows raised to the data sheet's memory bandwidth"
    return grids


def _latent(reader: _Reader) -> dict[str, Grid]:
    """Modules that keep K and V compressed, without cached tokens before the prompt."""
    grids: dict[str, Grid] = {}
    for operator, file in (("prefill_latent", "mla_context_module"), ("decode_latent", "mla_generation_module")):
        frame = reader.frame("mla", f"{file}_perf.parquet", operator)
        if frame.empty:
            continue
        frame = frame[frame["gemm_type"] == "bfloat16"]
        work = "context" if operator == "decode_latent" else "new_tokens"
        frame = frame[frame["step"] == 0] if work == "new_tokens" else frame
        for kv_dtype, rows in frame.groupby("kv_cache_dtype"):
            heads = np.stack([rows["num_heads"], np.ones(len(rows), dtype=np.int64)], axis=1)
            value = rows["step"] + 1 if work == "context" else rows["isl"]
            axes = {"heads": heads, "batch": rows["batch_size"].to_numpy(), work: value.to_numpy()}
            name = f"{operator}/{kv_dtype}"
            grids[name] = _grid(rows, axes, reader.notes, name)
    return grids


def _linear(reader: _Reader) -> dict[str, Grid]:
    """Convolution and delta rule together, of prompts alone and of decodes."""
    frame = reader.frame("linear_attention", "gdn_perf.parquet", "linear")
    if frame.empty:
        return {}
    keys = ["num_k_heads", "num_v_heads", "batch_size", "seq_len"]
    grids = {}
    for phase, operator in (("context", "prefill_linear"), ("generation", "decode_linear")):
        rows = frame[frame["phase"] == phase]
        each = rows.groupby([*keys, "kernel_source"])["latency_s"].median().reset_index()
        whole = (
            each.groupby(keys).agg(latency_s=("latency_s", "sum"), kernels=("kernel_source", "nunique")).reset_index()
        )
        whole = whole[whole["kernels"] == 2]
        axes = {"heads": whole[keys[:2]].to_numpy(np.int64), "batch": whole["batch_size"].to_numpy(np.int64)}
        if phase == "context":
            axes["new_tokens"] = whole["seq_len"].to_numpy(np.int64)
        grids[operator] = _grid(whole, axes, reader.notes, operator)
    for operator in grids:
        for what in ("backend", "source", "licence"):
            reader.notes[f"{operator}/all {what}"] = reader.notes[f"linear/all {what}"]
    return grids


def _wide(reader: _Reader) -> dict[str, Grid]:
    """Full attention with heads that the GPU's first file leaves out (``HEAD_DIMS``)."""
    grids: dict[str, Grid] = {}
    for operator, file in (("prefill_attention", "context_attention"), ("decode_attention", "generation_attention")):
        frame = reader.frame("attention", f"{file}_perf.parquet", operator)
        if frame.empty or "window_size" not in frame:
            continue
        wide = frame["head_dim"].isin(WIDE_HEADS) & (frame["window_size"] == 0) & (frame["attn_dtype"] == "bfloat16")
        work = "context" if operator == "decode_attention" else "new_tokens"
        frame = frame[wide & ((frame["step"] == 0) | (work == "context"))]
        for (kv_dtype, head_dim), rows in frame.groupby(["kv_cache_dtype", "head_dim"]):
            assert head_dim not in HEAD_DIMS
            heads = rows[["num_heads", "num_key_value_heads"]].to_numpy(np.int64)
            value = rows["step"] + 1 if work == "context" else rows["isl"]
            axes = {"heads": heads, "batch": rows["batch_size"].to_numpy(), work: value.to_numpy()}
            name = f"{operator}/{kv_dtype}/{head_dim}"
            grids[name] = _grid(rows, axes, reader.notes, name)
    return grids
