"""The result of a fit: tables to print, numbers as JSON, and a figure with a panel a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fineserve_calibrate.fit.contention import (
    ContentionFit,
    HalfShare,
    columns_of,
    curve_s,
    fit_contention,
    half_shares,
    rows_of,
    with_references,
)
from fineserve_calibrate.fit.least_squares import Fit, Residuals
from fineserve_calibrate.fit.rows import FITTED_INPUT, REPORTED_INPUT, read_authors, read_decodes
from fineserve_calibrate.fit.step_costs import fit_chunk_cost, fit_host_overhead, read_chunks, simulated_chunks
from fineserve_sim.catalog import deployment, gpu
from fineserve_sim.experiment.show.plot_style import COLOURS, beside, house_style, line_width, log_ticks, look_at, save
from fineserve_sim.latency import StepModel

ALONE = (
    "Errors are errors of the slowdown: each row's time with all SMs is taken as measured. The profile ran one engine at a "
    "time, so no other engine took bandwidth or power: two engines held to half of the SMs each slow at least as much."
)


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a fit: tables to print, a payload to write as JSON, and a figure to draw."""

    fits: list[Fit]
    tables: list[Table]
    payload: dict[str, Any]
    draw: Callable[[Path], list[Path]]
    note: str = ""


def chunk_cost(rows: Path | None, step: StepModel) -> Report:
    """Fit the constants of a chunk to the rows of a file, or to steps that ``step`` simulates where there is none."""
    if rows is not None:
        return _plain([fit_chunk_cost(read_chunks(rows))])
    what = f"simulated {step.model.name} {step.precision.name} on {step.gpu.name}"
    return _plain([fit_chunk_cost(simulated_chunks(step), what)])


def _plain(fits: list[Fit]) -> Report:
    payload = {"fits": [fitted.as_dict() for fitted in fits]}
    return Report(fits, [_fit_table(fits)], payload, lambda stem: draw_fits(fits, stem))


def contention(rows: Path, gpu_name: str, deployment_name: str) -> Report:
    """Fit shares of the SMs to the authors' profile. Compare two equal engines by them with processor sharing."""
    profile = with_references(read_authors(rows), gpu(gpu_name))
    fits = fit_contention(profile)
    halves = half_shares(profile, fits, gpu(gpu_name), deployment(deployment_name))
    plain = [fitted.fit for fitted in fits]
    return Report(
        plain,
        [_fit_table(plain), _half_table(fits, halves)],
        {
            "fits": [fitted.as_dict() for fitted in fits],
            "half_shares": [half.as_dict() for half in halves],
            "note": ALONE,
        },
        lambda stem: draw_contention(profile, fits, stem),
        ALONE,
    )


def host_overhead(rows: Path, gpu_name: str) -> Report:
    """Fit host times to the decodes of a file."""
    return _plain(fit_host_overhead(read_decodes(rows), gpu(gpu_name)))


def _fit_table(fits: list[Fit]) -> Table:
    table = Table(title="Fits (95 % intervals; errors are fitted / measured - 1)")
    errors = ["n", "median", "p90", "bias"]
    held_out = any(fitted.held_out for fitted in fits)
    headings = ["fit", "parameters", *errors, *([f"held-out {name}" for name in errors] if held_out else [])]
    for heading in headings:
        table.add_column(heading, overflow="fold")
    for fitted in fits:
        if fitted.refused:
            table.add_row(fitted.what, f"[red]refused[/red]: {fitted.refused}", str(len(fitted.rows)))
            continue
        lines = [f"{p.name} = {p.value:.4g} [{p.low:.4g}, {p.high:.4g}] {p.unit}" for p in fitted.parameters]
        text = "\n".join(lines).replace("[", r"\[")  # rich reads brackets as markup
        table.add_row(fitted.what, text, *_cells(fitted.residuals), *_cells(fitted.held_out))
    return table


def _cells(residuals: Residuals | None) -> list[str]:
    if residuals is None:
        return []
    return [str(residuals.n), f"{residuals.median_abs:.1%}", f"{residuals.p90_abs:.1%}", f"{residuals.bias:+.1%}"]


def _half_table(fits: Iterable[ContentionFit], halves: list[HalfShare]) -> Table:
    """Medians over the held-out batches."""
    table = Table(title="Two equal engines: half of the SMs against processor sharing (medians of the held-out rows)")
    columns = ("precision", "phase", "n", "measured", "fitted", "processor sharing", "disagreement", "uc", "um")
    for column in columns:
        table.add_column(column)
    for fitted in fits:
        mine = [half for half in halves if (half.precision, half.phase) == (fitted.precision, fitted.phase)]
        if not mine:
            continue
        slowdowns = [f"{_median(mine, name):.2f}" for name in ("measured", "fitted", "processor_sharing")]
        shares = [f"{_median(mine, name):.2f}" for name in ("compute", "bandwidth")]
        table.add_row(
            fitted.precision, fitted.phase, str(len(mine)), *slowdowns, f"{_median(mine, 'disagreement'):+.0%}", *shares
        )
    return table


def _median(halves: list[HalfShare], name: str) -> float:
    return float(np.median([getattr(half, name) for half in halves]))


COLUMNS = 3
ASIDE_PT = 12.0
"""Batches of one share of the SMs stand side by side, in so many points."""


def draw_fits(fits: Sequence[Fit], stem: Path) -> list[Path]:
    """Draw measured against fitted seconds: ``stem``.png and ``stem``.svg with every fit that was not refused.

    Returns the files written; none when all fits were refused.
    """
    shown = [fit for fit in fits if not fit.refused]
    return _draw([partial(_parity, fit=fit) for fit in shown], ("fitted (ms)", "measured (ms)"), stem)


def draw_contention(profile: pd.DataFrame, fits: Sequence[ContentionFit], stem: Path) -> list[Path]:
    """Draw slowdown against the share of the SMs: curves of the fitted rows, held-out points hollow. Returns the files."""
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
