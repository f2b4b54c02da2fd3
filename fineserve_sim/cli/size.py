"""The command that finds how many GPUs, how much load or how tight an SLO: size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

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
from fineserve_sim.cli.limits import (
    E2eOption,
    RequestsOption,
    SloScaleOption,
    SpreadOption,
    TpotOption,
    TtftOption,
    shares_of,
    slo_scale_of,
    tell_probe,
)

if TYPE_CHECKING:
    from fineserve_sim.experiment.sizing import Answer
    from fineserve_sim.experiment.sizing.probe import Prober

SYSTEMS = ("fineserve", "prism*", "prism", "muxserve++", "dedicated")
"""Tried on a trace where no system is named."""

SEEDS = 3
"""Deals of a trace's requests to models that share them; a trace that names its models has no randomness."""

MOST_GPUS = 16
"""Tried at most for a trace where no number is given."""

Pairs = list[tuple[str, str]]
Place = dict[str, float | str]

SourceArgument = Annotated[
    Path,
    path_argument("TRACE|FILE|DIR", "Trace, experiment in YAML, or results folder."),
]
GoalsOption = Annotated[
    list[str],
    typer.Option("--target", metavar="MOMENT:SHARE", help="ttft:0.95, tpot:0.95, e2e:0.9 or all:0.95, with commas."),
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
        "--model", "-m", metavar="NAME=MODEL:PRECISION:TP", help="Of a trace: as for compare.", show_default=False
    ),
]
SystemsOption = Annotated[
    list[str] | None,
    typer.Option("--system", "-s", help="Repeat for each.", show_default=False, autocompletion=complete_system),
]
RateScaleOption = Annotated[
    float | None, typer.Option(min=1e-6, help="Of a trace: replay so many times as fast.", show_default=False)
]
SeedsOption = Annotated[int | None, typer.Option(min=1, help="Seeds a probe.", show_default=False)]
QuickOption = Annotated[bool, typer.Option("--quick", help="Use the file's short version.")]


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim size trace.csv --model A=llama-3.1-8b:fp8 --model B=qwen3-32b --ttft-slo 1 --tpot-slo 0.05 "
            "--target ttft:0.95,tpot:0.95",
            "fineserve-sim size trace.csv --model A=llama-3.1-8b --model B=qwen3-32b --gpu h100-sxm --gpu a100-80gb "
            "--tp 1 --tp 2 --target ttft:0.95",
            "fineserve-sim size experiments/fig10.yaml --target ttft:0.99 --over gpus --at rate_scale=8 --quick",
            "fineserve-sim size experiments/fig13.yaml --target ttft:0.95 --over rate",
        )
    )(size)


