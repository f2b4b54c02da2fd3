"""``fineserve-calibrate sharing``: what sharing a GPU was measured to cost, beside what the simulator's laws say."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer


class SharingError(ValueError):
    """A folder without the measurements; one line."""


def sharing(
    data: Annotated[
        Path, typer.Option("--data", metavar="DIR", help="Folder with the measurements, in it or in sharing/.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON rows.")] = False,
) -> None:
    """Slowdowns of engines under thread caps, MPS, time-slicing and MIG: measured, and predicted by the laws."""
    from fineserve_calibrate.sharing.caps import (
        AUTHORS_FILES,
        FILE,
        cap_errors,
        fit_saturation,
        read_authors_caps,
        read_caps,
    )
    from fineserve_calibrate.sharing.pairs import PAIRS, REPLICAS, compare_pairs, compare_replicas
    from fineserve_calibrate.sharing.text import cap_table, compared_table
    from fineserve_sim.cli.console import console
    from fineserve_sim.latency import StepModel
    from fineserve_sim.latency.sharing import MEMORY_SATURATION
    from fineserve_sim.latency.tables import shipped

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
    screen.print(cap_table(caps))
    fitted = fit_saturation(rows)
    screen.print(f"memory saturates at {fitted:.3f} of the SMs on LLaMA-7B and 13B; in use {MEMORY_SATURATION}\n")
    screen.print(compared_table(compared))
