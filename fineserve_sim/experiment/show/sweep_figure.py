"""The figure of a sweep: one row a metric, one column a value of the axes that are not on x, one series a system.

Points carry their 95 % interval. A numeric axis gives lines; anything else (named loads, a single point) grouped bars. A bound
is no system that runs: only its attainments are drawn. A percentile of requests that never got so far says ``never``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import nan
from textwrap import fill
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import Transform

from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.show.answer import gpus_text, limits_text
from fineserve_sim.experiment.show.labels import (
    LATENCY,
    axis_label,
    axis_text,
    distinct,
    number,
    quantity,
    varying_axes,
)
from fineserve_sim.experiment.show.plot_style import Handle, SystemStyles, beside, line_width, panel_grid, set_heading

Cell = Mapping[str, Any]
"""One entry of ``cells`` in summary.json."""

_PANEL_PT, _TICK_PT = 190.0, 6.0
"""Width of a panel, and of a digit at its axis with some air."""
_NEVER: dict[str, Any] = {"rotation": 90, "fontsize": 7, "ha": "center"}


@dataclass(frozen=True, slots=True)
class Series:
    """One system in one panel: shown means and interval half-widths at each value of x (NaN where there is none). ``never``
    says where a percentile is of requests that never got so far."""

    system: str
    title: str
    means: list[float]
    half_widths: list[float]
    never: list[bool]


def sweep_figure(
    cells: Sequence[Cell],
    *,
    x: str | None,
    panels: Sequence[str],
    columns: str | None,
    title: str,
    styles: SystemStyles,
) -> Figure:
    """Draw the ``cells`` of one sweep. ``columns`` comes first among the axes that make columns; ``x`` None: one point.

    Raises ValueError when ``x`` or a panel is not among what the cells hold.
    """
    _require(x, {axis for cell in cells for axis in cell["axes"]} | {None}, "axis", title)
    for panel in panels:
        _require(panel, {metric for cell in cells for metric in cell["metrics"]}, "metric", title)
    others = sorted((axis for axis in varying_axes(cells) if axis != x), key=lambda axis: axis != columns)
    points = list(product(*(distinct(cell["axes"][axis] for cell in cells) for axis in others)))
    points = [point for point in points if any(_at(cell, others, point) for cell in cells)]
    xs = distinct(cell["axes"][x] for cell in cells) if x else [None]
    titles = _titles(cells, [*others, x])
    figure, grid = panel_grid(len(panels), len(points))
    legend: dict[str, Handle] = {}
    for panel, row in zip(panels, grid, strict=True):
        for point, axes in zip(points, row, strict=True):
            column = [cell for cell in cells if _at(cell, others, point)]
            legend |= _draw_panel(axes, xs, _series(column, x, xs, panel, titles), styles)
            legend |= _draw_limit(axes, column, panel)
        _label_y(row, panel)
    for axes, point in zip(grid[0], points, strict=True):
        where = ", ".join(axis_text(axis, value) for axis, value in zip(others, point, strict=True))
        axes.set_title(fill(where, 36))
    for axes in grid[-1]:
        axes.set_xlabel(axis_label(x) if x else "")
    set_heading(figure, title, _note(cells, x, others), legend)
    return figure


def _require(name: str | None, known: Iterable[str | None], kind: str, title: str) -> None:
    known = set(known)
    if name in known:
        return
    names = sorted(str(entry) for entry in known if entry)
    raise ValueError(f'figure "{title}": the results have no {kind} "{name}"; {nearest(name, names)}')


def _at(cell: Cell, axes: Sequence[str], point: Sequence[object]) -> bool:
    return all(cell["axes"].get(axis) == value for axis, value in zip(axes, point, strict=True))


def _titles(cells: Sequence[Cell], axes: Sequence[str | None]) -> dict[str, str]:
    """What each system is called: with its GPUs where these differ and no axis says so."""
    counts = {cell["cluster"]["count"] for cell in cells if "cluster" in cell and not _is_bound(cell)}
    several = len(counts) > 1 and "cluster.count" not in axes
    return {cell["system"]: _with_gpus(cell) if several and not _is_bound(cell) else cell["title"] for cell in cells}


def _with_gpus(cell: Cell) -> str:
    count = cell["cluster"]["count"]
    return f"{cell['title']} ({count} GPU{'s' * (count > 1)})"


def _is_bound(cell: Cell) -> bool:
    """Nothing that can be run: it has no GPUs to tell of."""
    return not cell.get("gpus", True)


def _series(
    cells: Sequence[Cell], x: str | None, xs: Sequence[object], metric: str, titles: Mapping[str, str]
) -> list[Series]:
    series = []
    for system in dict.fromkeys(cell["system"] for cell in cells):
        own = {cell["axes"].get(x) if x else None: cell for cell in cells if cell["system"] == system}
        if _is_bound(next(iter(own.values()))) and not metric.endswith("_attainment"):
            own = {}
        estimates = [own[value]["metrics"].get(metric, {}) if value in own else {} for value in xs]
        means, half_widths = (_shown(estimates, key, metric) for key in ("mean", "half_width"))
        never = [bool(found) and found["mean"] is None for found in estimates] if LATENCY.fullmatch(metric) else []
        series.append(Series(system, titles[system], means, half_widths, never))
    return series


def _shown(estimates: Sequence[Mapping[str, Any]], key: str, metric: str) -> list[float]:
    scale = quantity(metric).scale
    return [nan if (value := estimate.get(key)) is None else value * scale for estimate in estimates]


def _draw_panel(axes: Axes, xs: Sequence[Any], series: Sequence[Series], styles: SystemStyles) -> dict[str, Handle]:
    """Draw all series and return the handle of each title."""
    count = len(series)
    if len(xs) > 1 and all(isinstance(value, int | float) for value in xs):
        ticks = _apart(xs)
        axes.margins(x=0.08)
        axes.set_xticks(ticks, [number(value) for value in ticks])
        moved = [beside(axes, place, count, _room_pt(xs)) for place in range(count)]
        return {
            entry.title: _line(axes, xs, entry, styles, line_width(place, count), moved[place])
            for place, entry in enumerate(series)
        }
    axes.set_xticks(range(len(xs)), ["" if value is None else number(value) for value in xs])
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    width = 0.8 / max(1, count)
    offsets = [width * (place - (count - 1) / 2) for place in range(count)]
    return {
        entry.title: _bars(axes, [place + offset for place in range(len(xs))], width, entry, styles)
        for entry, offset in zip(series, offsets, strict=True)
    }


def _apart(xs: Sequence[float]) -> list[float]:
    """The values whose labels do not touch: the first, and each that is far enough from the one before."""
    per_pt = (max(xs) - min(xs)) / _PANEL_PT
    kept = [xs[0]]
    for value in xs[1:]:
        digits = (len(number(value)) + len(number(kept[-1]))) / 2 + 1
        if value - kept[-1] >= digits * _TICK_PT * per_pt:
            kept.append(value)
    return kept


def _room_pt(xs: Sequence[float]) -> float:
    """How far the points of one place may stand apart: most of the way to the next place."""
    return 0.7 * _PANEL_PT * min(later - sooner for sooner, later in pairwise(xs)) / (max(xs) - min(xs))


def _line(
    axes: Axes, xs: Sequence[float], series: Series, styles: SystemStyles, width_pt: float, moved: Transform
) -> Handle:
    colour = styles.colour(series.system)
    line = axes.errorbar(
        xs,
        series.means,
        yerr=series.half_widths,
        color=colour,
        marker=styles.marker(series.system),
        linestyle=styles.dashes(series.system),
        linewidth=width_pt,
        markersize=5.5 + 1.5 * (width_pt - 1),
        markeredgecolor="white",
        markeredgewidth=0.5,  # more would leave nothing of the arms of a cross
        capsize=2.5,
        elinewidth=1.0,
    )
    for part in line.get_children():
        part.set_transform(moved)
    for value, never in zip(xs, series.never, strict=False):
        if never:
            axes.annotate("never", (value, axes.get_ylim()[1]), xycoords=moved, **_NEVER, color=colour, va="top")
    return line


def _bars(axes: Axes, at: Sequence[float], width: float, series: Series, styles: SystemStyles) -> Handle:
    colour = styles.colour(series.system)
    for value, never in zip(at, series.never, strict=False):
        if never:
            axes.annotate("never", (value, 0), **_NEVER, color=colour, va="bottom")
    return axes.bar(
        at,
        series.means,
        width * 0.88,
        yerr=series.half_widths,
        color=(colour, 0.45),
        edgecolor=colour,
        linewidth=1.0,
        hatch=styles.hatch(series.system),
        error_kw={"elinewidth": 1.2, "capsize": 3.0, "ecolor": "black"},
    )


def _draw_limit(axes: Axes, cells: Sequence[Cell], metric: str) -> dict[str, Handle]:
    """The limit of a latency, where all models and cells of the panel have the same."""
    found = LATENCY.fullmatch(metric)
    limits_s = {limit_s for cell in cells for limit_s in cell.get(f"{found[1]}_slo_s", {}).values()} if found else set()
    if found is None or len(limits_s) != 1:
        return {}
    limit_s = limits_s.pop()
    line = axes.axhline(limit_s, color="#666666", linewidth=1.0, linestyle=(0, (2, 2)), zorder=1)
    return {f"{found[1].upper()} limit, {number(float(limit_s))} s": line}


def _label_y(row: Sequence[Axes], metric: str) -> None:
    shown = quantity(metric)
    row[0].set_ylabel(fill(shown.text, 30))
    highest = max(axes.dataLim.y1 for axes in row)
    row[0].set_ylim(0, max(row[0].get_ylim()[1], 1.05 * highest))  # markers of numbers that hardly differ are whole
    if shown.unit == "%":
        row[0].set_ylim(0, 104)
        row[0].set_yticks(range(0, 101, 20))


def _note(cells: Sequence[Cell], x: str | None, others: Sequence[str]) -> str:
    """What holds for every panel: GPUs, the axes that stay fixed, limits in seconds, seeds, and what the whiskers mean."""
    first, shown = cells[0], (x, *others)
    derived = any(cell.get("derived", True) for cell in cells)
    clusters = {gpus_text(cell) for cell in cells if "cluster" in cell and not _is_bound(cell)}
    fixed = [
        axis_text(axis, value)
        for axis, value in first["axes"].items()
        if axis not in shown and (derived or axis != "slo_scale") and not axis.startswith("cluster.")
    ]
    limits = {limits_text(cell) for cell in cells}
    told = [f"limits: {limits.pop()}"] if len(limits) == 1 and limits_text(first) else []
    if not told and limits_text(first):
        told = [f"limits from {limits_text(first)} on"] if "slo_scale" in shown else []
    seeds = max(cell["seeds"] for cell in cells)
    parts = [*(clusters if len(clusters) == 1 else ()), *fixed, *told, f"{seeds} seed{'s' if seeds > 1 else ''}"]
    return ", ".join([*parts, "whiskers: 95 % intervals"])
