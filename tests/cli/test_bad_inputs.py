"""Bad inputs as tables (bad_inputs/*.txt): each has one line for an answer, which names the place, what is wrong and what would
be right; exit code 2, nothing half-written, no waiting."""

from __future__ import annotations

import gzip
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from fineserve_calibrate.cli import main as calibrate

import fineserve_sim as fs

TABLES = Path(__file__).parent / "bad_inputs"
MODELS = "--model A=llama-3.1-8b:fp8 --model B=llama-3.1-8b"
LLAMA = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192}
MOST_S = 5.0


def table(name: str) -> list[Any]:
    """The rows of a table, a parameter set each: its cells, the answer last."""
    lines = enumerate((TABLES / f"{name}.txt").read_text(encoding="utf-8").splitlines(), 1)
    rows = {number: re.split(r"(?<=\s)\|(?=\s)", line) for number, line in lines if not line.startswith("#")}
    return [
        pytest.param(*(cell.strip().replace("\\n", "\n") for cell in cells), id=f"line {number}")
        for number, cells in rows.items()
    ]


def check(said: str, expected: str) -> None:
    """The answer is that of the table, in which … stands for anything."""
    assert re.fullmatch(".*".join(map(re.escape, expected.split("…"))), said), said


@pytest.fixture
def small(experiment: Path, trace: Path) -> str:
    """The text of the small experiment; beside it lie its trace and a version without the section ``quick``."""
    text = experiment.read_text(encoding="utf-8")
    (experiment.parent / "noquick.yaml").write_text(text.replace("quick: {", "assumptions: []  # {"), encoding="utf-8")
    return text


@pytest.fixture
def refused(call: Callable[..., Any], tmp_path: Path, small: str) -> Callable[[list[str], str], None]:
    """Call the command line: exit 2, one line that is the answer, and the folder stays as it was."""

    def called(words: list[str], expected: str) -> None:
        before, start_s = tree(tmp_path), time.process_time()
        done = call(*words)
        assert time.process_time() - start_s < MOST_S
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done.err
        check(done.err.rstrip("\n").removeprefix("fineserve-sim: error: "), expected)
        assert tree(tmp_path) == before

    return called


def tree(folder: Path) -> dict[Path, bytes | None]:
    """Every path under a folder, files with their bytes."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_there_are_more_than_two_hundred() -> None:
    assert sum(len(table(path.stem)) for path in TABLES.glob("*.txt")) >= 400


@pytest.mark.parametrize(("old", "new", "answer"), table("experiment"))
def test_experiments(refused: Any, experiment: Path, small: str, trace: Path, old: str, new: str, answer: str) -> None:
    assert old in small
    experiment.write_text(small.replace(old, new, 1), encoding="utf-8")
    refused(["run", "small.yaml"], answer)


@pytest.mark.parametrize(("line", "answer"), table("commands"))
def test_commands(refused: Any, trace: Path, finished: Path, tmp_path: Path, line: str, answer: str) -> None:
    if "{results}" in line:
        (tmp_path / "results_done").symlink_to(finished)
    refused(
        shlex.split(line.format(file="small.yaml", trace=trace.name, models=MODELS, results="results_done")), answer
    )


def trace_bytes(content: str, good: bytes) -> bytes:
    """What a trace file of the table holds."""
    packed, sink = gzip.compress(good), pa.BufferOutputStream()
    pq.write_table(pa.table({"arrival_s": [0.0], "prompt_tokens": [5], "output_tokens": [5]}), sink)
    made = {
        "@latin1": good.replace(b"A", b"\xe4"),
        "@utf16": good.decode().encode("utf-16"),
        "@long": good + b"10," + 200_000 * b"A" + b",5,5\n",
        "@deep": 100_000 * b'{"a":',
        "@cut": packed[:-12],
        "@twice": gzip.compress(packed),
        "@damaged": packed[:40] + b"xxxx" + packed[44:],
        "@parquet": sink.getvalue().to_pybytes(),
    }
    return made.get(content, content.encode())


@pytest.mark.parametrize(("name", "content", "answer"), table("traces"))
def test_traces(refused: Any, trace: Path, tmp_path: Path, name: str, content: str, answer: str) -> None:
    (tmp_path / name).write_bytes(trace_bytes(content, trace.read_bytes()))
    refused(["compare", name, *MODELS.split(), "-s", "fineserve", "--rate-scale", "1"], answer)


@pytest.mark.parametrize(("content", "answer"), table("configs"))
def test_configs(refused: Any, experiment: Path, small: str, content: str, answer: str) -> None:
    if content.startswith("@"):
        key, _, value = content[1:].partition(": ")
        content = json.dumps(LLAMA | {key: json.loads(value)})
    (experiment.parent / "m").mkdir()
    (experiment.parent / "m" / "config.json").write_text(content, encoding="utf-8")
    experiment.write_text(small.replace("model: llama-3.1-8b,", "model: {config: m/config.json},", 1), encoding="utf-8")
    refused(["run", "small.yaml"], answer)


def cut(summary: dict[str, Any], key: str) -> dict[str, Any]:
    """The summary without this key, or without this key of its first cell."""
    if key.startswith("cell "):
        del summary["cells"][0][key.removeprefix("cell ")]
    else:
        del summary[key]
    return summary


@pytest.mark.parametrize("command", ["plot", "report", "explain 1", "diff"])
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        (100_000 * '{"a":', "maximum recursion depth exceeded while …"),
        ("cells", "no cells"),
        ("title", "no title"),
        ("cell metrics", "no metrics"),
    ],
    ids=["half", "deep", "no cells", "no title", "no metrics"],
)
def test_damaged_results(
    refused: Any, finished: Path, tmp_path: Path, command: str, content: str, problem: str
) -> None:
    if not content.startswith("{"):
        content = json.dumps(cut(json.loads((finished / "summary.json").read_text(encoding="utf-8")), content))
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "summary.json").write_text(content, encoding="utf-8")
    name, *rest = command.split()
    words = [name, "bad", *rest, *(["bad"] if name == "diff" else [])]
    refused(words, f"bad/summary.json: damaged ({problem}); run the experiment again to write it anew")


@pytest.mark.parametrize("command", ["plot", "report"])
def test_a_damaged_timeline(refused: Any, finished: Path, tmp_path: Path, command: str) -> None:
    shutil.copytree(finished, tmp_path / "bad")
    for path in (tmp_path / "bad" / "cells").glob("*.timeline.parquet"):
        path.write_bytes(b"x")
    refused([command, "bad"], "bad/cells/….timeline.parquet: damaged; delete it and run again")


@pytest.mark.parametrize(("line", "answer"), table("calibrate"))
def test_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str, answer: str
) -> None:
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "step.parquet").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fineserve-calibrate", *line.split()])
    before, start_s = tree(tmp_path), time.process_time()
    with pytest.raises(SystemExit) as left:
        calibrate()
    assert time.process_time() - start_s < MOST_S
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1), err
    check(err.rstrip("\n").removeprefix("fineserve-calibrate: ").removeprefix("error: "), answer)
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("expression", "answer"), table("python"))
def test_python(
    small: str, experiment: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, expression: str, answer: str
) -> None:
    monkeypatch.chdir(experiment.parent)
    names = {"fs": fs, "small": yaml.safe_load(small), "file": experiment.name, "trace": trace.name}
    before = tree(experiment.parent)
    with pytest.raises(ValueError) as raised:  # the answer is checked below
        eval(expression, names)
    check(str(raised.value), answer)
    assert tree(experiment.parent) == before
