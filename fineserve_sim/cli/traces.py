"""Commands about trace files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fineserve_sim.cli.console import JsonOption, examples, path_argument, print_json, print_rows

app = typer.Typer(help="Look at trace files.", no_args_is_help=True)


@app.callback()
def options() -> None:
    """Look at trace files."""


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
