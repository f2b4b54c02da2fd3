"""The full latency tables: one Parquet file an operator, a row a measurement, with a fingerprint in the file's metadata.

================== ============================================================================================
operator           columns (``latency_s``: seconds of one call on one GPU; heads are those of one GPU)
================== ============================================================================================
gemm               dtype, m (tokens), n (outputs), k (inputs), latency_s
prefill_attention  dtype, kv_dtype, q_heads, kv_heads, head_dim, batch, new_tokens (a sequence), cached_tokens
                   (prefix of each sequence), latency_s: causal attention of one layer
decode_attention   dtype, kv_dtype, q_heads, kv_heads, head_dim, batch, context (keys a sequence, the new one
                   included), latency_s: paged attention of one layer
all_reduce         dtype, gpus, message_bytes (of each GPU), latency_s
================== ============================================================================================

dtype: bfloat16, fp8 (per-tensor scales), fp8_block (128 x 128 blocks), int4_wo (4-bit weights, 16-bit activations).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from fineserve_sim.latency.tables import TableError

Column = NDArray[Any]
UNKNOWN = "unknown"
METADATA_KEY = b"fineserve_fingerprint"
_HEADS = ("dtype", "kv_dtype", "q_heads", "kv_heads", "head_dim", "batch")
COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "gemm": ("dtype", "m", "n", "k", "latency_s"),
        "prefill_attention": (*_HEADS, "new_tokens", "cached_tokens", "latency_s"),
        "decode_attention": (*_HEADS, "context", "latency_s"),
        "all_reduce": ("dtype", "gpus", "message_bytes", "latency_s"),
    }
)
TEXT = ("dtype", "kv_dtype")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Under which conditions a table was measured; what is not known says so."""

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
        """The rows for which ``keep`` holds."""
        return Table(self.operator, {name: values[keep] for name, values in self.columns.items()}, self.fingerprint)

    def __len__(self) -> int:
        return len(self.columns["latency_s"])


def check_columns(where: str, found: list[str], expected: tuple[str, ...]) -> None:
    """Raise TableError unless ``found`` holds every expected column."""
    missing = [name for name in expected if name not in found]
    if missing:
        raise TableError(f"{where}: no column {', '.join(missing)}; found {', '.join(found)}")


def typed(columns: Mapping[str, Column]) -> dict[str, Column]:
    """Columns in their types: text, int64 and, for the latency, float64."""
    kinds = {name: np.str_ if name in TEXT else np.int64 for name in columns} | {"latency_s": np.float64}
    return {name: np.asarray(values).astype(kinds[name]) for name, values in columns.items()}


def write_table(table: Table, path: Path) -> None:
    """Write one operator's table."""
    data = pa.table({name: pa.array(values.tolist()) for name, values in table.columns.items()})
    metadata = {METADATA_KEY: json.dumps({"operator": table.operator, **asdict(table.fingerprint)}).encode()}
    pq.write_table(data.replace_schema_metadata(metadata), path, compression="zstd")


def read_table(path: Path) -> Table:
    """Read one operator's table; contents are checked by ``checks.check``.

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
    """Whether a column that must hold whole numbers holds NaN instead."""
    return any(values.dtype.kind == "f" and bool(np.isnan(values).any()) for values in columns.values())
