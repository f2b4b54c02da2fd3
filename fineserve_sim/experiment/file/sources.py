"""Where requests come from: the length source, the recorded trace and the arrival processes that a file names."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import fineserve_traces as traces
import numpy as np
from fineserve_traces import LengthSource, Trace, TraceError, TraceFile
from fineserve_traces.onoff import OnOff
from fineserve_traces.prism import ARENA, PROVIDER, arena_lengths, processes
from fineserve_traces.servegen import Client, servegen_clients
from numpy.typing import NDArray

from fineserve_sim.experiment.file import schema, values
from fineserve_sim.experiment.file.document import Document
from fineserve_sim.experiment.file.errors import ConfigError, MachineError, nearest
from fineserve_sim.experiment.file.resolve import Setup, Stamp, stamp_of

ARENA_LENGTHS = "arena_27models"
"""Name of the length source that is the public Arena trace."""

UNNAMED = ("default",)
"""The models of a trace file that names none."""


def check_sources(document: Document, setup: Setup) -> None:
    """Open the length source or the trace. Raises ConfigError at the line that names it when it cannot be used."""
    key = "lengths" if setup.workload.trace is None else "trace"
    try:
        if setup.workload.trace is None:
            length_source(setup)
        else:
            places(setup)
            _check_length(document, setup, len(recorded(setup)))
    except ConfigError:
        raise
    except ValueError as problem:
        raise document.error(("workload", key), str(problem)) from None
    if isinstance(setup.workload.arrivals, schema.ManyModels):
        try:
            processes_of(setup)
        except ValueError as problem:
            raise document.error(("workload", "arrivals"), str(problem)) from None


def _check_length(document: Document, setup: Setup, there: int) -> None:
    """A trace has the requests that a run is to measure."""
    work = setup.workload
    wanted = (work.requests or 1) + work.warmup_requests
    if wanted > there:
        key = "requests" if work.requests else "warmup_requests"
        raise document.error(
            ("workload", key), f"the trace has {there} requests, not {wanted}; take fewer, or all of them"
        )


def length_source(setup: Setup) -> LengthSource:
    """Where lengths come from. Raises ValueError when the name or the folder is wrong."""
    return source_named(*lengths_key(setup))


def lengths_key(setup: Setup) -> tuple[str | schema.FixedLengths, Path | None]:
    folder = setup.workload.data_dir
    return setup.workload.lengths or "", None if folder is None else setup.folder / folder


@lru_cache(maxsize=8)
def source_named(lengths: str | schema.FixedLengths, data_dir: Path | None) -> LengthSource:
    if isinstance(lengths, schema.FixedLengths):
        return traces.ConstantLengths(lengths.prompt_tokens, lengths.output_tokens)
    if lengths == ARENA_LENGTHS:
        return arena_lengths(data_dir)
    known = [*traces.DATASETS, *traces.FITTED, ARENA_LENGTHS]
    if lengths not in known:
        raise ValueError(f'unknown length source "{lengths}"; {nearest(lengths, known)}')
    return traces.length_source(lengths, data_dir)


@lru_cache(maxsize=2)
def _opened(path: Path, stamp: Stamp) -> TraceFile:
    found = traces.open_trace(path)
    check_unchanged(path, stamp)
    for column, (tokens, request) in found.longest.items():
        if tokens > values.MAX_TOKENS:
            raise TraceError(f"{path}, request {request}: {tokens} {column}; at most {values.MAX_TOKENS} make sense")
    return found


def check_unchanged(path: Path, stamp: Stamp) -> None:
    """Raises MachineError where a trace file changed since it was read: its requests would be stored under the wrong name."""
    if stamp_of(path) != stamp:
        raise MachineError(str(path), "", "has changed since the experiment was read; run the same command again")


def recorded(setup: Setup) -> TraceFile:
    """The trace file, of whose requests none is held. Raises ValueError when it cannot be used."""
    return _opened(setup.folder / str(setup.workload.trace), setup.trace_stamp)


@lru_cache(maxsize=2)
def held(path: Path, stamp: Stamp) -> Trace:
    """All requests of a trace file, for all runs of this process that hold them. MachineError as in ``check_unchanged``."""
    found = traces.read_trace(path)
    check_unchanged(path, stamp)
    return found


def places(setup: Setup) -> tuple[int, ...]:
    """Which of the file's models each model of the trace file is. All are the first where requests are dealt by shares, and
    where the trace names none and there is one model. Raises ValueError when a name does not fit."""
    trace, ids = recorded(setup), [model.id for model in setup.models]
    if setup.workload.assign == "share" or (len(ids) == 1 and trace.models == UNNAMED):
        return (0,) * len(trace.models)
    for name in trace.models:
        if name not in ids:
            hint = nearest(name, ids)
            end = "" if hint.endswith("?") else "."
            raise ValueError(
                f'the trace has a model "{name}" that is no id of models; {hint}{end} Or set assign: share'
            )
    return tuple(ids.index(name) for name in trace.models)


def model_rows(setup: Setup, model: str) -> NDArray[np.intp]:
    """The models of the trace file that are this one of the file."""
    ids = [each.id for each in setup.models]
    return np.flatnonzero(np.array(places(setup)) == ids.index(model))


def describe(setup: Setup) -> str:
    """Where the requests come from, for people."""
    return recorded(setup).source if setup.workload.trace is not None else length_source(setup).source


def processes_of(setup: Setup) -> Sequence[OnOff | Client]:
    """The process of each model, in the order of the file."""
    arrivals, models = setup.workload.arrivals, len(setup.models)
    assert isinstance(arrivals, schema.ManyModels)
    if arrivals.process == "servegen":
        return _clients(models, lengths_key(setup)[1])
    return processes(PROVIDER if arrivals.process == "provider" else ARENA, models)


@lru_cache(maxsize=4)
def _clients(models: int, data_dir: Path | None) -> list[Client]:
    return servegen_clients(models, data_dir)
