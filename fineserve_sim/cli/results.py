"""A results folder: run and compare simulate into it and print what is there; plot draws it again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from fineserve_sim.cli.console import (
    JsonOption,
    console,
    escaped,
    examples,
    interruptible,
    path_argument,
    print_json,
    progress_bar,
    unused_folder_goes,
)

if TYPE_CHECKING:
    from fineserve_sim.experiment import Experiment
    from fineserve_sim.experiment.run.executor import Executor

DecisionsOption = Annotated[bool, typer.Option("--decisions", help="Log every event and decision, a file a run.")]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(epilog=examples("fineserve-sim plot results/fig10"))(plot)


class Simulation(NamedTuple):
    """The ``targets`` of the answer, by metric; whether ``decisions`` are logged, every iteration is an event, ``rows`` of
    requests are kept, and a ``page`` is made of these."""

    targets: Mapping[str, float]
    decisions: bool = False
    exact_steps: bool = False
    rows: bool = True
    page: bool = True


def simulate_into(out: Path, experiment: Experiment, executor: Executor, how: Simulation) -> None:
    """Simulate and draw. Without rows there is nothing to make the page of."""
    from fineserve_sim.cluster import simulate, simulate_step_by_step
    from fineserve_sim.experiment import run_loaded
    from fineserve_sim.experiment.run.files import prepare
    from fineserve_sim.experiment.show.figures import draw
    from fineserve_sim.experiment.show.page.build import write_page

    with unused_folder_goes(out):
        prepare(out)
        _say_what_is_run(experiment, executor)
        with progress_bar() as advance:
            run_loaded(
                experiment,
                out,
                executor=executor,
                decisions=how.decisions,
                on_progress=advance,
                simulate=simulate_step_by_step if how.exact_steps else simulate,
                targets=how.targets,
                summary=not how.rows,
            )
        draw(out, timelines=how.rows)
        if how.rows and how.page:
            write_page([out], out / "report.html")


def print_results(out: Path, summary: Mapping[str, Any], as_json: bool, *, rows: bool = True) -> None:
    """The summary as tables or JSON, and what else lies in the folder."""
    from fineserve_sim.experiment.show.report import report

    if as_json:
        for warning in summary["warnings"]:
            typer.echo(f"fineserve-sim: warning: {warning}", err=True)
        print_json(summary)
        return
    console().print(report(summary))
    page = "report.html, " if rows else ""
    typer.echo(f"Results in {out}: {page}summary.json, tables (*.parquet), figures/")


def plot(
    folder: Annotated[Path, path_argument("DIR", "Results folder of a run.")],
    as_json: JsonOption = False,
) -> None:
    """Draw the figures of a results folder again."""
    with interruptible():
        from fineserve_sim.experiment.show.figures import draw

        written = [str(path) for path in draw(folder)]
        if as_json:
            print_json(written)
        else:
            typer.echo("\n".join(written))


def _say_what_is_run(experiment: Experiment, executor: Executor) -> None:
    from fineserve_sim.experiment.file.sources import describe

    seeds, cells = experiment.file.seeds, len(experiment.points)
    systems = len({point.system for point in experiment.points})
    console(stderr=True).print(
        f"[bold]{escaped(experiment.file.title)}[/bold]\n"
        f"{_counted(cells, 'cell')} of {_counted(systems, 'system')}, {_counted(seeds, 'seed')} each, "
        f"{_counted(executor.workers, 'job')}; requests from {escaped(describe(experiment.setup))}",
        soft_wrap=True,
    )


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
