"""The command that tells why a request was late, or its decode slow: explain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fineserve_sim.cli.console import (
    JsonOption,
    axis_and_value,
    examples,
    interruptible,
    path_argument,
    print_json,
    print_rows,
)

if TYPE_CHECKING:
    from fineserve_sim.experiment.show.timelines.life import Life


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim run experiments/fig13.yaml --quick --decisions --out results/late",
            "fineserve-sim explain results/late 25 --system fcfs --at rate_scale=2",
        )
    )(explain)


def explain(
    folder: Annotated[Path, path_argument("DIR", "Results folder of a run.")],
    request: Annotated[int, typer.Argument(metavar="REQUEST", help="Its number, by arrival.", show_default=False)],
    *,
    system: Annotated[
        str | None, typer.Option("--system", "-s", help="Of this system; else the first.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of this seed.")] = 0,
    at: Annotated[
        list[str] | None,
        typer.Option(
            "--at", metavar="AXIS=VALUE", help="Of the cell with this axis; may be repeated.", show_default=False
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """The life of one request: what it waited for, how long, on which decision, and what its decode was spent for.

    The experiment must have been run with --decisions.
    """
    with interruptible():
        from fineserve_sim.experiment.show.timelines.life import life_of
        from fineserve_sim.experiment.show.timelines.stored import stored_run

        run = stored_run(folder, system, seed, dict(axis_and_value(text) for text in at or ()))
        life = life_of(run, request)
        if as_json:
            print_json(asdict(life) | {"run": run.title})
        else:
            _print(life, run.title)


def _print(life: Life, title: str) -> None:
    typer.echo(
        f"{title}\nrequest {life.request}: {life.model}, {life.prompt_tokens} prompt and {life.output_tokens} output tokens"
    )
    typer.echo(f"{life.verdict}\n")
    rows = [[f"{moment.at_s:.3f}", f"+{moment.after_s:.3f}", moment.what] for moment in life.moments]
    print_rows(("time, s", "after, s", "what"), rows, right=("time, s", "after, s"))
    if len(life.visits) > 1:
        typer.echo("")
        _print_visits(life)
    if life.first_s:
        typer.echo("")
        _print_spent("to first token, s", life.first_s, "for")
    elif life.waited_s:
        typer.echo("")
        waits = [[f"{seconds:.3f}", what] for what, seconds in life.waited_s.items()]
        print_rows(("waited, s", "for"), waits, right=("waited, s",))
    if life.decoded_s:
        typer.echo("")
        _print_spent("decoded, s", life.decoded_s, f"for, in a batch of {life.batch:.1f} on average")


def _print_spent(header: str, spent_s: Mapping[str, float], what_for: str) -> None:
    """Seconds that add up, each with its part of them."""
    total_s = sum(spent_s.values())
    rows = [[f"{seconds:.3f}", f"{100 * seconds / total_s:.0f}", what] for what, seconds in spent_s.items()]
    print_rows((header, "%", what_for), rows, right=(header, "%"))


def _print_visits(life: Life) -> None:
    """The engines that it was at."""
    from fineserve_sim.experiment.show.timelines.life import LEFT, where

    rows = [
        [where(visit), f"{visit.from_s:.3f}", f"{visit.to_s:.3f}", str(visit.tokens), LEFT[visit.left]]
        for visit in life.visits
    ]
    right = ("from, s", "to, s", "tokens")
    print_rows(("was at", *right, "left because"), rows, right=right)
