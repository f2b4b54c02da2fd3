"""A run as a trace file of the Chrome format, which Perfetto (ui.perfetto.dev) and chrome://tracing show.

One process a GPU, with a track for each engine on it, so that engines that share a GPU stand below each other, and their KV
memory as a counter. Each visit of a request is a span of the GPUs of the engine that it was at. One process for the run
itself. There each request has a track of its own with its spans: it waits, is prefilled, decodes. Beside them are transfers
between engines (KV exchange, restore), queues as a counter, and decisions but dispatches as instants. An engine over several
GPUs is on each of them. Where engines come and go, the KV memory of a model is a counter of the run. Times are in us.

Source of the format: Trace Event Format, phases b and e (a span of its own track), X (a span of a thread), C (counter), i
(instant), M (metadata).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fineserve_sim.cluster import Left, Visits
from fineserve_sim.experiment.run.files import atomic
from fineserve_sim.experiment.show.timelines.stored import RunError, StoredRun

Event = Mapping[str, Any]
Entry = Mapping[str, Any]
_ORDINARY = ("Dispatch", "Survey")
_US = 1e6


_GPUS = 10_000
"""Numbers of processes are as far apart from run to run."""


def write_trace(runs: Iterable[StoredRun], path: Path) -> None:
    """Write the runs as one trace, a process each. Raises OSError when the disk refuses."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        for number, event in enumerate(
            event for process, run in enumerate(runs) for event in events(run, _GPUS * process)
        ):
            file.write(("," if number else "") + json.dumps(event, separators=(",", ":")) + "\n")
        file.write("]}\n")


def events(run: StoredRun, process: int) -> Iterator[Event]:
    """Every trace event of one run; ``process`` is its own number; the numbers of its GPUs follow."""
    yield _named("process_name", process, 0, run.title)
    seats = _Seats(run, process)
    yield from seats.names()
    yield from _decisions(run, process, seats)
    yield from _requests(run, process)
    yield from _visits(run, process, seats)
    yield from _samples(run, process, seats)


