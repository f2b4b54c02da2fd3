"""Results of ``vllm bench serve``: the requests it sent, and what it measured of each.

The per-request lists (start_times, input_lens, output_lens, ttfts, itls) are in the file only when the benchmark ran
with ``--save-result --save-detailed``; a failed request has output length 0. Field names: vllm/benchmarks/serve.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineserve_traces.files import parse_json, read_text
from fineserve_traces.rows import Rows, json_numbers, since_first
from fineserve_traces.schema import FloatArray, IntArray, Trace, TraceError, token_column


@dataclass(frozen=True, slots=True, eq=False)
class BenchResult:
    """What the client measured: its requests as a trace, and seconds for each of them. ``ttft_s``, float64 (n,), are the times
    to first token; ``itl_s[i]``, float64, are the gaps between the later tokens of request i."""

    trace: Trace
    ttft_s: FloatArray
    itl_s: tuple[FloatArray, ...]


def read_vllm_bench(path: str | Path) -> BenchResult:
    """Read one result file; requests in the order in which they were sent, failed ones dropped and counted.

    Raises TraceError when the file or one of the five per-request lists is missing or wrong.
    """
    path = Path(path)
    document = _document(read_text(path), path)
    rows = _rows(document, path)
    ttfts, itls = _fields(document, path, ("ttfts", "itls"))
    if not len(ttfts) == len(itls) == len(rows.arrival_s):
        raise TraceError(f"{path}: {len(ttfts)} ttfts and {len(itls)} itls for {len(rows.arrival_s)} requests")
    requests = rows.requests()
    return BenchResult(
        trace=rows.to_trace(str(path), f"{path.name} (vllm-bench)", _model(document), strict=True),
        ttft_s=json_numbers(ttfts, str(path), "ttfts")[requests],
        itl_s=tuple(json_numbers(itls[row], f"{path}, request {row + 1}", "itls") for row in requests),
    )


def vllm_bench_rows(data: bytes, path: Path) -> Rows:
    """The requests of a result file, arrivals from the first one sent. Rows are in the order of the data set, which
    under a concurrency limit is not that of sending."""
    return _rows(_document(data, path), path)


def vllm_bench_lengths(data: bytes, path: Path) -> tuple[IntArray, IntArray]:
    """Prompt and output tokens, which need no start times; failed requests (output 0) are still in."""
    return _lengths(_document(data, path), path)


def _rows(document: dict[str, Any], path: Path) -> Rows:
    (starts,) = _fields(document, path, ("start_times",))
    prompt_tokens, output_tokens = _lengths(document, path)
    times_s = since_first(json_numbers(starts, str(path), "start_times"), str(path), "start_times")
    if len(times_s) != len(prompt_tokens):
        raise TraceError(f"{path}: {len(times_s)} start_times for {len(prompt_tokens)} requests")
    names = [_model(document)] * len(times_s)
    return Rows(times_s, prompt_tokens, output_tokens, names, time_column="start_times", in_file_order=False)


def _lengths(document: dict[str, Any], path: Path) -> tuple[IntArray, IntArray]:
    inputs, outputs = _fields(document, path, ("input_lens", "output_lens"))
    if len(inputs) != len(outputs):
        raise TraceError(f"{path}: {len(inputs)} input_lens but {len(outputs)} output_lens")
    where = str(path)
    prompt_tokens = token_column(json_numbers(inputs, where, "input_lens"), where, "input_lens", minimum=0)
    return prompt_tokens, token_column(json_numbers(outputs, where, "output_lens"), where, "output_lens", minimum=0)


def _document(data: bytes, path: Path) -> dict[str, Any]:
    document = parse_json(data, path)
    if not isinstance(document, dict):
        raise TraceError(f"{path}: not the result of `vllm bench serve`, which is one JSON object")
    return document


def _fields(document: dict[str, Any], path: Path, names: Sequence[str]) -> list[list[Any]]:
    missing = [name for name in names if not isinstance(document.get(name), list)]
    if missing:
        advice = "run `vllm bench serve` with --save-result --save-detailed"
        if not any(name in document for name in ("start_times", "input_lens", "output_lens")):
            advice += ", or make a trace of another program's result with `fineserve-sim traces convert`"
        if "start_times" in missing and "input_lens" in document:
            advice = "use a vLLM that writes start_times, or read the lengths alone with read_lengths"
        raise TraceError(f"{path}: no per-request list {', '.join(missing)}; {advice}")
    return [document[name] for name in names]


def _model(document: dict[str, Any]) -> str:
    return str(document.get("model_id", "default"))
