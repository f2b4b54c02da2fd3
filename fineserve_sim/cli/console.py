"""How commands print: colour only on a terminal, JSON for scripts, one line when interrupted."""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
import time
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


def path_argument(metavar: str, help: str) -> Any:
    """An argument that is a path. Nothing, as of a variable that is not set, is none."""

    def given(text: str) -> Path:
        if not text.strip():
            raise typer.BadParameter("is empty; give a path")
        return Path(text)

    return typer.Argument(parser=given, metavar=metavar, help=help, show_default=False)


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

_PIPE_WIDTH = 100_000
"""Columns where there is no terminal: no row is broken, so that what reads it finds each in a line of its own."""


def examples(*lines: str) -> str:
    """The epilog of a command's help, one example a line."""
    return "Examples:\n\n" + "\n\n".join(lines)


def console(*, stderr: bool = False) -> Console:
    """A console on stdout or stderr that breaks lines for terminals only."""
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False)
    return found if found.file.isatty() else Console(stderr=stderr, highlight=False, width=_PIPE_WIDTH)


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
        with _delivered():
            yield
    except KeyboardInterrupt as problem:  # the runner's says how many are done
        text = str(problem) or "interrupted; run the same command again to go on"
        typer.echo(f"fineserve-sim: {text}", err=True)
        raise typer.Exit(130) from None


_AGAIN_S = 0.01


@contextmanager
def _delivered() -> Iterator[None]:
    """Let no Ctrl-C get lost. Python drops an exception that is raised in a finalizer or in the callback of a weak reference,
    as an import has them; the interrupt comes again a moment later, outside of it."""
    before, main = sys.unraisablehook, threading.main_thread().ident

    def again(dropped: Any) -> None:
        if issubclass(dropped.exc_type, KeyboardInterrupt) and main is not None:
            threading.Timer(_AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            before(dropped)

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def unused_folder_goes(out: Path) -> Iterator[None]:
    """Be alone in a results folder; a new one goes with an error that comes before any simulation has finished."""
    from fineserve_sim.experiment.run.files import gone_if_unused

    with gone_if_unused(out):
        yield


def escaped(text: str) -> str:
    """``text`` without rich markup."""
    from rich.markup import escape

    return escape(text)


LOOKS_S, LINE_S = 1.0, 20.0
"""Where there is no terminal: seconds that do not count for the pace, and between two lines that say how far a run is."""


@contextmanager
def progress_bar() -> Iterator[Callable[[float, int, str], None]]:
    """How far a run is and the time left, on stderr: a bar on terminals, else a line now and then. Yields what the runner calls
    after each simulation, and while one lasts."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    stderr = console(stderr=True)
    if not stderr.is_terminal:
        yield _Lines().advance
        return
    columns = (
        BarColumn(),
        TextColumn("{task.fields[done]} simulations,"),
        TimeRemainingColumn(),
        TextColumn("left [dim]{task.description}"),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("", total=None, done="")

        def advance(done: float, total: int, name: str) -> None:
            told = told_of(done, total)
            progress.update(task, completed=done, total=total, done=told, description=escaped(name))

        yield advance


class _Lines:
    """Prints how far a run is, now and then."""

    def __init__(self) -> None:
        self._told_s = time.monotonic()
        self._first_s = self._base_s = math.inf
        self._base = 0.0

    def advance(self, done: float, total: int, name: str) -> None:
        """As the runner calls it."""
        now_s = time.monotonic()
        self._first_s = min(self._first_s, now_s)
        if (
            now_s - self._first_s <= LOOKS_S
        ):  # what was in the folder already comes at once and says nothing of the pace
            self._base_s, self._base = now_s, done
        if now_s - self._told_s < LINE_S or done >= total:
            return
        self._told_s = now_s
        gone_s, gone = now_s - self._base_s, done - self._base
        left = f", {span((total - done) * gone_s / gone)} left" if gone > 0 else ""
        typer.echo(f"{told_of(done, total)} simulations{left}{name and f' ({name})'}", err=True)


def told_of(done: float, total: int) -> str:
    """``3 of 20``: those that are done, without the part of those under way."""
    return f"{int(done)} of {total}"


def span(seconds: float) -> str:
    """A time for people: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def axis_and_value(text: str, option: str = "--at") -> tuple[str, str]:
    """``AXIS=VALUE`` of an option. Raises ValueError for another text."""
    axis, sign, value = text.partition("=")
    if not sign or not axis:
        raise ValueError(f"{option} {text}: expected AXIS=VALUE, such as rate_scale=2")
    return axis, value
