"""Decision logs (``Scenario.log``) taken apart: what the controller was told, what it said to that, and the same again.

A line is a dict with ``now_s`` and one of ``event``, ``command`` and ``span``. Commands stand behind the event that caused
them; spans, in which something takes time, are nobody's decision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

from fineserve_sim.policy import events
from fineserve_sim.policy.interfaces import EngineLoad, EngineState, Request

Line = dict[str, Any]


class Exchange(NamedTuple):
    """One event and the commands that it caused."""

    event: Line
    commands: list[Line]


def events_of(log: Iterable[Line]) -> list[Line]:
    return [line for line in log if "event" in line]


def commands_of(log: Iterable[Line]) -> list[Line]:
    return [line for line in log if "command" in line]


def exchanges_of(log: Iterable[Line]) -> list[Exchange]:
    """The log by events. Raises ValueError for a command that no event comes before: nobody could replay it."""
    found: list[Exchange] = []
    for line in log:
        if "event" in line:
            found.append(Exchange(line, []))
        elif "command" in line:
            if not found:
                raise ValueError(f"no event comes before {line}")
            found[-1].commands.append(line)
    return found


def event_of(line: Line, decode: Mapping[str, Callable[[Any], Any]] | None = None) -> Any:
    """The event that a line describes. ``decode`` makes its fields out of JSON-able values where ``DECODE`` does not."""
    kind = getattr(events, line["event"])
    by_name = {**DECODE, **(decode or {})}
    fields = {name: by_name.get(name, lambda value: value)(line[name]) for name in kind._fields}
    return kind(**fields)


def command_line(now: float, command: Any, plain: Callable[[Any], Any] = lambda value: value) -> Line:
    """The line that a command is logged as; ``plain`` makes its values JSON-able."""
    fields = {name: plain(value) for name, value in command._asdict().items()}
    return {"now_s": now, "command": type(command).__name__, **fields}


def from_file(line: Line) -> Line:
    """The line as a log file gives it back: keys are strings there, and tuples lists."""
    read: Line = json.loads(json.dumps(line))
    return read


def replay(log: Iterable[Line], handle: Callable[[float, Any], Iterable[Any]]) -> str | None:
    """Tell ``handle(now_s, event)`` of a fresh controller every event of the log, as a file would hold it. The first answer
    that is not the logged one, in words; None when all commands are the same."""
    for number, (line, logged) in enumerate(exchanges_of(map(from_file, log))):
        commands = handle(line["now_s"], event_of(line))
        again = [from_file(command_line(line["now_s"], command)) for command in commands]
        for old, new in zip_longest(logged, again):
            if old != new:
                return f"event {number}, {line['event']} at {line['now_s']} s: the log has {old}, the controller says {new}"
    return None


DECODE: Mapping[str, Callable[[Any], Any]] = {
    "request": lambda fields: Request(**fields),
    "engines": lambda states: {int(engine): EngineState(**state) for engine, state in states.items()},
    "running": lambda running: {int(engine): requests for engine, requests in running.items()},
    "free_bytes": lambda free: {int(gpu): size for gpu, size in free.items()},
    "loads": lambda loads: {int(engine): EngineLoad(**load) for engine, load in loads.items()},
    "kv_tokens": lambda limits: {int(engine): tokens for engine, tokens in limits.items()},
    "gpus": tuple,
    "lost": tuple,
}
"""By the name of an event's field. JSON has strings for keys and lists for tuples: ids are numbers again here."""
