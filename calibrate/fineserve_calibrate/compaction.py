"""From full tables to the compact set that the simulator ships.

The set keeps what a dense decoder layer can ask for: GEMM dtypes and shapes, head dimensions, and full attention without a
cached prefix. A measured m is dropped when the line between its neighbours predicts it within ``M_TOLERANCE``, in the median
over shapes. Latencies keep 12 significant bits. Single spikes become the geometric mean of their neighbours. The error of all
this is measured against every full row of the kept shapes, with the simulator's isotonic regression. The fingerprint holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from fineserve_calibrate.tables import LEAST_WIDTH, Column, Table, despiked
from fineserve_sim.catalog import GpuSpec
from fineserve_sim.latency.tables import GemmTable, Grid, TableError, TableSet

GEMM_DTYPES = ("bfloat16", "fp8", "int4_wo")
HEAD_DIMS = (64, 128)
M_TOLERANCE = 0.01
SIGNIFICANT_BITS = 12

Floats = NDArray[np.float64]


def dense(axes: dict[str, Column], latency_s: Floats) -> Grid:
    """Make a grid of rows given by columns. A point that was measured several times gets the median."""
    values = {name: np.unique(column, axis=0, return_inverse=True) for name, column in axes.items()}
    shape = tuple(len(unique) for unique, _ in values.values())
    flat = np.ravel_multi_index(tuple(inverse.ravel() for _, inverse in values.values()), shape)
    order = np.argsort(flat, kind="stable")
    points, starts = np.unique(flat[order], return_index=True)
    grid = np.full(int(np.prod(shape)), np.nan)
    grid[points] = [np.median(rows) for rows in np.split(latency_s[order], starts[1:])]
    return Grid({name: unique for name, (unique, _) in values.items()}, grid.reshape(shape))


def kept_m(m: Floats, latency_s: Floats) -> NDArray[np.int64]:
    """Find the m that lines between kept neighbours do not predict within ``M_TOLERANCE``: greedy, left to right."""
    logs, x = np.log(latency_s.reshape(-1, len(m))), np.log(m)
    kept, end = [0], 2
    while end < len(m):
        start = kept[-1]
        weight = (x[start + 1 : end] - x[start]) / (x[end] - x[start])
        line = logs[:, [start]] * (1 - weight) + logs[:, [end]] * weight
        if np.abs(np.nanmedian(line - logs[:, start + 1 : end], axis=0)).max() > M_TOLERANCE:
            kept.append(end - 1)
        end += 1
    return np.array([*kept, len(m) - 1])


def rounded(latency_s: Floats) -> Floats:
    """Round latencies to ``SIGNIFICANT_BITS`` bits, which compress to half the size."""
    mantissa, exponent = np.frexp(latency_s)
    result: Floats = np.ldexp(np.round(mantissa * 2**SIGNIFICANT_BITS) / 2**SIGNIFICANT_BITS, exponent)
    return result


def gemm_grid(table: Table, dtype: str) -> Grid:
    """Make the full grid of one dtype over the kept shapes."""
    column = table.columns
    keep = (column["dtype"] == dtype) & (column["n"] >= LEAST_WIDTH) & (column["k"] >= LEAST_WIDTH)
    return dense({axis: column[axis][keep] for axis in ("n", "k", "m")}, column["latency_s"][keep])


def prediction_errors(compact: Grid, full: Grid, dtype: str, reference: GpuSpec) -> Floats:
    """Compute the relative errors of the simulator's GEMM lines against every row of ``full``."""
    predictor = GemmTable(compact, dtype, reference)
    m = full.axes["m"].astype(np.float64)
    errors = []
    for i, n in enumerate(full.axes["n"].tolist()):
        for j, k in enumerate(full.axes["k"].tolist()):
            errors.append(predictor.line(n, k, reference).at(m) / full.latency_s[i, j] - 1)
    every = np.concatenate(errors)
    known: Floats = every[~np.isnan(every)]
    return known


