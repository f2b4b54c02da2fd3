"""Feed the events of a decision log through a new core and compare its commands with the log's.

``python -m fineserve_runtime.replay_log FILE`` needs neither vllm nor torch. Exit code 0: every command is the same, event
for event; 1: the first difference is printed.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from fineserve_runtime.core import EVENTS, Core, CoreSpec
from fineserve_runtime.decisions import Entry, LogError, command_entry, decode_event, read_entries
from fineserve_runtime.logs import log_parts


@dataclass(slots=True)
class Replay:
    """The findings of a replay: the count of each event and command, and the first difference, if any."""

    events: Counter[str] = field(default_factory=Counter)
    commands: Counter[str] = field(default_factory=Counter)
    difference: str | None = None


def replay(entries: Iterable[Entry]) -> Replay:
    """Raises LogError for a log without a core or with an event that is unknown or incomplete."""
    steps = iter(entries)
    core = Core(_spec(next(steps, {})))
    result = Replay()
    for number, (event, logged) in enumerate(_by_event(steps), 1):
        now = event["now_s"]
        result.events[event["event"]] += 1
        told = decode_event(event, EVENTS)
        try:
            again = [_as_json(command_entry(now, each)) for each in core.handle(now, told)]
        except (KeyError, ValueError, AssertionError) as problem:  # an event that its history forbids
            result.difference = f"event {number}, {event['event']} at {now} s: the core fails with {problem!r}"
            break
        result.commands.update(each["command"] for each in again)
        if again != logged:
            result.difference = f"event {number}, {event['event']} at {now} s: log has {logged}, the core says {again}"
            break
    return result


def replay_file(path: Path) -> Replay:
    """``path`` with the parts that were rotated away, as far as they are still there. Raises LogError when the first is not."""
    with ExitStack() as stack:
        files = [stack.enter_context(part.open(encoding="utf-8")) for part in log_parts(path)]
        return replay(_joined(read_entries(chain.from_iterable(files))))


def _joined(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries of all parts with one head."""
    for number, entry in enumerate(entries):
        if "core" not in entry or number == 0:
            yield entry


def _spec(first: Entry) -> CoreSpec:
    if "core" not in first:
        raise LogError("line 1 describes no core; logs of fineserve-run begin with one")
    if "part" in first:
        raise LogError(f"the log begins with its part {first['part']}: earlier ones were rotated away")
    return CoreSpec.model_validate(first["core"])


def _by_event(entries: Iterator[Entry]) -> Iterator[tuple[Entry, list[Entry]]]:
    """Each event with the commands that follow it."""
    event: Entry | None = None
    commands: list[Entry] = []
    for entry in entries:
        if "event" in entry:
            if event is not None:
                yield event, commands
            event, commands = entry, []
        else:
            commands.append(entry)
    if event is not None:
        yield event, commands


def _as_json(entry: Entry) -> Entry:
    """The entry as it comes back from JSON: tuples are lists there."""
    return {name: _listed(value) for name, value in entry.items()}


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m fineserve_runtime.replay_log FILE", file=sys.stderr)
        return 2
    try:
        result = replay_file(Path(sys.argv[1]))
    except (OSError, ValueError) as problem:
        print(f"replay_log: error: {problem}", file=sys.stderr)
        return 2
    events, commands = sum(result.events.values()), sum(result.commands.values())
    print(f"{events} events {dict(result.events)}, {commands} commands {dict(result.commands)}")
    print(result.difference or "the same commands, event for event")
    return 1 if result.difference else 0


if __name__ == "__main__":
    sys.exit(main())
