"""The command that finds how many GPUs, how much load or how tight an SLO: size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fineserve_sim.cli.catalog import complete_gpu, complete_system
from fineserve_sim.cli.console import (
    ExecutorOption,
    JobsOption,
    JsonOption,
    OutOption,
    axis_and_value,
    console,
    examples,
    interruptible,
    path_argument,
    print_json,
    progress_bar,
    unused_folder_goes,
)
from fineserve_sim.cli.intake import ColumnsOption, hint_spread, own_traces, taken_trace, trace_name
from fineserve_sim.cli.limits import (
    E2eOption,
    MarginOption,
    RequestsOption,
    SeedsOption,
    ShareOption,
    SloScaleOption,
    Spreading,
    SpreadOption,
    TpotOption,
    TtftOption,
    spread_of,
    tell_probe,
)

if TYPE_CHECKING:
    from fineserve_sim.experiment.sizing.found import Searched
    from fineserve_sim.experiment.sizing.question import Question

SourceArgument = Annotated[
    Path | None,
    path_argument(
        "[TRACE|FILE|DIR]", "Trace, experiment in YAML, or results folder; none where each model has a trace."
    ),
]
GoalsOption = Annotated[
    list[str],
    typer.Option(
        "--target",
        metavar="MOMENT:SHARE",
        help="ttft:0.95, tpot:0.95, e2e:0.9 or all:0.95, with commas; each:all:0.95 of each model.",
    ),
]
OverOption = Annotated[str, typer.Option(metavar="AXIS", help="gpus, rate or slo_scale.")]
AtOption = Annotated[
    list[str] | None,
    typer.Option("--at", metavar="AXIS=VALUE", help="Value of another axis; may be repeated.", show_default=False),
]
GpuTypesOption = Annotated[
    list[str] | None,
    typer.Option("--gpu", help="GPU type to try; repeat for each.", show_default=False, autocompletion=complete_gpu),
]
MixOption = Annotated[
    bool, typer.Option("--mix", help="Also mixes of two of the --gpu types, where they cost less than each alone.")
]
DegreesOption = Annotated[
    list[int] | None,
    typer.Option("--tp", min=1, help="TP degree to try for every model; repeat for each.", show_default=False),
]
MostGpusOption = Annotated[
    int | None,
    typer.Option(min=1, help="GPUs to try at most; 16, or twice the file's.", show_default=False),
]
PrecisionOption = Annotated[float, typer.Option(min=0.001, max=1.0, help="Relative, of a rate or SLO scale.")]
PricesOption = Annotated[
    list[str] | None,
    typer.Option("--price", metavar="[GPU=]USD", help="Dollars a GPU-hour; repeat for each.", show_default=False),
]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model", "-m", metavar="NAME=MODEL:PRECISION:TP@TRACE", help="Of a trace: as for compare.", show_default=False
    ),
]
SystemsOption = Annotated[
    list[str] | None,
    typer.Option("--system", "-s", help="Repeat for each.", show_default=False, autocompletion=complete_system),
]
RateScaleOption = Annotated[
    float | None, typer.Option(min=1e-6, help="Of a trace: replay so many times as fast.", show_default=False)
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Use the file's short version.")]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim size trace.csv --model A=llama-3.1-8b:fp8 --model B=qwen3-32b --ttft-slo 1 --tpot-slo 0.05 "
            "--target ttft:0.95,tpot:0.95",
            "fineserve-sim size trace.csv --model A=llama-3.1-8b --model B=qwen3-32b --gpu h100-sxm --gpu a100-80gb "
            "--tp 1 --tp 2 --target ttft:0.95",
            "fineserve-sim size two_models.yaml --gpu h100-sxm --gpu l40s --mix --target ttft:0.95",
            "fineserve-sim size experiments/fig10.yaml --target ttft:0.99 --over gpus --at rate_scale=8 --quick",
            "fineserve-sim size experiments/fig13.yaml --target ttft:0.95 --over rate",
        ),
        cls=Spreading,
    )(size)


def size(
    source: SourceArgument = None,
    *,
    targets: GoalsOption,
    over: OverOption = "gpus",
    at: AtOption = None,
    gpu: GpuTypesOption = None,
    mix: MixOption = False,
    tp: DegreesOption = None,
    most_gpus: MostGpusOption = None,
    precision: PrecisionOption = 0.05,
    price: PricesOption = None,
    ttft_slo_s: TtftOption = None,
    tpot_slo_s: TpotOption = None,
    e2e_slo_s: E2eOption = None,
    slo_scale: SloScaleOption = None,
    models: ModelsOption = None,
    systems: SystemsOption = None,
    rate_scale: RateScaleOption = None,
    requests: RequestsOption = None,
    spread: SpreadOption = False,
    share: ShareOption = None,
    columns: ColumnsOption = None,
    margin: MarginOption = None,
    seeds: SeedsOption = None,
    quick: QuickOption = False,
    out: OutOption = None,
    jobs: JobsOption = None,
    executor: ExecutorOption = "local",
    as_json: JsonOption = False,
) -> None:
    """The fewest GPUs, highest rate or tightest SLO at which each system meets the targets.

    SOURCE is a trace, an experiment or a results folder. Over GPU types and TP degrees, it names the cheapest.
    Bisection over the same requests; a cell ends once the seeds that are left cannot change its answer.
    Results of NAME go to results/size-NAME unless --out names a folder.
    """
    named, paths = own_traces(models or [])
    folder = out or Path("results") / f"size-{trace_name(source, paths)}"
    with interruptible(), unused_folder_goes(folder):
        from fineserve_sim.experiment.run.executors import executor_of
        from fineserve_sim.experiment.sizing import axis_of, goals
        from fineserve_sim.experiment.sizing.found import search
        from fineserve_sim.experiment.sizing.mixes import kinds_of
        from fineserve_sim.experiment.sizing.probe import Prober
        from fineserve_sim.experiment.sizing.question import Asked, Limits, Load, check_trace
        from fineserve_sim.experiment.sizing.variants import variants

        axis, wanted, paid = axis_of(over), goals(targets), prices_of(price or [])
        tried, mixed = variants(gpu or [], tp or [], paid), kinds_of(gpu or [], paid, axis) if mix else []
        limits = Limits(ttft_slo_s, tpot_slo_s, e2e_slo_s, slo_scale)
        load = Load(named, requests, spread_of(spread, share), rate_scale)
        if _is_trace(source):
            check_trace(targets, limits, quick=quick)
        file = _file_of(source, named, paths, columns, folder)
        place = {name: _value(text) for name, text in (axis_and_value(each) for each in at or ())}
        hint = hint_spread(file, _ids(named), spread) if _is_trace(source) else nullcontext()
        with hint, executor_of(executor, jobs) as where, progress_bar() as advance:
            asked = Asked(limits, load, systems, seeds, place, most_gpus, margin).of(file, folder, axis)
            told = (asked.path, folder, wanted, asked.overrides, asked.place, quick, None, where, advance, tell_probe)
            found = search(
                Prober(*told), tried, axis, folder, mixed=mixed, most_gpus=asked.most_gpus, precision=precision
            )
        _print(found, asked, folder, as_json)


def _is_trace(source: Path | None) -> bool:
    from fineserve_sim.experiment.sizing.question import file_of

    return source is None or file_of(source) is None


def _ids(models: Sequence[str]) -> list[str]:
    from fineserve_sim.experiment.file.comparison import model_entries

    return [entry["id"] for entry in model_entries(models, spread=False)]


def _file_of(
    source: Path | None, models: Sequence[str], paths: Sequence[Path], columns: str | None, folder: Path
) -> Path:
    """The trace, the experiment or the results that are sized."""
    if _is_trace(source):
        return taken_trace(source, paths, _ids(models), columns, folder)
    if columns is not None:
        raise ValueError(f"--columns: for a trace alone; {source} has models and load of its own")
    assert source is not None
    return source


def _print(found: Searched, asked: Question, folder: Path, as_json: bool) -> None:
    """The answers as a table or as data; the page with all of it."""
    from fineserve_sim.experiment.show.page.build import write_page
    from fineserve_sim.experiment.show.report import report
    from fineserve_sim.experiment.show.sizes import table
    from fineserve_sim.experiment.show.where import PlainTable

    write_page([folder], folder / "report.html")
    if as_json:
        print_json(found.data)
        return
    if asked.said:
        console().print(asked.said, soft_wrap=True, markup=False)
    console().print(found.headline, soft_wrap=True, markup=False)
    cells = table(found.data)
    listed = PlainTable(*cells.headers, left=cells.texts)
    for row in cells.rows:
        listed.add_row(*row)
    console().print(listed)
    for line in found.reasons:
        console().print(line, markup=False)
    if found.summary is not None:
        console().print(report(found.summary))
    more = ", summary.json, tables" if found.summary is not None else ""
    typer.echo(f"Results in {folder}: report.html, size.json, figures/size.svg{more}")


def prices_of(texts: Sequence[str]) -> dict[str, float]:
    """``2.5`` or ``h100-sxm=2.5``, by GPU. Raises ValueError for anything else."""
    found: dict[str, float] = {}
    for text in texts:
        gpu, sign, usd = text.rpartition("=")
        if gpu in found:
            raise ValueError(f"--price {text}: a second price of {gpu or 'the same GPUs'}; give one")
        try:
            found[gpu] = float(usd)
        except ValueError:
            found[gpu] = 0.0
        if not 0 < found[gpu] < float("inf") or (sign and not gpu):
            raise ValueError(f"--price {text}: expected dollars a GPU-hour, such as 2.5 or h100-sxm=2.5")
    return found


def _value(text: str) -> float | str:
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        return text
