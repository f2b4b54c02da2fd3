"""The command that finds how many GPUs, how much load or how tight an SLO: size."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fineserve_sim.cli.console import (
    JobsOption,
    JsonOption,
    OutOption,
    axis_and_value,
    console,
    examples,
    interruptible,
    print_json,
    progress_bar,
)


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim size experiments/fig10.yaml --target ttft:0.99 --over gpus --at rate_scale=8 --quick",
            "fineserve-sim size experiments/fig13.yaml --target ttft:0.95 --over rate",
        )
    )(size)


def size(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Experiment in YAML.", show_default=False)],
    *,
    targets: Annotated[
        list[str],
        typer.Option("--target", metavar="METRIC:SHARE", help="ttft:0.99 or tpot:0.99; may be repeated."),
    ],
    over: Annotated[str, typer.Option(metavar="AXIS", help="gpus, rate or slo_scale.")],
    at: Annotated[
        list[str] | None,
        typer.Option("--at", metavar="AXIS=VALUE", help="Value of another axis; may be repeated.", show_default=False),
    ] = None,
    most_gpus: Annotated[
        int | None, typer.Option(min=1, help="GPUs to try at most; twice the file's if not given.", show_default=False)
    ] = None,
    precision: Annotated[float, typer.Option(min=0.001, max=1.0, help="Relative, of a rate or SLO scale.")] = 0.05,
    quick: Annotated[bool, typer.Option("--quick", help="Use the file's short version.")] = False,
    out: OutOption = None,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """The fewest GPUs, highest rate or tightest SLO at which each system meets the targets.

    Bisection over the same requests; a cell ends once the seeds that are left cannot change its answer.
    Results of NAME.yaml go to results/size-NAME unless --out names a folder.
    """
    with interruptible():
        from fineserve_sim.experiment.run.files import write_json
        from fineserve_sim.experiment.sizing import axis_of, goal
        from fineserve_sim.experiment.sizing import size as search
        from fineserve_sim.experiment.sizing.probe import Prober
        from fineserve_sim.experiment.sizing.report import as_json as data_of
        from fineserve_sim.experiment.sizing.report import draw, table

        axis, goals = axis_of(over), [goal(text) for text in targets]
        folder = out or Path("results") / f"size-{file.stem}"
        place = {name: _value(text) for name, text in (axis_and_value(each) for each in at or ())}
        with progress_bar() as advance:
            prober = Prober(file, folder, goals, at=place, quick=quick, jobs=jobs, on_progress=advance)
            answers = list(search(prober, axis, most_gpus=most_gpus, precision=precision))
        data = data_of(answers, axis, goals)
        write_json(folder / "size.json", data)
        draw(answers, axis, goals, prober.file().file.title, folder)
        if as_json:
            print_json(data)
        else:
            console().print(table(answers, axis, goals))
            typer.echo(f"Results in {folder}: size.json, figures/size.svg")


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
