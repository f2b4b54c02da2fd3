"""Errors of latency tables on rows that were left out, against table size.

A grid is thinned along one axis to every second, fourth, ... of its points. Its ends stay, so that nothing is extrapolated. The
simulator's own interpolation predicts the rows that were left out. A GEMM grid is also thinned along its ``rows``: every
second, fourth, ... row of the table along the grid's diagonals. The figure has a panel an operator, both axes in log space.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fineserve_sim.catalog import GpuSpec
from fineserve_sim.experiment.show.plot_style import house_style, log_ticks, look_at, save
from fineserve_sim.latency.tables import (
    DecodeTable,
    GemmTable,
    Grid,
    Line,
    PrefillTable,
    TableSet,
    isotonic,
    match_heads,
)

Floats = NDArray[np.float64]
Predictor = Callable[[Grid, Grid, str], Floats]  # thinned grid, whole grid, variant: predictions of the whole grid


class Thinning(NamedTuple):
    """Relative errors of a grid thinned to every ``keep_every``-th point of ``axis``, over the ``rows`` left out."""

    table: str
    axis: str
    keep_every: int
    rows_kept: int
    rows: int
    median: float
    p95: float


def _gemm(reference: GpuSpec) -> Predictor:
    def predict(thinned: Grid, whole: Grid, variant: str) -> Floats:
        table, m = GemmTable(thinned, variant, reference), whole.axes["m"].astype(np.float64)
        shapes = [
            [table.line(n, k, reference).at(m) for k in whole.axes["k"].tolist()] for n in whole.axes["n"].tolist()
        ]
        return np.array(shapes)

    return predict


def _decode(thinned: Grid, whole: Grid, variant: str) -> Floats:
    context = whole.axes["context"]
    result = np.empty(whole.latency_s.shape)
    for row, (q, kv) in enumerate(whole.axes["heads"].tolist()):
        match = match_heads(thinned, q, kv)
        if match is None:
            raise ValueError(f"heads {q}/{kv} left the thinned table")
        table = DecodeTable(thinned, match)
        for column, batch in enumerate(whole.axes["batch"].tolist()):
            result[row, column] = table.curve(batch, 1, 1.0).at_each(batch * context)
    return result


def _prefill(thinned: Grid, whole: Grid, variant: str) -> Floats:
    length = whole.axes["new_tokens"].tolist()
    result = np.empty(whole.latency_s.shape)
    for row, (q, kv) in enumerate(whole.axes["heads"].tolist()):
        match = match_heads(thinned, q, kv)
        if match is None:
            raise ValueError(f"heads {q}/{kv} left the thinned table")
        table = PrefillTable(thinned, match, 1, 1.0)
        for column, batch in enumerate(whole.axes["batch"].tolist()):
            prompts = [(batch * tokens, batch * tokens * (tokens + 1) / 2) for tokens in length]
            result[row, column] = [table.floor_s + table.beyond_floor_s(*prompt) for prompt in prompts]
    return result


def _all_reduce(thinned: Grid, whole: Grid, variant: str) -> Floats:
    message_bytes = thinned.axes["message_bytes"].astype(np.float64)
    lines = [Line(message_bytes, np.exp(isotonic(np.log(seconds)))) for seconds in thinned.latency_s]
    return np.array([line.at(whole.axes["message_bytes"].astype(np.float64)) for line in lines])


AXES = {
    "gemm": ("rows", "m", "n", "k"),
    "prefill_attention": ("new_tokens",),
    "decode_attention": ("context",),  # batches must stay powers of two
    "all_reduce": ("message_bytes",),
}


def _along(grid: Grid, axis: str, keep_every: int) -> tuple[Grid, NDArray[np.bool_]]:
    """The grid with every ``keep_every``-th point of an axis and its last, and which rows stayed."""
    position, length = list(grid.axes).index(axis), len(grid.axes[axis])
    kept = np.union1d(np.arange(0, length, keep_every), [length - 1])
    stayed = np.zeros(grid.latency_s.shape, dtype=bool)
    np.moveaxis(stayed, position, 0)[kept] = True
    latency_s = np.take(grid.latency_s, kept, axis=position)
    return Grid({**grid.axes, axis: grid.axes[axis][kept]}, latency_s), stayed


def _diagonals(grid: Grid, keep_every: int) -> tuple[Grid, NDArray[np.bool_]]:
    """The grid with every ``keep_every``-th of its rows, the others unmeasured, and which rows stayed."""
    stayed = np.indices(grid.latency_s.shape).sum(axis=0) % keep_every == 0
    return Grid(grid.axes, np.where(stayed, grid.latency_s, np.nan)), stayed


def _thinning(name: str, whole: Grid, axis: str, keep_every: int, predict: Predictor) -> Thinning:
    thinned, stayed = _diagonals(whole, keep_every) if axis == "rows" else _along(whole, axis, keep_every)
    error = np.abs(predict(thinned, whole, name.split("/")[1]) / whole.latency_s - 1)
    left_out = error[~stayed & ~np.isnan(error)]
    rows_kept = int(np.isfinite(thinned.latency_s).sum())
    median, p95 = (float(value) for value in np.quantile(left_out, [0.5, 0.95]))
    return Thinning(name, axis, keep_every, rows_kept, len(left_out), median, p95)


def curve(tables: TableSet, reference: GpuSpec, keep_every: tuple[int, ...]) -> Iterator[Thinning]:
    """Compute the errors of every table, thinned along each of its axes in turn, from the most rows kept to the least."""
    predictors: dict[str, Predictor] = {
        "gemm": _gemm(reference),
        "prefill_attention": _prefill,
        "decode_attention": _decode,
        "all_reduce": _all_reduce,
    }
    for name, grid in tables.grids.items():
        operator = name.split("/")[0]
        for axis in AXES[operator]:
            for every in keep_every:
                yield _thinning(name, grid, axis, every, predictors[operator])


LIMIT = 0.05
COLUMNS = 2


def draw_curve(rows: Iterable[Thinning], stem: Path) -> list[Path]:
    """Draw ``stem``.png and .svg: median error of the rows left out against the rows kept, with the limit dotted."""
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