def _named(what: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


class _Seats:
    """The GPUs of every engine, as processes of the trace."""

    def __init__(self, run: StoredRun, process: int) -> None:
        self._first = process + 1
        self._title = run.title
        self._gpus: dict[int, tuple[int, ...]] = dict(enumerate(run.engine_gpus))
        self._models = dict(enumerate(run.engine_instance_models))
        self.stay = run.engine_instance_models == run.data.engine_models
        """Whether each column of the samples is an engine that stays on its GPUs."""

    def processes(self, engine: int) -> list[int]:
        return [self._first + gpu for gpu in self._gpus.get(engine, ())]

    def names(self) -> Iterator[Event]:
        """What the GPUs and engines of the first placement are called."""
        for gpu in sorted({gpu for gpus in self._gpus.values() for gpu in gpus}):
            yield _named("process_name", self._first + gpu, 0, f"GPU {gpu}, {self._title}")
        for engine in self._gpus:
            yield from self._threads(engine)

    def activate(self, entry: Entry) -> Iterator[Event]:
        """An engine comes to GPUs."""
        engine = entry["engine"]
        self.stay = False
        new = set(entry["gpus"]) - {gpu for gpus in self._gpus.values() for gpu in gpus}
        self._gpus[engine], self._models[engine] = tuple(entry["gpus"]), entry["model"]
        for gpu in sorted(new):
            yield _named("process_name", self._first + gpu, 0, f"GPU {gpu}, {self._title}")
        yield from self._threads(engine)

    def _threads(self, engine: int) -> Iterator[Event]:
        for process in self.processes(engine):
            yield _named("thread_name", process, engine, f"engine {engine}: {self._models[engine]}")


def _decisions(run: StoredRun, process: int, seats: _Seats) -> Iterator[Event]:
    """What the decision log tells: commands but dispatches, what engines compute, and transfers."""
    try:
        for number, entry in enumerate(run.decisions()):
            kind = str(entry.get("command") or entry.get("span", ""))
            if kind == "Activate" and not run.of_groups:  # there seats are instances, which stay
                yield from seats.activate(entry)
            if kind == "EngineComputed":
                for gpu in seats.processes(entry["engine"]) or [process]:
                    yield _computed(entry, gpu)
            elif kind == "Transferred":
                yield from _transferred(entry, process, number)
            elif kind and kind not in _ORDINARY:
                place = {"pid": process, "tid": entry.get("engine", 0), "ts": _US * entry["now_s"]}
                yield {"ph": "i", "s": "p", "name": kind, **place, "args": _fields(entry)}
    except RunError:
        return  # without a decision log the trace has spans and counters


def _computed(entry: Entry, process: int) -> Event:
    """What an engine computed from then on, until its seconds have passed."""
    parts = [f"{entry['prefill_tokens']} prompt tokens"] if entry["prefill_tokens"] else []
    parts += [f"{entry['decodes']} decodes"] if entry["decodes"] else []
    parts += [f"{entry['iterations']} times"] if entry.get("iterations", 1) > 1 else []
    place = {"pid": process, "tid": entry["engine"], "ts": _US * entry["now_s"], "dur": _US * entry["seconds"]}
    return {"ph": "X", "name": ", ".join(parts), **place, "args": _fields(entry)}


def _transferred(entry: Entry, process: int, number: int) -> Iterator[Event]:
    """A transfer that has ended, in a track of its own."""
    track = {"pid": process, "tid": 0, "cat": "transfers", "id": f"{process}.transfer.{number}", "name": entry["what"]}
    yield track | {"ph": "b", "ts": _US * (entry["now_s"] - entry["seconds"]), "args": _fields(entry)}
    yield track | {"ph": "e", "ts": _US * entry["now_s"]}


def _fields(entry: Entry) -> Entry:
    return {name: value for name, value in entry.items() if name not in ("now_s", "command", "span")}


def _requests(run: StoredRun, process: int) -> Iterator[Event]:
    """The spans of every request that ended; it waits until it comes to the engine of its first token."""
    data = run.data
    visits = data.visits
    came_s = np.full(len(data.arrival_s), np.inf)
    early = visits.from_s <= data.first_token_s[visits.request]
    came_s[visits.request[early]] = visits.from_s[early]
    for request, arrival_s in enumerate(data.arrival_s.tolist()):
        first_s, finish_s = float(data.first_token_s[request]), float(data.finish_s[request])
        if not math.isfinite(finish_s):
            continue
        dispatch_s = min(float(came_s[request]), first_s)
        track = {"pid": process, "tid": 0, "cat": data.models[data.model[request]], "id": f"{process}.{request}"}
        tokens = {"prompt": int(data.prompt_tokens[request]), "output": int(data.output_tokens[request])}
        arguments = {"request": request, "tokens": tokens}
        for name, start_s, end_s in (
            (f"request {request}", arrival_s, finish_s),
            ("wait", arrival_s, dispatch_s),
            ("prefill", dispatch_s, first_s),
            ("decode", first_s, finish_s),
        ):
            yield track | {"ph": "b", "name": name, "ts": _US * start_s, "args": arguments}
            yield track | {"ph": "e", "name": name, "ts": _US * end_s}


def _visits(run: StoredRun, process: int, seats: _Seats) -> Iterator[Event]:
    """Each visit as a span of the GPUs of its engine."""
    data, visits = run.data, run.data.visits
    columns = (getattr(visits, name).tolist() for name in Visits.COLUMNS)
    for number, (request, engine, from_s, to_s, tokens, left) in enumerate(zip(*columns, strict=True)):
        arguments = {"request": request, "engine": engine, "tokens": tokens, "left": Left(left).name.lower()}
        name = f"request {request} at engine {engine}"
        places = dict.fromkeys(gpu for stage in visits.stages[engine] for gpu in seats.processes(stage))
        for gpu in places or [process]:
            track = {"pid": gpu, "tid": 0, "cat": data.models[data.model[request]], "id": f"{gpu}.visit.{number}"}
            yield track | {"ph": "b", "name": name, "ts": _US * from_s, "args": arguments}
            yield track | {"ph": "e", "name": name, "ts": _US * to_s}


def _samples(run: StoredRun, process: int, seats: _Seats) -> Iterator[Event]:
    """Counters of every sample: requests that wait, and KV memory on the GPU of each engine that stays there."""
    data = run.data
    names = [f"{engine}: {model}" for engine, model in enumerate(data.engine_models)]
    yield from _counter(run, "waiting requests", process, data.waiting, dict(enumerate(names)))
    used_gib = np.round(data.kv_used_bytes / 2**30, 3)
    on: dict[int, dict[int, str]] = {}
    for column, name in enumerate(names):
        for place in (seats.processes(column) if seats.stay else ()) or [process]:
            on.setdefault(place, {})[column] = name
    for place, columns in on.items():
        yield from _counter(run, "KV used, GiB", place, used_gib, columns)


def _counter(run: StoredRun, name: str, process: int, values: Any, columns: Mapping[int, str]) -> Iterator[Event]:
    """Some columns of samples (T, engines) as a series each."""
    for at_s, row in zip(run.data.sample_s.tolist(), values.tolist(), strict=True):
        series = {title: row[column] for column, title in columns.items()}
        yield {"ph": "C", "name": name, "pid": process, "ts": _US * at_s, "args": series}
