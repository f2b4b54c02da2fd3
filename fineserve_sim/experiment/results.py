"""The results folder: one row a request, one row a cell, and the summary that figures, reports and claims are made of.

Nothing here is a time, a path or a host name, and everything is written in the order of the file, so equal inputs give
equal bytes. Requests are streamed cell by cell; no more than one cell is in memory.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from fineserve_sim import __version__
from fineserve_sim.cluster.scenario import Fate
from fineserve_sim.experiment.axes import LOAD_AXES
from fineserve_sim.experiment.claims import evaluate_claims
from fineserve_sim.experiment.files import atomic, write_json
from fineserve_sim.experiment.metrics import CLUSTER_WIDE, Measures, RunData, estimate, measure, present
from fineserve_sim.experiment.plan import Experiment, Point
from fineserve_sim.experiment.slo import BaseSlo
from fineserve_sim.experiment.stats import Estimate
from fineserve_sim.experiment.step_times import pooled, warnings
from fineserve_sim.experiment.store import PARQUET, Store, code_digest
from fineserve_sim.experiment.workload import describe, mean_lengths

SCHEMA = 1
ENOUGH_REQUESTS = 2000
ENOUGH_PRECISION = 0.02
"""A cell says so when it measured fewer requests a run, or when its attainment is less certain than two points."""

_PACKAGES = ("numpy", "scipy", "pandas", "pyarrow", "simpy", "pydantic", "pyyaml", "matplotlib")
_FATES = [fate.name.lower() for fate in sorted(Fate)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished point: the base SLOs of each model (TPOT: of none where there is no limit), and the key of its run for each
    seed."""

    point: Point
    slos: Mapping[str, BaseSlo]
    tpot_slos: Mapping[str, BaseSlo]
    keys: tuple[str, ...]

    @property
    def limits_s(self) -> dict[str, float]:
        return {name: slo.at(self.point.slo_scale) for name, slo in self.slos.items()}

    @property
    def tpot_limits_s(self) -> dict[str, float]:
        return {name: slo.at(self.point.slo_scale) for name, slo in self.tpot_slos.items()}


def write_results(experiment: Experiment, outcomes: Sequence[Outcome], store: Store, out: Path) -> Path:
    """Write everything but figures and return the path of summary.json, which comes last."""
    _write_resolved(experiment, out / "resolved.yaml")
    write_json(out / "environment.json", environment())
    rows: list[dict[str, Any]] = []
    cells: dict[Point, dict[str, Any]] = {}
    with atomic(out / "requests.parquet") as temporary, _RequestWriter(temporary, experiment) as requests:
        for outcome in outcomes:
            measures = []
            for seed, key in enumerate(outcome.keys):
                run = store.read(key)
                requests.write(outcome, seed, run)
                measures.append(measure(run, outcome.limits_s, outcome.tpot_limits_s))
                rows.append(_row(experiment, outcome, seed, measures[-1]))
            cells[outcome.point] = _cell(experiment, outcome, measures)
    with atomic(out / "cells.parquet") as temporary:
        pq.write_table(pa.Table.from_pylist(rows), temporary, **PARQUET)
    write_json(out / "summary.json", _summary(experiment, outcomes, cells, store))
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


def _write_resolved(experiment: Experiment, path: Path) -> None:
    """The file as it was run: every default written out, relative paths made absolute so that it runs from anywhere."""
    data = experiment.file.model_dump(mode="json", exclude_none=True, exclude={"quick", "runtime"})
    folder = experiment.setup.folder
    for key in ("trace", "data_dir"):
        if key in data["workload"]:
            data["workload"][key] = str(folder / data["workload"][key])
    if "step_times" in data["engine"]:
        data["engine"]["step_times"] = str(folder / data["engine"]["step_times"])
    for model in data["models"]:
        if isinstance(model["model"], dict):
            model["model"]["config"] = str(folder / model["model"]["config"])
    with atomic(path) as temporary:
        temporary.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")


def axis_names(experiment: Experiment) -> list[str]:
    """Every axis of any sweep, in order of appearance; the axes of the load come first."""
    return list(dict.fromkeys(axis for point in experiment.points for axis in point.axes))


