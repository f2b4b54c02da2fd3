"""``fineserve-run replay``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fineserve_runtime.cli.options import FileArgument, SetOption, pairs

if TYPE_CHECKING:
    from fineserve_runtime.config import RuntimeFile


def replay(
    file: FileArgument,
    *,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", "-t", metavar="TRACE", help="Requests, instead of the file's workload.", show_default=False
        ),
    ] = None,
    speed: Annotated[float, typer.Option(min=0.001, help="Play the requests of TRACE this many times as fast.")] = 1.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Only the first so many requests of TRACE.", show_default=False)
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs a cell, instead of the file's seeds.", show_default=False)
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="Results folder.", show_default=False)
    ] = None,
    overrides: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout, and nothing else there.")] = False,
) -> None:
    """Play an experiment on real engines, in real time: the same results folder as fineserve-sim run.

    Without --trace the file's own cells are played. Finished runs are kept; the same command goes on where it stopped.
    Results of NAME.yaml go to results/NAME-real unless --out names a folder.
    """
    from fineserve_runtime.config import load_file
    from fineserve_runtime.replay import with_trace

    changes: list[tuple[str, Any, str]] = [] if seeds is None else [("seeds", seeds, f"--seeds {seeds}")]
    if trace is not None:
        changes += with_trace(file, trace, speed, requests)
    elif speed != 1 or requests is not None:
        raise ValueError("--speed and --requests are for --trace; set rate_scale or workload.requests in the file")
    loaded = load_file(file, pairs(overrides), changes, serving=False)
    _play(loaded, out or Path("results") / f"{file.stem}-real", as_json=as_json)


def _play(loaded: RuntimeFile, folder: Path, *, as_json: bool) -> None:
    """Play it into the folder, draw it, and say what came of it."""
    from fineserve_runtime.replay import claim_folder, replay_on, without_model_warnings
    from fineserve_sim.cli.console import console
    from fineserve_sim.experiment import run_loaded
    from fineserve_sim.experiment.results.summary import read_summary
    from fineserve_sim.experiment.show.figures import draw
    from fineserve_sim.experiment.show.report import report

    claim_folder(folder, loaded.section.backend)

    def tell(done: float, total: int, name: str) -> None:
        typer.echo(f"{done:g}/{total}: {name}", err=True)

    summary = run_loaded(
        loaded.experiment, folder, jobs=1, decisions=True, on_progress=tell, simulate=replay_on(loaded)
    )
    without_model_warnings(summary)
    figures = draw(folder)
    if as_json:
        typer.echo(json.dumps(json.loads(summary.read_text(encoding="utf-8")), indent=1, ensure_ascii=False))
        return
    console().print(report(read_summary(folder)))
    typer.echo(
        f"Results in {folder}: summary.json, cells.parquet, requests.parquet, decisions, {len(figures)} figure files"
    )
