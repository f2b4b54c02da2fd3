"""``fineserve-calibrate campaign``: measure what a GPU at hand for minutes should be asked, the most important first."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fineserve_calibrate.campaign import MINUTES


def campaign(
    gpu_name: Annotated[str, typer.Option("--gpu", help="h100, h200, ... (checked), auto (whatever is there) or cpu.")],
    minutes: Annotated[
        float, typer.Option(min=0.1, help="Begin nothing that would not end within so many minutes.")
    ] = MINUTES,
    out: Annotated[Path | None, typer.Option(help="Folder; calibration/GPU-campaign unless given.")] = None,
    only: Annotated[str | None, typer.Option(help="Only parts with one of these texts, separated by commas.")] = None,
    retry: Annotated[bool, typer.Option(help="Try again what could not be measured.")] = False,
    show_plan: Annotated[
        bool, typer.Option("--plan", help="Print the parts and their expected minutes; no more.")
    ] = False,
) -> None:
    """Several engines on one device, then steps, driver, layouts and runtime; the same command goes on where it stopped."""
    from fineserve_calibrate.campaign import command

    request = command.Request(gpu_name, minutes, out, only, retry)
    if show_plan:
        typer.echo("\n".join(command.plan_lines(command.planned(request)[2])))
        return
    try:
        archive = command.campaign(request, typer.echo)
    except KeyboardInterrupt:
        typer.echo("interrupted; what was measured is packed, and the same command goes on", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"packed {archive}; fineserve-calibrate report {archive} says what to commit")
