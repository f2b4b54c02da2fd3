"""Commands about finished results: report, diff."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fineserve_sim.cli.console import (
    JsonOption,
    console,
    examples,
    interruptible,
    named_path,
    path_argument,
    print_json,
)


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim report results/fig10",
            "fineserve-sim report results/fig10 results/fig13 --out both.html",
        )
    )(report)
    app.command(epilog=examples("fineserve-sim diff results/before results/after"))(diff)


def report(
    folders: Annotated[
        list[Path],
        path_argument("DIR...", "Results folders of runs."),
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            parser=named_path,
            metavar="FILE",
            help="The page; report.html in the one DIR.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a page to hand on: figures that zoom and filter, memory over time, slow requests, claims, assumptions.

    One file that needs no network. Every run writes it already; several folders make one page.
    """
    with interruptible():
        from fineserve_sim.experiment.run.files import check_writable
        from fineserve_sim.experiment.show.page.build import write_page

        if out is None and len(folders) > 1:
            raise ValueError(f"{len(folders)} folders make one page: say where with --out FILE")
        if out is not None:
            check_writable(out, "--out")
        typer.echo(str(write_page(folders, out or folders[0] / "report.html")))


def diff(
    a: Annotated[Path, path_argument("A", "Results folder of a run.")],
    b: Annotated[Path, path_argument("B", "Another, say after a change.")],
    as_json: JsonOption = False,
) -> None:
    """What changed from A to B: inputs, results beyond their intervals, decisions, claims.

    Cells are matched by sweep, system and axes. With --decisions in both runs, the first command that differs is told.
    """
    with interruptible():
        from dataclasses import asdict

        from fineserve_sim.experiment.show.diff import diff as compared
        from fineserve_sim.experiment.show.diff.text import told

        found = compared(a, b)
        if as_json:
            print_json(asdict(found))
        else:
            console().print(told(found))