def size(
    source: SourceArgument,
    *,
    targets: GoalsOption,
    over: OverOption = "gpus",
    at: AtOption = None,
    gpus: GpuTypesOption = None,
    degrees: DegreesOption = None,
    most_gpus: MostGpusOption = None,
    precision: PrecisionOption = 0.05,
    prices: PricesOption = None,
    ttft_slo: TtftOption = None,
    tpot_slo: TpotOption = None,
    e2e_slo: E2eOption = None,
    slo_scale: SloScaleOption = None,
    models: ModelsOption = None,
    systems: SystemsOption = None,
    rate_scale: RateScaleOption = None,
    requests: RequestsOption = None,
    spread: SpreadOption = False,
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
    folder = out or Path("results") / f"size-{source.name.split('.')[0]}"
    limits, load = _Limits(ttft_slo, tpot_slo, e2e_slo, slo_scale), _Load(models, requests, spread, rate_scale)
    with interruptible(), unused_folder_goes(folder):
        from fineserve_sim.experiment.run.executors import executor_of
        from fineserve_sim.experiment.sizing import axis_of, goals
        from fineserve_sim.experiment.sizing.changes import size_changed
        from fineserve_sim.experiment.sizing.probe import Prober
        from fineserve_sim.experiment.sizing.variants import size_all, variants

        axis, wanted, tried = (
            axis_of(over),
            goals(targets),
            variants(gpus or [], degrees or [], prices_of(prices or [])),
        )
        if _file(source) is None:
            _check_trace(targets, limits, quick=quick)
        path, overrides, place, most = _asked(source, folder, load, limits, systems, seeds, at or (), most_gpus)
        with executor_of(executor, jobs) as where:
            with progress_bar() as advance:
                prober = Prober(path, folder, wanted, overrides, place, quick, None, where, advance, tell_probe)
                found = list(size_all(prober, tried, axis, most_gpus=most, precision=precision))
                found += size_changed(found, axis, most_gpus=most, precision=precision)
            _report(found, axis, prober, folder, as_json)


def _check_trace(targets: Sequence[str], limits: _Limits, *, quick: bool) -> None:
    """Raises ValueError for what only an experiment file has, and for a target without its limit."""
    if quick:
        raise ValueError("--quick: for an experiment file alone; of a trace, --requests takes the first so many")
    shares_of(targets, limits.tpot_slo_s, limits.e2e_slo_s)


class _Limits(NamedTuple):
    """Limits in seconds, or the scale of derived ones."""

    ttft_slo_s: float | None
    tpot_slo_s: float | None
    e2e_slo_s: float | None
    slo_scale: float | None


class _Load(NamedTuple):
    """Models and load: options of a trace alone."""

    models: Sequence[str] | None
    requests: int | None
    spread: bool
    rate_scale: float | None


def _asked(
    source: Path,
    folder: Path,
    load: _Load,
    limits: _Limits,
    systems: Sequence[str] | None,
    seeds: int | None,
    at: Sequence[str],
    most_gpus: int | None,
) -> tuple[Path, Pairs, Place, int | None]:
    """The experiment file that is asked about, what is replaced in it, the values of its other axes, and how many GPUs are
    tried at most (None: as the file has it)."""
    place: Place = {name: _value(text) for name, text in (axis_and_value(each) for each in at)}
    path = _file(source)
    if path is not None:
        _refuse(load, path)
        return path, _overrides(limits, systems, seeds), place, most_gpus
    if load.rate_scale is not None and "rate_scale" in place:
        raise ValueError("--rate-scale with --at rate_scale: both say how fast the trace is replayed; give one of them")
    most = most_gpus or MOST_GPUS
    question = _question(source, folder, load, limits, systems or SYSTEMS, seeds, most)
    place |= {} if load.rate_scale is None else {"rate_scale": load.rate_scale}
    return question, [], place, most


def _report(found: Sequence[tuple[Answer, Prober]], axis: Any, prober: Prober, folder: Path, as_json: bool) -> None:
    """The answers as a table, a figure and data; the one to take, or else the closest, with its models and GPUs."""
    from fineserve_sim.experiment.results.summary import read_summary
    from fineserve_sim.experiment.run.files import prepare, write_json
    from fineserve_sim.experiment.show.answer import limits_text
    from fineserve_sim.experiment.show.page.build import write_page
    from fineserve_sim.experiment.show.report import report
    from fineserve_sim.experiment.sizing import to_take
    from fineserve_sim.experiment.sizing.changes import closest, place_of
    from fineserve_sim.experiment.sizing.report import as_json as data_of
    from fineserve_sim.experiment.sizing.report import draw, headline, reasons, table

    answers = [answer for answer, _ in found]
    chosen = to_take(answers, axis)
    shown = closest(found) if chosen is None else next(each for each in found if each[0] is chosen)
    summary = None
    if shown is not None:
        value = place_of(*shown, axis) if chosen is None or chosen.best is None else chosen.best.value
        summary = _results(*shown, axis.key, value, folder)
    else:
        (folder / "summary.json").unlink(missing_ok=True)  # the answer of another search
    title = prober.file().file.title
    data = data_of(answers, axis, prober.goals, title, found=summary is not None)
    prepare(folder)
    write_json(folder / "size.json", data)
    fixed = summary is not None and axis.key != "slo_scale"
    limits = limits_text(read_summary(folder)["cells"][0]) if fixed else ""
    draw(answers, axis, prober.goals, title, folder, limits)
    write_page([folder], folder / "report.html")
    if as_json:
        print_json(data)
        return
    console().print(headline(answers, axis, prober.goals), soft_wrap=True, markup=False)
    console().print(table(answers, axis, prober.goals))
    for line in reasons(answers):
        console().print(line, markup=False)
    if summary is not None:
        console().print(report(read_summary(folder)))
    typer.echo(
        f"Results in {folder}: report.html, size.json, figures/size.svg" + (", summary.json, tables" if summary else "")
    )


def _results(answer: Answer, prober: Prober, key: str, value: float, folder: Path) -> Path:
    """The whole results of an answer's system at one value: a results folder like any other."""
    from fineserve_sim.experiment import run_loaded

    return run_loaded(
        prober.experiment(answer.system, key, value), folder, executor=prober.executor, targets=prober.targets
    )


def _file(source: Path) -> Path | None:
    """The experiment file that ``source`` is, or has as a results folder; None for a trace. Raises ValueError for a folder
    without one."""
    if source.is_dir():
        resolved = source / "resolved.yaml"
        if not resolved.is_file():
            raise ValueError(f"{source}: no resolved.yaml here; give a trace, an experiment file, or a results folder")
        return resolved
    return source if source.suffix in (".yaml", ".yml") else None


def _question(
    trace: Path,
    folder: Path,
    load: _Load,
    limits: _Limits,
    systems: Sequence[str],
    seeds: int | None,
    most_gpus: int,
) -> Path:
    """The experiment file of a trace, written into the folder, so that the search can be repeated."""
    from fineserve_sim.experiment import experiment_for_trace
    from fineserve_sim.experiment.file.comparison import model_entries
    from fineserve_sim.experiment.results.resolved import write_resolved
    from fineserve_sim.experiment.run.files import prepare

    told = limits._asdict() | {"slo_scale": slo_scale_of(limits.slo_scale, limits.ttft_slo_s)}
    if not load.models:
        raise ValueError(f"{trace}: a trace needs --model, once for each of its models, such as A=llama-3.1-8b:fp8")
    parsed = model_entries(load.models, spread=load.spread)
    deals = seeds or (SEEDS if load.spread else 1)
    experiment = experiment_for_trace(
        trace, systems, parsed, seeds=deals, count=most_gpus, requests=load.requests, **told
    )
    prepare(folder)
    write_resolved(experiment, folder / "question.yaml")
    return folder / "question.yaml"


def _refuse(load: _Load, path: Path) -> None:
    """Raises ValueError for an option that means something for traces alone."""
    for name, value in zip(("--model", "--requests", "--spread", "--rate-scale"), load, strict=True):
        if value:
            raise ValueError(f"{name}: for a trace alone; {path} has models and load of its own")


def _overrides(limits: _Limits, systems: Sequence[str] | None, seeds: int | None) -> Pairs:
    """What the options replace in an experiment file."""
    import json

    if limits.slo_scale is not None:
        raise ValueError("--slo-scale: for a trace alone; give --at slo_scale=VALUE")
    pairs: Pairs = []
    for key, limit_s in (("ttft", limits.ttft_slo_s), ("tpot", limits.tpot_slo_s)):
        if limit_s is not None:
            pairs += [(f"slo.{key}_s", str(limit_s)), (f"slo.{key}", "null")]
    if limits.e2e_slo_s is not None:
        pairs.append(("slo.e2e_s", str(limits.e2e_slo_s)))
    pairs += [("systems", json.dumps(list(systems)))] if systems else []
    return [*pairs, *([("seeds", str(seeds))] if seeds else [])]


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
