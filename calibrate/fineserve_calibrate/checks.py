"""What a latency table must satisfy before anything is predicted from it.

Tolerances, chosen so that every published table of the reference GPU passes:

* noise: a row may be as low as 0.4 x the slowest row with less work; one row in 100, and one in a small table, may be
  lower still (block-scaled FP8 changes kernels as m grows, and leaves a 60 us floor behind), or be a single spike of more
  than twice both its neighbours (a failed measurement);
* plausibility: no more than one row in 100 is faster than 1.2 x the data sheet, and the best tenth of the large rows
  reaches at least 2 % of it (seconds that are milliseconds miss this by a factor of twenty).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fineserve_calibrate.tables import COLUMNS, Table, check_columns
from fineserve_sim.catalog import GpuSpec
from fineserve_sim.latency.tables import TableError, gemm_roofline_s
from fineserve_sim.latency.tables.curves import PEAK

DIP = 0.4
DIP_ROWS = 1 / 100
SPIKE = 2.0
FASTER, FASTER_ROWS = 1.2, 1 / 100
SLOWEST_PEAK_FRACTION = 0.02
WORK = {"gemm": "m", "prefill_attention": "new_tokens", "decode_attention": "context", "all_reduce": "message_bytes"}
ELEMENT_BYTES = {"bfloat16": 2, "fp8": 1}

Floats = NDArray[np.float64]


def _numbers(table: Table) -> None:
    """Every number is there and possible."""
    for name, values in table.columns.items():
        if values.dtype.kind not in "fiu":
            continue
        least = 0 if name == "cached_tokens" else 1
        bad = ~np.isfinite(values) | (values <= 0 if name == "latency_s" else values < least)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise TableError(f"{table.operator}: {name} of row {row} is {values[row]}; positive numbers are expected")


def despiked(latency_s: Floats) -> tuple[Floats, int]:
    """Latencies along the last axis with single spikes made the geometric mean of their neighbours, and how many."""
    before, here, after = latency_s[..., :-2], latency_s[..., 1:-1], latency_s[..., 2:]
    spikes = here > SPIKE * np.fmax(before, after)
    result = latency_s.copy()
    result[..., 1:-1] = np.where(spikes, np.sqrt(before * after), here)
    return result, int(spikes.sum())


def _monotone(table: Table) -> None:
    """More work does not take much less time."""
    work = WORK[table.operator]
    rest = [name for name in table.columns if name not in (work, "latency_s")]
    keys = [np.unique(table.columns[name], return_inverse=True)[1] for name in rest]
    order = np.lexsort([table.columns[work], *keys])
    seconds = table.columns["latency_s"][order]
    changed = np.zeros(len(order), dtype=bool)
    changed[0] = True
    for key in keys:
        changed[1:] |= np.diff(key[order]) != 0
    low = np.empty(len(order), dtype=bool)
    for start, end in zip(np.flatnonzero(changed), [*np.flatnonzero(changed)[1:], len(order)], strict=True):
        line = seconds[start:end]
        smooth = despiked(line)[0]
        low[start:end] = (smooth < DIP * np.maximum.accumulate(smooth)) | (smooth != line)
    if low.sum() > max(1.0, DIP_ROWS * len(low)):
        row = int(order[np.flatnonzero(low)[0]])
        raise TableError(
            f"{table.operator}: {int(low.sum())} of {len(low)} rows take less than {DIP} x the time of a row with "
            f"smaller {work}, or are spikes, first row {row}; at most 1 in 100 may: latencies must grow with {work}"
        )


def roofline_s(table: Table, gpu: GpuSpec) -> Floats:
    """Seconds that the data sheet needs for each row (launch and software excluded)."""
    column = table.columns
    if table.operator == "gemm":
        ideal_s = np.empty(len(table))
        for dtype in np.unique(column["dtype"]):
            rows = column["dtype"] == dtype
            known = str(dtype) if str(dtype) in PEAK else "fp8"  # fp8_block
            m, n, k = (column[name][rows].astype(np.float64) for name in "mnk")
            ideal_s[rows] = gemm_roofline_s(gpu, known, m, n, k)
        return ideal_s
    if table.operator == "all_reduce":
        link_s: Floats = column["message_bytes"] * (2 * (column["gpus"] - 1) / column["gpus"]) / gpu.peer_bytes_per_s
        return link_s
    batch, heads, head_dim = (column[name].astype(np.float64) for name in ("batch", "q_heads", "head_dim"))
    if table.operator == "prefill_attention":
        new = column["new_tokens"].astype(np.float64)
        flops = 4 * batch * heads * head_dim * (new * column["cached_tokens"] + new * new / 2)
        peak = np.where(column["dtype"] == "fp8", gpu.fp8_flops_per_s or gpu.bf16_flops_per_s, gpu.bf16_flops_per_s)
        compute_s: Floats = flops / peak
        return compute_s
    element = np.array([ELEMENT_BYTES.get(str(dtype), 2) for dtype in column["kv_dtype"]])
    read_s: Floats = 2 * batch * column["context"] * column["kv_heads"] * head_dim * element / gpu.memory_bytes_per_s
    return read_s


def _plausible(table: Table, gpu: GpuSpec) -> None:
    """Latencies agree in magnitude with the GPU's data sheet; only rows that are no mere launch are looked at."""
    ideal_s = roofline_s(table, gpu)
    large = ideal_s >= 50e-6
    if not large.any():
        large = ideal_s >= np.quantile(ideal_s, 0.9)
    peak_fraction = ideal_s[large] / table.columns["latency_s"][large]
    if (peak_fraction > FASTER).mean() > FASTER_ROWS:
        raise TableError(
            f"{table.operator}: {(peak_fraction > FASTER).mean():.0%} of the large rows are faster than the data sheet of "
            f"{gpu.name} allows; is latency_s in seconds, and the GPU the right one?"
        )
    best = float(np.quantile(peak_fraction, 0.9))
    if best < SLOWEST_PEAK_FRACTION:
        raise TableError(
            f"{table.operator}: the large rows reach {best:.2%} of the data sheet of {gpu.name}; latency_s must be in "
            "seconds, these look like milliseconds"
        )


def check(table: Table, device: str, gpu: GpuSpec) -> None:
    """Raise TableError, in one line, unless the table was measured on ``device`` and its rows can be true of ``gpu``."""
    check_columns(table.operator, list(table.columns), COLUMNS[table.operator])
    if table.fingerprint.device != device:
        raise TableError(f"{table.operator}: measured on {table.fingerprint.device}, not on {device}")
    if not len(table):
        raise TableError(f"{table.operator}: no rows")
    _numbers(table)
    _monotone(table)
    _plausible(table, gpu)
