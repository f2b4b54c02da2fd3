"""What commands take for a trace: a file of a known layout, one of another layout, or a file a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fineserve_traces import Trace

ColumnsOption = Annotated[
    str | None,
    typer.Option(
        metavar="ROLE=COLUMN,...",
        help="The trace's columns of arrival, prompt, output and model, where it has another layout.",
        show_default=False,
    ),
]


def parsed_columns(text: str | None) -> dict[str, str] | None:
    """``arrival=when,prompt=sent`` by role."""
    return dict(part.partition("=")[::2] for part in text.split(",")) if text else None


def own_traces(models: Sequence[str]) -> tuple[list[str], list[Path]]:
    """The models without their ``@TRACE``, and these, of which all have one or none."""
    parts = [text.rpartition("@") if "@" in text else (text, "", "") for text in models]
    paths = [Path(path) for _, sign, path in parts if sign]
    if paths and len(paths) < len(models):
        without = next(text for text in models if "@" not in text)
        raise ValueError(f"--model {without}: has no trace where others have; give it one, as in {without}@trace.csv")
    return [model for model, _, _ in parts], paths


def trace_name(trace: Path | None, paths: Sequence[Path]) -> str:
    """What results are called after. Raises ValueError for no trace, and for two of one request."""
    if paths and trace is not None:
        raise ValueError(f"{trace}: a trace of all models, where each --model has its own; leave out one or the other")
    if not paths and trace is None:
        raise ValueError("no trace: give one, or one a model, as in --model chat=llama-3.1-8b:fp8@chat.csv")
    files = [*paths] if trace is None else [trace]
    return "-".join(dict.fromkeys(path.name.split(".")[0] for path in files))


def taken_trace(
    trace: Path | None, paths: Sequence[Path], names: Sequence[str], columns: str | None, folder: Path
) -> Path:
    """The trace file that a command runs on. One of another layout, or one a model, is written into the results folder first;
    traces of models begin together. TraceError as of ``take_in``."""
    from fineserve_traces import merge

    from fineserve_sim.experiment.run.files import prepare

    if not paths and columns is None and trace is not None:
        return trace
    if paths:
        found = merge([_of_one(path, name, columns) for path, name in zip(paths, names, strict=True)])
    else:
        assert trace is not None
        found = _taken(trace, columns)
    prepare(folder)
    path = folder / f"{trace_name(trace, paths)}.csv"
    found.to_csv(path)
    return path


def _taken(path: Path, columns: str | None) -> Trace:
    from fineserve_traces import take_in

    return take_in(path, columns=parsed_columns(columns))


def _of_one(path: Path, name: str, columns: str | None) -> Trace:
    """All requests of a file, for one model, from its first one on."""
    import numpy as np

    found = _taken(path, columns)
    alone = found.with_models((name,), np.zeros(len(found), dtype=np.int32))
    return alone.with_arrivals(alone.arrival_s - alone.arrival_s[0])


@contextmanager
def hint_spread(trace: Path, ids: list[str], spread: bool) -> Iterator[None]:
    """Where the trace names models that were not given, say how to name them, or that there is --spread."""
    from fineserve_sim.experiment import ConfigError

    try:
        yield
    except ConfigError as problem:
        if spread or problem.key != "workload.trace":
            raise
        from fineserve_traces import read_trace

        from fineserve_sim.experiment.file.sources import UNNAMED

        models = read_trace(trace).models
        if models == UNNAMED:
            raise ValueError(f"{trace}: it names no models; give --spread, which deals its requests out") from None
        if missing := sorted(set(models) - set(ids)):
            names = ", ".join(name if name == name.strip() else repr(name) for name in missing)
            raise ValueError(f"{trace}: --model is missing for {names}; name them, or give --spread") from None
        raise
