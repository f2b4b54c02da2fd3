"""Readers of the public trace formats. One small function a format; `read_trace` tells the format by the file's first line.

=============  ======================================================================================================
csv            arrival_s[, model], prompt_tokens, output_tokens; also the reduced Azure 2023 files
arena          csv with the model column required (LMSYS Chatbot Arena order, 27 models)
azure          AzurePublicDataset 2023 and 2024: TIMESTAMP, ContextTokens, GeneratedTokens
burstgpt       BurstGPT: Timestamp, Model, Request tokens, Response tokens, Total tokens, Log Type
mooncake       JSONL: timestamp (ms), input_length, output_length, hash_ids (one id per 512-token block)
vllm-bench     the JSON result of ``vllm bench serve --save-detailed``: start_times, input_lens, output_lens, ttfts, itls
=============  ======================================================================================================

Files without arrivals (length pairs, ShareGPT's own JSON) are read by `read_lengths` in `fineserve_traces.lengths`.
In recorded formats (all but csv and arena) a row with zero prompt or output tokens is a failed request: it is dropped and
counted in ``Trace.dropped_rows``. In csv and arena it is an error. Recorded arrivals count from the first request of the file.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fineserve_traces.files import CsvTable, csv_header, json_field, json_lines, parse_json, read_text
from fineserve_traces.schema import (
    FloatArray,
    IntArray,
    Trace,
    TraceError,
    arrival_column,
    cell_error,
    token_column,
)

MOONCAKE_BLOCK_TOKENS = 512  # kvcache-ai/Mooncake, FAST'25 release of the traces

CSV_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens")
ARENA_COLUMNS = ("arrival_s", "model", "prompt_tokens", "output_tokens")
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Model", "Request tokens", "Response tokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class _Rows:
    """Checked columns of one file, zero-token and unsorted rows still in it. ``names``: the model of each row, or None."""

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    names: Sequence[str] | None = None
    hashes: Sequence[tuple[int, ...]] | None = None


def read_trace(path: str | Path, format: str | None = None, *, model: str = "default", strict: bool = True) -> Trace:
    """Read a trace file, plain or gzip; ``Trace.source`` says as which ``format`` (told by the content unless given).

    ``model`` names the model of formats without a model column. With ``strict`` arrivals out of order are an error,
    otherwise rows are sorted (stable). Raises TraceError: missing, empty or damaged file, unknown format, missing column, or
    a cell that is no number, negative, or zero tokens (csv, arena).
    """
    path = Path(path)
    data = read_text(path)
    if format is None:
        format = detect_format(data, path)
    if format in ("sharegpt", "lengths"):
        raise TraceError(f"{path}: holds lengths without arrivals; use read_lengths and add arrivals with generate")
    if format not in _READERS:
        raise TraceError(f"{path}: unknown format {format!r}; known are {', '.join(_READERS)}")
    rows = _READERS[format](data, path, strict)
    return _to_trace(rows, f"{path.name} ({format})", model)


def detect_format(data: bytes, path: Path) -> str:
    """The format of a trace file by its first line. Raises TraceError when it is like none of them."""
    start = data.lstrip()
    if start.startswith(b"["):
        return "sharegpt"
    if start.startswith(b"{"):
        return "mooncake" if _is_mooncake(start.split(b"\n", 1)[0]) else "vllm-bench"
    return _detect_csv(csv_header(data), path)


def _is_mooncake(line: bytes) -> bool:
    try:
        return bool({"timestamp", "input_length", "hash_ids"} & set(json.loads(line)))
    except json.JSONDecodeError:
        return False


def _detect_csv(header: list[str], path: Path) -> str:
    """The CSV format that shares most column names with ``header``; near misses count, the reader then names them."""
    if {"prompt_tokens", "output_tokens"} <= set(header) and not difflib.get_close_matches("arrival_s", header):
        return "lengths"
    layouts = {"csv": CSV_COLUMNS, "azure": AZURE_COLUMNS, "burstgpt": BURSTGPT_COLUMNS}
    alike = {
        name: sum(bool(difflib.get_close_matches(column, header)) for column in columns) / len(columns)
        for name, columns in layouts.items()
    }
    best = max(alike, key=lambda name: alike[name])
    if alike[best] < 0.5:
        known = "; ".join(f"{name}: {', '.join(columns)}" for name, columns in layouts.items())
        raise TraceError(f"{path}: unknown columns {header}; known headers are {known}")
    return best


def _read_csv(data: bytes, path: Path, strict: bool) -> _Rows:
    table = CsvTable(data, path)
    table.require(CSV_COLUMNS)
    return _Rows(
        arrival_s=arrival_column(table.numbers("arrival_s"), table.where, in_order=strict),
        prompt_tokens=token_column(table.numbers("prompt_tokens"), table.where, "prompt_tokens"),
        output_tokens=token_column(table.numbers("output_tokens"), table.where, "output_tokens"),
        names=table.text("model") if "model" in table.names else None,
    )


def _read_arena(data: bytes, path: Path, strict: bool) -> _Rows:
    CsvTable(data, path).require(ARENA_COLUMNS)
    return _read_csv(data, path, strict)


def _read_azure(data: bytes, path: Path, strict: bool) -> _Rows:
    if csv_header(data)[0] == "arrival_s":
        return _read_csv(data, path, strict)
    table = CsvTable(data, path)
    table.require(AZURE_COLUMNS)
    seconds = _from_first(_timestamps_s(table, "TIMESTAMP"))
    return _Rows(
        arrival_s=arrival_column(seconds, table.where, "TIMESTAMP", strict),
        prompt_tokens=token_column(table.numbers("ContextTokens"), table.where, "ContextTokens", minimum=0),
        output_tokens=token_column(table.numbers("GeneratedTokens"), table.where, "GeneratedTokens", minimum=0),
    )


def _timestamps_s(table: CsvTable, name: str) -> FloatArray:
    """ISO 8601 times, with or without a zone, as seconds since the first row; 100 ns resolution survives the conversion."""
    import pandas as pd

    cells = table.text(name)
    times = pd.DatetimeIndex(pd.to_datetime(cells, format="ISO8601", utc=True, errors="coerce"))
    wrong = np.flatnonzero(np.asarray(times.isna()))
    if wrong.size:
        row = int(wrong[0])
        raise cell_error(table.where, row, name, f"{cells[row]!r} is not a time such as 2023-11-16 18:15:46.68")
    nanoseconds = times.as_unit("ns").asi8
    return np.asarray(nanoseconds - nanoseconds[0], dtype=np.float64) * 1e-9


def _read_burstgpt(data: bytes, path: Path, strict: bool) -> _Rows:
    table = CsvTable(data, path)
    table.require(BURSTGPT_COLUMNS)
    times = arrival_column(table.numbers("Timestamp"), table.where, "Timestamp", strict)
    return _Rows(
        arrival_s=_from_first(times),
        prompt_tokens=token_column(table.numbers("Request tokens"), table.where, "Request tokens", minimum=0),
        output_tokens=token_column(table.numbers("Response tokens"), table.where, "Response tokens", minimum=0),
        names=table.text("Model"),
    )


def _read_mooncake(data: bytes, path: Path, strict: bool) -> _Rows:
    where = str(path)
    fields: dict[str, list[Any]] = {name: [] for name in MOONCAKE_FIELDS}
    for row, record in enumerate(json_lines(data, path)):
        for name in MOONCAKE_FIELDS:
            fields[name].append(json_field(record, name, f"{where}, row {row + 1}"))
    times_ms = arrival_column(_json_numbers(fields["timestamp"], where, "timestamp"), where, "timestamp", strict)
    prompts = _json_numbers(fields["input_length"], where, "input_length")
    outputs = _json_numbers(fields["output_length"], where, "output_length")
    return _Rows(
        arrival_s=_from_first(times_ms) / 1e3,
        prompt_tokens=token_column(prompts, where, "input_length", minimum=0),
        output_tokens=token_column(outputs, where, "output_length", minimum=0),
        hashes=[tuple(ids) for ids in fields["hash_ids"]],
    )


@dataclass(frozen=True, slots=True, eq=False)
class BenchResult:
    """What ``vllm bench serve`` measured: its requests as a trace, and per request of that trace the time to first token
    (float64 (n,)) and the gaps between its later tokens (one float64 array a request), all in seconds."""

    trace: Trace
    ttft_s: FloatArray
    itl_s: tuple[FloatArray, ...]


def read_vllm_bench(path: str | Path) -> BenchResult:
    """Read a ``vllm bench serve --save-result --save-detailed`` JSON; requests sorted by the time they were sent, failed ones
    (no output token) dropped. Raises TraceError when a per-request field is missing, naming it."""
    path = Path(path)
    data = read_text(path)
    rows = _read_vllm_rows(data, path, False)
    keep = _in_order(rows)
    ttfts, itls = _vllm_fields(data, path, ("ttfts", "itls"))
    if not len(ttfts) == len(itls) == len(rows.arrival_s):
        raise TraceError(f"{path}: {len(ttfts)} ttfts and {len(itls)} itls for {len(rows.arrival_s)} requests")
    return BenchResult(
        trace=read_trace(path, "vllm-bench"),
        ttft_s=arrival_column(_json_numbers(ttfts, str(path), "ttfts"), str(path), "ttfts", in_order=False)[keep],
        itl_s=tuple(np.asarray(itls[row], dtype=np.float64) for row in keep),
    )


def _read_vllm_rows(data: bytes, path: Path, strict: bool) -> _Rows:
    """Requests are recorded in the order of the data set; under a concurrency limit they are sent in another: never strict."""
    del strict
    where = str(path)
    starts, inputs, outputs = _vllm_fields(data, path, ("start_times", "input_lens", "output_lens"))
    times = arrival_column(_json_numbers(starts, where, "start_times"), where, "start_times", in_order=False)
    rows = _Rows(
        arrival_s=_from_first(times, earliest=True),
        prompt_tokens=token_column(_json_numbers(inputs, where, "input_lens"), where, "input_lens", minimum=0),
        output_tokens=token_column(_json_numbers(outputs, where, "output_lens"), where, "output_lens", minimum=0),
    )
    if not len(times) == len(rows.prompt_tokens) == len(rows.output_tokens):
        raise TraceError(f"{where}: start_times, input_lens and output_lens have different lengths")
    return rows


def _vllm_fields(data: bytes, path: Path, names: Sequence[str]) -> list[list[Any]]:
    document = parse_json(data, path)
    if not isinstance(document, dict):
        raise TraceError(f"{path}: not the result of `vllm bench serve` (a JSON object)")
    missing = [name for name in names if name not in document]
    if missing:
        advice = "run `vllm bench serve` with --save-result --save-detailed"
        if "start_times" in missing and "input_lens" in document:
            advice = "use a vLLM that writes start_times, or read the lengths alone with read_lengths"
        raise TraceError(f"{path}: no per-request {', '.join(missing)}; {advice}")
    return [document[name] for name in names]


def vllm_bench_lengths(data: bytes, path: Path) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens of a ``vllm bench serve`` result, which need no start times. Zero outputs stay in."""
    inputs, outputs = _vllm_fields(data, path, ("input_lens", "output_lens"))
    prompt_tokens = token_column(_json_numbers(inputs, str(path), "input_lens"), str(path), "input_lens", minimum=0)
    return prompt_tokens, token_column(_json_numbers(outputs, str(path), "output_lens"), str(path), "output_lens", minimum=0)


