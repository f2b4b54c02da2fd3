"""Measured latency tables: the file that carries them, and interpolation over them."""

from fineserve_sim.latency.tables.attention import DecodeTable, HeadMatch, PiecewiseLinear, PrefillTable, match_heads
from fineserve_sim.latency.tables.curves import GemmTable, Line, as_served, gemm_roofline_s, isotonic, slower_memory
from fineserve_sim.latency.tables.grids import (
    AXES,
    DENSE_ALONE,
    DEVICES,
    Grid,
    TableError,
    TableSet,
    load,
    measured_on,
    save,
    shipped,
    shipped_layers,
)

__all__ = [
    "AXES",
    "DENSE_ALONE",
    "DEVICES",
    "DecodeTable",
    "GemmTable",
    "Grid",
    "HeadMatch",
    "Line",
    "PiecewiseLinear",
    "PrefillTable",
    "TableError",
    "TableSet",
    "as_served",
    "gemm_roofline_s",
    "isotonic",
    "load",
    "match_heads",
    "measured_on",
    "save",
    "shipped",
    "shipped_layers",
    "slower_memory",
]
