"""Readers of the public trace formats, one small function each; `read_trace` tells the format by the start of the file.

=============  ======================================================================================================
csv            arrival_s[, model], prompt_tokens, output_tokens (seconds); also the reduced Azure 2023 files
arena          csv with the model column required (LMSYS Chatbot Arena order, 27 models)
azure          AzurePublicDataset 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens
burstgpt       BurstGPT: Timestamp (s), Model, Request tokens, Response tokens, Total tokens, Log Type
mooncake       JSONL: timestamp (ms), input_length, output_length, hash_ids (one id per 512-token block), which may be missing
sessions       the same for turns of conversations: session_id, and delay (ms) in place of timestamp (see `sessions`)
vllm-bench     the JSON result of ``vllm bench serve --save-result --save-detailed``
=============  ======================================================================================================

Files without arrivals (length pairs, ShareGPT's own JSON) are read by `fineserve_traces.lengths.read_lengths`.
In recorded formats (all but csv and arena) a row with zero prompt or output tokens is a failed request. It is dropped and
counted in ``Trace.dropped_rows``. Arrivals count from the earliest row. In csv and arena a zero is an error,
and arrivals stay as they are.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fineserve_traces.files import CsvTable, csv_header, json_field, json_lines, read_text
from fineserve_traces.rows import Rows, json_numbers, since_first
from fineserve_traces.schema import FloatArray, Trace, TraceError, arrival_column, cell_error, token_column
from fineserve_traces.sessions import with_arrivals
from fineserve_traces.vllm_bench import vllm_bench_rows

MOONCAKE_BLOCK_TOKENS = 512  # kvcache-ai/Mooncake, traces of its FAST'25 release

_CSV_LAYOUTS = {
    "csv": ("arrival_s", "prompt_tokens", "output_tokens"),
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Model", "Request tokens", "Response tokens"),
}
LATEST_S = 1e9
"""No trace goes on for so long, 31 years: such arrivals are times since 1970, in seconds or less."""
MAKE = "`fineserve-sim traces convert FILE --out trace.csv` makes a trace of it"
CONVERT = "`fineserve-sim traces convert FILE --out trace.csv` counts from the first one"
_YEARS = 1677, 2262
"""Between these nanoseconds since 1970 fit into 64 bits."""
_MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


def read_trace(path: str | Path, format: str | None = None, *, model: str = "default", strict: bool = True) -> Trace:
    """Read a trace file, plain or gzip; ``Trace.source`` says as which ``format`` (told by the content unless given).

    ``model`` names the model of formats without a model column. With ``strict`` arrivals out of order are an error,
    otherwise rows are sorted (stable). Raises TraceError: missing, empty or damaged file, unknown format, missing
    column, or a cell that is no number, negative, or zero tokens (csv, arena).
    """
    path = Path(path)
    data = read_text(path)
    format = detect_format(data, path) if format is None else format
    if format not in READERS:
        raise TraceError(f"{path}: unknown format {format!r}; known are {', '.join(READERS)}")
    rows = READERS[format](data, path)
    return rows.to_trace(str(path), f"{path.name} ({format})", model, strict)


def detect_format(data: bytes, path: Path) -> str:
    """The format of a trace file. Raises TraceError when it is like none of them, or holds no arrivals."""
    start = data.lstrip()
    if start.startswith(b"["):
        raise TraceError(f"{path}: a JSON list is none of the known formats; {MAKE}")
    if start.startswith(b"{"):
        first, _, others = start.partition(b"\n")
        return _detect_json(first, bool(others.strip()), path)
    return _detect_csv(csv_header(data), path)


def _detect_json(line: bytes, more: bool, path: Path) -> str:
    """By the first line of a file that begins with an object: whole objects line by line, or one that goes on."""
    try:
        fields = list(json.loads(line))
    except (ValueError, RecursionError):
        return "vllm-bench"  # whose reader tells what is wrong
    if set(_MOONCAKE_FIELDS) & set(fields):
        return "sessions" if "session_id" in fields else "mooncake"
    if more:
        known = ", ".join(_MOONCAKE_FIELDS)
        raise TraceError(f"{path}: JSON lines with unknown fields {fields[:6]}; known are {known} (mooncake); {MAKE}")
    return "vllm-bench"


def _detect_csv(header: list[str], path: Path) -> str:
    """The layout that shares most column names with ``header``. Near misses count: its reader will name them."""
    alike = {
        format: sum(bool(difflib.get_close_matches(column, header)) for column in columns) / len(columns)
        for format, columns in _CSV_LAYOUTS.items()
    }
    best = max(alike, key=lambda format: alike[format])
    if alike[best] < 0.5:
        known = "; ".join(f"{format}: {', '.join(columns)}" for format, columns in _CSV_LAYOUTS.items())
        apart = "; `fineserve-sim traces convert` reads other separators and names"
        raise TraceError(f"{path}: unknown columns {header}; known headers are {known}{apart}")
    return best


def _read_csv(data: bytes, path: Path) -> Rows:
    table = CsvTable(data, path)
    if not difflib.get_close_matches("arrival_s", table.names):
        needed = ", ".join(_CSV_LAYOUTS["csv"])
        raise TraceError(
            f"{path}: no column 'arrival_s' in {table.names}; a trace has {needed} and, for several models, model"
        )
    table.require(_CSV_LAYOUTS["csv"])
    times_s = arrival_column(table.numbers("arrival_s"), table.where, in_order=False)
    if times_s.max() >= LATEST_S:
        row, latest = int(times_s.argmax()), f"{times_s.max():.0f} is a time since 1970"
        raise cell_error(table.where, row, "arrival_s", f"{latest}, not seconds since the trace began; {CONVERT}")
    return Rows(
        arrival_s=times_s,
        prompt_tokens=token_column(table.numbers("prompt_tokens"), table.where, "prompt_tokens"),
        output_tokens=token_column(table.numbers("output_tokens"), table.where, "output_tokens"),
        names=table.model_names("model") if "model" in table.names else None,
    )


def _read_arena(data: bytes, path: Path) -> Rows:
    CsvTable(data, path).require(("model",))
    return _read_csv(data, path)


def _read_azure(data: bytes, path: Path) -> Rows:
    if "arrival_s" in csv_header(data):
        return _read_csv(data, path)
    table = CsvTable(data, path)
    table.require(_CSV_LAYOUTS["azure"])
    return Rows(
        arrival_s=_timestamps_s(table, "TIMESTAMP"),
        prompt_tokens=token_column(table.numbers("ContextTokens"), table.where, "ContextTokens", minimum=0),
        output_tokens=token_column(table.numbers("GeneratedTokens"), table.where, "GeneratedTokens", minimum=0),
        time_column="TIMESTAMP",
    )


def _timestamps_s(table: CsvTable, name: str) -> FloatArray:
    """ISO 8601 times, with or without a zone, as seconds since the earliest; the published 100 ns steps survive."""
    import pandas as pd

    cells = table.text(name)
    times = pd.DatetimeIndex(pd.to_datetime(cells, format="ISO8601", utc=True, errors="coerce"))
    wrong = np.flatnonzero(np.asarray(times.isna() | (times.year <= _YEARS[0]) | (times.year >= _YEARS[1])))
    if wrong.size:
        row = int(wrong[0])
        raise cell_error(table.where, row, name, f"{cells[row]!r} is not a time such as 2023-11-16 18:15:46.68")
    nanoseconds = np.asarray(times.as_unit("ns").asi8)
    seconds: FloatArray = (nanoseconds - nanoseconds.min()) / 1e9
    return seconds


def _read_burstgpt(data: bytes, path: Path) -> Rows:
    table = CsvTable(data, path)
    table.require(_CSV_LAYOUTS["burstgpt"])
    return Rows(
        arrival_s=since_first(table.numbers("Timestamp"), table.where, "Timestamp"),
        prompt_tokens=token_column(table.numbers("Request tokens"), table.where, "Request tokens", minimum=0),
        output_tokens=token_column(table.numbers("Response tokens"), table.where, "Response tokens", minimum=0),
        names=table.model_names("Model"),
        time_column="Timestamp",
    )


def _read_mooncake(data: bytes, path: Path) -> Rows:
    where = str(path)
    records = list(json_lines(data, path))
    return _lines_rows(records, where, hashed="hash_ids" in records[0])


def _read_sessions(data: bytes, path: Path) -> Rows:
    records = with_arrivals(list(json_lines(data, path)), str(path))
    return replace(_lines_rows(records, str(path), hashed=False), in_file_order=False)


def _lines_rows(records: Sequence[dict[str, Any]], where: str, *, hashed: bool) -> Rows:
    columns: dict[str, list[Any]] = {name: [] for name in _MOONCAKE_FIELDS}
    for row, record in enumerate(records):
        for name in _MOONCAKE_FIELDS[: 4 if hashed else 3]:
            columns[name].append(json_field(record, name, where, row))
    times_ms, prompts, outputs = (json_numbers(columns[name], where, name) for name in _MOONCAKE_FIELDS[:3])
    return Rows(
        arrival_s=since_first(times_ms, where, "timestamp") / 1e3,
        prompt_tokens=token_column(prompts, where, "input_length", minimum=0),
        output_tokens=token_column(outputs, where, "output_length", minimum=0),
        hashes=[_block_ids(ids, where, row) for row, ids in enumerate(columns["hash_ids"])] if hashed else None,
        block_tokens=MOONCAKE_BLOCK_TOKENS if hashed else None,
        time_column="timestamp",
    )


def _block_ids(ids: Any, where: str, row: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(type(block) is int for block in ids):
        raise cell_error(where, row, "hash_ids", "not a list of integers, one per block of the prompt")
    return tuple(ids)


READERS: dict[str, Callable[[bytes, Path], Rows]] = {
    "csv": _read_csv,
    "arena": _read_arena,
    "azure": _read_azure,
    "burstgpt": _read_burstgpt,
    "mooncake": _read_mooncake,
    "sessions": _read_sessions,
    "vllm-bench": vllm_bench_rows,
}
