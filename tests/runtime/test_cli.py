"""The command line, and a whole server from a file, over fake engines."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import threading
from pathlib import Path

import httpx
import pytest
from filekit import start_fake, write_file
from fineserve_runtime.cli import app, main
from fineserve_runtime.cli.check import regions
from fineserve_runtime.cli.top import figures, look, view
from fineserve_runtime.config import load_file
from fineserve_runtime.engines.region import RegionLock, RegionPaths
from fineserve_runtime.replay_log import replay_file
from fineserve_runtime.serve import run_server
from rich.console import Console
from serverkit import ByteTokenizer, served
from typer.testing import CliRunner

COMMANDS = ("serve", "replay", "top", "model", "check", "demo")


def test_help_and_version() -> None:
    runner = CliRunner()
    text = runner.invoke(app, ["--help"]).output
    assert all(re.search(rf"\b{command}\b", text) for command in COMMANDS)
    assert runner.invoke(app, ["--version"]).output.startswith("fineserve-run ")
    for command in COMMANDS:
        assert runner.invoke(app, [command, "--help"]).exit_code == 0


def test_check_lists_what_it_found() -> None:
    result = CliRunner().invoke(app, ["check", "--json"])
    found = {each["what"]: each for each in json.loads(result.stdout)}
    assert {"python", "vllm", "fastapi", "cpu", "memory", "/dev/shm"} <= found.keys()
    missing = any(each["state"] == "missing" for each in found.values())
    assert result.exit_code == (1 if missing else 0)


def test_check_tells_a_live_region_from_a_stale_one(tmp_path: Path) -> None:
    for name in ("live", "stale"):
        (tmp_path / f"fineserve-{name}.kv").write_bytes(b"")
    (tmp_path / "fineserve-stale.lock").write_text("4711")  # its holder is gone: nobody locks it
    paths = RegionPaths(tmp_path, "live")
    paths.bytes_file.unlink()
    lock = RegionLock(paths)
    paths.bytes_file.write_bytes(b"")
    found = {finding.found.split(":")[0]: finding for finding in regions(tmp_path)}
    assert found["live"].state == "ok" and f"in use by process {os.getpid()}" in found["live"].found
    assert found["stale"].state == "note" and "left by a crash" in found["stale"].found
    lock.release()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["serve", "nowhere.yaml"], "nowhere.yaml: cannot be read: No such file or directory"),
        (["serve", "file.yaml", "--system", "prism"], '--system: unknown system "prism"'),
        (["serve", "file.yaml", "--set", "runtime.port"], "--set runtime.port: expected KEY=VALUE"),
        (["replay", "file.yaml", "--speed", "2"], "--speed and --requests are for --trace"),
        (["top", "http://127.0.0.1:9"], "is it running?"),
        (["model", "sleep", "A"], "FINESERVE_ADMIN_KEY is empty or not set"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_file(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fineserve-run", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("fineserve-run: error: ") and error.count("\n") == 1 and problem in error


def test_a_server_from_a_file_serves_and_drains_at_sigterm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = load_file(write_file(tmp_path))
    texts: list[str] = []

    def client(url: str) -> None:
        def talk() -> None:
            try:
                for model in ("tiny-bf16", "tiny-fp8"):
                    body = {"model": model, "prompt": "hello", "max_tokens": 5}
                    texts.append(httpx.post(f"{url}/v1/completions", json=body).json()["choices"][0]["text"])
                texts.append(httpx.get(f"{url}/version").text)
            finally:
                os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=talk).start()

    before = signal.getsignal(signal.SIGTERM)
    run_server(file, None, start=start_fake, tokenizer=lambda folder: ByteTokenizer(), ready=client)
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(texts) == 3 and texts[0] == texts[1] and "fineserve" in texts[2]
    events = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
    assert events[:2] == ["starting", "ready"] and "draining" in events and events[-1] == "stopped"
    result = replay_file(tmp_path / "decisions.jsonl")
    assert result.difference is None and result.events["RequestArrived"] == 2


def test_top_shows_every_model_and_its_memory() -> None:
    with served(step_s=0.05) as here:  # all tokens would take 15 s
        body = {"model": "A", "prompt": "x" * 60, "max_tokens": 300, "stream": True}
        with httpx.stream("POST", here.url + "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            now = look(here.url)
        assert now["A"]["kv_used_bytes"] >= 4096 and now["A"]["num_requests_running"] == 1
        assert now["B"]["kv_used_bytes"] == 0 and now[""]["total"] == 64 * 1024
        console = Console(width=160, file=io.StringIO())
        console.print(view(now, now, 1.0))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert re.search(r"^A +1 +1", text, re.MULTILINE) and re.search(r"^B +1 +0", text, re.MULTILINE)


def test_figures_of_text() -> None:
    text = '# TYPE a:b counter\na:b_total{model_name="M"} 2\na:b_total{model_name="M"} 3\n'
    assert figures(text) == {"M": {"b": 5.0}}
