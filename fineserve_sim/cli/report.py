"""Commands about finished results: report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fineserve_sim.cli.console import examples, interruptible


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim report results/fig10",
            "fineserve-sim report results/fig10 results/fig13 --out both.html",
        )
    )(report)


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Results folders of runs.", show_default=False)
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The page; report.html in the one DIR.", show_default=False),
    ] = None,
) -> None:
    """Write a page to hand on: figures that zoom and filter, memory over time, slow requests, claims, assumptions.

    One file that needs no network. Every run writes it already; several folders make one page.
    """
    with interruptible():
        from fineserve_sim.experiment.show.page.build import write_page

        if out is None and len(folders) > 1:
            raise ValueError(f"{len(folders)} folders make one page: say where with --out FILE")
        typer.echo(str(write_page(folders, out or folders[0] / "report.html")))
