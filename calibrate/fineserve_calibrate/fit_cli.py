"""``fineserve-calibrate fit``: constants of the cost models from measured rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from fineserve_calibrate.fit import (
    ContentionFit,
    Fit,
    HalfShare,
    Residuals,
    RowError,
    fit_chunk_cost,
    fit_contention,
    fit_host_overhead,
    half_shares,
    read_authors,
    read_chunks,
    read_decodes,
    simulated_chunks,
    with_references,
)
from fineserve_calibrate.fit.figure import draw_contention, draw_fits
from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.cli.console import console
from fineserve_sim.latency import StepModel

ALONE = (
    "Errors are those of the slowdown: each row's time with all SMs is taken as measured. The profile ran one engine at a "
    "time, so nobody else took bandwidth or power: two engines held to half of the SMs each slow at least as much."
)


class What(StrEnum):
    """What to fit."""

    CHUNK_COST = "chunk-cost"
    HOST_OVERHEAD = "host-overhead"
    CONTENTION = "contention"


@dataclass(frozen=True, slots=True)
class Report:
    """A fitted command: what to print, to write as JSON and to draw."""

    fits: list[Fit]
    tables: list[Table]
    payload: dict[str, Any]
    draw: Callable[[Path], list[Path]]
    note: str = ""


def fit(
    what: Annotated[What, typer.Argument(help="Cost model to fit.")],
    rows: Annotated[
        Path | None,
        typer.Argument(help="CSV file of measured rows; chunk-cost without one fits the simulator's own steps."),
    ] = None,
    gpu_name: Annotated[str, typer.Option("--gpu", help="Catalog GPU of the rows.")] = "h100-sxm",
    deployment_name: Annotated[
        str, typer.Option("--deployment", help="Host times of the simulated steps (chunk-cost, contention).")
    ] = "vllm-0.9.1-authors",
    model_name: Annotated[
        str, typer.Option("--model", help="Model of the simulated steps (chunk-cost).")
    ] = "llama-3.1-8b",
    precision_name: Annotated[
        str, typer.Option("--precision", help="Precision of the simulated steps (chunk-cost).")
    ] = "fp16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Figure to write: this path with .png and .svg.")] = None,
) -> None:
    """Fit the chunk cost, the host overhead or the contention model to measured rows."""
    errors = console(stderr=True)
    try:
        if what is What.CHUNK_COST:
            step = StepModel(
                model(model_name), precision(precision_name), 1, gpu(gpu_name), deployment(deployment_name)
            )
            report = _chunk_cost(rows, step)
        elif rows is None:
            raise RowError(
                f"fit {what.value}: no file of measured rows; give one, or fit chunk-cost, which can simulate its rows"
            )
        elif what is What.HOST_OVERHEAD:
            report = _plain(fit_host_overhead(read_decodes(rows), gpu(gpu_name)))
        else:
            report = _contention(rows, gpu_name, deployment_name)
    except ValueError as error:
        errors.print(f"[red]error:[/red] {error}", soft_wrap=True)
        raise typer.Exit(2) from error
    _show(report, as_json)
    for path in report.draw(out.with_suffix("")) if out else []:
        errors.print(f"wrote {path}", soft_wrap=True)
    if all(fitted.refused for fitted in report.fits):
        errors.print("[red]error:[/red] every fit was refused")
        raise typer.Exit(1)


def _chunk_cost(rows: Path | None, step: StepModel) -> Report:
    if rows is not None:
        return _plain([fit_chunk_cost(read_chunks(rows))])
    what = f"simulated {step.model.name} {step.precision.name} on {step.gpu.name}"
    return _plain([fit_chunk_cost(simulated_chunks(step), what)])


def _plain(fits: list[Fit]) -> Report:
    payload = {"fits": [fitted.as_dict() for fitted in fits]}
    return Report(fits, [_fit_table(fits)], payload, lambda stem: draw_fits(fits, stem))


def _contention(rows: Path, gpu_name: str, deployment_name: str) -> Report:
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


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.payload, indent=1))
        return
    screen = console()
    for table in report.tables:
        screen.print(table)
    if report.note:
        screen.print(report.note)


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
