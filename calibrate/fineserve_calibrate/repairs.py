"""What some published tables need before anything is predicted from them; tables without these faults stay as they are.

* **Operands in the L2 cache.** A benchmark that repeats a kernel finds small operands in a large L2 cache, and its rows beat
  the memory of the data sheet. An engine reads other layers in between. Therefore every row takes at least a launch and the
  time in which memory brings weights or KV, at the rate that rows far beyond the cache reach.
* **Unsteady clocks.** They show where more than one row in 100 dips or spikes. A matrix product far from the median of its
  neighbours, as a ratio to the roofline, then takes that median.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from fineserve_calibrate.tables import ELEMENT_BYTES, Table, unsteady
from fineserve_sim.catalog import GpuSpec
from fineserve_sim.latency.tables import gemm_roofline_s
from fineserve_sim.latency.tables.curves import WEIGHT_BYTES

Floats = NDArray[np.float64]
CACHED_BYTES = 4e6  # rows beyond show whether the cache served them
FAR_BYTES = 300e6  # beyond any L2 cache
REACHED = 0.9  # quantile of the rates of rows beyond the cache
FEW_ROWS = 8
NEIGHBOURS = 9
OUTLIER = 1.5


def repaired(table: Table, gpu: GpuSpec) -> Table:
    """The table without the faults that it has."""
    return _from_memory(_steadied(table, gpu), gpu)


def _read_bytes(table: Table) -> Floats:
    """Weights of matrix products, KV of decode attention: what an engine reads from memory at each call."""
    column = {name: values.astype(np.float64) for name, values in table.columns.items() if values.dtype.kind in "if"}
    if table.operator == "gemm":
        width = np.array([WEIGHT_BYTES[str(dtype)] for dtype in table.columns["dtype"]])
        return np.asarray(column["n"] * column["k"] * width)
    width = np.array([ELEMENT_BYTES.get(str(dtype), 2) for dtype in table.columns["kv_dtype"]])
    return np.asarray(2 * column["batch"] * column["context"] * column["kv_heads"] * column["head_dim"] * width)


def _from_memory(table: Table, gpu: GpuSpec) -> Table:
    """Rows that an L2 cache served take what memory needs."""
    if table.operator not in ("gemm", "decode_attention"):
        return table
    read_bytes, latency_s = _read_bytes(table), table.columns["latency_s"]
    rate = read_bytes / latency_s
    if rate[read_bytes > CACHED_BYTES].max(initial=0.0) <= gpu.memory_bytes_per_s:
        return table
    floor_s = np.zeros(len(table))
    kinds = table.columns["dtype" if table.operator == "gemm" else "kv_dtype"]
    streaming = table.columns["m"] <= FEW_ROWS if table.operator == "gemm" else np.ones(len(table), dtype=bool)
    for kind in np.unique(kinds):
        rows = kinds == kind
        far = rows & streaming & (read_bytes > FAR_BYTES)
        launch_s = latency_s[rows].min()
        reached = np.quantile(rate[far], REACHED) if far.any() else gpu.memory_bytes_per_s
        floor_s[rows] = launch_s + read_bytes[rows] / reached
    raised = (latency_s < floor_s).sum()
    note = f"{raised} of {len(table)} rows were in the L2 cache and take what memory needs"
    return _with(table, np.maximum(latency_s, floor_s), note)


def _steadied(table: Table, gpu: GpuSpec) -> Table:
    """Matrix products far from the median of their neighbours take it."""
    if table.operator != "gemm" or not unsteady(table).any():
        return table
    latency_s = table.columns["latency_s"].copy()
    m, n, k = (table.columns[name].astype(np.float64) for name in "mnk")
    dtypes, kind = np.unique(table.columns["dtype"], return_inverse=True)
    line = np.unique(np.stack([kind, n, k]), axis=1, return_inverse=True)[1].ravel()
    order = np.lexsort([m, line])
    changed = 0
    for rows in np.split(order, np.flatnonzero(np.diff(line[order])) + 1):
        dtype = str(dtypes[kind[rows[0]]])
        ideal_s = latency_s[rows].min() + gemm_roofline_s(gpu, dtype, m[rows], n[rows], k[rows])
        ratio = latency_s[rows] / ideal_s
        usual = _medians(ratio)
        far = (ratio > OUTLIER * usual) | (ratio * OUTLIER < usual)
        latency_s[rows] = np.where(far, usual * ideal_s, latency_s[rows])
        changed += int(far.sum())
    return _with(
        table, latency_s, f"{changed} of {len(table)} rows were far from the median of their neighbours and take it"
    )


def _medians(values: Floats) -> Floats:
    """Of each value and those about it, fewer at the ends."""
    padded = np.pad(values, NEIGHBOURS // 2, constant_values=np.nan)
    medians: Floats = np.nanmedian(np.lib.stride_tricks.sliding_window_view(padded, NEIGHBOURS), axis=-1)
    return medians


def _with(table: Table, latency_s: Floats, note: str) -> Table:
    """Other latencies, and what was changed in the fingerprint."""
    fingerprint = replace(table.fingerprint, source=f"{table.fingerprint.source} ({note})")
    return Table(table.operator, {**table.columns, "latency_s": latency_s}, fingerprint)
