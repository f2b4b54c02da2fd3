"""The figure of a sweep: one row a metric, one column a value of the axes that are not on x, one series a system.

Points carry their 95 % interval. A numeric axis gives lines; anything else (named loads, a single point) grouped bars.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import nan
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.show.labels import axis_text, distinct, number, quantity, varying_axes
from fineserve_sim.experiment.show.plot_style import Handle, SystemStyles, panel_grid, set_heading

Cell = Mapping[str, Any]
"""One entry of ``cells`` in summary.json."""

_MOST_TICKS = 8
"""A tick at every point up to this many; beyond it the labels would touch."""


@dataclass(frozen=True, slots=True)
class Series:
    """One system in one panel: shown means and interval half-widths (NaN where there is none) at each value of x."""

    system: str
    title: str
    means: list[float]
    half_widths: list[float]


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
    figure, grid = panel_grid(len(panels), len(points))
    legend: dict[str, Handle] = {}
    for panel, row in zip(panels, grid, strict=True):
        for point, axes in zip(points, row, strict=True):
            column = [cell for cell in cells if _at(cell, others, point)]
            legend |= _draw_panel(axes, xs, _series(column, x, xs, panel), styles)
        _label_y(row, panel)
    for axes, point in zip(grid[0], points, strict=True):
        axes.set_title(", ".join(axis_text(axis, value) for axis, value in zip(others, point, strict=True)))
    for axes in grid[-1]:
        axes.set_xlabel(quantity(x).label if x else "")
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


def _series(cells: Sequence[Cell], x: str | None, xs: Sequence[object], metric: str) -> list[Series]:
    series = []
    for system in dict.fromkeys(cell["system"] for cell in cells):
        own = {cell["axes"].get(x) if x else None: cell for cell in cells if cell["system"] == system}
        estimates = [own[value]["metrics"].get(metric, {}) if value in own else {} for value in xs]
        title = next(iter(own.values()))["title"]
        series.append(Series(system, title, *(_shown(estimates, key, metric) for key in ("mean", "half_width"))))
    return series


def _shown(estimates: Sequence[Mapping[str, Any]], key: str, metric: str) -> list[float]:
    scale = quantity(metric).scale
    return [nan if (value := estimate.get(key)) is None else value * scale for estimate in estimates]


def _draw_panel(axes: Axes, xs: Sequence[Any], series: Sequence[Series], styles: SystemStyles) -> dict[str, Handle]:
    """Draw all series and return the handle of each title."""
    if len(xs) > 1 and all(isinstance(value, int | float) for value in xs):
        return {entry.title: _line(axes, xs, entry, styles) for entry in series}
    axes.set_xticks(range(len(xs)), ["" if value is None else number(value) for value in xs])
    axes.grid(visible=False, axis="x")
    axes.tick_params(axis="x", length=0)
    width = 0.8 / len(series)
    offsets = [width * (place - (len(series) - 1) / 2) for place in range(len(series))]
    return {
        entry.title: _bars(axes, [place + offset for place in range(len(xs))], width, entry, styles)
        for entry, offset in zip(series, offsets, strict=True)
    }


def _line(axes: Axes, xs: Sequence[float], series: Series, styles: SystemStyles) -> Handle:
    colour = styles.colour(series.system)
    line = axes.errorbar(
        xs,
        series.means,
        yerr=series.half_widths,
        color=colour,
        marker=styles.marker(series.system),
        linestyle=styles.dashes(series.system),
        markeredgecolor="white",
        markeredgewidth=0.8,
        capsize=2.5,
        elinewidth=1.0,
    )
    if len(xs) <= _MOST_TICKS:
        axes.set_xticks(xs, [number(value) for value in xs])
    return line


def _bars(axes: Axes, at: Sequence[float], width: float, series: Series, styles: SystemStyles) -> Handle:
    return axes.bar(
        at,
        series.means,
        width * 0.92,
        yerr=series.half_widths,
        color=styles.colour(series.system),
        error_kw={"elinewidth": 1.0, "capsize": 2.5, "ecolor": "#333333"},
    )


def _label_y(row: Sequence[Axes], metric: str) -> None:
    shown = quantity(metric)
    row[0].set_ylabel(shown.text)
    row[0].set_ylim(bottom=0)
    if shown.unit == "%":
        row[0].set_ylim(0, 104)
        row[0].set_yticks(range(0, 101, 20))


def _note(cells: Sequence[Cell], x: str | None, others: Sequence[str]) -> str:
    """What holds for every panel: the axes that stay fixed, seeds, and what the whiskers mean."""
    fixed = [axis_text(axis, value) for axis, value in cells[0]["axes"].items() if axis not in (x, *others)]
    seeds = max(cell["seeds"] for cell in cells)
    return ", ".join([*fixed, f"{seeds} seed{'s' if seeds > 1 else ''}", "whiskers: 95 % intervals"])
