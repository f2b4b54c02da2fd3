"""What a fit comes to: tables to print, numbers as JSON, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from fineserve_calibrate.fit.chunk_cost import fit_chunk_cost, read_chunks, simulated_chunks
from fineserve_calibrate.fit.contention import ContentionFit, HalfShare, fit_contention, half_shares, with_references
from fineserve_calibrate.fit.figure import draw_contention, draw_fits
from fineserve_calibrate.fit.host_overhead import fit_host_overhead
from fineserve_calibrate.fit.least_squares import Fit, Residuals
from fineserve_calibrate.fit.rows import read_authors, read_decodes
from fineserve_sim.catalog import deployment, gpu
from fineserve_sim.latency import StepModel

ALONE = (
    "Errors are those of the slowdown: each row's time with all SMs is taken as measured. The profile ran one engine at a "
    "time, so nobody else took bandwidth or power: two engines held to half of the SMs each slow at least as much."
)


@dataclass(frozen=True, slots=True)
class Report:
    """A fitted command: what to print, to write as JSON and to draw."""

    fits: list[Fit]
    tables: list[Table]
    payload: dict[str, Any]
    draw: Callable[[Path], list[Path]]
    note: str = ""


def chunk_cost(rows: Path | None, step: StepModel) -> Report:
    """Constants of a chunk from the rows of a file, or from steps simulated by ``step`` where there is none."""
    if rows is not None:
        return _plain([fit_chunk_cost(read_chunks(rows))])
    what = f"simulated {step.model.name} {step.precision.name} on {step.gpu.name}"
    return _plain([fit_chunk_cost(simulated_chunks(step), what)])


def _plain(fits: list[Fit]) -> Report:
    payload = {"fits": [fitted.as_dict() for fitted in fits]}
    return Report(fits, [_fit_table(fits)], payload, lambda stem: draw_fits(fits, stem))


def contention(rows: Path, gpu_name: str, deployment_name: str) -> Report:
    """Shares of the SMs from the authors' profile, and two equal engines by them beside processor sharing."""
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
    """Host times from the decodes of a file."""
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
