"""The Parquet tables: one row a request, a run, a model of a run, a GPU of a run, an instance on a GPU."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fineserve_sim.cluster import Cause, Fate, Left, Visits
from fineserve_sim.experiment.file.axes import LOAD_AXES
from fineserve_sim.experiment.file.metric_names import CLUSTER_WIDE
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.results import misses
from fineserve_sim.experiment.results.metrics import Measures, estimate, present
from fineserve_sim.experiment.run.files import atomic
from fineserve_sim.experiment.run.run_data import Limits, RunData
from fineserve_sim.experiment.run.runner import Outcome
from fineserve_sim.experiment.run.store import PARQUET, visit_columns

_MOMENTS = ("ttft", "tpot", "e2e")
_FATES = [fate.name.lower() for fate in sorted(Fate)]
_LEFT = [left.name.lower() for left in sorted(Left)]
_CAUSES = ["", *(cause.name.lower() for cause in sorted(Cause) if cause)]


def axis_names(experiment: Experiment) -> list[str]:
    """Every axis of any sweep, in order of appearance; the axes of the load come first."""
    return list(dict.fromkeys(axis for point in experiment.points for axis in point.axes))


class TableWriter:
    """Streams a table, one row group a run. The file is there when all are written, and not where there is none; an older one
    goes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open = ExitStack()
        self._writer: Any = None

    def __enter__(self) -> TableWriter:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._writer is None and raised[0] is None:
            self._path.unlink(missing_ok=True)
        self._open.__exit__(*raised)

    def write(self, columns: Mapping[str, Any]) -> None:
        table = pa.table(columns)
        if self._writer is None:
            temporary = self._open.enter_context(atomic(self._path))
            self._writer = self._open.enter_context(pq.ParquetWriter(temporary, table.schema, **PARQUET))
        self._writer.write_table(table)


class RequestWriter:
    """Streams requests.parquet, and visits.parquet with the visits of requests that had more than one."""

    def __init__(self, out: Path, experiment: Experiment) -> None:
        self._axes = axis_names(experiment)
        self._requests, self._visits = TableWriter(out / "requests.parquet"), TableWriter(out / "visits.parquet")

    def __enter__(self) -> RequestWriter:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._requests.__exit__(*raised)
        self._visits.__exit__(*raised)

    def write(self, outcome: Outcome, seed: int, run: RunData, unplaced: Collection[str] = ()) -> None:
        """``unplaced``: models that had no instance in the run."""
        self._requests.write(self._place(outcome, seed, len(run.arrival_s)) | _request_columns(outcome, run, unplaced))
        if len((moved := run.visits.moved()).request):
            self._visits.write(self._place(outcome, seed, len(moved.request)) | _moved_columns(run, moved))

    def _place(self, outcome: Outcome, seed: int, count: int) -> dict[str, Any]:
        axes = outcome.point.axes
        columns = {"system": _constant(outcome.point.system, count)}
        columns |= {axis: _constant(_column_value(axis, axes.get(axis)), count) for axis in self._axes}
        return columns | {"seed": _constant(seed, count)}


def _request_columns(outcome: Outcome, run: RunData, unplaced: Collection[str]) -> dict[str, Any]:
    limits = outcome.limits
    judged = run.accepting_cuts() if limits.accept_cut else run
    codes = misses.causes(judged, misses.met(judged, limits), unplaced, limits.reach_tokens)
    return {
        "request": pa.array(np.arange(len(run.arrival_s))),
        "model": _words(run.models, run.model),
        "arrival_s": pa.array(run.arrival_s),
        "prompt_tokens": pa.array(run.prompt_tokens),
        "output_tokens": pa.array(run.output_tokens),
        "generated_tokens": pa.array(run.generated_tokens),
        "first_token_s": pa.array(run.first_token_s),
        "finish_s": pa.array(run.finish_s),
        "fate": _words(_FATES, run.fate.astype(np.int32)),
        "cause": _words(_CAUSES, run.cause.astype(np.int32)),
        "miss": _words(["", *misses.CAUSES], codes),
        "preemptions": pa.array(run.preemptions),
        "engine": pa.array(run.engine),
        "measured": pa.array(run.measured),
    }


def _moved_columns(run: RunData, moved: Visits) -> dict[str, Any]:
    model = {"model": _words(run.models, run.model[moved.request])}
    return model | visit_columns(moved) | {"left": _words(_LEFT, moved.left.astype(np.int32))}


def _words(words: Sequence[str], index: Any) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(index, type=pa.int32()), pa.array(list(words)))


def _constant(value: Any, count: int) -> Any:
    if isinstance(value, str):
        return _words([value], np.zeros(count, dtype=np.int32))
    return pa.array(np.full(count, value))


def _column_value(axis: str, value: Any) -> Any:
    """Scales are numbers and loads are words. Values of file keys may be of any type, so they are text."""
    return value if axis in LOAD_AXES else "" if value is None else json.dumps(value)


def place_row(experiment: Experiment, outcome: Outcome, seed: int) -> dict[str, Any]:
    """System, axes and seed: how every row of a run's tables begins."""
    axes = outcome.point.axes
    values = {axis: _column_value(axis, axes.get(axis)) for axis in axis_names(experiment)}
    return {"system": outcome.point.system, **values, "seed": seed}


def model_rows(run: Measures, limits: Limits, instances: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row a model: its requests, how many were within all limits, misses by cause, limits in seconds, tokens, instances,
    and every metric that models have."""
    rows = []
    for name in run.models:
        hits = run.hits["slo_attainment"][name]
        row: dict[str, Any] = {"model": name, "instances": instances.get(name, 0)}
        row |= {"requests": len(hits), "within": hits.sum()}
        row |= {f"missed_{cause}": count for cause, count in run.misses[name].items()}
        row |= {
            f"{moment}_slo_s": (limit_s or {}).get(name)
            for moment, limit_s in zip(_MOMENTS, limits.moments, strict=True)
        }
        row |= {f"{side}_tokens": tokens for side, tokens in run.tokens[name].items()}
        row |= {metric: estimate([run], metric, name).mean for metric in present([run]) if metric not in CLUSTER_WIDE}
        rows.append(row)
    return rows


def run_row(experiment: Experiment, outcome: Outcome, seed: int, run: Measures) -> dict[str, Any]:
    """One row of cells.parquet: a run with all its numbers."""
    row = place_row(experiment, outcome, seed)
    row |= {"run": outcome.keys[seed], **run.counts, **{f"missed_{cause}": n for cause, n in run.misses[""].items()}}
    row |= {f"ttft_slo_s.{name}": limit_s for name, limit_s in outcome.limits_s.items()}
    for metric in present([run]):
        row[metric] = estimate([run], metric).mean
    return row
