"""Turns of conversations in JSON lines, as AIPerf replays them: ``session_id``, and a ``delay`` in place of a timestamp.

The first turn of a session has a timestamp. Each later one comes ``delay`` milliseconds after the turn before was answered, and
its lengths are of what is new: the prompt is all that was said before, too. How long an answer takes is not in the file, so a
turn counts from the arrival of the one before: the earliest at which it can come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from fineserve_traces.rows import json_numbers
from fineserve_traces.schema import cell_error, error_at


class _Said(NamedTuple):
    """When the last turn of a session came, in milliseconds, and the tokens of all turns."""

    arrival_ms: float
    tokens: int


def with_arrivals(records: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The records, each with a ``timestamp`` and with the tokens of its whole prompt. Raises TraceError for a first turn
    without a timestamp, and for a delay or length that is no number."""
    said: dict[Any, _Said] = {}
    found = []
    for row, record in enumerate(records):
        session = record.get("session_id")
        if not isinstance(session, str | int):
            found.append(record)
            continue
        before = said.get(session)
        lengths = [record.get(name) for name in ("input_length", "output_length")]
        if any(type(length) is not int for length in lengths):
            found.append(record)  # whose lengths the reader refuses
            continue
        prompt = (before.tokens if before else 0) + lengths[0]  # type: ignore[operator]
        arrival_ms = _arrival_ms(record, before, where, row)
        said[session] = _Said(arrival_ms, prompt + lengths[1])  # type: ignore[operator]
        found.append(record | {"timestamp": arrival_ms, "input_length": prompt})
    return found


def _arrival_ms(record: dict[str, Any], before: _Said | None, where: str, row: int) -> float:
    if "timestamp" in record:
        return _number(record, "timestamp", where, row)
    if before is None:
        problem = f": the first turn of session {record['session_id']!r} has no timestamp; give it one, in milliseconds"
        raise error_at(where, "row", row + 1, problem)
    delay_ms = _number(record, "delay", where, row) if "delay" in record else 0.0
    if delay_ms < 0:
        raise cell_error(where, row, "delay", f"{delay_ms:g} is negative")
    return before.arrival_ms + delay_ms


def _number(record: dict[str, Any], name: str, where: str, row: int) -> float:
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise cell_error(where, row, name, f"{value!r} is not a number")
    return float(json_numbers([value], where, name)[0])
