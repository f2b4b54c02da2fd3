"""Finished simulations on disk, by key. A run is four files; its JSON comes last, so that it is there or not.

The files of a run:

    cells/<key>.parquet            one row a request
    cells/<key>.visits.parquet     one row a visit of a request to an engine
    cells/<key>.timeline.parquet   one row a sample (absent for runs without samples)
    cells/<key>.summary.json       instead of these, where metrics alone are kept
    cells/<key>.json               placement, capacities, counters
    decisions/<key>.jsonl          every event and command, on request
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fineserve_traces import Requests, Trace
from pydantic import BaseModel

from fineserve_sim import __version__
from fineserve_sim.cluster import GpuUse, RunResult, Scenario, Visits
from fineserve_sim.cluster.compose.policies import registered_sources
from fineserve_sim.cluster.scenario import OUTCOMES, boards
from fineserve_sim.experiment.file.errors import MachineError
from fineserve_sim.experiment.run.files import atomic, write_json
from fineserve_sim.experiment.run.run_data import RunData

PARQUET = {"compression": "zstd", "compression_level": 3, "version": "2.6"}
FORMAT = 7
"""Raised whenever the files of a run change their columns or meaning, or their key what it covers."""

_COMPILED = (".so", ".pyd")
_TRACE_COLUMNS = ("model", "arrival_s", "prompt_tokens", "output_tokens")


def key_of(scenario: Scenario, warmup: int) -> str:
    """The name of a run: a hash of all that determines it, its requests, our code and data files and the sources of registered
    policies included."""
    fields = (field.name for field in dataclasses.fields(scenario) if field.name not in ("trace", "log", "tell"))
    described = {name: plain(getattr(scenario, name)) for name in fields} | {
        "trace": _digests(scenario.trace),
        "warmup": warmup,
        "code": [__version__, code_digest(), FORMAT, *registered_sources(scenario.system)],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:24]


def _digests(requests: Requests) -> dict[str, str]:
    """The hash of every field of a trace that a simulation can see: of all but where its rows come from. How many rows are
    there at a time changes no hash."""
    fields = [field.name for field in dataclasses.fields(Trace) if field.name not in ("source", "dropped_rows")]
    hashers = {name: hashlib.sha256() for name in fields}
    for number, chunk in enumerate(requests.chunks()):
        for name, hasher in hashers.items():
            value = getattr(chunk, name)
            if isinstance(value, np.ndarray):
                hasher.update(value.tobytes())
            elif name == "prefix_hashes" and value is not None:
                hasher.update("".join(json.dumps(ids, default=int) for ids in value).encode())
            elif number == 0:
                hasher.update(json.dumps(value, default=int).encode())
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


@cache
def code_digest() -> str:
    """Hash of all sources and data files that a simulation is made of. This package is not among them: the scenario that it
    makes of a file is hashed itself, and its use of a run does not change the run. Nor are its callers, or compiled modules,
    whose sources lie beside them."""
    digest = hashlib.sha256()
    for package in ("fineserve_sim", "fineserve_traces"):
        root = Path(str(files(package)))
        for path in sorted(root.rglob("*")):
            relative = path.relative_to(root)
            ours = not {"__pycache__", "experiment", "cli", "api.py"} & set(relative.parts)
            if ours and path.is_file() and path.suffix not in _COMPILED:
                digest.update(f"{package}/{relative.as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def metrics_digest() -> str:
    """Hash of the sources that metrics are made of: where they alone are kept of a run, another formula is another run."""
    root = Path(str(files("fineserve_sim.experiment")))
    sources = [*sorted((root / "results").glob("*.py")), root / "run" / "run_data.py"]
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


class Store:
    """The runs of one output folder."""

    def __init__(self, out: Path) -> None:
        self._cells = out / "cells"
        self._decisions = out / "decisions"

    def has(self, key: str, decisions: bool = False) -> bool:
        """Whether the run is there and whole, as far as its ends tell; one that is damaged is simulated again."""
        logged = not decisions or self.decisions_path(key).exists()
        return logged and (self._cells / f"{key}.json").exists() and self._has_tables(key)

    def _has_tables(self, key: str) -> bool:
        """Or its metrics, where they alone were kept."""
        if (self._cells / f"{key}.summary.json").exists():
            return True
        *tables, samples = (self._cells / f"{key}{kind}.parquet" for kind in ("", ".visits", ".timeline"))
        return all(map(_is_parquet, tables)) and (not samples.exists() or _is_parquet(samples))

    def decisions_path(self, key: str) -> Path:
        return self._decisions / f"{key}.jsonl"

    @contextmanager
    def decision_log(self, key: str) -> Iterator[Callable[[dict[str, object]], None]]:
        """A logger that writes one JSON line an entry; the file appears when the run has succeeded."""
        self._decisions.mkdir(exist_ok=True)
        with atomic(self.decisions_path(key)) as temporary, temporary.open("w", encoding="utf-8") as file:
            yield lambda entry: print(json.dumps(entry, separators=(",", ":")), file=file)

    def write(self, key: str, scenario: Scenario, warmup: int, result: RunResult) -> None:
        """Store a finished run. Raises OSError when the disk refuses; then the run is not there."""
        trace = result.sent or scenario.whole_trace
        requests = {column: getattr(trace, column) for column in _TRACE_COLUMNS}
        requests |= {column: getattr(result, column) for column in OUTCOMES}
        self._write_table(self._cells / f"{key}.parquet", requests)
        self._write_table(self._cells / f"{key}.visits.parquet", visit_columns(result.visits))
        if len(result.timeline.time_s):
            self._write_table(self._cells / f"{key}.timeline.parquet", _timeline_columns(result))
        self._write_meta(key, scenario, warmup, result)

    def write_summary(
        self, key: str, scenario: Scenario, warmup: int, result: RunResult, summary: Mapping[str, Any]
    ) -> None:
        """Store a finished run of which metrics alone are kept."""
        write_json(self._cells / f"{key}.summary.json", summary)
        self._write_meta(key, scenario, warmup, result)

    def _write_meta(self, key: str, scenario: Scenario, warmup: int, result: RunResult) -> None:
        meta = {
            "models": list(scenario.trace.models),
            "engine_models": list(result.timeline.engine_models),
            "kv_capacity_bytes": list(result.kv_capacity_bytes),
            "gpus": boards(scenario.gpus),
            "warmup": warmup,
            "placement": placement(result),
            "end_s": result.end_s,
            "iterations": result.iterations,
            "step_times": result.step_times,
            "step_samples": result.step_samples,
            "counters": dict(result.counters),
            "gpu_use": [plain(use) for use in result.gpu_use],
        }
        write_json(self._cells / f"{key}.json", meta)

    def _write_table(self, path: Path, columns: dict[str, Any]) -> None:
        with atomic(path) as temporary:
            pq.write_table(pa.table(columns), temporary, **PARQUET)

    def meta(self, key: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self._cells / f"{key}.json").read_text(encoding="utf-8"))
        return found

    def summary(self, key: str) -> dict[str, Any] | None:
        """The metrics of a run, where they alone were kept."""
        path = self._cells / f"{key}.summary.json"
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def read(self, key: str) -> RunData:
        """A stored run with its timeline. Raises ValueError where metrics alone were kept of it."""
        if self.summary(key) is not None:
            path = self._cells / f"{key}.parquet"
            raise ValueError(f"{path}: not there, metrics alone were kept; run it again without --metrics summary")
        meta = self.meta(key)
        table = read_table(self._cells / f"{key}.parquet")
        columns = {name: table.column(name).to_numpy() for name in table.column_names}
        engines = len(meta["engine_models"])
        path = self._cells / f"{key}.timeline.parquet"
        samples = read_table(path) if path.exists() else None
        return RunData(
            models=tuple(meta["models"]),
            **columns,
            warmup=meta["warmup"],
            engine_models=tuple(meta["engine_models"]),
            sample_s=np.empty(0) if samples is None else samples.column("time_s").to_numpy(),
            waiting=_by_engine(samples, "waiting", engines),
            kv_used_bytes=_by_engine(samples, "kv_used_bytes", engines),
            kv_capacity_bytes=sum(meta["kv_capacity_bytes"]),
            counters=meta["counters"],
            gpus=meta["gpus"],
            gpu_free_bytes=_columns(samples, "gpu_free_bytes"),
            gpu_use=tuple(GpuUse(**use) for use in meta["gpu_use"]),
            visits=_visits(self._cells / f"{key}.visits.parquet"),
        )


def _is_parquet(path: Path) -> bool:
    """Whether a file begins and ends as a Parquet file does."""
    try:
        with path.open("rb") as file:
            first = file.read(4)
            file.seek(-4, os.SEEK_END)
            return first == file.read(4) == b"PAR1"
    except OSError:
        return False


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """A stored table, or some of its columns. Raises MachineError for a damaged one."""
    try:
        return pq.read_table(path, columns=columns)
    except (OSError, pa.ArrowException):
        raise MachineError(str(path), "", "damaged; delete it and run again") from None


def placement(result: RunResult) -> dict[str, Any]:
    """The placement as JSON-able data, instances in the order of the decisions."""
    return {
        "instances": [
            {"model": instance.model, "replica": instance.replica, "gpus": list(instance.gpus)}
            for instance in result.placement.instances
        ],
        "unplaced": list(result.placement.unplaced),
        "infeasible": list(result.placement.infeasible),
    }


def visit_columns(visits: Visits) -> dict[str, Any]:
    """The columns of a table of visits."""
    stages = pa.array([visits.stages[engine] for engine in visits.engine.tolist()], pa.list_(pa.int32()))
    return {name: getattr(visits, name) for name in Visits.COLUMNS} | {"stages": stages}


def _visits(path: Path) -> Visits:
    """None where an earlier version wrote the run."""
    if not path.exists():
        return Visits.joined(())
    table = read_table(path)
    columns = [table.column(name).to_numpy() for name in Visits.COLUMNS]
    engines, firsts = np.unique(table.column("engine").to_numpy(), return_index=True)
    stages = map(tuple, table.column("stages").take(firsts).to_pylist())
    return Visits.of_columns(columns, dict(zip(engines.tolist(), stages, strict=True)))


def _timeline_columns(result: RunResult) -> dict[str, Any]:
    timeline = result.timeline
    columns: dict[str, Any] = {"time_s": timeline.time_s}
    for name in ("waiting", "running", "kv_used_bytes", "gpu_stranded_bytes", "gpu_free_bytes"):
        series = getattr(timeline, name)
        columns |= {f"{name}.{index}": series[:, index] for index in range(series.shape[1])}
    return columns


def _by_engine(samples: Any, name: str, engines: int) -> Any:
    """Shape (samples, engines)."""
    if samples is None or engines == 0:
        return np.empty((0 if samples is None else len(samples), engines), dtype=np.int64)
    return np.stack([samples.column(f"{name}.{engine}").to_numpy() for engine in range(engines)], axis=1)


def _columns(samples: Any, name: str) -> Any:
    """Shape (samples, GPUs with KV memory), of which there are none where no model has a place."""
    names = [] if samples is None else [column for column in samples.column_names if column.startswith(f"{name}.")]
    if not names:
        return np.empty((0 if samples is None else len(samples), 0), dtype=np.int64)
    return np.stack([samples.column(each).to_numpy() for each in names], axis=1)


def plain(value: Any) -> Any:
    """Dataclasses and pydantic models as JSON-able data, for hashes and files."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value
