"""The command that simulates an experiment file: run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fineserve_sim.cli.console import (
    ExecutorOption,
    JobsOption,
    JsonOption,
    OutOption,
    axis_and_value,
    examples,
    interruptible,
    named_path,
    path_argument,
)
from fineserve_sim.cli.limits import PriceOption, SeedsOption, SetOption, TargetsOption, key_and_value
from fineserve_sim.cli.results import DecisionsOption, Simulation, print_results, simulate_into

if TYPE_CHECKING:
    from fineserve_sim.experiment import Experiment

FileArgument = Annotated[Path, path_argument("FILE", "Experiment in YAML.")]
QuickOption = Annotated[bool, typer.Option("--quick", help="Use the file's short version.")]
ExactStepsOption = Annotated[
    bool, typer.Option("--exact-steps", help="One event an engine iteration: the same results, slower.")
]
TraceOutOption = Annotated[
    Path | None,
    typer.Option(
        "--trace-out",
        parser=named_path,
        metavar="FILE",
        help="Write a cell of each system for Perfetto.",
        show_default=False,
    ),
]
CellOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cell",
        metavar="AXIS=VALUE",
        help="The cell of --trace-out; may be repeated. The first if not given.",
        show_default=False,
    ),
]
MetricsOption = Annotated[
    Literal["rows", "summary"],
    typer.Option(
        metavar="rows|summary",
        help="Keep every request and sample, or metrics alone, in memory that does not grow with them.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim run experiments/fig10.yaml --quick",
            "fineserve-sim run experiments/fig10.yaml --seeds 5 --jobs 8 --out results/fig10",
            "fineserve-sim run experiments/fig10.yaml --set engine.token_budget=4096 --json > summary.json",
        )
    )(run)


def run(
    file: FileArgument,
    *,
    out: OutOption = None,
    seeds: SeedsOption = None,
    jobs: JobsOption = None,
    executor: ExecutorOption = "local",
    overrides: SetOption = None,
    quick: QuickOption = False,
    decisions: DecisionsOption = False,
    exact_steps: ExactStepsOption = False,
    trace_out: TraceOutOption = None,
    cell: CellOption = None,
    metrics: MetricsOption = "rows",
    targets: TargetsOption = None,
    price: PriceOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an experiment: tables here, figures and data in the results folder.

    Finished simulations are kept; the same command goes on where it stopped.
    Results of NAME.yaml go to results/NAME unless --out names a folder.
    --trace-out implies --decisions and draws seed 0; see ui.perfetto.dev.
    """
    with interruptible():
        from fineserve_sim.experiment import load_experiment
        from fineserve_sim.experiment.results.summary import read_summary
        from fineserve_sim.experiment.run.executors import executor_of
        from fineserve_sim.experiment.sizing.question import shares_of

        pairs = [key_and_value(text) for text in overrides or ()]
        pairs += [] if price is None else [("cluster.usd_per_gpu_hour", str(price))]
        experiment = load_experiment(file, pairs, quick, seeds)
        at = dict(axis_and_value(text, "--cell") for text in cell or ())
        traced = _traced(experiment, trace_out, at)
        rows, logged = _kept(metrics, exact_steps, trace_out), decisions or trace_out is not None
        folder, slo = out or Path("results") / file.stem, experiment.setup.slo
        wanted = shares_of(targets, slo.tpot_s or slo.tpot, slo.e2e_s)
        with executor_of(executor, jobs) as where:
            how = Simulation(wanted, logged, exact_steps, rows)
            simulate_into(folder, experiment, where, how)
        print_results(folder, read_summary(folder), as_json, rows=rows)
        _write_traces(folder, traced, at, trace_out)


def _kept(metrics: str, exact_steps: bool, trace_out: Path | None) -> bool:
    """Whether every request is kept. Raises ValueError for options that need them where they are not."""
    if metrics == "summary" and (exact_steps or trace_out):
        other = "--exact-steps" if exact_steps else "--trace-out"
        raise ValueError(f"--metrics summary keeps no request that {other} could tell of; leave one of them out")
    return metrics == "rows"


def _traced(experiment: Experiment, trace_out: Path | None, at: Mapping[str, str]) -> list[str]:
    """The systems that have a cell at this place; whether a trace can be written is said before anything is simulated."""
    from fineserve_sim.experiment.run.files import check_writable
    from fineserve_sim.experiment.show.timelines.stored import is_at

    if trace_out is None:
        if at:
            raise ValueError("--cell says which cell --trace-out writes: give --trace-out FILE, too")
        return []
    check_writable(trace_out, "--trace-out")
    found = list(dict.fromkeys(point.system for point in experiment.points if is_at(point.axes, at)))
    if not found:
        values: dict[str, dict[str, None]] = {}
        for point in experiment.points:
            for axis, value in point.axes.items():
                values.setdefault(axis, {})[str(value)] = None
        there = "; ".join(f"{axis}: {', '.join(of)}" for axis, of in values.items())
        raise ValueError(f"--cell {' '.join(f'{axis}={value}' for axis, value in at.items())}: no such cell; {there}")
    return found


def _write_traces(folder: Path, systems: Sequence[str], at: Mapping[str, str], trace_out: Path | None) -> None:
    """The cell at this place of each system, for Perfetto, where it is asked for."""
    from fineserve_sim.experiment.show.timelines.chrome import write_trace
    from fineserve_sim.experiment.show.timelines.stored import stored_run

    if trace_out:
        write_trace((stored_run(folder, system, at=at) for system in systems), trace_out)
