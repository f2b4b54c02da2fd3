"""The command that holds our numbers against the papers': reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fineserve_sim.cli.console import (
    ExecutorOption,
    JobsOption,
    JsonOption,
    OutOption,
    console,
    examples,
    interruptible,
    print_json,
    progress_bar,
)

PaperOption = Annotated[str | None, typer.Option(help="Only the claims of this paper.", show_default=False)]
ClaimsOption = Annotated[
    list[str] | None,
    typer.Option("--claims", metavar="ID", help="Only these, with commas; may be repeated.", show_default=False),
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Use the short version of every experiment.")]
MarkdownOption = Annotated[
    Path | None,
    typer.Option("--markdown", metavar="FILE", help="Put the ledger into a Markdown file.", show_default=False),
]
ReadingsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Decide the claims under every open reading, too. Verdicts go to this CSV file; what is there is not run again.",
        show_default=False,
    ),
]
ClaimsFileOption = Annotated[
    Path | None,
    typer.Option("--claims-file", metavar="FILE", help="Take targets from this ledger.", show_default=False),
]
ExperimentsOption = Annotated[Path, typer.Option(metavar="DIR", help="Folder of experiment files.")]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim reproduce --quick",
            "fineserve-sim reproduce --paper KunServe --json > ledger.json",
            "fineserve-sim reproduce --claims FS-10c,FS-10d",
        )
    )(reproduce)


def reproduce(
    *,
    paper: PaperOption = None,
    claims: ClaimsOption = None,
    quick: QuickOption = False,
    jobs: JobsOption = None,
    executor: ExecutorOption = "local",
    readings: ReadingsOption = None,
    markdown: MarkdownOption = None,
    claims_file: ClaimsFileOption = None,
    experiments: ExperimentsOption = Path("experiments"),
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run what the papers' claims need and give each a verdict.

    Finished simulations are kept; the same command goes on where it stopped.
    Results go to results/reproduce, or results/reproduce-quick, unless --out names a folder.
    Claims whose experiment is missing, broken or cannot run stay open; then the exit code is 1.
    """
    with interruptible():
        from fineserve_sim.experiment.reproduce import chosen, load_all, read_ledger, targets
        from fineserve_sim.experiment.reproduce import reproduce as decide
        from fineserve_sim.experiment.reproduce.readings import sweep
        from fineserve_sim.experiment.reproduce.text import as_json as data_of
        from fineserve_sim.experiment.reproduce.text import check_markdown, ledger, write_markdown
        from fineserve_sim.experiment.run.executors import executor_of

        ids = " ".join(claims or ()).replace(",", " ").split()
        if claims and not ids:
            raise ValueError("--claims: names no claim; leave the option out for all of them")
        wanted = chosen(read_ledger(claims_file) if claims_file else targets(), paper, ids)
        if markdown:
            check_markdown(markdown)
        folder = out or Path("results") / ("reproduce-quick" if quick else "reproduce")
        loaded = load_all(experiments, quick)
        with executor_of(executor, jobs) as where, progress_bar() as advance:
            how: Any = {"executor": where, "on_progress": advance}
            verdicts = sweep(wanted, loaded, folder, readings, **how) if readings else None
            rows = decide(wanted, loaded, folder, **how)
        if as_json:
            print_json(data_of(rows, verdicts))
        else:
            console().print(ledger(rows, verdicts))
        if markdown:
            write_markdown(rows, markdown, verdicts)
        failed = dict.fromkeys(row.reason for row in rows if row.failed)
        typer.echo("".join(f"fineserve-sim: {reason}\n" for reason in failed), nl=False, err=True)
        raise typer.Exit(1 if failed else 0)
