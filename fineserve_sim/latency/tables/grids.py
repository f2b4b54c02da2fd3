"""Measured latency tables as dense grids, and the file that carries them.

One ``.npz`` file holds a table set of one GPU. Each array is named ``operator/variant/column``; ``latency_s`` is the dense
grid over the operator's axes in the order listed in ``AXES``, NaN where nothing was measured. ``fingerprint`` is a JSON
text: device, software versions, date, clocks, repeats, spread, source, licence and the error of the compaction.
numpy alone reads it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import as_file, files
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.catalog import GpuSpec

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# variant: gemm by dtype of weights and activations, attention by KV dtype and head dimension, all_reduce by dtype.
# "heads" is an axis of (query heads, KV heads) pairs per GPU; "context" counts the token that is being decoded. "shape" is an
# axis of (experts, active ones, hidden size, width, GPUs that split each, GPUs that whole ones are spread over).
AXES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gemm": ("n", "k", "m"),
        "prefill_attention": ("heads", "batch", "new_tokens"),
        "decode_attention": ("heads", "batch", "context"),
        "all_reduce": ("gpus", "message_bytes"),
        "experts": ("shape", "tokens"),
        "prefill_latent": ("heads", "batch", "new_tokens"),
        "decode_latent": ("heads", "batch", "context"),
        "prefill_linear": ("heads", "batch", "new_tokens"),
        "decode_linear": ("heads", "batch"),
    }
)

REFERENCE_GPU = "h100-sxm"
DEVICES: Mapping[str, str] = MappingProxyType(
    {
        "h100-sxm": "NVIDIA H100 80GB HBM3",
        "h200-sxm": "NVIDIA H200",
        "a100-80gb": "NVIDIA A100-SXM4-80GB",
        "l40s": "NVIDIA L40S",
        "b200": "NVIDIA B200",
        "rtx-pro-6000-server": "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "rtx-4090": "NVIDIA GeForce RTX 4090",
    }
)
"""The GPUs whose tables ship: as the catalog names them, and as their drivers report them."""
DENSE_ALONE = "rtx-4090"
"""The GPU of these on which layers of dense models alone were measured."""


class TableError(ValueError):
    """A latency table that cannot be used; the text says which, where and what would be right."""


@dataclass(frozen=True, slots=True)
class Grid:
    """One operator's measurements: ``axes`` sorted ascending (``heads``: pairs, shape (n, 2)), ``latency_s`` seconds of
    one call with shape ``tuple(len(axis) for axis in axes)``, NaN where unmeasured."""

    axes: Mapping[str, Ints]
    latency_s: Floats


@dataclass(frozen=True, slots=True)
class TableSet:
    """The tables of one GPU: grids by ``operator/variant`` (``gemm/bfloat16``, ``decode_attention/fp8/128``, ...)."""

    fingerprint: Mapping[str, str]
    grids: Mapping[str, Grid]


def save(path: str | Path, tables: TableSet) -> None:
    """Write a table set; the same tables give the same bytes."""
    arrays: dict[str, NDArray[np.generic]] = {"fingerprint": np.array(json.dumps(dict(tables.fingerprint)))}
    for name, grid in tables.grids.items():
        arrays |= {f"{name}/{axis}": values.astype(np.int32) for axis, values in grid.axes.items()}
        arrays[f"{name}/latency_s"] = grid.latency_s.astype(np.float32)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, array in arrays.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _grid(name: str, arrays: Mapping[str, NDArray[np.generic]], where: str) -> Grid:
    operator = name.split("/", maxsplit=1)[0]
    if operator not in AXES:
        raise TableError(f"{where}: unknown operator {operator!r}; known: {', '.join(AXES)}")
    missing = [axis for axis in AXES[operator] if f"{name}/{axis}" not in arrays]
    if missing:
        raise TableError(f"{where}: {name} lacks {', '.join(missing)}")
    axes = {axis: arrays[f"{name}/{axis}"].astype(np.int64) for axis in AXES[operator]}
    latency_s = arrays[f"{name}/latency_s"].astype(np.float64)
    shape = tuple(len(axis) for axis in axes.values())
    if latency_s.shape != shape:
        raise TableError(f"{where}: {name}/latency_s has shape {latency_s.shape}, its axes give {shape}")
    if np.any(latency_s <= 0) or np.any(np.isinf(latency_s)) or np.all(np.isnan(latency_s)):
        raise TableError(f"{where}: {name}/latency_s must be positive seconds, NaN only where nothing was measured")
    return Grid(axes, latency_s)


def load(path: str | Path, device: str | None = None) -> TableSet:
    """Read a table set.

    Raises TableError when the file is no table set, lacks a column, holds impossible latencies, or was measured on
    another GPU than ``device`` (the name that the driver reports).
    """
    where = Path(path).name
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        fingerprint: dict[str, str] = json.loads(str(arrays.pop("fingerprint")))
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise TableError(f"{where}: not a latency table set ({error})") from error
    if device is not None and fingerprint.get("device") != device:
        raise TableError(f"{where}: measured on {fingerprint.get('device')}, not on {device}")
    names = [name.removesuffix("/latency_s") for name in arrays if name.endswith("/latency_s")]
    return TableSet(fingerprint, {name: _grid(name, arrays, where) for name in names})


def shipped(gpu_name: str = REFERENCE_GPU) -> TableSet:
    """The compact tables of one GPU that the simulator ships; see their fingerprint for source and licence."""
    return _shipped(gpu_name)


@cache
def _shipped(gpu_name: str, part: str = "") -> TableSet:
    with as_file(files("fineserve_sim.latency.tables").joinpath(f"{gpu_name}{part}.npz")) as path:
        return load(path, device=DEVICES[gpu_name])


def shipped_layers(gpu_name: str) -> TableSet:
    """The compact tables of the layers that not every model has: experts, latent and linear attention, wide heads. Without any
    grid for a GPU on which none was measured."""
    return _shipped(gpu_name, "-layers") if gpu_name != DENSE_ALONE else TableSet({}, {})


def measured_on(gpu: GpuSpec) -> TableSet | None:
    """The tables for a GPU of this type: measured on it, on the GPU of which it is a slice, or on the one that the catalog
    names for it. None where there are none."""
    name = gpu.tables_from or gpu.whole or gpu.name
    return shipped(name) if name in DEVICES else None
