"""``fineserve-calibrate fit``: constants of the cost models from measured rows."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fineserve_sim.cli.console import console

if TYPE_CHECKING:
    from fineserve_calibrate.fit.report import Report


class What(StrEnum):
    """What to fit."""

    CHUNK_COST = "chunk-cost"
    HOST_OVERHEAD = "host-overhead"
    CONTENTION = "contention"


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
    report = _fitted(what, rows, gpu_name, (model_name, precision_name, deployment_name))
    _show(report, as_json)
    for path in report.draw(out.with_suffix("")) if out else []:
        typer.echo(f"wrote {path}", err=True)
    if all(fitted.refused for fitted in report.fits):
        typer.echo("fineserve-calibrate: error: every fit was refused", err=True)
        raise typer.Exit(1)


def _fitted(what: What, rows: Path | None, gpu_name: str, simulated: tuple[str, str, str]) -> Report:
    """Raises ValueError, RowError among them, for rows that cannot be used and names that the catalog lacks. ``simulated``: the
    model, precision and deployment of simulated steps."""
    from fineserve_calibrate.fit import report
    from fineserve_calibrate.fit.rows import RowError
    from fineserve_sim.catalog import deployment, gpu, model, precision
    from fineserve_sim.latency import StepModel

    model_name, precision_name, deployment_name = simulated
    if what is What.CHUNK_COST:
        step = StepModel(model(model_name), precision(precision_name), 1, gpu(gpu_name), deployment(deployment_name))
        return report.chunk_cost(rows, step)
    if rows is None:
        raise RowError(
            f"fit {what.value}: no file of measured rows; give one, or fit chunk-cost, which can simulate its rows"
        )
    if what is What.HOST_OVERHEAD:
        return report.host_overhead(rows, gpu_name)
    return report.contention(rows, gpu_name, deployment_name)


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report.payload, indent=1))
        return
    screen = console()
    for table in report.tables:
        screen.print(table)
    if report.note:
        screen.print(report.note)