def _stated(errors: Floats) -> str:
    size = np.abs(errors)
    return f"median {np.median(size):.2%}, p95 {np.quantile(size, 0.95):.2%}"


def _gemms(tables: Sequence[Table], reference: GpuSpec, thin: bool) -> tuple[dict[str, Grid], dict[str, str]]:
    grids, notes = {}, {}
    for table in tables:
        for dtype in (name for name in GEMM_DTYPES if name in table.columns["dtype"]):
            full = gemm_grid(table, dtype)
            clean, spikes = despiked(full.latency_s)
            every = np.arange(len(full.axes["m"]))
            kept = kept_m(full.axes["m"].astype(np.float64), clean) if thin else every
            grid = Grid({**full.axes, "m": full.axes["m"][kept]}, rounded(clean[..., kept]))
            grids[f"gemm/{dtype}"] = grid
            error = _stated(prediction_errors(grid, full, dtype, reference))
            notes[f"compaction gemm/{dtype}"] = (
                f"{len(kept)} of {len(full.axes['m'])} m, n and k >= {LEAST_WIDTH}, {spikes} spikes replaced; "
                f"|error| against {np.isfinite(full.latency_s).sum()} rows: {error}"
            )
    return grids, notes


def _attention(table: Table, work: str) -> tuple[dict[str, Grid], dict[str, str]]:
    grids, column = {}, table.columns
    full = np.ones(len(table), dtype=bool) if work == "context" else column["cached_tokens"] == 0
    for kv_dtype in np.unique(column["kv_dtype"]):
        for head_dim in HEAD_DIMS:
            keep = full & (column["dtype"] == "bfloat16") & (column["kv_dtype"] == kv_dtype)
            keep &= column["head_dim"] == head_dim
            if not keep.any():
                continue
            heads = np.stack([column["q_heads"][keep], column["kv_heads"][keep]], axis=1)
            axes = {"heads": heads, "batch": column["batch"][keep], work: column[work][keep]}
            grid = dense(axes, column["latency_s"][keep])
            grids[f"{table.operator}/{kv_dtype}/{head_dim}"] = Grid(grid.axes, rounded(grid.latency_s))
    note = f"head dimensions {', '.join(map(str, HEAD_DIMS))}, no window; |error| of rounding below 0.03%"
    return grids, {f"compaction {table.operator}": note}


def _all_reduce(table: Table) -> tuple[dict[str, Grid], dict[str, str]]:
    keep = table.columns["dtype"] == "bfloat16"
    axes = {axis: table.columns[axis][keep] for axis in ("gpus", "message_bytes")}
    grid = dense(axes, table.columns["latency_s"][keep])
    clean, spikes = despiked(grid.latency_s)
    note = f"{spikes} spikes replaced; |error| of rounding below 0.03%"
    return {"all_reduce/bfloat16": Grid(grid.axes, rounded(clean))}, {"compaction all_reduce": note}


def compact(tables: Sequence[Table], reference: GpuSpec, thin: bool = True) -> TableSet:
    """Make the compact set of one GPU's tables. It keeps every measured m unless ``thin``.

    Raises TableError when the tables come from several devices.
    """
    devices = {table.fingerprint.device for table in tables}
    if len(devices) != 1:
        raise TableError(f"tables of several devices: {', '.join(sorted(devices))}")
    fingerprint = {"device": devices.pop(), "gpu": reference.name}
    for table in tables:
        variant = "int4_wo" if set(table.columns["dtype"]) == {"int4_wo"} else "all"
        fields = {name: value for name, value in asdict(table.fingerprint).items() if name != "device"}
        fingerprint |= {f"{table.operator}/{variant} {name}": value for name, value in fields.items()}
    grids, notes = _gemms([table for table in tables if table.operator == "gemm"], reference, thin)
    for table in tables:
        if table.operator == "all_reduce":
            found = _all_reduce(table)
        elif table.operator != "gemm":
            found = _attention(table, "context" if table.operator == "decode_attention" else "new_tokens")
        else:
            continue
        grids, notes = grids | found[0], notes | found[1]
    return TableSet(fingerprint | notes, grids)