class _RequestWriter:
    """Streams requests.parquet, one row group a run."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self._path = path
        self._axes = axis_names(experiment)
        self._writer: Any = None

    def __enter__(self) -> _RequestWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def write(self, outcome: Outcome, seed: int, run: RunData) -> None:
        table = self._table(outcome, seed, run)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, **PARQUET)
        self._writer.write_table(table)

    def _table(self, outcome: Outcome, seed: int, run: RunData) -> Any:
        count = len(run.arrival_s)
        axes = outcome.point.axes
        columns = {"system": _constant(outcome.point.system, count)}
        columns |= {axis: _constant(_column_value(axis, axes.get(axis)), count) for axis in self._axes}
        columns |= {
            "seed": _constant(seed, count),
            "request": pa.array(np.arange(count)),
            "model": _words(run.models, run.model),
            "arrival_s": pa.array(run.arrival_s),
            "prompt_tokens": pa.array(run.prompt_tokens),
            "output_tokens": pa.array(run.output_tokens),
            "first_token_s": pa.array(run.first_token_s),
            "finish_s": pa.array(run.finish_s),
            "fate": _words(_FATES, run.fate.astype(np.int32)),
            "preemptions": pa.array(run.preemptions),
            "engine": pa.array(run.engine),
            "measured": pa.array(run.measured),
        }
        return pa.table(columns)


def _words(words: Sequence[str], index: Any) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(index, type=pa.int32()), pa.array(list(words)))


def _constant(value: Any, count: int) -> Any:
    if isinstance(value, str):
        return _words([value], np.zeros(count, dtype=np.int32))
    return pa.array(np.full(count, value))


def _column_value(axis: str, value: Any) -> Any:
    """Scales are numbers and loads are words. Values of file keys may be of any type, so they are text."""
    return value if axis in LOAD_AXES else "" if value is None else json.dumps(value)


def _row(experiment: Experiment, outcome: Outcome, seed: int, run: Measures) -> dict[str, Any]:
    """One row of cells.parquet: a run with all its numbers."""
    axes = outcome.point.axes
    row: dict[str, Any] = {"system": outcome.point.system}
    row |= {axis: _column_value(axis, axes.get(axis)) for axis in axis_names(experiment)}
    row |= {"seed": seed, "run": outcome.keys[seed], **run.counts}
    row |= {f"ttft_slo_s.{name}": limit_s for name, limit_s in outcome.limits_s.items()}
    for metric in present([run]):
        row[metric] = estimate([run], metric).mean
    return row


def _cell(experiment: Experiment, outcome: Outcome, runs: Sequence[Measures]) -> dict[str, Any]:
    """One entry of summary.json's cells, without its sweep."""
    measured = sum(run.counts["arrived"] for run in runs)
    totals = {name: sum(run.counts[name] for run in runs) for name in runs[0].counts}
    metrics = {metric: _metric(runs, metric) for metric in present(runs)}
    return {
        "system": outcome.point.system,
        "title": experiment.setup_of(outcome.point).systems[outcome.point.system].title,
        "axes": outcome.point.axes,
        "seeds": len(runs),
        "requests": measured,
        **totals,
        "ttft_slo_s": outcome.limits_s,
        **({"tpot_slo_s": outcome.tpot_limits_s} if outcome.tpot_slos else {}),
        "runs": list(outcome.keys),
        "metrics": metrics,
        "flags": list(_flags(runs, metrics)),
    }


def _metric(runs: Sequence[Measures], metric: str) -> dict[str, Any]:
    overall = estimate(runs, metric)
    found = _jsonable(overall) | {"observations": [_number(value) for value in overall.observations]}
    if metric in CLUSTER_WIDE:
        return found
    return found | {"by_model": {name: _jsonable(estimate(runs, metric, name)) for name in runs[0].models}}


def _jsonable(value: Estimate) -> dict[str, Any]:
    return {"mean": _number(value.mean), "half_width": _number(value.half_width)}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _flags(runs: Sequence[Measures], metrics: Mapping[str, Any]) -> Iterator[str]:
    """What a reader should know before trusting the numbers of a cell."""
    fewest = min(run.counts["arrived"] for run in runs)
    if fewest < ENOUGH_REQUESTS:
        yield f"{fewest} measured requests a run < {ENOUGH_REQUESTS}"
    half_width = metrics["ttft_attainment"]["half_width"]
    if half_width is None:
        yield "attainment without interval: too few requests"
    elif half_width > ENOUGH_PRECISION:
        yield f"attainment half-width {100 * half_width:.1f} points > {100 * ENOUGH_PRECISION:.0f}"
    for fate in ("rejected", "unfinished"):
        count = sum(run.counts[fate] for run in runs)
        if count:
            yield f"{count} requests {fate}"


def _summary(
    experiment: Experiment, outcomes: Sequence[Outcome], cells: Mapping[Point, dict[str, Any]], store: Store
) -> dict[str, Any]:
    listed = [
        {"sweep": sweep, **cells[point], "axes": experiment.ordered_axes(sweep, point)}
        for sweep, points in experiment.sweeps.items()
        for point in points
    ]
    placements = [_placement(outcome, store) for outcome in outcomes]
    step_times = pooled([store.meta(key) for outcome in outcomes for key in outcome.keys])
    setup = experiment.setup
    return {
        "schema": SCHEMA,
        "fineserve": __version__,
        "title": experiment.file.title,
        "experiment": experiment.name,
        "workload": _workload(experiment),
        "slo": _slo(outcomes),
        "assumptions": [assumption.model_dump(mode="json") for assumption in experiment.file.assumptions],
        "placements": placements,
        "step_times": step_times,
        "warnings": list(warnings(step_times, setup.gpus[0].spec, setup.engine)),
        "cells": listed,
        "claims": evaluate_claims(experiment.file.claims, listed, placements),
    }


def _workload(experiment: Experiment) -> dict[str, Any]:
    setup = experiment.setup
    means = {model.id: mean_lengths(setup, model.id) for model in setup.models}
    return {
        "source": describe(setup),
        "requests": setup.workload.requests,
        "warmup_requests": setup.workload.warmup_requests,
        "loads": {name: load.model_dump() for name, load in setup.loads.items()},
        "mean_tokens": {name: {"prompt": prompt, "output": output} for name, (prompt, output) in means.items()},
    }


def _slo(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The base SLO of each model; null where it differs from cell to cell (the cells have the limits themselves)."""
    found: dict[str, Any] = {}
    for name in outcomes[0].slos:
        bases = {outcome.slos[name].base_s for outcome in outcomes}
        found[name] = {
            "base_s": bases.pop() if len(bases) == 1 else None,
            "reference": outcomes[0].slos[name].reference,
        }
    return found


def _placement(outcome: Outcome, store: Store) -> dict[str, Any]:
    return {"system": outcome.point.system, **outcome.point.axes, **store.meta(outcome.keys[0])["placement"]}
