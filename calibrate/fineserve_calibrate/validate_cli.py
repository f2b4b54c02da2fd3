"""``fineserve-calibrate validate``: how far predictions are from measured end-to-end results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.table import Table

from fineserve_calibrate.validate import (
    KNOWN_FILES,
    ErrorRow,
    LayoutError,
    MeasuredSet,
    Predicted,
    StepFactory,
    campaign,
    error_rows,
    predict_set,
    read_set,
    sensitivity,
)
from fineserve_calibrate.validate.errors import relative
from fineserve_sim.cli.console import console
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.tables import shipped

MOST_PARTS = 3
"""Parts of a set (scenarios, GPUs) whose sensitivities are printed one by one."""


class Latency(StrEnum):
    """Which step model predicts."""

    ROOFLINE = "roofline"
    TABLES = "tables"


def step_factory(latency: Latency) -> StepFactory:
    """How step models are made. Tables of the H100 predict other GPUs too, scaled by the data sheets."""
    return StepModel if latency is Latency.ROOFLINE else partial(StepModel, tables=shipped())


def validate(
    set_files: Annotated[
        list[Path] | None,
        typer.Option("--set", metavar="FILE", help="Validate this file instead, of a known column layout; may repeat."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="Folder with the measured sets, in it or in e2e/.")
    ] = None,
    latency: Annotated[Latency, typer.Option("--latency", help="The step model.")] = Latency.TABLES,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Write the figures here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows to stdout, and nothing else there.")] = False,
    with_sensitivity: Annotated[
        bool, typer.Option("--sensitivity/--no-sensitivity", help="Also predict under other readings of each set.")
    ] = True,
) -> None:
    """Predict every row of measured end-to-end sets; print median, p90 and bias of the errors of TTFT and TPOT."""
    make_step = step_factory(latency)
    sets = [read_set(path, make_step) for path in _files(set_files, data)]
    predictions = [predict_set(measured, make_step) for measured in sets]
    rows = [row for found in predictions for row in error_rows(found)]
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=1, ensure_ascii=False, allow_nan=False))
    else:
        _report(sets, predictions, make_step if with_sensitivity else None)
    if out is not None:
        from fineserve_calibrate.validate.figures import draw_sets

        by_set = {measured.name: found for measured, found in zip(sets, predictions, strict=True)}
        for path in draw_sets(by_set, out):
            typer.echo(f"wrote {path}", err=True)


def _files(set_files: Sequence[Path] | None, data: Path | None) -> list[Path]:
    """The files to read. Raises LayoutError naming what is missing."""
    if not set_files and data is None:
        raise LayoutError("name what to validate: --data DIR with the measured sets, or --set FILE")
    if set_files:
        missing = [path for path in set_files if not path.is_file()]
        if missing:
            raise LayoutError(f"--set {missing[0]}: no such file")
        return list(set_files)
    assert data is not None
    folder = data / "e2e" if (data / "e2e").is_dir() else data
    found = [folder / name for name in KNOWN_FILES if (folder / name).is_file()]
    if not found:
        raise LayoutError(f"--data {data}: none of the measured sets is there; expected {', '.join(KNOWN_FILES)}")
    return found


def _report(sets: Sequence[MeasuredSet], predictions: Sequence[list[Predicted]], make_step: StepFactory | None) -> None:
    screen = console()
    for measured, found in zip(sets, predictions, strict=True):
        screen.print(_table(measured.name, error_rows(found)))
        for line in _notes(measured):
            screen.print(f"  {line}", markup=False)
        for line in _other_readings(measured, make_step) if make_step is not None else ():
            screen.print(f"  {line}", markup=False)
        screen.print()


def _other_readings(measured: MeasuredSet, make_step: StepFactory) -> Iterator[str]:
    """One line for each other reading of the set, then one for each named reading of each engine and version."""
    for reading in measured.sensitivities:
        before, after = (predict_set(read, make_step) for read in sensitivity(measured, reading))
        yield f"sensitivity, {reading.what}: {_moves(before, after)}"
    for engine in dict.fromkeys(case.campaign for case in measured.cases if case.reading):
        mine = campaign(measured, engine)
        for reading in measured.readings:
            read = replace(mine, cases=tuple(map(reading.change, mine.cases)))
            taken = " (taken)" if mine.cases[0].reading == reading.what else ""
            ttft, tpot = (_median(predict_set(read, make_step), column) for column in ("ttft_s", "tpot_s"))
            yield f"reading of {engine}, {reading.what}: TTFT {ttft:.1%}, TPOT {tpot:.1%}{taken}"


def _table(title: str, rows: Sequence[ErrorRow]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, header_style="bold", title_justify="left")
    for header in ("set", "backend", "model", "precision"):
        table.add_column(header, overflow="fold")
    for header in ("TP", "n", "TTFT med", "p90", "bias", "TPOT med", "p90", "bias"):
        table.add_column(header, justify="right")
    if counted := any(row.throughput_median_abs is not None for row in rows):
        table.add_column("requests/s med", justify="right")
    for row in rows:
        ttft = [_percent(row.ttft_median_abs), _percent(row.ttft_p90_abs), _signed(row.ttft_bias)]
        tpot = [_percent(row.tpot_median_abs), _percent(row.tpot_p90_abs), _signed(row.tpot_bias)]
        more = [_percent(row.throughput_median_abs)] if counted else []
        table.add_row(row.set, row.backend, row.model, row.precision, str(row.tp), str(row.n), *ttft, *tpot, *more)
    return table


def _notes(measured: MeasuredSet) -> list[str]:
    notes = [f"assumed: {assumption}" for assumption in measured.assumptions]
    hosts = sorted({case.serving.deployment.name for case in measured.cases})
    notes += [f"host time: deployment {', '.join(hosts)}"] if hosts else []
    if measured.kind != "prediction":
        notes.append(f"{measured.kind}: what it alone records is taken from rows that are not reported")
    if measured.shares_prefixes:
        notes.append("prompts share prefixes, which the engines' caches keep in the simulation, too")
    for (backend, model, reason), n in sorted(measured.unsupported.items()):
        notes.append(f"unsupported: {n} rows, {backend} {model}: {reason}")
    return notes


def _moves(before: Sequence[Predicted], after: Sequence[Predicted]) -> str:
    """Median absolute errors as assumed and read otherwise: of each part of a set that has few, else over all rows tried."""
    parts = list(dict.fromkeys(one.case.label.set for one in before))
    if not 1 < len(parts) <= MOST_PARTS:
        return _moved(before, after)
    found = []
    for part in parts:
        mine = ([one for one in side if one.case.label.set == part] for side in (before, after))
        found.append(f"{part.rsplit(', ', 1)[-1]}: {_moved(*mine)}")
    return "; ".join(found)


def _moved(before: Sequence[Predicted], after: Sequence[Predicted]) -> str:
    changes = []
    for column, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT")):
        medians = [_median(found, column) for found in (before, after)]
        changes.append(f"{name} {medians[0]:.1%} -> {medians[1]:.1%}")
    return ", ".join(changes)


def _median(found: Sequence[Predicted], column: str) -> float:
    """Median absolute error over all rows; NaN where none has the measurement."""
    errors = np.concatenate([relative(getattr(one, column), getattr(one.case, column)) for one in found])
    return float(np.median(np.abs(errors))) if len(errors) else np.nan


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1%}"
