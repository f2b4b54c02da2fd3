"""From finished parts to tables, the simulator's table set and the report. Needs no device.

The report says what was measured under which conditions, how far each row is from its roofline, and what is missing. A device
without a data sheet (a CPU) is held against the best row of its own probes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fineserve_calibrate.compaction import compact
from fineserve_calibrate.probes.nvidia import catalog_name
from fineserve_calibrate.probes.parts import Finished, Measured, collect
from fineserve_calibrate.probes.schema import KEYS
from fineserve_calibrate.probes.store import tables, write_tables
from fineserve_calibrate.tables import COLUMNS, Table, check, roofline_s
from fineserve_sim.catalog import GpuSpec, gpu
from fineserve_sim.experiment.show.plot_style import COLOURS, house_style, log_ticks, look_at, save
from fineserve_sim.latency.measured_steps import fit_steps
from fineserve_sim.latency.tables import TableError
from fineserve_sim.latency.tables import save as save_set
from fineserve_sim.latency.tables.curves import INPUT_BYTES, OUTPUT_BYTES, WEIGHT_BYTES

NEEDED = ("gemm", "prefill_attention", "decode_attention")


def conclude(folder: Path) -> list[Path]:
    """Write tables, table set and report of the parts in ``folder``. Return the files written.

    Raises ProbeError when there are no parts.
    """
    measured = collect(folder)
    name = catalog_name(measured.identity.device)
    spec = gpu(name) if name else None
    found = tables(measured)
    written = write_tables(found, folder)
    note = _compact(found, spec, folder)
    if note.endswith(".npz"):
        written.append(folder / note)
    return [*written, *write_report(folder, measured, found, spec, note)]


def _compact(found: Sequence[Table], spec: GpuSpec | None, folder: Path) -> str:
    """Name of the table set that the simulator loads, or why there is none."""
    known = [table for table in found if table.operator in COLUMNS]
    if spec is None:
        return "no table set for the simulator: the device is not in its catalog"
    if set(NEEDED) - {table.operator for table in known}:
        return f"no table set for the simulator: it needs {', '.join(NEEDED)}"
    try:
        compacted = compact(known, spec)
    except (TableError, ValueError) as error:
        return f"no table set for the simulator: {error}"
    save_set(folder / f"{spec.name}.npz", compacted)
    return f"{spec.name}.npz"


SERIES = ("dtype", "kv_dtype", "operation", "direction", "host_memory")
"""Columns whose values are drawn in colours of their own."""
COMPARED = {"int4_gemm": ("kernel", "machete"), "kv_layout": ("layout", "LBNHC"), "streams": ("neighbour", "none")}
"""Operators that exist to compare: the column, and the value to compare the others with."""
PANELS_A_ROW = 3
RESTLESS = 0.1
"""Median spread above which the report warns."""


def write_report(
    folder: Path, measured: Measured, tables: Sequence[Table], data_sheet: GpuSpec | None, note: str
) -> list[Path]:
    """Write ``report.md`` and its figures. Return the files written.

    ``data_sheet`` is the device's data sheet, where the catalog has it. ``note`` tells of the simulator's table set.
    """
    spec = data_sheet or measured_spec(tables, "its own best rows")
    figures = _figures(folder / "figures", tables, spec)
    lines = [f"# Probes of {measured.identity.device}", "", *_conditions(tables), "", *_operators(tables, spec), ""]
    lines += [f"![Achieved against roofline](figures/{path.name})\n" for path in figures if path.suffix == ".png"]
    lines += [*_compared(tables), *_steps(tables), *_checks(tables, data_sheet), *_missing(measured.parts)]
    lines += [f"* Compact set: {note}", ""]
    path = folder / "report.md"
    path.write_text("\n".join(lines), encoding="utf-8")
    return [path, *figures]


def _conditions(tables: Sequence[Table]) -> list[str]:
    if not tables:
        return ["Nothing was measured."]
    mark = tables[0].fingerprint
    clocks = dict.fromkeys(clock for table in tables for clock in table.fingerprint.clocks.split("; "))
    restless = [table.operator for table in tables if np.median(table.columns["spread"]) > RESTLESS]
    warning = f"Spread above {RESTLESS:.0%} in {', '.join(restless)}: the device was not free, or its clocks moved."
    return [
        f"Driver {mark.driver}, CUDA {mark.cuda}, torch {mark.torch}, {mark.backend}; {mark.date}; {mark.source}.",
        "",
        f"Clocks seen: {'; '.join(clocks)}.",
        *(["", warning] if restless else []),
    ]


def _operators(tables: Sequence[Table], spec: GpuSpec | None) -> list[str]:
    against = f"roofline of {spec.name}" if spec else "roofline"
    lines = [
        f"| operator | implementation | rows | spread, median | share of the {against}, median / best |",
        "| --- | --- | --- | --- | --- |",
    ]
    for table in tables:
        kinds = ", ".join(sorted({str(name) for name in table.columns["implementation"]}))
        bound = ideal_s(table, spec) if spec else None
        share = "no bound"
        if bound is not None:
            achieved = bound / table.columns["latency_s"]
            share = f"{np.median(achieved):.1%} / {achieved.max():.1%}"
        spread = float(np.median(table.columns["spread"]))
        lines.append(f"| {table.operator} | {kinds} | {len(table)} | {spread:.1%} | {share} |")
    return lines


def _compared(tables: Sequence[Table]) -> list[str]:
    """How much longer each alternative takes, in the median over points that both have."""
    lines = []
    for table in tables:
        if table.operator not in COMPARED:
            continue
        column, base = COMPARED[table.operator]
        rest = [name for name in KEYS[table.operator] if name != column]
        seconds: dict[str, dict[tuple[str, ...], float]] = {}
        for place, value in enumerate(table.columns[column]):
            point = tuple(str(table.columns[name][place]) for name in rest)
            seconds.setdefault(str(value), {})[point] = float(table.columns["latency_s"][place])
        for value, mine in seconds.items():
            ratios = [mine[point] / held for point, held in seconds.get(base, {}).items() if point in mine]
            if value != base and ratios:
                lines.append(f"* {table.operator}: {value} takes {np.median(ratios):.2f} times as long as {base}")
    return lines


def _steps(tables: Sequence[Table]) -> list[str]:
    """How well the step model that the simulator can load describes the measured steps, an engine a line."""
    steps = next((table for table in tables if table.operator == "step"), None)
    if steps is None:
        return []
    lines = ["## Engine steps", "", "| engine | rows | seconds, least to most | step model: median and worst error |"]
    lines.append("| --- | --- | --- | --- |")
    names = [
        " ".join(values)
        for values in zip(*(steps.columns[c].tolist() for c in ("model", "dtype", "mode")), strict=True)
    ]
    for name in dict.fromkeys(names):
        engine = steps.where(np.array(names) == name)
        seconds = engine.columns["latency_s"]
        try:
            error = np.abs(fit_steps(dict(engine.columns)).error)
            fit = f"{np.median(error):.1%}, {error.max():.1%}"
        except TableError as refused:
            fit = str(refused)
        lines.append(f"| {name} | {len(engine)} | {seconds.min():.4g} to {seconds.max():.4g} | {fit} |")
    return [*lines, ""]


def _checks(tables: Sequence[Table], data_sheet: GpuSpec | None) -> list[str]:
    lines = ["## Checks", ""]
    for table in tables:
        if table.operator not in COLUMNS or data_sheet is None:
            continue
        try:
            known = {name: table.columns[name] for name in COLUMNS[table.operator]}
            check(replace(table, columns=known), table.fingerprint.device, data_sheet)
            lines.append(f"* {table.operator}: passed")
        except TableError as problem:
            lines.append(f"* {problem}")
    return [*lines, ""] if len(lines) > 2 else []


def _missing(finished: Iterable[Finished]) -> list[str]:
    lines = ["## Not measured", ""]
    for part in finished:
        lines += [f"* {part.name}: {count} points, {reason}" for reason, count in part.unavailable]
        if part.left_out:
            lines.append(f"* {part.name}: {part.left_out} points, the part's time was over")
    return [*lines, ""] if len(lines) > 2 else []


def _figures(folder: Path, tables: Sequence[Table], spec: GpuSpec | None) -> list[Path]:
    """Draw measured seconds against the roofline, a panel an operator; none without a bound."""
    bounds = [(table, bound) for table in tables if spec and (bound := ideal_s(table, spec)) is not None]
    if not bounds:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    with house_style():
        rows = -(-len(bounds) // PANELS_A_ROW)
        figure = Figure(figsize=(3.3 * PANELS_A_ROW + 0.6, 2.9 * rows + 0.4), layout="constrained")
        panels = figure.subplots(rows, PANELS_A_ROW, squeeze=False).ravel().tolist()
        for panel, (table, bound) in zip(panels, bounds, strict=False):
            _panel(panel, table, bound)
        for panel in panels[len(bounds) :]:
            panel.set_visible(False)
        figure.supxlabel(f"roofline of {spec.name if spec else ''} (s)")
        figure.supylabel("measured (s)")
        return save(figure, folder / "roofline")


def _panel(panel: Axes, table: Table, bound: Floats) -> None:
    seconds = table.columns["latency_s"]
    panel.plot([bound.min(), bound.max()], [bound.min(), bound.max()], color=COLOURS[6], linewidth=0.8)
    names = [name for name in SERIES if name in table.columns and len(set(table.columns[name].tolist())) > 1]
    series = [" ".join(values) for values in zip(*(table.columns[name].tolist() for name in names), strict=True)]
    labels = np.array(series if names else [table.operator] * len(table))
    found = list(dict.fromkeys(labels.tolist()))
    for place, label in enumerate(found):
        rows = labels == label
        size = 3.0 + 1.2 * (len(found) - 1 - place)  # equal series lie in one another
        look = look_at(place) | {"linestyle": "", "markersize": size, "markerfacecolor": "none"}
        panel.plot(bound[rows], seconds[rows], **look, markeredgewidth=0.8, label=label)
    panel.set_xscale("log")
    panel.set_yscale("log")
    log_ticks(panel.xaxis)
    log_ticks(panel.yaxis)
    panel.set_title(table.operator)
    if names:
        panel.legend(fontsize=6.5)


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
    """Compute the seconds that each row needs at least; None for operators without such a bound."""
    if table.operator in COLUMNS:
        return roofline_s(table, spec)
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
    """Make a data sheet of the best rows; None without matrix products."""
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
