"""Files that people have: of load generators, logs, data sets, cut from published traces, and damaged. Each is read rightly, or
one line says what is wrong and what to write."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from fineserve_traces import Trace, TraceError, open_trace, read_trace, take_in

SHARED = Path(__file__).parents[2].resolve().parent / "shared" / "data" / "traces"
START = 1_716_000_000
ROWS = ((0.0, 40, 2), (0.5, 300, 7), (2.0, 8, 1))
"""Three requests: arrival in seconds, prompt and output tokens. Every file that is read has these."""


def table(header: str, arrival: Callable[[float], object] = float, separator: str = ",", end: str = "\n") -> str:
    lines = [header.replace(",", separator)]
    lines += [separator.join(map(str, (arrival(at), prompt, output))) for at, prompt, output in ROWS]
    return end.join(lines) + end


def lines(record: Callable[[float, int, int], dict[str, Any]]) -> str:
    return "".join(json.dumps(record(*row)) + "\n" for row in ROWS)


def ms(at: float) -> int:
    return round(1000 * at)


def iso(at: float, zone: str = "Z") -> str:
    return pd.Timestamp(START + at, unit="s").isoformat() + zone


OWN = table("arrival_s,prompt_tokens,output_tokens")


def openai(at: float, prompt: int, output: int) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}
    return {"id": "chatcmpl-1", "object": "chat.completion", "created": START + at, "model": "m", "usage": usage}


def anthropic(at: float, prompt: int, output: int) -> dict[str, Any]:
    return {"ts": iso(at), "model": "m", "usage": {"input_tokens": prompt, "output_tokens": output}}


def gemini(at: float, prompt: int, output: int) -> dict[str, Any]:
    usage = {"promptTokenCount": prompt, "candidatesTokenCount": output, "totalTokenCount": prompt + output}
    return {"timestamp": ms(START + at), "usageMetadata": usage}


def aiperf(at: float, prompt: int, output: int, phase: str = "profiling") -> dict[str, Any]:
    """A line of profile_export.jsonl, with the names that AIPerf 0.13.0 wrote against a server of ours."""
    start_ns = round((START + at) * 1e9)
    counts = {"input_sequence_length": prompt, "output_sequence_length": output, "output_token_count": output}
    counts |= {"usage_prompt_tokens": prompt, "usage_completion_tokens": output, "usage_total_tokens": prompt + output}
    times = {"credit_issued_ns": start_ns - 10**6, "request_start_ns": start_ns, "request_end_ns": start_ns + 10**8}
    return {
        "metadata": {"session_num": 0, "turn_index": 0, **times, "worker_id": "w", "benchmark_phase": phase},
        "metrics": {name: {"value": value, "unit": "tokens"} for name, value in counts.items()}
        | {"request_latency": {"value": 100.0, "unit": "ms"}, "inter_chunk_latency": {"value": [4.2], "unit": "ms"}},
    }


def warmed_up() -> str:
    """What AIPerf writes with --warmup-request-count: requests before the ones that count, of a pace of their own."""
    warmup = [json.dumps(aiperf(at - 9, 11, 3, "warmup")) for at in (0.0, 0.001)]
    return "\n".join(warmup) + "\n" + lines(aiperf)


def guidellm(at: float, prompt: int, output: int) -> dict[str, Any]:
    """A request of the JSON report, with the names that guidellm 0.8.1 wrote against a server of ours."""
    start_s = START + at
    timings = {
        "targeted_start": start_s - 0.01,
        "queued": start_s - 1,
        "request_start": start_s,
        "request_end": start_s + 1,
    }
    metrics = {"text_tokens": prompt, "total_tokens": prompt, "text_words": None}
    return {
        "type_": "generative_request_stats",
        "request_id": "r",
        "info": {"status": "completed", "timings": timings, "started_at": start_s},
        "input_metrics": metrics,
        "output_metrics": {"text_tokens": output, "total_tokens": output, "text_words": output},
        "request_start_time": start_s,
        "request_end_time": start_s + 1,
        "prompt_tokens": prompt,
        "output_tokens": output,
        "total_tokens": prompt + output,
    }


def vllm_bench(**changed: Any) -> str:
    """The result of ``vllm bench serve --save-result --save-detailed``."""
    at, prompts, outputs = (list(column) for column in zip(*ROWS, strict=True))
    found = {"date": "20260101-000000", "model_id": "m", "num_prompts": 3, "request_rate": "inf", "completed": 3}
    found |= {"input_lens": prompts, "output_lens": outputs, "start_times": [1000 + each for each in at]}
    found |= {"ttfts": [0.1] * 3, "itls": [[0.01] * (output - 1) for output in outputs], "errors": [""] * 3}
    return json.dumps({name: value for name, value in (found | changed).items() if value is not None})


def mooncake(at: float, prompt: int, output: int) -> dict[str, Any]:
    blocks = list(range(-(-prompt // 512)))
    return {"timestamp": ms(at), "input_length": prompt, "output_length": output, "hash_ids": blocks}


def unhashed(at: float, prompt: int, output: int) -> dict[str, Any]:
    return {name: value for name, value in mooncake(at, prompt, output).items() if name != "hash_ids"}


def benchmarks(requests: list[dict[str, Any]]) -> str:
    """A report of two benchmarks. A sweep at full speed leaves more requests incomplete than it completes."""
    cut = [guidellm(9, 99, 1)] * 5
    few = {"requests": {"successful": requests[:1], "errored": [], "incomplete": cut, "total": None}}
    most = {"requests": {"successful": requests, "errored": cut, "incomplete": cut, "total": None}}
    return json.dumps({"metadata": {"version": 2}, "config": {}, "benchmarks": [few, most]}, indent=2)


def parquet(**columns: Any) -> bytes:
    file = io.BytesIO()
    pd.DataFrame(columns).to_parquet(file)
    return file.getvalue()


def zipped(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, OWN)
    return file.getvalue()


AT, PROMPTS, OUTPUTS = (list(column) for column in zip(*ROWS, strict=True))
READ: dict[str, str | bytes] = {
    "own.csv": OWN,
    "windows.csv": OWN.replace("\n", "\r\n"),
    "bom.csv": b"\xef\xbb\xbf" + OWN.encode(),
    "packed.csv.gz": gzip.compress(OWN.encode()),
    "packed-without-its-name.csv": gzip.compress(OWN.encode()),
    "blank-lines.csv": OWN.replace("\n", "\n\n"),
    "no-last-newline.csv": OWN.rstrip(),
    "more-columns.csv": "id," + OWN.replace("\n", "\nx,", 3),
    "semicolons.csv": table("arrival_s,prompt_tokens,output_tokens", separator=";"),
    "tabs.tsv": table("arrival_s,prompt_tokens,output_tokens", separator="\t"),
    "pipes.txt": table("arrival_s,prompt_tokens,output_tokens", separator="|"),
    "unsorted.csv": "time,input_tokens,output_tokens\n2.0,8,1\n0.0,40,2\n0.5,300,7\n",
    "epoch-s.csv": table("timestamp,prompt_tokens,completion_tokens", lambda at: START + at),
    "epoch-ms.csv": table("timestamp,prompt_tokens,completion_tokens", lambda at: ms(START + at)),
    "epoch-us.csv": table("timestamp,prompt_tokens,completion_tokens", lambda at: 1000 * ms(START + at)),
    "epoch-ns.csv": table("timestamp,prompt_tokens,completion_tokens", lambda at: 10**6 * ms(START + at)),
    "named-ms.csv": table("arrival_ms,isl,osl", ms),
    "iso-utc.csv": table("created_at,input_tokens,output_tokens", iso),
    "iso-plain.csv": table("created_at,input_tokens,output_tokens", lambda at: iso(at, "")),
    "iso-zone.csv": table("created_at,input_tokens,output_tokens", lambda at: iso(at, "+02:00")),
    "camel.csv": table("startTime,promptTokens,outputTokens", iso),
    "azure.csv": table("TIMESTAMP,ContextTokens,GeneratedTokens", lambda at: iso(at, "").replace("T", " ")),
    "burstgpt.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    + "".join(f"{at + 5},ChatGPT,{prompt},{output},{prompt + output},API log\n" for at, prompt, output in ROWS)
    + "9,ChatGPT,100,0,100,API log\n",
    "mooncake.jsonl": lines(mooncake),
    "mooncake-without-hashes.jsonl": lines(unhashed),
    "sessions.jsonl": '{"session_id": "a", "timestamp": 0, "input_length": 40, "output_length": 2}\n'
    '{"session_id": "a", "delay": 500, "input_length": 258, "output_length": 7}\n'
    '{"session_id": "b", "timestamp": 2000, "input_length": 8, "output_length": 1}\n',
    "aiperf.jsonl": lines(aiperf),
    "aiperf-with-warm-up.jsonl": warmed_up(),
    "guidellm.json": benchmarks([guidellm(*row) for row in ROWS]),
    "vllm-bench.json": vllm_bench(),
    "vllm-bench-out-of-order.json": vllm_bench(
        input_lens=[300, 40, 8], output_lens=[7, 2, 1], start_times=[1000.5, 1000.0, 1002.0]
    ),
    "openai.jsonl": lines(openai),
    "openai.json": json.dumps([openai(*row) for row in ROWS]),
    "anthropic.jsonl": lines(anthropic),
    "gemini.jsonl": lines(gemini),
    "log.parquet": parquet(arrival_s=AT, prompt_tokens=PROMPTS, output_tokens=OUTPUTS),
    "dates.parquet": parquet(
        created_at=[pd.Timestamp(START + at, unit="s") for at in AT], input_tokens=PROMPTS, output_tokens=OUTPUTS
    ),
}


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def same(trace: Trace) -> bool:
    found = zip(trace.arrival_s - trace.arrival_s[0], trace.prompt_tokens, trace.output_tokens, strict=True)
    return [(round(float(at), 6), int(prompt), int(output)) for at, prompt, output in found] == list(ROWS)


@pytest.mark.parametrize("name", READ)
def test_files_that_are_read(tmp_path: Path, name: str) -> None:
    assert same(take_in(write(tmp_path, name, READ[name])))


TALK = {
    "sharegpt.json": [{"conversations": [{"from": "human", "value": "abcd" * 10}, {"from": "gpt", "value": "x" * 8}]}]
    * 3,
    "hugging-face.json": [
        {"messages": [{"role": "user", "content": "abcd" * 10}, {"role": "assistant", "content": "x" * 8}]}
    ]
    * 3,
}


@pytest.mark.parametrize("name", TALK)
def test_conversations_need_a_rate(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, name, json.dumps(TALK[name]))
    with pytest.raises(TraceError, match="write --rate R, in requests a second"):
        take_in(path)
    trace = take_in(path, rate_per_s=1.0)
    assert trace.prompt_tokens.tolist() == [40 // 4 * 1] * 3 and trace.output_tokens.tolist() == [2] * 3


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "empty.csv": (b"", "the file is empty"),
    "blank.csv": (b"\n \n", "the file is empty"),
    "header.csv": ("arrival_s,prompt_tokens,output_tokens\n", "a header but no rows; give at least one request"),
    "cut.csv.gz": (gzip.compress(OWN.encode() * 50)[:-30], "the gzip file is cut short; fetch it again"),
    "bent.csv.gz": (gzip.compress(OWN.encode())[:12] + b"\x00" * 40, "the gzip file is damaged"),
    "twice.csv.gz": (gzip.compress(gzip.compress(OWN.encode())), "a gzip file in a gzip file"),
    "book.xlsx": (zipped("sheet1.xml"), "a ZIP archive or a spreadsheet; a trace is CSV, JSON or JSON lines"),
    "packed.zst": (b"\x28\xb5\x2f\xfd" + b"\x00" * 20, "a Zstandard file; a trace is CSV"),
    "packed.xz": (b"\xfd7zXZ\x00" + b"\x00" * 20, "an xz file; a trace is CSV"),
    "latin1.csv": (
        "modèle,arrival_s,prompt_tokens,output_tokens\n".encode("latin-1"),
        "line 1: byte 0xe8 is not UTF-8",
    ),
    "bent.parquet": (b"PAR1" + b"\x00" * 20, "a Parquet file that cannot be read"),
    "names.csv": ("a,b,c\n1,2,3\n", "write --columns arrival=COLUMN,prompt=COLUMN,output=COLUMN or --rate R"),
    "one-name.csv": ("time,in,output_tokens\n1,2,3\n", "write --columns prompt=COLUMN. It has time, in, output_tokens"),
    "text.csv": ("time,prompt_tokens,output_tokens\n0,many,3\n", "row 1, column prompt_tokens: 'many' is not a number"),
    "negative.csv": ("time,prompt_tokens,output_tokens\n0,-4,3\n", "row 1, column prompt_tokens"),
    "half.csv": ("time,prompt_tokens,output_tokens\n0,4.5,3\n", "row 1, column prompt_tokens"),
    "short.csv": ("time,prompt_tokens,output_tokens\n0,4\n", "row 1: 2 values, but the header has 3 columns"),
    "when.csv": ("time,prompt_tokens,output_tokens\nnoon,4,3\n", "row 1, column time: 'noon' is not a number"),
    "cut.json": ('{"requests": [{"prompt_tokens": 1', "not JSON"),
    "nothing.json": ('{"a": 3}', "a JSON document without a list of requests; give a list of objects, or JSON lines"),
    "nested.json": ("[" * 100_000, "nested too deeply"),
    "bent.jsonl": (lines(unhashed) + '{"timestamp": 3', "row 4: not JSON"),
    "first-turn.jsonl": (
        '{"session_id": "a", "input_length": 4, "output_length": 2}\n',
        "row 1: the first turn of session 'a' has no timestamp; give it one, in milliseconds",
    ),
    "delay.jsonl": (
        '{"session_id": "a", "timestamp": 0, "input_length": 4, "output_length": 2}\n'
        '{"session_id": "a", "delay": -1, "input_length": 4, "output_length": 2}\n',
        "row 2, column delay: -1 is negative",
    ),
    "summary.json": (
        vllm_bench(input_lens=None, output_lens=None, start_times=None, ttfts=None, itls=None),
        "run `vllm bench serve` with --save-result --save-detailed",
    ),
    "lengths.json": (vllm_bench(start_times=[1.0]), "1 start_times for 3 requests"),
    "profile_export_aiperf.json": (
        json.dumps({"schema_version": "1.4", "aiperf_version": "0.13.0", "request_count": {"avg": 3.0}}, indent=2),
        "a summary of AIPerf; its requests are in profile_export.jsonl beside it",
    ),
    "profile_export_aiperf.csv": (
        "Metric,avg,min,max,sum,p1\nRequest Latency (ms),17.3,3.0,90.0,,3.0\n\nMetric,Value\nRequest Count,3\n",
        "a summary of AIPerf; its requests are in profile_export.jsonl beside it",
    ),
    "profile_export_raw.jsonl": (
        json.dumps({"metadata": aiperf(0, 1, 1)["metadata"], "start_perf_ns": 1, "responses": [], "payload": {}})
        + "\n",
        "raw answers of AIPerf; its requests are in profile_export.jsonl beside it",
    ),
    "guidellm.csv": (
        "Run Info,Run Info,Benchmark\nModel,Backend,Strategy\nm,openai_http,poisson\n",
        "a summary of guidellm; write its requests by --output kind=json",
    ),
    "guidellm.yaml": (
        "benchmarks:\n- config:\n    backend:\n      kind: openai_http\n",
        "YAML of guidellm; write its requests by --output kind=json",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_files_that_are_refused_say_what_is_wrong_in_one_line(tmp_path: Path, name: str) -> None:
    content, said = REFUSED[name]
    path = write(tmp_path, name, content)
    with pytest.raises(TraceError) as found:
        take_in(path)
    assert said in str(found.value) and str(path) in str(found.value) and "\n" not in str(found.value)


def test_there_are_fifty() -> None:
    assert len(READ) + len(TALK) + len(REFUSED) >= 50


def test_turns_come_after_their_delays_with_all_that_was_said(tmp_path: Path) -> None:
    """Prompts hold all turns before and their answers; sessions may be interleaved; both ways to read a file agree."""
    turns = [
        {"session_id": 1, "timestamp": 100, "input_length": 10, "output_length": 5},
        {"session_id": 2, "timestamp": 150, "input_length": 7, "output_length": 3},
        {"session_id": 1, "delay": 1000, "input_length": 20, "output_length": 6},
        {"session_id": 1, "delay": 0, "input_length": 1, "output_length": 1},
        {"session_id": 2, "delay": 100, "input_length": 2, "output_length": 2},
    ]
    path = write(tmp_path, "turns.jsonl", "".join(json.dumps(turn) + "\n" for turn in turns))
    trace = read_trace(path)
    assert trace.arrival_s.tolist() == pytest.approx([0, 0.05, 0.15, 1.0, 1.0])
    assert trace.prompt_tokens.tolist() == [10, 7, 12, 35, 42]
    assert trace.output_tokens.tolist() == [5, 3, 2, 6, 1]
    (chunk,) = open_trace(path).chunks()
    assert np.array_equal(chunk.arrival_s, trace.arrival_s)


CUT = (
    ("azure2023_code.csv.gz", 40),
    ("azure2023_conv.csv.gz", 40),
    ("arena_27models.csv.gz", 40),
    ("mooncake_conversation.jsonl.gz", 40),
    ("mooncake_synthetic.jsonl.gz", 40),
    ("mooncake_arxiv_first1000.jsonl.gz", 40),
    ("burstgpt_v1_dense_120.csv", 40),
    ("alibaba_gentd26_requests.csv.gz", 40),
)


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs shared/data/traces")
@pytest.mark.parametrize(("name", "count"), CUT)
def test_the_first_lines_of_published_traces(tmp_path: Path, name: str, count: int) -> None:
    """Read, with as many requests as rows that have tokens; or refused in a line that says what to write."""
    data = (SHARED / name).read_bytes()
    text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    head = "\n".join(text.splitlines()[: count + 1])
    path = write(tmp_path, name.removesuffix(".gz"), head)
    try:
        trace = take_in(path)
    except TraceError as problem:
        assert "write --columns" in str(problem) and "\n" not in str(problem)
    else:
        assert len(trace) + trace.dropped_rows == count + (".jsonl" in name)
        assert np.all(np.diff(trace.arrival_s) >= 0)
