"""The Parquet tables: one row a request, one row a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from fineserve_sim.cluster import Fate
from fineserve_sim.experiment.file.axes import LOAD_AXES
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.results.metrics import Measures, estimate, present
from fineserve_sim.experiment.run.run_data import RunData
from fineserve_sim.experiment.run.runner import Outcome
from fineserve_sim.experiment.run.store import PARQUET

_FATES = [fate.name.lower() for fate in sorted(Fate)]


def axis_names(experiment: Experiment) -> list[str]:
    """Every axis of any sweep, in order of appearance; the axes of the load come first."""
    return list(dict.fromkeys(axis for point in experiment.points for axis in point.axes))


class RequestWriter:
    """Streams requests.parquet, one row group a run."""

    def __init__(self, path: Path, experiment: Experiment) -> None:
        self._path = path
        self._axes = axis_names(experiment)
        self._writer: Any = None

    def __enter__(self) -> RequestWriter:
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


def run_row(experiment: Experiment, outcome: Outcome, seed: int, run: Measures) -> dict[str, Any]:
    """One row of cells.parquet: a run with all its numbers."""
    axes = outcome.point.axes
    row: dict[str, Any] = {"system": outcome.point.system}
    row |= {axis: _column_value(axis, axes.get(axis)) for axis in axis_names(experiment)}
    row |= {"seed": seed, "run": outcome.keys[seed], **run.counts}
    row |= {f"ttft_slo_s.{name}": limit_s for name, limit_s in outcome.limits_s.items()}
    for metric in present([run]):
        row[metric] = estimate([run], metric).mean
    return row
