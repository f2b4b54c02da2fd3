"""Error against table size: a panel an operator, a line a table and axis, both axes in log space."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fineserve_calibrate.crossvalidation import Thinning
from fineserve_sim.experiment.show.plot_style import house_style, log_ticks, look_at, save

LIMIT = 0.05
COLUMNS = 2


def draw_curve(rows: Iterable[Thinning], stem: Path) -> list[Path]:
    """Write ``stem``.png and .svg: median error of the rows left out against the rows kept, the limit dotted."""
    operators: dict[str, dict[str, list[Thinning]]] = {}
    for row in rows:
        operator, variant = row.table.split("/", maxsplit=1)
        operators.setdefault(operator, {}).setdefault(f"{variant}, {row.axis}", []).append(row)
    with house_style():
        depth = -(-len(operators) // COLUMNS)
        figure = Figure(figsize=(10.0, 3.0 * depth), layout="constrained")
        panels = figure.subplots(depth, COLUMNS, squeeze=False).flatten().tolist()
        for panel, (operator, lines) in zip(panels, operators.items(), strict=False):
            _panel(panel, operator, lines)
        for panel in panels[len(operators) :]:
            panel.remove()
        return save(figure, stem)


def _panel(axes: Axes, operator: str, lines: dict[str, list[Thinning]]) -> None:
    for place, (name, rows) in enumerate(lines.items()):
        kept, median = [row.rows_kept for row in rows], [row.median for row in rows]
        axes.plot(kept, median, **look_at(place), ms=4, lw=1, label=name)
    axes.axhline(LIMIT, color="#555555", lw=0.8, ls=":")
    axes.set(xscale="log", yscale="log", xlabel="rows kept", ylabel="median error", title=operator.replace("_", " "))
    log_ticks(axes.xaxis, "{:,.0f}".format)
    log_ticks(axes.yaxis, "{:.0%}".format)
    axes.legend(fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
