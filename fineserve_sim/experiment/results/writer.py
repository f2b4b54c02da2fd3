"""The results folder: one row a request, one row a cell, and the summary that figures, reports and claims are made of.

Nothing here is a time, a path or a host name, and everything is written in the order of the file, so equal inputs give
equal bytes. Requests are streamed cell by cell; no more than one cell is in memory.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fineserve_sim import __version__
from fineserve_sim.experiment.file.plan import Experiment, Point
from fineserve_sim.experiment.results.metrics import measure
from fineserve_sim.experiment.results.resolved import write_resolved
from fineserve_sim.experiment.results.summary import cell_entry, summary_of
from fineserve_sim.experiment.results.tables import RequestWriter, run_row
from fineserve_sim.experiment.run.files import atomic, write_json
from fineserve_sim.experiment.run.runner import Outcome
from fineserve_sim.experiment.run.store import PARQUET, Store, code_digest

_PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "simpy", "pydantic", "pyyaml", "matplotlib")


def write_results(experiment: Experiment, outcomes: Sequence[Outcome], store: Store, out: Path) -> Path:
    """Write everything but figures and return the path of summary.json, which comes last."""
    write_resolved(experiment, out / "resolved.yaml")
    write_json(out / "environment.json", environment())
    rows: list[dict[str, Any]] = []
    cells: dict[Point, dict[str, Any]] = {}
    with atomic(out / "requests.parquet") as temporary, RequestWriter(temporary, experiment) as requests:
        for outcome in outcomes:
            measures = []
            for seed, key in enumerate(outcome.keys):
                run = store.read(key)
                requests.write(outcome, seed, run)
                measures.append(measure(run, outcome.limits_s, outcome.tpot_limits_s))
                rows.append(run_row(experiment, outcome, seed, measures[-1]))
            cells[outcome.point] = cell_entry(experiment, outcome, measures)
    with atomic(out / "cells.parquet") as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary, **PARQUET)
    write_json(out / "summary.json", summary_of(experiment, outcomes, cells, store))
    return out / "summary.json"


def environment() -> dict[str, Any]:
    """What the results depend on beside the file: versions, platform and the digest of our own sources."""
    return {
        "fineserve": __version__,
        "code": code_digest(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(name) for name in _PACKAGES},
    }
