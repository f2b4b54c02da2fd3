"""Commands about trace files: what is in one, and one out of a file that another program wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fineserve_sim.cli.console import JsonOption, examples, path_argument, print_json, print_rows
from fineserve_sim.cli.intake import parsed_columns

app = typer.Typer(help="Look at trace files, and make them from other files.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Look at trace files, and make them from other files."""


@app.command(
    epilog=examples(
        "fineserve-sim traces stats azure2023_conv.csv.gz", "fineserve-sim traces stats mooncake.jsonl --json"
    )
)
def stats(
    file: Annotated[Path, path_argument("FILE", "Trace file, plain or gzip.")],
    trace_format: Annotated[
        str | None,
        typer.Option("--format", help="Format, where the content does not tell it.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a trace looks like: rates, burstiness, lengths, models, prefix reuse."""
    from fineserve_traces import describe, read_trace

    trace = read_trace(file, trace_format)
    found = describe(trace).as_dict()
    if as_json:
        print_json({"source": trace.source, **found})
        return
    typer.echo(trace.source)
    print_rows(["", "value"], [[name, value] for name, value in _rows(found)], right=["value"])


@app.command(
    epilog=examples(
        "fineserve-sim traces convert access_log.jsonl --out trace.csv",
        "fineserve-sim traces convert log.csv --columns arrival=when,prompt=sent,output=got --unit ms --out trace.csv",
        "fineserve-sim traces convert sharegpt.json --rate 4 --out trace.csv",
    )
)
def convert(
    file: Annotated[Path, path_argument("FILE", "CSV, Parquet, JSON or JSON lines; plain or gzip.")],
    out: Annotated[Path, typer.Option(help="The trace file to write.")],
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="ROLE=COLUMN,...",
            help="The columns of arrival, prompt, output and model, where their names do not tell.",
            show_default=False,
        ),
    ] = None,
    unit: Annotated[
        str | None,
        typer.Option(
            help="Unit of the arrivals: s, ms, us or ns; where numbers and names do not tell.", show_default=False
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            metavar="R", help="Draw Poisson arrivals, R a second, in place of the file's.", show_default=False
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the arrivals that --rate draws.")] = 0,
) -> None:
    """Make a trace from the log of a server, the result of a load generator, or a table of any layout."""
    from fineserve_traces import TraceError, take_in

    if out.exists():
        raise TraceError(f"{out}: exists already; name another file with --out, or remove it")
    trace = take_in(file, columns=parsed_columns(columns), unit=unit, rate_per_s=rate, seed=seed)
    trace.to_csv(out)
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    typer.echo(f"{trace.source}: {len(trace)} requests of {len(trace.models)} models in {span_s:.1f} s, in {out}")


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    """The statistics as lines for people; what does not exist for the trace is a dash."""
    from fineserve_sim.experiment.show.labels import number

    rows = [
        ("requests", number(found["requests"])),
        ("rows dropped (no tokens)", number(found["dropped_rows"])),
        ("span (s)", number(found["span_s"])),
        ("rate (requests/s)", number(found["rate_per_s"])),
        ("requests a minute, mean", number(found["mean_per_minute"])),
        ("requests a minute, peak", number(found["peak_per_minute"])),
        ("cv of requests a minute", number(found["cv_per_minute"])),
        ("cv of gaps between arrivals", number(found["cv_inter_arrival"])),
    ]
    for side in ("prompt", "output"):
        rows += [(f"{side} tokens, {name}", number(value)) for name, value in found[side].items()]
    rows += [(f"share of model {name} (%)", number(100 * share)) for name, share in found["model_shares"].items()]
    if found["prefix_hit_ratio"] is not None:
        rows.append(("prompt tokens in a cached prefix (%)", number(100 * found["prefix_hit_ratio"])))
    return rows
