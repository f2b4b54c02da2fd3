"""``fineserve-calibrate validate``: how far predictions are from measured end-to-end results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fineserve_calibrate.validate import StepFactory


class Latency(StrEnum):
    """Which step model predicts."""

    ROOFLINE = "roofline"
    TABLES = "tables"


def step_factory(latency: Latency) -> StepFactory:
    """How step models are made. Tables of the H100 predict other GPUs too, scaled by the data sheets."""
    from fineserve_sim.latency import StepModel
    from fineserve_sim.latency.tables import shipped

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
    from fineserve_calibrate.validate import error_rows, predict_set, read_set
    from fineserve_calibrate.validate.text import tell

    make_step = step_factory(latency)
    sets = [read_set(path, make_step) for path in _files(set_files, data)]
    predictions = [predict_set(measured, make_step) for measured in sets]
    rows = [row for found in predictions for row in error_rows(found)]
    if as_json:
        typer.echo(json.dumps([row.as_dict() for row in rows], indent=1, ensure_ascii=False, allow_nan=False))
    else:
        tell(sets, predictions, make_step if with_sensitivity else None)
    if out is not None:
        from fineserve_calibrate.validate.figures import draw_sets

        by_set = {measured.name: found for measured, found in zip(sets, predictions, strict=True)}
        for path in draw_sets(by_set, out):
            typer.echo(f"wrote {path}", err=True)


def _files(set_files: Sequence[Path] | None, data: Path | None) -> list[Path]:
    """The files to read. Raises LayoutError naming what is missing."""
    from fineserve_calibrate.validate import KNOWN_FILES, LayoutError

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
