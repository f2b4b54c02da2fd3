"""The command that finds a plan: plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineserve_sim.cli.catalog import complete_gpu
from fineserve_sim.cli.compare import GpusOption, TraceArgument
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
from fineserve_sim.cli.intake import ColumnsOption, own_traces, taken_trace, trace_name
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
    from fineserve_sim.planning.in_time import InTime
    from fineserve_sim.planning.make import Found, Told

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
LikeOption = Annotated[
    Path | None,
    typer.Option(
        "--like",
        parser=named_path,
        metavar="FILE",
        help="Instead of --model: the models of this experiment as they are, with its GPU, engines and section runtime.",
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
    target: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Find the fewest of these GPUs that keep this share of the requests on time."
        ),
    ] = None,
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
    with interruptible():
        from fineserve_sim.experiment.file.document import to_yaml
        from fineserve_sim.experiment.run.executors import executor_of
        from fineserve_sim.planning import in_time, make, page
        from fineserve_sim.planning import like as planning_like

        types = gpu or ["h100-sxm"]
        prices = make.prices_by_type(types, prices_of(price or []), target)
        named, paths = own_traces(models or [])
        wanted, taken = planning_like.wanted(named, like)
        folder = out or Path("results") / f"plan-{trace_name(trace, paths)}"
        wish = make.Wish(
            trace=taken_trace(trace, paths, [each.id for each in wanted], columns, folder),
            models=wanted,
            gpus=gpus,
            ttft_slo_s=ttft_slo_s,
            gpu=taken.gpu if taken else types[0],
            tpot_slo_s=tpot_slo_s,
            e2e_slo_s=e2e_slo_s,
            rate_scale=rate_scale,
            load=load,
            spread=spread_of(spread, share),
            requests=requests,
            margin=margin,
            rules=make.rules_of(
                [text.split(",") for text in apart or ()],
                _pinned(pin),
                most_per_gpu,
                [each.id for each in wanted],
                gpus,
                None if survive is None else survive.value,
            ),
            kept=taken.kept if taken else {},
        )
        if seconds is None and evaluations is None:
            seconds = make.SECONDS
        budget: dict[str, Any] = {"evaluations": evaluations, "seconds": seconds, "seed": seed}
        budget |= {"tell": _tell, "path": folder / SEARCHED}
        path = folder / "plan.yaml"
        with executor_of(executor, jobs) as where:
            if every_s is not None:
                in_time.check(target)
                timed = in_time.planned(wish, every_s, where, **budget)
            else:
                found = make.found(wish, target, where, **budget, prices=prices)
        folder.mkdir(parents=True, exist_ok=True)
        if every_s is not None:
            path.write_text(to_yaml(in_time.document(timed, every_s)), encoding="utf-8")
            _tell_in_time(timed, path, as_json=as_json)
            return
        if found.best.stopped:
            typer.echo("Stopped: this is the best so far. The same command goes on from here.", err=True)
        path.write_text(to_yaml(make.plan_document(found.wish, found.best.layout)), encoding="utf-8")
        page.write_page(page.shown(found, path, target, prices.get(str(found.wish.gpu))), folder / page.PAGE)
        if as_json:
            print_json(_json(found, path))
        else:
            _print(found, path, prices.get(str(found.wish.gpu)))


def _pinned(texts: Sequence[str] | None) -> dict[str, list[str]]:
    """GPUs by model, of ``A=0,1``."""
    parts = [text.partition("=") for text in texts or ()]
    return {name: numbers.split(",") for name, _, numbers in parts}


def _tell(told: Told) -> None:
    typer.echo(
        f"  {told.elapsed_s:5.0f} s, {told.best.runs} simulated: {100 * told.share:.2f} % on time; "
        f"no plan keeps more than {100 * told.bound:.1f} %",
        err=True,
    )


def _json(found: Found, path: Path) -> dict[str, Any]:
    return {
        "plan": str(path),
        "gpu": found.wish.gpu,
        "gpus": found.wish.gpus,
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
            each.situation: {"plan": each.plan, "best_system": each.best_system, "half_width": each.half_width}
            for each in found.judged
        },
        "promised": found.promised,
    }


def _tell_in_time(found: InTime, path: Path, *, as_json: bool) -> None:
    from rich.table import Table

    from fineserve_sim.planning.in_time import RIVALS

    if as_json:
        print_json({"plan": str(path), **asdict(found) | {"wish": None}})
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


def _print(found: Found, path: Path, usd_per_gpu_hour: float | None) -> None:
    from rich.table import Table

    from fineserve_sim.planning.judge import warnings

    where = Table("GPU", "models", box=None)
    for gpu in range(found.wish.gpus):
        here = [
            f"{each.id} ({each.options[home.option][0]}" + (f", TP {len(group)})" if len(group) > 1 else ")")
            for each, home in found.homes
            for group in home.groups
            if gpu in group
        ]
        where.add_row(str(gpu), ", ".join(here) or "-")
    kept = Table("requests on time", "plan", f"{found.best_system}'s placement", "± (difference)", box=None)
    for row in found.judged:
        shares = (f"{100 * share:.1f} %" for share in (row.plan, row.best_system, row.half_width))
        kept.add_row(row.situation, *shares)
    console().print(where, kept)
    for line in warnings(found.judged, found.promised):
        typer.echo(line)
    for each, home in found.homes:
        if not home.groups:
            typer.echo(f"{each.id} has no GPU: none has room left")
    usd = "" if usd_per_gpu_hour is None else f", {usd_per_gpu_hour * found.wish.gpus:,.2f} dollars an hour"
    typer.echo(f"{found.wish.gpus} {found.wish.gpu}{usd}. Plan in {path}: fineserve-sim run {path}")
    typer.echo(f"Why each model is where it is, and what else was asked: {path.with_name('plan.html')}")
