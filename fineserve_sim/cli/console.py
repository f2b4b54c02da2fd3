"""How commands print: colour only on a terminal, JSON for scripts, one line when interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else there.")]
"""The option of every command that prints results."""


def named_path(text: str) -> Path:
    """The path that an option names. Nothing, as of a variable that is not set, would be the current folder."""
    if not text.strip():
        raise typer.BadParameter("is empty; give a path, or leave the option out")
    return Path(text)


OutOption = Annotated[
    Path | None,
    typer.Option("--out", "-o", parser=named_path, metavar="DIR", help="Results folder.", show_default=False),
]
JobsOption = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, help="Simulations at a time; one a core if not given.", show_default=False),
]
"""Options of the commands that simulate."""

ExecutorOption = Annotated[
    str,
    typer.Option(
        "--executor", metavar="WHERE", help="Where simulations run: local, ray, or ray:HOST:PORT (docs/scaling.md)."
    ),
]

_PIPE_WIDTH = 200
"""Columns where there is no terminal to ask: wide enough that no row of ours is broken."""


def examples(*lines: str) -> str:
    """The epilog of a command's help, one example a line."""
    return "Examples:\n\n" + "\n\n".join(lines)


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr that breaks lines and uses colour for terminals only."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False)
    return found if found.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


def print_json(value: Any) -> None:
    """``value`` on stdout. Raises ValueError for NaN, which JSON does not have."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False))


def print_rows(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A plain table; the columns named in ``right`` hold numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn Ctrl-C into one line on stderr and exit 130. Between simulations the runner says how many are kept."""
    try:
        yield
    except KeyboardInterrupt as problem:  # the runner's says how many are done
        text = str(problem) or "interrupted; run the same command again to go on"
        typer.echo(f"fineserve-sim: {text}", err=True)
        raise typer.Exit(130) from None


@contextmanager
def unused_folder_goes(out: Path) -> Iterator[None]:
    """A new results folder goes with an error that comes before any simulation has finished."""
    from fineserve_sim.experiment.run.files import gone_if_unused

    with gone_if_unused(out):
        yield


def escaped(text: str) -> str:
    """``text`` without rich markup."""
    from rich.markup import escape

    return escape(text)


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr with the time left, on terminals only; yields what the runner calls after each simulation."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    stderr = console(stderr=True)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("simulations,"),
        TimeRemainingColumn(),
        TextColumn("left [dim]{task.description}"),
    )
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def advance(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total, description=escaped(name))

        yield advance


def axis_and_value(text: str, option: str = "--at") -> tuple[str, str]:
    """``AXIS=VALUE`` of an option. Raises ValueError for another text."""
    axis, sign, value = text.partition("=")
    if not sign or not axis:
        raise ValueError(f"{option} {text}: expected AXIS=VALUE, such as rate_scale=2")
    return axis, value