_READERS: dict[str, Callable[[bytes, Path, bool], _Rows]] = {
    "csv": _read_csv,
    "arena": _read_arena,
    "azure": _read_azure,
    "burstgpt": _read_burstgpt,
    "mooncake": _read_mooncake,
    "vllm-bench": _read_vllm_rows,
}


def _json_numbers(values: Sequence[Any], where: str, column: str) -> FloatArray:
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise cell_error(where, row, column, f"{value!r} is not a number")
    return np.asarray(values, dtype=np.float64)


def _from_first(times: FloatArray, earliest: bool = False) -> FloatArray:
    """Times counted from the first row, or from the earliest one where rows are not in time order."""
    if times.size == 0:
        return times
    return times - (times.min() if earliest else times[0])


def _in_order(rows: _Rows) -> npt.NDArray[np.intp]:
    """The rows that are requests, in arrival order."""
    order = np.argsort(rows.arrival_s, kind="stable")
    served = (rows.prompt_tokens > 0) & (rows.output_tokens > 0)
    return order[served[order]]


def _to_trace(rows: _Rows, source: str, model: str) -> Trace:
    keep = _in_order(rows)
    names = [model] * len(rows.arrival_s) if rows.names is None else rows.names
    models = _model_names(names)
    position = {name: index for index, name in enumerate(models)}
    dropped = len(rows.arrival_s) - len(keep)
    return Trace(
        arrival_s=rows.arrival_s[keep],
        model=np.array([position[names[row]] for row in keep], dtype=np.int32),
        prompt_tokens=rows.prompt_tokens[keep],
        output_tokens=rows.output_tokens[keep],
        models=models,
        source=source + (f", {dropped} rows with zero tokens dropped" if dropped else ""),
        prefix_hashes=None if rows.hashes is None else tuple(rows.hashes[row] for row in keep),
        prefix_block_tokens=None if rows.hashes is None else MOONCAKE_BLOCK_TOKENS,
        dropped_rows=dropped,
    )


def _model_names(names: Sequence[str]) -> tuple[str, ...]:
    """The distinct names, sorted; numbered models (arena) in the order of their numbers."""
    return tuple(sorted(set(names), key=lambda name: (int(name), "") if name.isdecimal() else (1 << 62, name)))
