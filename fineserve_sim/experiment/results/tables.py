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

from fineserve_sim.cluster import Cause, Fate
from fineserve_sim.experiment.file.axes import LOAD_AXES
from fineserve_sim.experiment.file.metric_names import CLUSTER_WIDE
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.results import misses
from fineserve_sim.experiment.results.metrics import Measures, estimate, present
from fineserve_sim.experiment.run.files import atomic
from fineserve_sim.experiment.run.run_data import Limits, RunData
from fineserve_sim.experiment.run.runner import Outcome
from fineserve_sim.experiment.run.store import PARQUET

_MOMENTS = ("ttft", "tpot", "e2e")
_FATES = [fate.name.lower() for fate in sorted(Fate)]
_CAUSES = ["", *(cause.name.lower() for cause in sorted(Cause) if cause)]


def axis_names(experiment: Experiment) -> list[str]:
    """Every axis of any sweep, in order of appearance; the axes of the load come first."""
    return list(dict.fromkeys(axis for point in experiment.points for axis in point.axes))


class RequestWriter:
    """Streams requests.parquet, one row group a run. The file is there when all are written, and not where there is none; an
    older one goes."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self._path = path
        self._axes = axis_names(experiment)
        self._open = ExitStack()
        self._writer: Any = None

    def __enter__(self) -> RequestWriter:
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._writer is None and raised[0] is None:
            self._path.unlink(missing_ok=True)
        self._open.__exit__(*raised)

    def write(self, outcome: Outcome, seed: int, run: RunData, unplaced: Collection[str] = ()) -> None:
        """``unplaced``: models that had no instance in the run."""
        table = self._table(outcome, seed, run, unplaced)
        if self._writer is None:
            temporary = self._open.enter_context(atomic(self._path))
            self._writer = self._open.enter_context(pq.ParquetWriter(temporary, table.schema, **PARQUET))
        self._writer.write_table(table)

    def _table(self, outcome: Outcome, seed: int, run: RunData, unplaced: Collection[str]) -> Any:
        count = len(run.arrival_s)
        judged = run.accepting_cuts() if outcome.limits.accept_cut else run
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
            "generated_tokens": pa.array(run.generated_tokens),
            "first_token_s": pa.array(run.first_token_s),
            "finish_s": pa.array(run.finish_s),
            "fate": _words(_FATES, run.fate.astype(np.int32)),
            "cause": _words(_CAUSES, run.cause.astype(np.int32)),
            "miss": _words(["", *misses.CAUSES], misses.causes(judged, misses.met(judged, outcome.limits), unplaced)),
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
