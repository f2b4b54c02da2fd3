"""Measured points and fitted curves, a panel a fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fineserve_calibrate.fit.contention import (
    ContentionFit,
    columns_of,
    curve_s,
    rows_of,
)
from fineserve_calibrate.fit.least_squares import Fit
from fineserve_calibrate.fit.rows import FITTED_INPUT, REPORTED_INPUT
from fineserve_sim.experiment.show.plot_style import COLOURS, beside, house_style, line_width, log_ticks, look_at, save

COLUMNS = 3
ASIDE_PT = 12.0
"""Batches of one share of the SMs stand side by side, in so many points."""


def draw_fits(fits: Sequence[Fit], stem: Path) -> list[Path]:
    """Measured against fitted seconds: ``stem``.png and ``stem``.svg with every fit that was not refused.

    Returns the files written, none when all were refused.
    """
    shown = [fit for fit in fits if not fit.refused]
    return _draw([partial(_parity, fit=fit) for fit in shown], ("fitted (ms)", "measured (ms)"), stem)


def draw_contention(profile: pd.DataFrame, fits: Sequence[ContentionFit], stem: Path) -> list[Path]:
    """Slowdown against the share of the SMs; curves of the fitted rows, held-out points hollow. Files as ``draw_fits``."""
    shown = [fit for fit in fits if not fit.fit.refused]
    panels = [partial(_slowdowns, fitted=fit, rows=rows_of(profile, fit)) for fit in shown]
    return _draw(panels, ("share of the SMs", "slowdown against all SMs"), stem)


def _draw(draws: Sequence[Callable[[Axes], None]], labels: tuple[str, str], stem: Path) -> list[Path]:
    if not draws:
        return []
    with house_style():
        columns = min(COLUMNS, len(draws))
        rows = ceil(len(draws) / columns)
        figure = Figure(figsize=(3.3 * columns + 0.6, 2.9 * rows + 0.4), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
        for panel, draw in zip(panels, draws, strict=False):
            draw(panel)
        for panel in panels[len(draws) :]:
            panel.set_visible(False)
        figure.supxlabel(labels[0])
        figure.supylabel(labels[1])
        stem.parent.mkdir(parents=True, exist_ok=True)
        return save(figure, stem)


def _parity(panel: Axes, fit: Fit) -> None:
    measured_ms, fitted_ms = ([1e3 * value for value in values] for values in (fit.measured_s, fit.fitted_s))
    ends = [min(measured_ms + fitted_ms), max(measured_ms + fitted_ms)]
    panel.plot(ends, ends, color=COLOURS[6], linewidth=0.8)
    panel.plot(fitted_ms, measured_ms, "o", color=COLOURS[0], markersize=3.5, alpha=0.7)
    if ends[1] > 10 * ends[0]:
        panel.set_xscale("log")
        panel.set_yscale("log")
        log_ticks(panel.xaxis)
        log_ticks(panel.yaxis)
    panel.set_title(_title(fit))


def _slowdowns(panel: Axes, fitted: ContentionFit, rows: pd.DataFrame) -> None:
    alone, measured = columns_of(fitted.phase)
    rows = rows.sort_values("share").assign(fitted_s=lambda frame: curve_s(frame, fitted.phase, fitted.fit.values))
    seen = rows[rows.input_tokens == FITTED_INPUT]
    batches = list(seen.groupby("batch"))
    legend = []
    for place, (batch, curve) in enumerate(batches):
        look = look_at(place) | {"markersize": 3.5}
        line = look | {"linewidth": line_width(place, len(batches)) - 0.5}
        drawn = panel.plot(curve.share, curve.fitted_s / curve[alone], **line | {"marker": ""})
        for points, face in (
            (curve, look["color"]),
            (rows[(rows.batch == batch) & (rows.input_tokens == REPORTED_INPUT)], "none"),
        ):
            drawn += panel.plot(points.share, points[measured] / points[alone], **look | {"linestyle": "", "mfc": face})
        for artist in drawn:
            artist.set_transform(beside(panel, place, len(batches), ASIDE_PT))
        legend += panel.plot([], [], **line, label=f"batch {batch}")
    panel.margins(x=0.08)
    panel.legend(handles=legend, fontsize=6.5)
    panel.set_title(_title(fitted.fit))


def _title(fit: Fit) -> str:
    error = f"\nmedian error {fit.residuals.median_abs:.1%}, n = {fit.residuals.n}" if fit.residuals else ""
    return fit.what + error
