"""A run as a trace file of the Chrome format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

One process a run: each request as spans in a track of its own (it waits, is prefilled, decodes), a track of each engine with
what it computes, transfers between engines (KV exchange, restore), queues and KV memory of each engine as counters from the
samples, and decisions other than dispatches as instants. Times are in us.

Source of the format: Trace Event Format, phases b and e (a span of its own track), X (a span of a thread), C (counter), i
(instant), M (metadata).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fineserve_sim.experiment.run.files import atomic
from fineserve_sim.experiment.show.timelines.stored import RunError, StoredRun

Event = Mapping[str, Any]
Entry = Mapping[str, Any]
_ORDINARY = ("Dispatch", "Survey")
_US = 1e6


def write_trace(runs: Iterable[StoredRun], path: Path) -> None:
    """Write the runs as one trace, a process each. Raises OSError when the disk refuses."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(event for process, run in enumerate(runs) for event in events(run, process)):
            file.write(("," if number else "") + json.dumps(event, separators=(",", ":")) + "\n")
        file.write("]}\n")


def events(run: StoredRun, process: int) -> Iterator[Event]:
    """Every trace event of one run."""
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": run.title}}
    dispatched_s: dict[int, float] = {}
    for engine, model in enumerate(run.data.engine_models):
        named = {"name": f"engine {engine}: {model}"}
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": engine, "args": named}
    yield from _decisions(run, process, dispatched_s)
    yield from _requests(run, process, dispatched_s)
    yield from _samples(run, process)


def _decisions(run: StoredRun, process: int, dispatched_s: dict[int, float]) -> Iterator[Event]:
    """What the decision log tells: commands but dispatches, whose last time for each request goes to ``dispatched_s``, what
    engines compute, and transfers."""
    try:
        for number, entry in enumerate(run.decisions()):
            kind = str(entry.get("command") or entry.get("span", ""))
            if kind == "Dispatch":
                dispatched_s[entry["request_id"]] = entry["now_s"]
            elif kind in _SPANS:
                yield from _SPANS[kind](entry, process, number)
            elif kind and kind not in _ORDINARY:
                place = {"pid": process, "tid": entry.get("engine", 0), "ts": _US * entry["now_s"]}
                yield {"ph": "i", "s": "p", "name": kind, **place, "args": _fields(entry)}
    except RunError:
        return  # without a decision log the trace has spans and counters


def _computed(entry: Entry, process: int, _: int) -> Iterator[Event]:
    """What an engine computed from then on, until its seconds have passed."""
    parts = [f"{entry['prefill_tokens']} prompt tokens"] if entry["prefill_tokens"] else []
    parts += [f"{entry['decodes']} decodes"] if entry["decodes"] else []
    parts += [f"{entry['iterations']} times"] if entry.get("iterations", 1) > 1 else []
    place = {"pid": process, "tid": entry["engine"], "ts": _US * entry["now_s"], "dur": _US * entry["seconds"]}
    yield {"ph": "X", "name": ", ".join(parts), **place, "args": _fields(entry)}


def _transferred(entry: Entry, process: int, number: int) -> Iterator[Event]:
    """A transfer that has ended, in a track of its own."""
    track = {"pid": process, "tid": 0, "cat": "transfers", "id": f"{process}.transfer.{number}", "name": entry["what"]}
    yield track | {"ph": "b", "ts": _US * (entry["now_s"] - entry["seconds"]), "args": _fields(entry)}
    yield track | {"ph": "e", "ts": _US * entry["now_s"]}


_SPANS: Mapping[str, Callable[[Entry, int, int], Iterator[Event]]] = {
    "EngineComputed": _computed,
    "Transferred": _transferred,
}


def _fields(entry: Entry) -> Entry:
    return {name: value for name, value in entry.items() if name not in ("now_s", "command", "span")}


def _requests(run: StoredRun, process: int, dispatched_s: Mapping[int, float]) -> Iterator[Event]:
    """The spans of every request that ended; without a decision log, prefill is part of the wait."""
    data = run.data
    for request, arrival_s in enumerate(data.arrival_s.tolist()):
        first_s, finish_s = float(data.first_token_s[request]), float(data.finish_s[request])
        if not math.isfinite(finish_s):
            continue
        dispatch_s = min(dispatched_s.get(request, first_s), first_s)
        track = {"pid": process, "tid": 0, "cat": data.models[data.model[request]], "id": f"{process}.{request}"}
        tokens = {"prompt": int(data.prompt_tokens[request]), "output": int(data.output_tokens[request])}
        arguments = {"request": request, "engine": int(data.engine[request]), "tokens": tokens}
        for name, start_s, end_s in (
            (f"request {request}", arrival_s, finish_s),
            ("wait", arrival_s, dispatch_s),
            ("prefill", dispatch_s, first_s),
            ("decode", first_s, finish_s),
        ):
            yield track | {"ph": "b", "name": name, "ts": _US * start_s, "args": arguments}
            yield track | {"ph": "e", "name": name, "ts": _US * end_s}


def _samples(run: StoredRun, process: int) -> Iterator[Event]:
    """Counters of every sample, an engine a series."""
    data = run.data
    series: Mapping[str, Any] = {
        "waiting requests": data.waiting,
        "KV used, GiB": np.round(data.kv_used_bytes / 2**30, 3),
    }
    names = [f"{engine}: {model}" for engine, model in enumerate(data.engine_models)]
    for name, values in series.items():
        for at_s, row in zip(data.sample_s.tolist(), values.tolist(), strict=True):
            yield {
                "ph": "C",
                "name": name,
                "pid": process,
                "ts": _US * at_s,
                "args": dict(zip(names, row, strict=True)),
            }
