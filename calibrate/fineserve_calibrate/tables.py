"""The full latency tables, and what they must satisfy before anything is predicted from them.

An operator has one Parquet file. A row is a measurement; the file's metadata holds a fingerprint of the conditions.

================== ============================================================================================
operator           columns (``latency_s``: seconds of one call on one GPU; heads count one GPU's)
================== ============================================================================================
gemm               dtype, m (tokens), n (outputs), k (inputs), latency_s
prefill_attention  dtype, kv_dtype, q_heads, kv_heads, head_dim, batch, new_tokens (a sequence), cached_tokens
                   (prefix of each sequence), latency_s: causal attention of one layer
decode_attention   dtype, kv_dtype, q_heads, kv_heads, head_dim, batch, context (keys a sequence, the new one
                   included), latency_s: paged attention of one layer
all_reduce         dtype, gpus, message_bytes (of each GPU), latency_s
================== ============================================================================================

dtype: bfloat16, fp8 (per-tensor scales), int4_wo (4-bit weights, 16-bit activations).

``check`` has tolerances, chosen so that every published table of the reference GPU passes:

* Noise: a row may take 0.4 x the time of the slowest row with less work. One row in 100 may take less, or be a single spike
  of more than twice both its neighbours. Block-scaled FP8 changes kernels as m grows; a spike is a failed measurement.
* Plausibility: at most one row in 100 is faster than 1.2 x the data sheet. The best tenth of the large rows reaches at
  least 2 % of it; seconds that are milliseconds miss this by a factor of twenty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fineserve_calibrate.probes.schema import KEYS
from fineserve_sim.catalog import GpuSpec
from fineserve_sim.latency.tables import TableError, gemm_roofline_s

Column = NDArray[Any]
UNKNOWN = "unknown"
LEAST_WIDTH = 256  # no layer asks for a narrower matrix product
METADATA_KEY = b"fineserve_fingerprint"
COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {name: (*KEYS[name], "latency_s") for name in ("gemm", "prefill_attention", "decode_attention", "all_reduce")}
)
TEXT = ("dtype", "kv_dtype")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The conditions under which a table was measured. Unknown ones say so."""

    device: str
    backend: str
    source: str
    licence: str
    driver: str = UNKNOWN
    cuda: str = UNKNOWN
    torch: str = UNKNOWN
    date: str = UNKNOWN
    clocks: str = UNKNOWN
    repeats: str = UNKNOWN
    spread: str = UNKNOWN


@dataclass(frozen=True, slots=True)
class Table:
    """One operator's measurements: columns of equal length, named as in ``COLUMNS``."""

    operator: str
    columns: Mapping[str, Column]
    fingerprint: Fingerprint

    def where(self, keep: NDArray[np.bool_]) -> Table:
        """Keep the rows for which ``keep`` holds."""
        return Table(self.operator, {name: values[keep] for name, values in self.columns.items()}, self.fingerprint)

    def __len__(self) -> int:
        return len(self.columns["latency_s"])


def joined(tables: Sequence[Table]) -> Table:
    """The rows of several tables of one operator and device, with all sources."""
    first, *others = tables
    columns = {name: np.concatenate([table.columns[name] for table in tables]) for name in first.columns}
    named = {
        field: " and ".join(dict.fromkeys(getattr(table.fingerprint, field) for table in tables))
        for field in ("backend", "source")
    }
    return Table(first.operator, columns, replace(first.fingerprint, **named)) if others else first


def check_columns(where: str, found: list[str], expected: tuple[str, ...]) -> None:
    """Raise TableError unless ``found`` holds every expected column."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise TableError(f"{where}: no column {', '.join(missing)}; found {', '.join(found)}")


def typed(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Convert columns to their types: text, int64 and, for the latency, float64."""
    kinds = {name: np.str_ if name in TEXT else np.int64 for name in columns} | {"latency_s": np.float64}
    return {name: np.asarray(values).astype(kinds[name]) for name, values in columns.items()}


