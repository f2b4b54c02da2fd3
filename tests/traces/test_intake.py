"""Files that other programs wrote become traces: layouts, names, units, and what is said where these do not tell."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from fineserve_traces import TraceError, read_trace, take_in
from hypothesis import given
from hypothesis import strategies as st

Write = Callable[[str, str | bytes], Path]

START = 1_716_000_000
OPENAI = {"created": START, "model": "m", "usage": {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42}}
AIPERF = {
    "metadata": {"session_num": 0, "request_start_ns": START * 10**9, "request_end_ns": START * 10**9 + 10**8},
    "metrics": {
        "input_sequence_length": {"value": 40, "unit": "tokens"},
        "output_sequence_length": {"value": 2, "unit": "tokens"},
    },
}
GUIDELLM_REQUEST = {"request_start_time": START + 0.5, "prompt_tokens": 40, "output_tokens": 2}
GUIDELLM = {
    "metadata": {"version": 1},
    "benchmarks": [
        {"requests": {"successful": [GUIDELLM_REQUEST], "errored": [], "incomplete": []}},
        {"requests": {"successful": [GUIDELLM_REQUEST, GUIDELLM_REQUEST | {"request_start_time": START + 1.0}]}},
    ],
}
LAYOUTS = {
    "names.csv": f"timestamp,input_tokens,completion_tokens\n{START}000,40,2\n{START}500,40,2\n",
    "semicolons.csv": "arrival_s;prompt_tokens;output_tokens\n0;40;2\n0.5;40;2\n",
    "tabs.tsv": "arrival_ms\tprompt_tokens\toutput_tokens\n0\t40\t2\n500\t40\t2\n",
    "since1970.csv": f"arrival_s,prompt_tokens,output_tokens\n{START},40,2\n{START}.5,40,2\n",
    "camel.csv": "startTime,promptTokens,outputTokens\n2024-05-18T02:40:00Z,40,2\n2024-05-18T02:40:00.5Z,40,2\n",
    "mooncake.jsonl": '{"timestamp": 7, "input_length": 40, "output_length": 2}\n'
    '{"timestamp": 507, "input_length": 40, "output_length": 2}\n',
    "openai.jsonl": "\n".join(json.dumps(OPENAI | {"created": START + gap}) for gap in (0, 0.5)),
    "aiperf.jsonl": "\n".join(
        json.dumps(AIPERF | {"metadata": {"request_start_ns": START * 10**9 + gap}}) for gap in (0, 500_000_000)
    ),
    "guidellm.json": json.dumps(GUIDELLM, indent=1),
    "list.json": json.dumps([OPENAI, OPENAI | {"created": START + 0.5}]),
}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def to_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return to_file


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_other_programs(write: Write, name: str) -> None:
    trace = take_in(write(name, LAYOUTS[name]))
    assert trace.arrival_s == pytest.approx([0, 0.5], abs=1e-9)
    assert trace.prompt_tokens.tolist() == [40, 40]
    assert trace.output_tokens.tolist() == [2, 2]


def test_parquet(tmp_path: Path) -> None:
    times = pd.to_datetime(["2024-05-02", "2024-05-01"])
    frame = pd.DataFrame({"time": times, "prompt_tokens": [1, 2], "output_tokens": [3, 4], "model": ["b", "a"]})
    frame.to_parquet(tmp_path / "log.parquet")
    trace = take_in(tmp_path / "log.parquet")
    assert trace.arrival_s.tolist() == [0, 86400]
    assert [trace.models[index] for index in trace.model] == ["a", "b"]


def test_named_columns_and_units(write: Write) -> None:
    path = write("log.csv", "when,in,out\n1,2,3\n3,4,5\n")
    named = {"arrival": "when", "prompt": "in", "output": "out"}
    assert take_in(path, columns=named).arrival_s.tolist() == [0, 2]
    assert take_in(path, columns=named, unit="ms").arrival_s.tolist() == [0, 0.002]


def test_failed_requests_are_dropped_and_counted(write: Write) -> None:
    trace = take_in(write("log.csv", "time,prompt_tokens,completion_tokens\n0,5,6\n1,5,\n2,5,0\n"))
    assert (len(trace), trace.dropped_rows) == (1, 2)


@pytest.mark.parametrize("turns", ["conversations", "messages"])
def test_conversations_take_a_rate(write: Write, turns: str) -> None:
    who, text = ("from", "value") if turns == "conversations" else ("role", "content")
    said = [{who: "user", text: "abcdefgh"}, {who: "assistant", text: "x" * 40}]
    path = write("talk.json", json.dumps([{turns: said}] * 3))
    with pytest.raises(TraceError, match="conversations have no arrivals; write --rate R"):
        take_in(path)
    trace = take_in(path, rate_per_s=2)
    assert trace.prompt_tokens.tolist() == [2] * 3 and trace.output_tokens.tolist() == [10] * 3
    assert np.array_equal(trace.arrival_s, take_in(path, rate_per_s=2).arrival_s)
    assert trace.arrival_s.tolist() == pytest.approx((2 * take_in(path, rate_per_s=4).arrival_s).tolist())


WRONG = [
    (
        "x.csv",
        "when,in,out\n1,2,3\n",
        {},
        "arrival and prompt and output is told by its name; write --columns arrival=",
    ),
    ("x.csv", "time,in,out\n1,2,3\n", {"columns": {"prompt": "inn", "output": "out"}}, "did you mean 'in'?"),
    ("x.csv", "time,in,out\n1,2,x\n", {"columns": {"prompt": "in", "output": "out"}}, "row 1, column out: 'x' is not"),
    ("x.csv", "time,in,out\n1,2,3\n", {"columns": {"prompts": "in"}}, "prompts=...: not a role; roles are arrival"),
    ("x.csv", "time,in,out\n1,2,3\n", {"unit": "h"}, "--unit h: not a unit of time; give one of s, ms"),
    ("x.csv", "time,prompt_tokens,output_tokens\n-1,2,3\n", {}, "row 1, column time: -1 is negative"),
    (
        "x.csv",
        "created_at,input_tokens,output_tokens\n2024-01-01,2,3\nsoon,2,3\n",
        {},
        "row 2, column created_at: 'soon'",
    ),
    ("x.csv", "time;input_tokens;output_tokens\n1;2\n", {}, "row 1: 2 values, but the header has 3 columns"),
    ("x.csv", "time;input_tokens;output_tokens\n", {}, "a header but no rows"),
    ("x.json", '{"a": 3}', {}, "a JSON document without a list of requests"),
    ("x.json", '{"a": [1, 2', {}, "line 1: not JSON"),
    ("x.json", "[]", {}, "without a list of requests"),
    ("x.csv", "", {}, "the file is empty"),
    ("x.parquet", b"PAR1xxxx", {}, "a Parquet file that cannot be read"),
    (
        "x.csv",
        "arrival_s,prompt_tokens,output_tokens\n0,1,1\n",
        {"rate_per_s": -1},
        "--rate -1: give requests a second",
    ),
]


@pytest.mark.parametrize(("name", "content", "options", "said"), WRONG)
def test_what_cannot_be_read_is_one_line(
    write: Write, name: str, content: str | bytes, options: dict[str, object], said: str
) -> None:
    with pytest.raises(TraceError) as found:
        take_in(write(name, content), **options)  # type: ignore[arg-type]
    assert said in str(found.value) and "\n" not in str(found.value)


def test_arrivals_since_1970_are_refused_by_the_plain_layout(write: Write) -> None:
    """They were seconds since the trace began: half a second was 500 s, and the first came after 54,000 years."""
    path = write("log.csv", f"arrival_s,prompt_tokens,output_tokens\n{START}000,1,1\n{START}500,1,1\n")
    with pytest.raises(TraceError, match="row 2, column arrival_s: 1716000000500 is a time since 1970"):
        read_trace(path)
    assert take_in(path).arrival_s.tolist() == [0, 0.5]


@given(
    st.lists(st.tuples(st.integers(0, 10**8), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=20),
    st.sampled_from(",;\t|"),
    st.sampled_from([("ns", 10**9), ("us", 10**6), ("ms", 10**3)]),
)
def test_separator_and_unit_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]], separator: str, unit: tuple[str, int]
) -> None:
    """The same requests, sorted, whatever the table looks like; and what is written is read as the same trace."""
    name, ticks = unit
    lines = [("sent_at_" + name, "input_tokens", "output_tokens"), *rows]
    folder = tmp_path_factory.mktemp("intake")
    (folder / "log.csv").write_text("\n".join(separator.join(map(str, line)) for line in lines))
    trace = take_in(folder / "log.csv", unit=name)
    first = min(at for at, _, _ in rows)
    wanted = sorted(rows, key=lambda row: row[0])
    assert trace.arrival_s == pytest.approx([(at - first) / ticks for at, _, _ in wanted])
    assert trace.prompt_tokens.tolist() == [prompt for _, prompt, _ in wanted]
    trace.to_csv(folder / "trace.csv")
    again = read_trace(folder / "trace.csv")
    assert np.array_equal(again.arrival_s, trace.arrival_s) and np.array_equal(again.output_tokens, trace.output_tokens)
