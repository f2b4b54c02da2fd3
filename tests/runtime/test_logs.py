"""A log costs lines when it cannot be written, and nothing else."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fineserve_runtime.decisions import LogError
from fineserve_runtime.logs import EventLog, FileTarget, LineLog, LoggingHandler, StreamTarget, log_parts
from fineserve_runtime.replay_log import replay_file
from runtimekit import HANGS_S, core_spec, eventually, runtime


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_come_in_order_and_all_are_there_when_it_is_closed(tmp_path: Path) -> None:
    log = LineLog(FileTarget(tmp_path / "sub" / "log"), "test")
    for number in range(5000):
        log({"number": number})
    log.close()
    assert [line["number"] for line in lines(tmp_path / "sub" / "log")] == list(range(5000))
    assert log.lost == 0 and (tmp_path / "sub" / "log").stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_under_the_decision_log_costs_its_lines_alone() -> None:
    log = LineLog(FileTarget(Path("/dev/full")), "decisions")
    with runtime(core_spec(), log=log) as here:
        _, heard = here.ask("A", tokens=5)
        here.run()
        assert heard.end and heard.end.kind == "finished"
        eventually(lambda: log.lost > 3)
        assert not here.incidents
    log.close()


def test_a_pipe_that_nobody_reads_blocks_nobody() -> None:
    reading, writing = os.pipe()
    with suppress(BrokenPipeError), open(writing, "w") as stream:  # noqa: PTH123  # a descriptor; its reader leaves first
        log = LineLog(StreamTarget(stream), "events", most_lines=100)
        for number in range(50_000):
            log({"number": number, "text": "x" * 100})
        assert log.lost > 40_000
        with open(reading) as reader:  # noqa: PTH123
            while '"lost"' not in (line := reader.readline()):
                log({"number": -1})
                assert line
        log.close()


CHATTY = """
import subprocess, sys
SHORT = "import os; os.write(2, b'one' + b' more' * 200 + bytes([13]) + b'two' + b'x' * 100_000)"
LONG = "import sys; sys.stderr.write(('y' * 100 + chr(10)) * 9999)"
from fineserve_runtime.logs import EventLog
from fineserve_runtime.printed import catch_printed

with catch_printed() as printed:
    log = EventLog(printed.stream)
    printed.into(log)
    for code in (SHORT, LONG):
        subprocess.run([sys.executable, "-c", code], check=True)
    print("done", flush=True)
    sys.stdin.read(1)
log.close()
print("mine again", file=sys.stderr)
"""


def test_an_engine_that_prints_is_not_stopped_by_a_pipe_that_nobody_reads() -> None:
    """It starts in a process of its own and inherits stderr; vLLM shows its progress there."""
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", CHATTY], env=environment, text=True, **pipes) as process:
        assert process.stdout.readline() == "done\n", "a megabyte was printed, and nobody has read"
        _, errors = process.communicate("x", timeout=HANGS_S)
    *logged, last = errors.splitlines()
    texts = [event["text"] for event in map(json.loads, logged) if event.get("event") == "printed"]
    assert texts[0].startswith("one more") and texts[1].startswith("twoxxx") and "y" * 100 in texts
    assert max(map(len, texts)) <= 4096 and last == "mine again" and process.returncode == 0


def test_a_file_is_rotated_and_its_parts_replay_as_one_log(tmp_path: Path) -> None:
    with runtime(core_spec()) as here:
        for _ in range(10):
            here.ask("A", tokens=4)
            here.ask("B", tokens=4)
            here.run()
    path = tmp_path / "decisions"
    target = FileTarget(path, file_bytes=6000)
    for entry in here.log:
        target.write(json.dumps(entry) + "\n")
    target.close()
    parts = log_parts(path)
    assert len(parts) > 1 and [lines(part)[0].get("part") for part in parts] == [None, *range(1, len(parts))]
    assert replay_file(path).difference is None
    parts[0].unlink()
    with pytest.raises(LogError, match="begins with its part 1"):
        replay_file(path)


def test_a_rotation_that_fails_writes_into_nobody_elses_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor was closed, and the next file or connection of the server had that number."""
    target = FileTarget(tmp_path / "log", file_bytes=110)
    target.write('{"head": 1}\n')
    target.write('{"x": "%s"}\n' % ("x" * 80))
    with monkeypatch.context() as patch:
        patch.setattr("fineserve_runtime.logs.FileTarget._open", lambda self: os.open(tmp_path / "no" / "log", 0))
        for _ in range(6):
            with pytest.raises(OSError, match="No such file"):
                target.write('{"y": 1}\n')
    other = (tmp_path / "other").open("w")
    target.write('{"y": 2}\n')
    target.close()
    other.close()
    assert not (tmp_path / "other").read_text()
    assert [path.name for path in log_parts(tmp_path / "log")] == ["log.1", "log"]
    assert [line.get("y") for line in lines(tmp_path / "log")] == [None, 2]
    assert len(lines(tmp_path / "log.1")) == 2


def test_an_entry_that_is_no_json_costs_itself(tmp_path: Path) -> None:
    log = LineLog(FileTarget(tmp_path / "log"), "test")
    log({("no", "key"): 1})  # type: ignore[dict-item]
    eventually(lambda: log.lost == 1)
    log({"number": 1})
    log.close()
    assert lines(tmp_path / "log") == [{"lost": 1}, {"number": 1}]


def test_a_log_with_a_gap_is_not_replayed_in_silence(tmp_path: Path) -> None:
    with runtime(core_spec()) as here:
        here.ask("A")
        here.run()
    entries = json.loads(json.dumps([*here.log[:3], {"lost": 7}, *here.log[3:]]))
    (tmp_path / "log").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    with pytest.raises(LogError, match="7 lines were lost"):
        replay_file(tmp_path / "log")


def test_what_libraries_log_are_events_too() -> None:
    stream = io.StringIO()
    log = EventLog(stream)
    logger = logging.Logger("uvicorn.error")
    logger.addHandler(LoggingHandler(log))
    try:
        raise KeyError("what")
    except KeyError:
        logger.exception("in %s", "the app")
    logger.error("bad %d", "arguments")
    log.close()
    (line,) = [json.loads(each) for each in stream.getvalue().splitlines()]
    assert (line["event"], line["message"], line["problem"]) == ("library", "in the app", "KeyError('what')")