def write_table(table: Table, path: Path) -> None:
    """Write one operator's table."""
    data = pa.table({name: pa.array(values.tolist()) for name, values in table.columns.items()})
    metadata = {METADATA_KEY: json.dumps({"operator": table.operator, **asdict(table.fingerprint)}).encode()}
    pq.write_table(data.replace_schema_metadata(metadata), path, compression="zstd")


def read_table(path: Path) -> Table:
    """Read one operator's table. ``check`` looks at its contents.

    Raises TableError for a file that is no Parquet file, has no fingerprint, or has other columns.
    """
    try:
        data = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise TableError(f"{path.name}: not a Parquet file ({error})") from error
    metadata = json.loads((data.schema.metadata or {}).get(METADATA_KEY, b"{}"))
    operator = metadata.pop("operator", None)
    if operator not in COLUMNS:
        raise TableError(f"{path.name}: no fingerprint of a latency table; operators: {', '.join(COLUMNS)}")
    known = {field.name for field in fields(Fingerprint)}
    if set(metadata) != known:
        raise TableError(f"{path.name}: fingerprint must hold {', '.join(sorted(known))}")
    check_columns(path.name, data.column_names, COLUMNS[operator])
    columns = {name: data[name].to_numpy(zero_copy_only=False) for name in COLUMNS[operator]}
    return Table(operator, columns if has_holes(columns) else typed(columns), Fingerprint(**metadata))


def has_holes(columns: Mapping[str, Column]) -> bool:
    """Say whether a column that must hold whole numbers holds NaN instead."""
    return any(values.dtype.kind == "f" and bool(np.isnan(values).any()) for values in columns.values())


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
    """Replace single spikes along the last axis by the geometric mean of their neighbours. Return how many, too."""
    before, here, after = latency_s[..., :-2], latency_s[..., 1:-1], latency_s[..., 2:]
    spikes = here > SPIKE * np.fmax(before, after)
    result = latency_s.copy()
    result[..., 1:-1] = np.where(spikes, np.sqrt(before * after), here)
    return result, int(spikes.sum())


def unsteady(table: Table) -> NDArray[np.bool_]:
    """The rows that take much less time than others with less work, or are spikes; none where few are."""
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
    found = np.zeros(len(order), dtype=bool)
    found[order] = low if low.sum() > max(1.0, DIP_ROWS * len(low)) else False
    return found


def _monotone(table: Table) -> None:
    """More work does not take much less time."""
    work, low = WORK[table.operator], unsteady(table)
    if low.any():
        row = int(np.flatnonzero(low)[0])
        raise TableError(
            f"{table.operator}: {int(low.sum())} of {len(low)} rows take less than {DIP} x the time of a row with "
            f"smaller {work}, or are spikes, first row {row}; at most 1 in 100 may: latencies must grow with {work}"
        )


def roofline_s(table: Table, gpu: GpuSpec) -> Floats:
    """Compute the seconds that the data sheet needs for each row, without launch and software."""
    column = table.columns
    if table.operator == "gemm":
        ideal_s = np.empty(len(table))
        for dtype in np.unique(column["dtype"]):
            rows = column["dtype"] == dtype
            m, n, k = (column[name][rows].astype(np.float64) for name in "mnk")
            ideal_s[rows] = gemm_roofline_s(gpu, str(dtype), m, n, k)
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


def check_rows(table: Table, device: str) -> None:
    """Raise TableError, in one line, unless the table was measured on ``device`` and holds latencies."""
    check_columns(table.operator, list(table.columns), COLUMNS[table.operator])
    if table.fingerprint.device != device:
        raise TableError(f"{table.operator}: measured on {table.fingerprint.device}, not on {device}")
    if not len(table):
        raise TableError(f"{table.operator}: no rows")
    _numbers(table)


def check(table: Table, device: str, gpu: GpuSpec) -> None:
    """Raise TableError, in one line, unless the table was measured on ``device`` and its rows are possible on ``gpu``."""
    check_rows(table, device)
    _monotone(table)
    _plausible(table, gpu)
