"""What the data sheet would allow for each measured row, where an operator has such a bound.

A device without a data sheet (a CPU) is held against the best that its own probes reached: then the share of the roofline
says how far a row is from the best row, no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from fineserve_calibrate.checks import roofline_s as known_roofline_s
from fineserve_calibrate.tables import COLUMNS, Table
from fineserve_sim.catalog import GpuSpec
from fineserve_sim.latency.tables.curves import INPUT_BYTES, OUTPUT_BYTES, WEIGHT_BYTES

Floats = NDArray[np.float64]
MOVED: Mapping[str, float] = MappingProxyType(
    {"rms_norm": 4.0, "add_rms_norm": 8.0, "rope": 4.0, "silu_and_mul": 3.0, "greedy": 4.0, "random": 12.0}
)
"""Bytes that an elementwise operation must read and write for each element of its input."""


def _moved_bytes(table: Table) -> Floats | None:
    """Bytes through the device's memory, for the operators that they bound."""
    column = table.columns
    if table.operator == "elementwise":
        each = np.array([MOVED[str(operation)] for operation in column["operation"]])
        moved: Floats = column["tokens"] * column["width"] * each
        return moved
    if table.operator == "copy" and "host_to_host" in column["direction"]:
        both: Floats = 2.0 * column["bytes"]
        return both
    return None


def ideal_s(table: Table, spec: GpuSpec) -> Floats | None:
    """Seconds that each row needs at least; None for operators without such a bound."""
    if table.operator in COLUMNS:
        return known_roofline_s(table, spec)
    moved = _moved_bytes(table)
    if moved is not None:
        return moved / spec.memory_bytes_per_s
    if table.operator in ("copy", "weight_load"):
        across: Floats = table.columns["bytes"] / spec.pcie_bytes_per_s
        return across
    if table.operator == "point_to_point":
        link: Floats = table.columns["message_bytes"] / spec.peer_bytes_per_s
        return link
    return None


def _products(table: Table) -> tuple[float, float]:
    """Best FLOP/s and bytes/s of the matrix products."""
    m, n, k = (table.columns[axis].astype(np.float64) for axis in "mnk")
    dtypes = [str(dtype) for dtype in table.columns["dtype"]]
    weight, given = (np.array([size[dtype] for dtype in dtypes]) for size in (WEIGHT_BYTES, INPUT_BYTES))
    seconds = table.columns["latency_s"]
    moved = n * k * weight + m * k * given + m * n * OUTPUT_BYTES
    return float((2 * m * n * k / seconds).max()), float((moved / seconds).max())


def measured_spec(tables: Iterable[Table], name: str) -> GpuSpec | None:
    """A data sheet made of the best rows; None without matrix products."""
    found = {table.operator: table for table in tables}
    if "gemm" not in found:
        return None
    flops_per_s, bytes_per_s = _products(found["gemm"])
    for table in found.values():
        moved = _moved_bytes(table)
        if moved is not None:
            bytes_per_s = max(bytes_per_s, float((moved / table.columns["latency_s"]).max()))
    return GpuSpec(
        name=name,
        memory_gib=1,
        memory_bytes_per_s=bytes_per_s,
        bf16_flops_per_s=flops_per_s,
        fp8_flops_per_s=flops_per_s,
        pcie_bytes_per_s=bytes_per_s,
        efficiency="measured",
        source="best rows of these probes",
    )
