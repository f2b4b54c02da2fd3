"""The command that finds a plan: plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineserve_sim.cli.catalog import complete_gpu
from fineserve_sim.cli.compare import TraceArgument
from fineserve_sim.cli.console import (
    ExecutorOption,
    JobsOption,
    JsonOption,
    OutOption,
    console,
    examples,
    interruptible,
    named_path,
    print_json,
)
from fineserve_sim.cli.intake import ColumnsOption, hint_spread, own_traces, taken_trace, trace_name
from fineserve_sim.cli.limits import (
    E2eOption,
    MarginOption,
    RequestsOption,
    ShareOption,
    Spreading,
    SpreadOption,
    TpotOption,
    spread_of,
)
from fineserve_sim.cli.size import PricesOption, prices_of

if TYPE_CHECKING:
    from rich.table import Table

    from fineserve_sim.planning.find import Budget, Told
    from fineserve_sim.planning.in_time import InTime
    from fineserve_sim.planning.make import Found
    from fineserve_sim.planning.question import Question

ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model",
        "-m",
        metavar="NAME=MODEL:PRECISIONS:DEGREES@TRACE",
        help="A model and the ways in which it may run, the best first, as in chat=llama-3.1-8b:fp8|awq:1|2; repeat for each.",
    ),
]
TypesOption = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        help="GPU of the catalog, h100-sxm if none is given; of several the cheapest is taken.",
        show_default=False,
        autocompletion=complete_gpu,
    ),
]
GpusOption = Annotated[
    str,
    typer.Option(
        metavar="N|KIND:N,...",
        help="GPUs to plan for, as in 8, or of several kinds, as in h100-sxm:4,l40s:8.",
        show_default=False,
    ),
]
TargetOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SHARE",
        help="Find the fewest or cheapest of these GPUs that keep this share of the requests on time: all:0.95 or 0.95; "
        "each:all:0.95 of each model; both with a comma.",
        show_default=False,
    ),
]
LikeOption = Annotated[
    Path | None,
    typer.Option(
        "--like",
        parser=named_path,
        metavar="FILE",
        help="Instead of --model: the models of this experiment as they are, its engines, runtime, and GPU if none is named.",
        show_default=False,
    ),
]
SecondsOption = Annotated[
    float | None, typer.Option(min=1.0, help="How long to search: 60 if nothing else is said.", show_default=False)
]
SEARCHED = "searched.jsonl"
"""What was simulated: a search that was stopped goes on from it."""

EvaluationsOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Search until so many parts of clusters were simulated: the same answer on every machine."
    ),
]


class Survive(StrEnum):
    """What may be lost."""

    gpu = "gpu"
    node = "node"


def register(app: typer.Typer) -> None:
    """Add the command of this module."""
    app.command(
        epilog=examples(
            "fineserve-sim plan trace.csv --spread --model a=llama-3.1-8b:fp8 --model b=qwen3-32b:W16A16|fp8 --gpus 4 "
            "--rate-scale 10 --ttft-slo 1 --seconds 60"
        ),
        cls=Spreading,
    )(plan)


def plan(
    trace: TraceArgument = None,
    *,
    models: ModelsOption = None,
    like: LikeOption = None,
    gpus: GpusOption,
    ttft_slo_s: Annotated[float, typer.Option("--ttft-slo", min=1e-6, help="TTFT limit in seconds.")],
    gpu: TypesOption = None,
    price: PricesOption = None,
    tpot_slo_s: TpotOption = None,
    e2e_slo_s: E2eOption = None,
    rate_scale: Annotated[float, typer.Option(min=1e-6, help="Replay this many times as fast.")] = 1.0,
    load: Annotated[float, typer.Option(min=1e-6, help="Head room: plan for this many times the load.")] = 1.0,
    requests: RequestsOption = None,
    spread: SpreadOption = False,
    share: ShareOption = None,
    columns: ColumnsOption = None,
    margin: MarginOption = None,
    apart: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="Models that share no GPU; may be repeated.")
    ] = None,
    pin: Annotated[
        list[str] | None, typer.Option(metavar="A=0,1", help="GPUs that a model may stand on; may be repeated.")
    ] = None,
    most_per_gpu: Annotated[int | None, typer.Option(min=1, help="Engines on a GPU, at most.")] = None,
    survive: Annotated[
        Survive | None, typer.Option(help="Every model outlives the loss of any one GPU, or node.", show_default=False)
    ] = None,
    target: TargetOption = None,
    every_s: Annotated[
        float | None,
        typer.Option(
            "--every",
            min=1.0,
            metavar="SECONDS",
            help="Plan in time: a placement for each stretch of so many seconds, chosen by the one before.",
            show_default=False,
        ),
    ] = None,
    seconds: SecondsOption = None,
    evaluations: EvaluationsOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    out: OutOption = None,
    jobs: JobsOption = None,
    executor: ExecutorOption = "local",
    as_json: JsonOption = False,
) -> None:
    """Find a plan: which model in which precision and degree on which GPUs.

    The plan is chosen by the first two thirds of the requests and judged by the others. With --every, each part of the trace
    judges what was chosen by the part before.
    """
    rules: dict[str, Any] = {"apart": [text.split(",") for text in apart or ()], "pin": _pinned(pin)}
    rules |= {"most_per_gpu": most_per_gpu, "survive": None if survive is None else survive.value}
    wished: dict[str, Any] = {"ttft_slo_s": ttft_slo_s, "tpot_slo_s": tpot_slo_s, "e2e_slo_s": e2e_slo_s}
    wished |= {"rate_scale": rate_scale, "load": load, "requests": requests, "margin": margin}
    with interruptible():
        from fineserve_sim.experiment.run.executors import executor_of
        from fineserve_sim.planning.gpus import numbers_of
        from fineserve_sim.planning.like import wanted
        from fineserve_sim.planning.question import budget, question
        from fineserve_sim.planning.target import target_of

        named, paths = own_traces(models or [])
        folder = out or Path("results") / f"plan-{trace_name(trace, paths)}"
        own, taken = wanted(named, like)
        ids = [each.id for each in own]
        wished["spread"] = spread_of(spread, share)
        file = taken_trace(trace, paths, ids, columns, folder)
        numbers, prices = numbers_of(gpus), prices_of(price or [])
        asked = question(file, own, taken, numbers, gpu or [], prices, target_of(target), **rules, **wished)
        with executor_of(executor, jobs) as where, hint_spread(file, ids, bool(asked.wish.spread)):
            search = budget(evaluations, seconds, seed, path=folder / SEARCHED, executor=where, tell=_tell)
            if every_s is None:
                _plan(asked, search, folder, as_json=as_json)
            else:
                _plan_in_time(asked, every_s, search, folder, as_json=as_json)


def _plan(asked: Question, budget: Budget, folder: Path, *, as_json: bool) -> None:
    """Search, write the plan and its page, and print."""
    from fineserve_sim.planning import make, page

    found = make.found(asked, budget)
    _tell_stopped(stopped=found.best.stopped)
    path = _written(found.document, folder)
    page.write_page(page.shown(found, path, asked.prices), folder / page.PAGE)
    if as_json:
        print_json(_json(found, path))
    else:
        _print(found, path)


def _plan_in_time(asked: Question, every_s: float, budget: Budget, folder: Path, *, as_json: bool) -> None:
    """The same of a plan in time, which is written before it is judged; one that was stopped is not."""
    from fineserve_sim.planning import in_time

    in_time.check(asked.wish, asked.target)
    timetable = in_time.planned(asked.wish, every_s, budget)
    path = _written(in_time.document(timetable), folder)
    _tell_stopped(stopped=timetable.stopped)
    if not timetable.stopped:
        _tell_in_time(in_time.judged(timetable), path, as_json=as_json)
    elif as_json:
        print_json({"plan": str(path), "stopped": True})
    else:
        typer.echo(f"Plan in {path}: fineserve-sim run {path}")


def _written(document: dict[str, Any], folder: Path) -> Path:
    from fineserve_sim.experiment.file.document import to_yaml

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.yaml"
    path.write_text(to_yaml(document), encoding="utf-8")
    return path


def _tell_stopped(*, stopped: bool) -> None:
    from fineserve_sim.planning.words import STOPPED

    if stopped:
        typer.echo(STOPPED, err=True)


def _pinned(texts: Sequence[str] | None) -> dict[str, list[str]]:
    """GPUs by model, of ``A=0,1``."""
    parts = [text.partition("=") for text in texts or ()]
    return {name: numbers.split(",") for name, _, numbers in parts}


def _tell(told: Told) -> None:
    typer.echo(
        f"  {told.about}{told.elapsed_s:.0f} s, {told.best.runs} simulated: {100 * told.share:.2f} % on time; "
        f"no plan keeps more than {100 * told.bound:.1f} %",
        err=True,
    )


def _json(found: Found, path: Path) -> dict[str, Any]:
    return {
        "plan": str(path),
        "gpus": [{"gpu": gpu, "count": count} for gpu, count in found.wish.kinds],
        "usd_per_hour": found.usd_per_hour,
        "holds": found.holds,
        "stopped": found.best.stopped,
        "models": {
            each.id: {
                "precision": each.options[home.option][0],
                "tp": each.options[home.option][1],
                "gpus": home.groups,
            }
            for each, home in found.homes
        },
        "best_system": found.best_system,
        "judged": {
            each.situation: {name: value for name, value in asdict(each).items() if name != "situation"}
            for each in found.judged
        },
        "promised": found.promised,
        "band": found.sure.told(),
    }


def _tell_in_time(found: InTime, path: Path, *, as_json: bool) -> None:
    from rich.table import Table

    from fineserve_sim.planning.in_time import RIVALS

    if as_json:
        print_json({"plan": str(path), "stopped": False, **asdict(found)})
        return
    kept = Table("from s", "engines came", "GiB moved", "on time", *RIVALS, box=None)
    for window in found.windows:
        shares = (f"{100 * share:.1f} %" for share in (window.on_time, *window.rivals))
        kept.add_row(f"{window.from_s:,.0f}", str(window.came), f"{window.moved_bytes / 2**30:.0f}", *shares)
    totals = (f"{100 * share:.1f} ± {100 * half_width:.1f} %" for share, half_width in found.rivals)
    kept.add_row("all but the first", "", "", f"{100 * found.on_time:.1f} %", *totals)
    console().print(kept)
    typer.echo("The first window is looked at, not judged; ± is of the difference to the plan in time.")
    typer.echo(f"Plan in {path}: fineserve-sim run {path}")


def _print(found: Found, path: Path) -> None:
    console().print(_where(found), _kept(found))
    for line in found.warnings:
        typer.echo(line)
    for each, home in found.homes:
        if not home.groups:
            typer.echo(f"{each.id} has no GPU: none has room left")
    usd = "" if found.usd_per_hour is None else f", {found.usd_per_hour:,.2f} dollars an hour"
    row = found.judged[0]
    typer.echo(f"{100 * row.plan:.1f} % of the unseen requests on time ({found.sure}). {found.sure.why}")
    typer.echo(f"{found.wish.cluster}{found.sure.beside_gpus}{usd}. Plan in {path}: fineserve-sim run {path}")
    typer.echo(f"Why each model is where it is, and what else was asked: {path.with_name('plan.html')}")


def _where(found: Found) -> Table:
    """A row a GPU: the models on it."""
    from rich.table import Table

    where = Table("GPU", "models", box=None)
    kinds = [str(kind) for kind, count in found.wish.kinds for _ in range(count)]
    for gpu, kind in enumerate(kinds):
        here = [
            f"{each.id} ({each.options[home.option][0]}" + (f", TP {len(group)})" if len(group) > 1 else ")")
            for each, home in found.homes
            for group in home.groups
            if gpu in group
        ]
        where.add_row(f"{gpu} {kind}" if len(set(kinds)) > 1 else str(gpu), ", ".join(here) or "-")
    return where


def _kept(found: Found) -> Table:
    """A row a situation: what the plan keeps, and the best system's placement."""
    from rich.table import Table

    headers = ["requests on time", "plan", "worst model", f"{found.best_system}'s placement", "± (difference)"]
    kept = Table(*headers, box=None)
    for row in found.judged:
        plan, worst, system, half_width = (
            f"{100 * share:.1f} %" for share in (row.plan, row.worst, row.best_system, row.half_width)
        )
        kept.add_row(row.situation, plan, f"{row.worst_model} {worst}", system, half_width)
    return kept
