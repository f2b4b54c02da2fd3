"""The results folder: tables of requests, runs, models, GPUs and placements, and the summary that figures, reports and claims
are made of.

Nothing here is a time, a path or a host name, and everything is written in the order of the file, so equal inputs give
equal bytes. Requests are streamed cell by cell; no more than one cell is in memory. Where metrics alone were kept there is no
table of requests. The file as it was run is there, too, with every default and path, so that it runs from anywhere.
"""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fineserve_sim import __version__
from fineserve_sim.cluster import GpuUse
from fineserve_sim.experiment.file.document import to_yaml
from fineserve_sim.experiment.file.plan import Experiment, Point
from fineserve_sim.experiment.results.answer import DEFAULT_TARGETS, Targets
from fineserve_sim.experiment.results.metrics import measure
from fineserve_sim.experiment.results.places import Places, kv_left
from fineserve_sim.experiment.results.summarised import measures_of
from fineserve_sim.experiment.results.summary import Judged, cell_entry, is_bound, runs_told, summary_of
from fineserve_sim.experiment.results.tables import RequestWriter, model_rows, place_row, run_row
from fineserve_sim.experiment.run.files import atomic, write_json
from fineserve_sim.experiment.run.runner import Outcome
from fineserve_sim.experiment.run.store import PARQUET, Store, code_digest

TABLES = ("cells", "models", "gpus", "placements")
"""Tables of a row a run, a model of a run, a GPU of a run, and an instance on a GPU of a run (docs/answers.md)."""

_PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "simpy", "pydantic", "pyyaml", "matplotlib")


def write_results(
    experiment: Experiment, outcomes: Sequence[Outcome], store: Store, out: Path, targets: Targets = DEFAULT_TARGETS
) -> Path:
    """Write everything but figures and return the path of summary.json, which comes last. A summary of other runs goes first,
    so that a process killed in between leaves none beside other tables, and so does the answer of a search."""
    (out / "size.json").unlink(missing_ok=True)
    if runs_told(out) != {key for outcome in outcomes for key in outcome.keys}:
        (out / "summary.json").unlink(missing_ok=True)
    write_resolved(experiment, out / "resolved.yaml")
    write_json(out / "environment.json", environment())
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    cells: dict[Point, dict[str, Any]] = {}
    with RequestWriter(out, experiment) as requests:
        for outcome in outcomes:
            runs = []
            for seed in range(len(outcome.keys)):
                runs.append(_judged(experiment, outcome, seed, store, requests))
                _add_rows(rows, experiment, outcome, seed, runs[-1])
            cells[outcome.point] = cell_entry(experiment, outcome, runs, targets)
    for name, table in rows.items():
        _write_table(out / f"{name}.parquet", table)
    write_json(out / "summary.json", summary_of(experiment, outcomes, cells, store, targets))
    return out / "summary.json"


def _judged(experiment: Experiment, outcome: Outcome, seed: int, store: Store, requests: RequestWriter) -> Judged:
    """One run by its limits. Its requests are written, where they were kept."""
    key = outcome.keys[seed]
    meta, summary = store.meta(key), store.summary(key)
    setup = experiment.setup_of(outcome.point)
    system = setup.systems[outcome.point.system]
    places = Places(setup, meta["placement"], system)
    if summary is not None:
        measures, left = measures_of(summary), summary["kv_left"]
    else:
        run, unplaced = store.read(key), meta["placement"]["unplaced"]
        requests.write(outcome, seed, run, unplaced)
        measures, left = measure(run, outcome.limits_s, *outcome.limits[1:], unplaced), kv_left(run)
    uses = [GpuUse(**use) for use in meta["gpu_use"]]
    return Judged(measures, places, [] if is_bound(system) else places.gpus(uses, left))


def _add_rows(
    rows: Mapping[str, list[dict[str, Any]]], experiment: Experiment, outcome: Outcome, seed: int, run: Judged
) -> None:
    """The rows of one run in every table."""
    place = place_row(experiment, outcome, seed)
    instances = Counter(instance["model"] for instance in run.places.instances)
    rows["cells"].append(run_row(experiment, outcome, seed, run.measures))
    rows["models"] += [place | row for row in model_rows(run.measures, outcome.limits, instances)]
    rows["gpus"] += [place | entry for entry in run.gpus]
    rows["placements"] += [place | row for row in run.places.rows()] if run.gpus else []


def _write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    with atomic(path) as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary, **PARQUET)


def environment() -> dict[str, Any]:
    """The things besides the file on which results depend: versions, platform and the digest of our own sources."""
    return {
        "fineserve": __version__,
        "code": code_digest(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": {name: version(name) for name in _PACKAGES},
    }


def write_resolved(experiment: Experiment, path: Path) -> None:
    """Write the file as it was run. The sections ``quick`` and ``runtime`` are left out."""
    file = experiment.file
    if any(setup.names_files for setup in experiment.setups.values()):
        file = file.model_copy(update={"folder": str(experiment.setup.folder)})
    data = file.model_dump(mode="json", exclude_none=True, exclude={"quick", "runtime"})
    with atomic(path) as temporary:
        temporary.write_text(to_yaml(data), encoding="utf-8")
