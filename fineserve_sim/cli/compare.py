"""The command that compares systems on a trace: compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineserve_sim.cli.catalog import complete_gpu, complete_system
from fineserve_sim.cli.console import (
    ExecutorOption,
    JobsOption,
    JsonOption,
    OutOption,
    console,
    examples,
    interruptible,
    path_argument,
    progress_bar,
    unused_folder_goes,
)
from fineserve_sim.cli.intake import ColumnsOption, hint_spread, own_traces, taken_trace, trace_name
from fineserve_sim.cli.limits import (
    E2eOption,
    MarginOption,
    PriceOption,
    RequestsOption,
    SeedsOption,
    SetOption,
    ShareOption,
    SloScaleOption,
    Spreading,
    SpreadOption,
    TargetsOption,
    TpotOption,
    TtftOption,
    key_and_value,
    spread_of,
    tell_probe,
)
from fineserve_sim.cli.results import DecisionsOption, Simulation, print_results, simulate_into

if TYPE_CHECKING:
    from fineserve_sim.experiment import Experiment
    from fineserve_sim.experiment.run.executor import Executor

TraceArgument = Annotated[
    Path | None, path_argument("[TRACE]", "Trace file, plain or gzip; none where each model has its own.")
]
SystemsOption = Annotated[
    list[str], typer.Option("--system", "-s", help="A system; repeat for each.", autocompletion=complete_system)
]
ModelsOption = Annotated[
    list[str],
    typer.Option(
        "--model",
        "-m",
        metavar="NAME=MODEL:PRECISION:TP@TRACE",
        help="A model of the trace and what it is; repeat for each. All but MODEL may be left out: "
        "its own name, the precision in which it is published, 1 GPU, the one TRACE of all.",
    ),
]
GpuOption = Annotated[str, typer.Option(help="GPU of the catalog.", autocompletion=complete_gpu)]
GpusOption = Annotated[int, typer.Option(min=1, help="Number of GPUs.")]
SharingOption = Annotated[
    str | None,
    typer.Option(
        metavar="WORD",
        help="How engines share a GPU, for all systems: mps, time_slice, exclusive, fluid, or mig:PROFILE such as mig:3g.",
        show_default=False,
    ),
]
RateScaleOption = Annotated[
    float | None,
    typer.Option(
        min=1e-6, help="Replay this many times as fast; if not given, where systems part.", show_default=False
    ),
]
SearchOption = Annotated[
    bool, typer.Option("--search/--no-search", help="Find where the answer breaks and how many GPUs it needs.")
]
AnchorsOption = Annotated[
    bool,
    typer.Option("--anchors/--no-anchors", help="Add the clairvoyant bound and a GPU (group) of its own a model."),
]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim compare trace.csv --system fineserve --system static* --model A=llama-3.1-8b:fp8 "
            "--model B=qwen3-32b --gpus 2 --ttft-slo 0.5",
            "fineserve-sim compare azure2023_conv.csv.gz --system fineserve --system prism* --spread "
            "--model llama-3.1-8b --model llama-3-8b:W4A8KV4",
        ),
        cls=Spreading,
    )(compare)


def compare(
    trace: TraceArgument = None,
    *,
    systems: SystemsOption,
    models: ModelsOption,
    gpu: GpuOption = "h100-sxm",
    gpus: GpusOption = 1,
    sharing: SharingOption = None,
    ttft_slo_s: TtftOption = None,
    tpot_slo_s: TpotOption = None,
    e2e_slo_s: E2eOption = None,
    slo_scale: SloScaleOption = None,
    rate_scale: RateScaleOption = None,
    requests: RequestsOption = None,
    spread: SpreadOption = False,
    share: ShareOption = None,
    columns: ColumnsOption = None,
    targets: TargetsOption = None,
    price: PriceOption = None,
    margin: MarginOption = None,
    seeds: SeedsOption = None,
    overrides: SetOption = None,
    search: SearchOption = True,
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
        from fineserve_sim.experiment.file.comparison import model_entries
        from fineserve_sim.experiment.run.executors import executor_of
        from fineserve_sim.experiment.sizing.parting import hopeless
        from fineserve_sim.experiment.sizing.question import shares_of, slo_scale_of

        told: dict[str, Any] = {"ttft_slo_s": ttft_slo_s, "tpot_slo_s": tpot_slo_s, "e2e_slo_s": e2e_slo_s}
        told |= {"slo_scale": slo_scale_of(slo_scale, ttft_slo_s), "requests": requests, "anchors": anchors}
        told |= {"gpu": gpu, "count": gpus, "sharing": _sharing(sharing), "usd_per_gpu_hour": price}
        told |= {"seeds": seeds or 1, "overrides": list(map(key_and_value, overrides or ())), "margin": margin}
        wanted = shares_of(targets, tpot_slo_s, e2e_slo_s)
        named, paths = own_traces(models)
        folder = out or Path("results") / f"compare-{trace_name(trace, paths)}"
        entries = model_entries(named, spread=spread_of(spread, share))
        with executor_of(executor, jobs) as where, unused_folder_goes(folder):
            file = taken_trace(trace, paths, [entry["id"] for entry in entries], columns, folder)
            experiment = _at_rate(rate_scale, partial(_experiment, file, systems, entries, told), folder, where, wanted)
            page = not (search and hopeless(experiment, wanted))  # which is soon made with what the search finds
            simulate_into(folder, experiment, where, Simulation(wanted, decisions, page=page))
            summary = _summary(folder, where, search)
        print_results(folder, summary, as_json)


def _at_rate(
    rate_scale: float | None,
    experiment_at: Callable[[float], Experiment],
    folder: Path,
    executor: Executor,
    wanted: Mapping[str, float],
) -> Experiment:
    """The experiment at this rate; where none is given, where systems part."""
    from fineserve_sim.experiment.sizing.parting import parted

    if rate_scale is not None:
        return experiment_at(rate_scale)
    with progress_bar() as advance:
        return parted(experiment_at, folder, executor, wanted, advance, _say)


def _say(line: str) -> None:
    console(stderr=True).print(line)


def _experiment(
    trace: Path,
    systems: Sequence[str],
    models: Sequence[Mapping[str, Any]],
    told: Mapping[str, Any],
    rate_scale: float,
) -> Experiment:
    """The experiment of a trace that is replayed so many times as fast."""
    from fineserve_sim.experiment import experiment_for_trace

    with hint_spread(trace, [model["id"] for model in models], any("share" in model for model in models)):
        return experiment_for_trace(trace, systems, models, rate_scale=rate_scale, **told)


def _summary(folder: Path, executor: Executor, search: bool) -> Mapping[str, Any]:
    """What was found, with a ``search`` around the answer."""
    from fineserve_sim.experiment.results.summary import read_summary
    from fineserve_sim.experiment.show.page.build import write_page
    from fineserve_sim.experiment.sizing.around import search_around

    if not search:
        return read_summary(folder)
    told = tell_probe if not console(stderr=True).is_terminal else None
    with progress_bar() as advance:
        summary = search_around(folder, executor=executor, on_progress=advance, told=told)
    write_page([folder], folder / "report.html")  # with what the search found
    return summary


def _sharing(text: str | None) -> str | dict[str, str] | None:
    """``mig:PROFILE`` as a file has it; other words as they are."""
    word, sign, profile = (text or "").partition(":")
    return {word: profile} if sign else text
