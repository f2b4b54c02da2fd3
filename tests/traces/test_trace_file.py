"""A trace file that is read some rows at a time: the requests of `read_trace`, its errors, and a block in memory."""

from __future__ import annotations

import gzip
import json
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from fineserve_traces import TraceError, open_trace, read_trace, trace_file, whole
from tracefilekit import AZURE, BROKEN, BURSTGPT, CSV

ARENA = "arrival_s,model,prompt_tokens,output_tokens\n"
MODELS = ("9", "gpt", "10", "a")
COLUMNS = ("arrival_s", "model", "prompt_tokens", "output_tokens")


def csv_text(header: str, row: Callable[[int], str], rows: int = 300) -> str:
    return header + "".join(row(number) + "\n" for number in range(rows))


def mooncake(number: int) -> str:
    prompt, output = 700 + number, 0 if number % 50 == 7 else 5
    ids = f'"output_length": {output}, "hash_ids": [{number}, 1]'
    return f'{{"timestamp": {3 * number + 0.1}, "input_length": {prompt}, {ids}}}'


FILES = {
    "plain": csv_text(CSV, lambda n: f"{n / 7},{n + 1},{2 * n + 1}"),
    "late": csv_text(CSV, lambda n: f"{5 + n // 3},{n + 1},1"),
    "windows": csv_text(CSV, lambda n: f"{n / 7},{n + 1},{2 * n + 1}").replace("\n", "\r\n"),
    "blank lines": csv_text(CSV, lambda n: f"{n / 7},{n + 1},{2 * n + 1}" + "\n" * (n % 4)).rstrip("\n"),
    "models": csv_text(ARENA, lambda n: f"{n / 7},{MODELS[n % (2 + n // 150)]},{n + 1},5"),
    "quoted": csv_text(ARENA, lambda n: f'{n / 7},"a ""b""\nc, {n % 3}",{n + 1},5').replace(
        '0.0,"a ""b""\nc, 0"', "0.0,x"
    ),
    "azure": csv_text(AZURE, lambda n: f"2023-11-16 18:{n // 60:02}:{n % 60:02}.68{n:03}59,{n},{n % 9}"),
    "burstgpt": csv_text(BURSTGPT, lambda n: f"{5.1 * n + 3.3},m{n // 150},{n},{n % 9},1,x"),
    "mooncake": csv_text("", mooncake),
}


@pytest.fixture(params=[40, 333, 1 << 20], ids=lambda size: f"blocks of {size}")
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", request.param)
    return int(request.param)


@pytest.mark.parametrize("packed", [False, True], ids=["text", "gzip"])
@pytest.mark.parametrize("kind", FILES)
def test_the_requests_are_those_of_the_whole_file(kind: str, packed: bool, blocks: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.dat"
    path.write_bytes(gzip.compress(FILES[kind].encode()) if packed else FILES[kind].encode())
    held, opened = read_trace(path, model="m"), open_trace(path, model="m")
    chunks = [*pickle.loads(pickle.dumps(opened)).chunks()]
    assert len(chunks) <= 2 if blocks > 1000 else len(chunks) > 5
    streamed = whole(opened)
    for name in COLUMNS:
        assert getattr(held, name).tobytes() == getattr(streamed, name).tobytes(), name
    assert (held.models, held.source, held.prefix_hashes) == (streamed.models, streamed.source, streamed.prefix_hashes)
    covered = [trace.prefix_tokens is not None and trace.prefix_tokens.tolist() for trace in (held, streamed)]
    assert covered[0] == covered[1]
    assert all(chunk.models == opened.models and chunk.source == opened.source for chunk in chunks)


@pytest.mark.parametrize("kind", FILES)
def test_what_a_file_is_found_to_hold(kind: str, blocks: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.dat"
    path.write_text(FILES[kind], newline="")
    held, found = read_trace(path), open_trace(path)
    assert len(found) == len(held)
    assert (found.first_s, found.last_s) == (held.arrival_s[0], held.arrival_s[-1])
    for number in range(len(held.models)):
        own = held.take(np.flatnonzero(held.model == number))
        assert found.requests[number] == len(own)
        assert found.prompt_tokens[number] == own.prompt_tokens.sum()
        assert found.output_tokens[number] == own.output_tokens.sum()
    for name, (tokens, request) in found.longest.items():
        column = getattr(held, name)
        assert (tokens, request) == (column.max(), column.argmax() + 1)


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_a_broken_file_gives_the_line_that_it_gives_whole(
    content: str | bytes, message: str, blocks: int, tmp_path: Path
) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TraceError) as found:
        open_trace(path)
    if blocks > 1000 or path.read_bytes()[:1] != b"\x1f":  # of a cut gzip file, blocks may be wrong before the cut
        assert message in str(found.value)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("plain", "40.0,1,1"),
        ("plain", "40.0,1"),
        ("plain", "99,-1,1"),
        ("plain", "x,1,1"),
        ("azure", "2023-11-16 18:02:46.1,1,1"),
        ("azure", "2023-11-16 17:15:46.1,1,1"),
        ("burstgpt", "1,m,1,1,1,x"),
        ("mooncake", "{x"),
        ("mooncake", "[]"),
        ("mooncake", '{"timestamp": 1, "input_length": 1}'),
        ("mooncake", '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": []}'),
        ("mooncake", '{"timestamp": 9e9, "input_length": 1, "output_length": 1, "hash_ids": [1, 2, 3]}'),
    ],
)
def test_an_error_far_down_names_its_place_in_the_file(kind: str, wrong: str, blocks: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.dat"
    path.write_text(FILES[kind] + "\n" + wrong + "\n")
    texts = []
    for read in (read_trace, lambda path: whole(open_trace(path))):
        with pytest.raises(TraceError) as found:
            read(path)
        texts.append(str(found.value))
    assert "row 3" in texts[0] or "line 303" in texts[0] or "row 29" in texts[0]
    if 'hash_ids": [1, 2' not in wrong:
        assert texts[0] == texts[1]
    else:  # the source of the whole counts dropped rows
        assert texts[0].partition(", row")[2] == texts[1].partition(", row")[2]


def json_line(number: int) -> str:
    """With a quote in its text, in the first line alone: no cell that goes over lines."""
    note = '5" pipe' if not number else ""
    ids = list(range(-(-(number % 900 + 1) // 512)))
    told = {"timestamp": number, "input_length": number % 900 + 1, "output_length": 1, "hash_ids": ids, "note": note}
    return json.dumps(told)


@pytest.mark.parametrize(
    ("head", "row"), [(CSV, lambda n: f"{n / 7},{n + 1},{2 * n + 1}"), ("", json_line)], ids=["csv", "json lines"]
)
def test_a_longer_file_takes_no_more_memory(
    head: str, row: Callable[[int], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(trace_file, "BLOCK_BYTES", 1 << 14)
    peaks = []
    for rows in (3_000, 12_000):
        path = tmp_path / f"{rows}.dat"
        path.write_text(csv_text(head, row, rows))
        found = open_trace(path)
        tracemalloc.start()
        assert sum(map(len, found.chunks())) == rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
