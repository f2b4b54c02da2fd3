"""``fineserve-sim reproduce``, ``explain`` and ``run --trace-out`` as a user calls them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fineserve_sim.cli.app import app
from fineserve_sim.experiment.reproduce import LedgerError

FILE = """\
fineserve: 1
title: Small
cluster: {gpu: h100-sxm, count: 1}
models:
  - {id: A, model: llama-3.1-8b, precision: fp8, rate_per_s: 20}
workload: {lengths: {prompt_tokens: 256, output_tokens: 8}, requests: 40}
slo: {ttft_s: 0.5}
systems: [fineserve, "static*"]
seeds: 2
quick: {seeds: 1}
claims:
  - {id: FS-10c/static*, paper: 1.2, measure: ratio, metric: ttft_attainment, of: fineserve, over: "static*", at: {sweep: run}}
  - {id: FS-10c/itself, paper: 1.2, measure: ratio, metric: ttft_attainment, of: "static*", over: "static*", at: {sweep: run}}
"""

PROGRAM = "from fineserve_sim.cli import main; main()"


def call(*arguments: object) -> None:
    app([str(each) for each in arguments], standalone_mode=False)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "small.yaml").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_reproduce_prints_and_writes_the_ledger(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("reproduce", "--quick", "--claims", "FS-10c,KS-2-token", "--jobs", 1, "--json", "--markdown", "l.md")
    data = json.loads(capsys.readouterr().out)
    assert {entry["id"]: entry["by"] for entry in data["claims"]} == {"FS-10c": "small", "KS-2-token": "analysis"}
    assert [each["label"] for each in data["claims"][0]["ours"]] == ["static*", "itself"]
    assert "| KS-2-token |" in (folder / "l.md").read_text(encoding="utf-8")
    assert (folder / "results" / "reproduce-quick" / "small" / "summary.json").exists()


def test_reproduce_takes_targets_from_another_ledger(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = "{{paper: KunServe, where: s, kind: number, backend: analytic, id: {}, target: {}}}"
    lines = (f"  - {entry.format(*pair)}" for pair in (("KS-2-token", 200), ("KS-99", 1)))
    (folder / "ledger.yaml").write_text("\n".join(["claims:", *lines, ""]), encoding="utf-8")
    call("reproduce", "--claims-file", "ledger.yaml", "--json")
    data = json.loads(capsys.readouterr().out)
    assert [(each["id"], each["verdict"]) for each in data["claims"]] == [
        ("KS-2-token", "not reproduced"),
        ("KS-99", "not decidable here"),
    ]
    call("reproduce", "--claims-file", "ledger.yaml")
    assert "2 claims: " in (told := capsys.readouterr().out) and "KS-99" in told


def test_reproduce_names_what_is_wrong(folder: Path) -> None:
    with pytest.raises(LedgerError, match="--claims FS-0: no such claim"):
        call("reproduce", "--claims", "FS-0")
    with pytest.raises(LedgerError, match="no experiment files there"):
        call("reproduce", "--experiments", folder, "--claims", "FS-10c")


def test_reproduce_says_by_its_exit_code_that_an_experiment_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "experiments" / "kunserve_fig05.yaml").write_text("fineserve: [1\n", encoding="utf-8")
    command = (
        "reproduce",
        "--quick",
        "--claims",
        "FS-10c,KS-5,KS-load",
        "--jobs",
        1,
        "--markdown",
        "l.md",
    )
    assert app([str(each) for each in command], standalone_mode=False) == 1
    streams = capsys.readouterr()
    assert "3 claims: 1 not reproduced, 2 not decidable here" in streams.out
    assert [line.partition(": ")[2][:44] for line in streams.err.splitlines()] == [
        "experiments/kunserve_fig05.yaml:2: not valid",
        "There is no experiments/kunserve_fig13.yaml.",
    ]
    assert (folder / "l.md").exists()
    with pytest.raises(LedgerError, match="expected the lines"):
        (folder / "l.md").write_text("no place", encoding="utf-8")
        call("reproduce", "--claims", "FS-10c", "--markdown", "l.md")


def test_ctrl_c_keeps_what_is_done(folder: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, "reproduce", "--claims", "FS-10c", "--jobs", "1"]
    slow = FILE.replace("requests: 40", "requests: 4000").replace("seeds: 2", "seeds: 20")
    (folder / "experiments" / "small.yaml").write_text(slow, encoding="utf-8")
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        while not list(folder.glob("results/reproduce/small/cells/*.json")):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (130, "")
    assert re.fullmatch(r"fineserve-sim: interrupted after \d+ of 40 simulations, which are kept; .*\n", err)
    assert not list(folder.glob("results/reproduce/small/**/.*"))


def test_run_with_a_trace_file_then_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("run", "experiments/small.yaml", "--quick", "--jobs", 1, "--out", "out", "--trace-out", "trace.json")
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    shown = ["FineServe", "GPU 0, FineServe", "Static*", "GPU 0, Static*"]
    assert [name.partition(", slo_scale")[0] for name in names] == shown
    capsys.readouterr()
    call("explain", "out", 7, "--system", "static*")
    out = capsys.readouterr().out
    assert out.startswith("Static*, ") and "request 7: A, 256 prompt and 8 output tokens" in out and "last token" in out
    call("explain", "out", 7, "--json")
    assert json.loads(capsys.readouterr().out)["request"] == 7
    with pytest.raises(ValueError, match="--at rate: expected AXIS=VALUE"):
        call("explain", "out", 7, "--at", "rate")
