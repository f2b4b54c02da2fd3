"""``fineserve-calibrate sharing``: what sharing a GPU was measured to cost, beside what the simulator's laws say."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fineserve_calibrate.sharing.caps import (
    AUTHORS_FILES,
    FILE,
    CapErrors,
    cap_errors,
    fit_saturation,
    read_authors_caps,
    read_caps,
)
from fineserve_calibrate.sharing.pairs import PAIRS, REPLICAS, Compared, compare_pairs, compare_replicas
from fineserve_sim.cli.console import console
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.sharing import MEMORY_SATURATION
from fineserve_sim.latency.tables import shipped


class SharingError(ValueError):
    """A folder without the measurements; one line."""


def sharing(
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="Folder with the measurements, in it or in sharing/.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows.")] = False,
) -> None:
    """Slowdowns of engines under thread caps, MPS, time-slicing and MIG: measured, and predicted by the laws."""
    folder = data / "sharing" if (data / "sharing").is_dir() else data
    missing = [name for name in (FILE, PAIRS, REPLICAS) if not (folder / name).is_file()]
    if missing:
        raise SharingError(f"--data {data}: no {missing[0]} in it")
    make_step = partial(StepModel, tables=shipped())
    rows = read_caps(folder / FILE, make_step)
    authors = [folder.parent / "e2e" / name for name in AUTHORS_FILES]
    profiles = [read_authors_caps(path, make_step) for path in authors if path.is_file()]
    caps = [one for found in (rows, *profiles) for one in cap_errors(found)]
    compared = [*compare_replicas(folder / REPLICAS), *compare_pairs(folder / PAIRS, make_step)]
    if as_json:
        found = {"caps": [one._asdict() for one in caps], "compared": [one._asdict() for one in compared]}
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    screen = console()
    screen.print(_cap_table(caps))
    fitted = fit_saturation(rows)
    screen.print(f"memory saturates at {fitted:.3f} of the SMs on LLaMA-7B and 13B; in use {MEMORY_SATURATION}\n")
    screen.print(_compared_table(compared))


def _cap_table(caps: list[CapErrors]) -> Table:
    table = Table(
        title="One engine under a thread cap: slowdown against all SMs",
        box=None,
    )
    for header in ("model", "TP", "phase", "", "n", "median", "p90", "bias"):
        table.add_column(header, justify="left" if header in ("model", "phase", "") else "right")
    for one in caps:
        numbers = (str(one.n), f"{one.median_abs:.1%}", f"{one.p90_abs:.1%}", f"{one.bias:+.1%}")
        table.add_row(one.model, str(one.tp), one.phase, "held out" if one.held_out else "fitted", *numbers)
    return table


def _compared_table(compared: list[Compared]) -> Table:
    table = Table(
        title="Engines that share a GPU: how many times slower than alone (FP8 pair: throughput ratio)", box=None
    )
    for header in (
        "source",
        "GPU",
        "mode",
        "engines",
        "workload",
        "beside",
        "metric",
        "measured",
        "predicted",
        "error",
        "",
    ):
        table.add_column(header, overflow="fold")
    for one in compared:
        numbers = (_number(one.measured), _number(one.predicted), _error(one), "fitted" if one.fitted else "")
        table.add_row(
            one.source, one.gpu, one.mode, str(one.engines), one.workload, one.beside, one.metric, *numbers
        )  # fmt: skip
    return table


def _error(one: Compared) -> str:
    if one.measured is None or one.predicted is None:
        return "-"
    return f"{one.predicted / one.measured - 1:+.0%}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
