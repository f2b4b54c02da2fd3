"""A slice of the chaos campaign over fake engines: nothing happens that must not, and it goes on where it ended."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.chaos_clients import waited_for_token_s

ROOT = Path(__file__).parents[2]


def campaign(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """``--grace``: how long somebody waits on a busy machine is not this test's business."""
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "chaos.py"),
        str(folder),
        "--engines",
        "fake",
        "--segment",
        "250",
    ]
    command += ["--grace", "120", "--gap", "0.3", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=ROOT, check=False)


@pytest.mark.slow
def test_a_slice_breaks_nothing_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    pytest.importorskip("openai")
    first = campaign(tmp_path, "--requests", "250")
    assert first.returncode == 0, first.stdout + first.stderr
    both = campaign(tmp_path, "--requests", "500")
    assert both.returncode == 0, both.stdout + both.stderr
    played = [json.loads(line) for line in (tmp_path / "segments.jsonl").read_text().splitlines()]
    assert [each["segment"] for each in played] == [0, 1] and "segment 0" not in both.stderr
    assert all(each["faults"]["disk under the decision log full"] and each["log_lines_lost"] for each in played)
    assert all(each["outcomes"]["finished"] > 200 and len(each["faults"]) >= 4 for each in played)
    assert campaign(tmp_path, "--report").stdout == both.stdout
    other = campaign(tmp_path, "--requests", "750", "--seed", "1")
    assert other.returncode == 1 and "take another folder" in other.stderr


def test_only_streams_say_how_long_a_first_token_took() -> None:
    assert waited_for_token_s(1.0, 3.0, 9.0, stream=True) == 2.0
    assert waited_for_token_s(1.0, None, 9.0, stream=True) == 8.0
    assert waited_for_token_s(1.0, None, 23.0, stream=False) == 0.0
