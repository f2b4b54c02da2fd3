"""Commands that simulate and draw: run, compare, plot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fineserve_sim.cli.catalog import complete_gpu, complete_system
from fineserve_sim.cli.console import (
    ExecutorOption,
    JobsOption,
    JsonOption,
    OutOption,
    axis_and_value,
    console,
    escaped,
    examples,
    interruptible,
    named_path,
    print_json,
    progress_bar,
    unused_folder_goes,
)
from fineserve_sim.cli.limits import (
    E2eOption,
    PriceOption,
    RequestsOption,
    SloScaleOption,
    SpreadOption,
    TargetsOption,
    TpotOption,
    TtftOption,
    model_of,
    shares_of,
    slo_scale_of,
    tell_probe,
)

if TYPE_CHECKING:
    from fineserve_sim.experiment import Experiment
    from fineserve_sim.experiment.run.executor import Executor

PARTED, MOST_RATE_SCALE = 0.05, 64.0
"""Systems part where the best and the worst are so far apart, or none is so close to all; the fastest replay that is tried."""

ModelsOption = Annotated[
    list[str],
    typer.Option(
        "--model",
        "-m",
        metavar="NAME=MODEL:PRECISION:TP",
        help="A model of the trace and what it is; repeat for each. All but MODEL may be left out: "
        "its own name, W16A16, 1 GPU.",
    ),
]
AnchorsOption = Annotated[
    bool,
    typer.Option("--anchors/--no-anchors", help="Add the clairvoyant bound and a GPU (group) of its own a model."),
]
MetricsOption = Annotated[
    Literal["rows", "summary"],
    typer.Option(
        metavar="rows|summary",
        help="Keep every request and sample, or metrics alone, in memory that does not grow with them.",
    ),
]
DecisionsOption = Annotated[bool, typer.Option("--decisions", help="Log every event and decision, a file a run.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim run experiments/fig10.yaml --quick",
            "fineserve-sim run experiments/fig10.yaml --seeds 5 --jobs 8 --out results/fig10",
            "fineserve-sim run experiments/fig10.yaml --set engine.token_budget=4096 --json > summary.json",
        )
    )(run)
    app.command(
        epilog=examples(
            "fineserve-sim compare trace.csv --system fineserve --system static* --model A=llama-3.1-8b:fp8 "
            "--model B=qwen3-32b --gpus 2 --ttft-slo 0.5",
            "fineserve-sim compare azure2023_conv.csv.gz --system fineserve --system prism* --spread "
            "--model llama-3.1-8b --model llama-3-8b:W4A8KV4",
        )
    )(compare)
    app.command(epilog=examples("fineserve-sim plot results/fig10"))(plot)


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Experiment in YAML.", show_default=False)],
    *,
    out: OutOption = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds a cell, instead of the file's.", show_default=False)
    ] = None,
    jobs: JobsOption = None,
    executor: ExecutorOption = "local",
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Replace a value of the file; may be repeated.", show_default=False
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Use the file's short version.")] = False,
    decisions: DecisionsOption = False,
    exact_steps: Annotated[
        bool, typer.Option("--exact-steps", help="One event an engine iteration: the same results, slower.")
    ] = False,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            "--trace-out",
            parser=named_path,
            metavar="FILE",
            help="Write a cell of each system for Perfetto.",
            show_default=False,
        ),
    ] = None,
    cell: Annotated[
        list[str] | None,
        typer.Option(
            "--cell",
            metavar="AXIS=VALUE",
            help="The cell of --trace-out; may be repeated. The first if not given.",
            show_default=False,
        ),
    ] = None,
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
        from fineserve_sim.experiment.run.executors import executor_of

        pairs = [_key_and_value(text) for text in overrides or ()]
        pairs += [] if price is None else [("cluster.usd_per_gpu_hour", str(price))]
        experiment = load_experiment(file, pairs, quick, seeds)
        at = dict(axis_and_value(text, "--cell") for text in cell or ())
        traced = _traced(experiment, trace_out, at)
        folder = out or Path("results") / file.stem
        if metrics == "summary" and (exact_steps or trace_out):
            other = "--exact-steps" if exact_steps else "--trace-out"
            raise ValueError(f"--metrics summary keeps no request that {other} could tell of; leave one of them out")
        logged, slo = decisions or trace_out is not None, experiment.setup.slo
        wanted = shares_of(targets, slo.tpot_s or slo.tpot, slo.e2e_s)
        with executor_of(executor, jobs) as where:
            rows = metrics == "rows"
            _run(experiment, folder, where, logged, as_json, exact_steps, targets=wanted, rows=rows)
        if trace_out:
            from fineserve_sim.experiment.show.timelines.chrome import write_trace
            from fineserve_sim.experiment.show.timelines.stored import stored_run

            write_trace((stored_run(folder, system, at=at) for system in traced), trace_out)


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


def compare(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="Trace file, plain or gzip.", show_default=False)],
    *,
    systems: Annotated[
        list[str], typer.Option("--system", "-s", help="A system; repeat for each.", autocompletion=complete_system)
    ],
    models: ModelsOption,
    gpu: Annotated[str, typer.Option(help="GPU of the catalog.", autocompletion=complete_gpu)] = "h100-sxm",
    gpus: Annotated[int, typer.Option(min=1, help="Number of GPUs.")] = 1,
    sharing: Annotated[
        str | None,
        typer.Option(
            metavar="WORD",
            help="How engines share a GPU, for all systems: mps, time_slice, exclusive, fluid, or mig:PROFILE such as mig:3g.",
            show_default=False,
        ),
    ] = None,
    ttft_slo: TtftOption = None,
    tpot_slo: TpotOption = None,
    e2e_slo: E2eOption = None,
    slo_scale: SloScaleOption = None,
    rate_scale: Annotated[
        float | None,
        typer.Option(help="Replay this many times as fast; if not given, where systems part.", show_default=False),
    ] = None,
    requests: RequestsOption = None,
    spread: SpreadOption = False,
    targets: TargetsOption = None,
    price: PriceOption = None,
    search: Annotated[
        bool, typer.Option("--search/--no-search", help="Find where the answer breaks and how many GPUs it needs.")
    ] = True,
    anchors: AnchorsOption = True,
    out: OutOption = None,
    jobs: JobsOption = None,
    executor: ExecutorOption = "local",
    decisions: DecisionsOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare systems on a trace file, without writing YAML.

    Models are named as in the trace, or any way with --spread.
    Results of NAME.csv go to results/compare-NAME unless --out names a folder.
    """
    with interruptible():
        from fineserve_sim.experiment import experiment_for_trace
        from fineserve_sim.experiment.run.executors import executor_of

        parsed = [model_of(text) | ({"share": 1.0} if spread else {}) for text in models]
        with _hint_spread(trace, [model["id"] for model in parsed], spread):
            experiment_at = partial(
                experiment_for_trace,
                trace,
                systems,
                parsed,
                gpu=gpu,
                count=gpus,
                ttft_slo_s=ttft_slo,
                tpot_slo_s=tpot_slo,
                e2e_slo_s=e2e_slo,
                slo_scale=slo_scale_of(slo_scale, ttft_slo),
                requests=requests,
                anchors=anchors,
                sharing=_sharing(sharing),
                usd_per_gpu_hour=price,
            )
            first = experiment_at(rate_scale=1.0 if rate_scale is None else rate_scale)
        folder, wanted = out or Path("results") / f"compare-{first.name}", shares_of(targets, tpot_slo, e2e_slo)
        with executor_of(executor, jobs) as where:
            if rate_scale is None:
                first = _parting(experiment_at, first, folder, where, wanted)
            _run(first, folder, where, decisions, as_json, targets=wanted, search=search)


