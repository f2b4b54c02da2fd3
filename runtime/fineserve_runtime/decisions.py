"""The decision log: one JSON line an event or command, as ``fineserve-sim run --decisions`` writes it too.

The first line of a log of the runtime is ``{"core": ...}``: all that determines the core that decided. The log can then be
replayed (``replay_log``). A log that was rotated has that line at the head of each part.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel

Entry = dict[str, Any]
Log = Callable[[Entry], None]


class LogError(ValueError):
    """A decision log that cannot be read, in one line that names the line of the file."""


class Decisions:
    """Writes the events and commands of the core to ``log``. When that fails, ``on_failure`` hears why, and writing ends.
    None: no listener."""

    def __init__(self, log: Log | None, on_failure: Callable[[Exception], None]) -> None:
        self._log = log
        self._on_failure = on_failure

    def begin(self, core: BaseModel) -> None:
        if self._log is not None:
            self._log({"core": core.model_dump(mode="json")})

    def note(self, now: float, event: Any, commands: Sequence[Any]) -> None:
        if self._log is None:
            return
        try:
            self._log(event_entry(now, event))
            for command in commands:
                self._log(command_entry(now, command))
        except Exception as problem:
            self._log = None
            self._on_failure(problem)


def event_entry(now: float, event: Any) -> Entry:
    return {"now_s": now, "event": type(event).__name__, **_plain_fields(event)}


def command_entry(now: float, command: Any) -> Entry:
    return {"now_s": now, "command": type(command).__name__, **_plain_fields(command)}


def read_entries(lines: Iterable[str]) -> Iterator[Entry]:
    """Raises LogError for a line that is no JSON object."""
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except ValueError:
            raise LogError(f"line {number} is no JSON: {line[:60]!r}") from None
        if not isinstance(entry, dict):
            raise LogError(f"line {number} is no JSON object: {line[:60]!r}")
        if set(entry) == {"lost"}:  # an engine's death has a field of that name, too
            raise LogError(f"line {number}: {entry['lost']} lines were lost here, so what follows cannot be replayed")
        yield entry


def decode_event(entry: Mapping[str, Any], kinds: Mapping[str, type]) -> Any:
    """The event of an entry; ``kinds`` are the event types by name. Raises LogError for an unknown or incomplete one."""
    kind = kinds.get(entry["event"])
    if kind is None:
        raise LogError(f"unknown event {entry['event']!r}; known are {', '.join(sorted(kinds))}")
    try:
        return _object(kind, entry)
    except KeyError as missing:
        raise LogError(f"event {entry['event']} at {entry.get('now_s')} s lacks {missing}") from None


def _plain_fields(value: Any) -> Entry:
    names = value._fields if hasattr(value, "_fields") else [field.name for field in fields(value)]
    return {name: _plain(getattr(value, name)) for name in names}


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if hasattr(value, "_fields") or is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _object(kind: Any, data: Mapping[str, Any]) -> Any:
    """An instance of a NamedTuple or dataclass from its fields as JSON gives them back."""
    return kind(**{name: _value(hint, data[name]) for name, hint in get_type_hints(kind).items()})


def _value(hint: Any, data: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key, item = arguments
        return {key(name): _value(item, each) for name, each in data.items()}
    if origin in (tuple, list):
        return origin(_value(arguments[0], each) for each in data)
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return hint.model_validate(data)
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return _object(hint, data)
    return data