def plot(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Results folder of a run.", show_default=False)],
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


def _key_and_value(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ValueError(f"--set {text}: expected KEY=VALUE, such as engine.token_budget=4096")
    return key, value


def _sharing(text: str | None) -> str | dict[str, str] | None:
    """``mig:PROFILE`` as a file has it; other words as they are."""
    word, sign, profile = (text or "").partition(":")
    return {word: profile} if sign else text


@contextmanager
def _hint_spread(trace: Path, ids: list[str], spread: bool) -> Iterator[None]:
    """Where the trace names models that were not given, say how to name them, or that there is --spread."""
    from fineserve_sim.experiment import ConfigError

    try:
        yield
    except ConfigError as problem:
        if spread or problem.key != "workload.trace":
            raise
        from fineserve_traces import read_trace

        if missing := sorted(set(read_trace(trace).models) - set(ids)):
            names = ", ".join(missing)
            raise ValueError(f"{trace}: --model is missing for {names}; name them, or give --spread") from None
        raise


def _parting(
    experiment_at: Callable[..., Experiment],
    first: Experiment,
    out: Path,
    executor: Executor,
    targets: Mapping[str, float],
) -> Experiment:
    """The experiment at the rate at which the systems part, in doublings of the trace's own; the first where they never do."""
    from fineserve_sim.experiment import run_loaded
    from fineserve_sim.experiment.results.answer import spread_of
    from fineserve_sim.experiment.results.summary import read_summary

    experiment, rate_scale = first, 1.0
    while rate_scale <= MOST_RATE_SCALE:
        with unused_folder_goes(out), progress_bar() as advance:
            run_loaded(experiment, out, executor=executor, on_progress=advance, targets=targets)
        least, most = spread_of(read_summary(out))
        if most - least >= PARTED or most < 1 - PARTED:
            return experiment
        console(stderr=True).print(
            f"At rate scale {rate_scale:g} the systems keep {100 * least:.1f} to {100 * most:.1f} % within limits; faster."
        )
        rate_scale *= 2
        experiment = experiment_at(rate_scale=rate_scale)
    console(stderr=True).print(f"They part at no rate scale up to {MOST_RATE_SCALE:g}: what follows is at 1.")
    return first


def _run(
    experiment: Experiment,
    out: Path,
    executor: Executor,
    decisions: bool,
    as_json: bool,
    exact_steps: bool = False,
    *,
    targets: Mapping[str, float],
    search: bool = False,
    rows: bool = True,
) -> None:
    """Simulate, draw and report; ``search``: around the answer, too. Without ``rows`` there is nothing to make the page of."""
    from fineserve_sim.cluster import simulate, simulate_step_by_step
    from fineserve_sim.experiment import run_loaded
    from fineserve_sim.experiment.results.summary import read_summary
    from fineserve_sim.experiment.run.files import prepare
    from fineserve_sim.experiment.show.figures import draw
    from fineserve_sim.experiment.show.page.build import write_page

    how = simulate_step_by_step if exact_steps else simulate
    with unused_folder_goes(out), progress_bar() as advance:
        prepare(out)
        _say_what_is_run(experiment, executor)
        run_loaded(
            experiment,
            out,
            executor=executor,
            decisions=decisions,
            on_progress=advance,
            simulate=how,
            targets=targets,
            summary=not rows,
        )
    figures = draw(out, timelines=rows)
    if rows:
        write_page([out], out / "report.html")
    summary = read_summary(out)
    if search:
        from fineserve_sim.experiment.sizing.around import search_around

        told = tell_probe if not console(stderr=True).is_terminal else None
        with progress_bar() as advance:
            summary = search_around(out, executor=executor, on_progress=advance, told=told)
        write_page([out], out / "report.html")  # with what the search found
    if as_json:
        for warning in summary["warnings"]:
            typer.echo(f"fineserve-sim: warning: {warning}", err=True)
        print_json(summary)
        return
    from fineserve_sim.experiment.show.report import report

    console().print(report(summary))
    page = "report.html, " if rows else ""
    typer.echo(f"Results in {out}: {page}summary.json, tables (*.parquet), {len(figures)} figure files in figures/")


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
