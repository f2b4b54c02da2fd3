"""dev.py's tests in stages: what a change waits for, what it does not, and each of them once in continuous integration."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
LINTERS = [["ruff", "check", "."], ["ruff", "format", "--check", "."]]
CI = (ROOT / ".ci" / "run").read_text(encoding="utf-8")


class Recorded:
    """dev.py with programs that only note how they were called; those in ``failing`` end with 1."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        spec = importlib.util.spec_from_file_location("dev", ROOT / "dev.py")
        assert spec is not None and spec.loader is not None
        self.dev: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.dev)
        self.calls: list[list[str]] = []
        self.failing: set[str] = set()
        monkeypatch.setattr(self.dev, "environment", lambda *_: Path("tools"))
        monkeypatch.setattr(self.dev, "compile_modules", lambda _: self.calls.append(["compile"]))
        monkeypatch.setattr(self.dev.shutil, "which", lambda _: "cc")
        monkeypatch.setattr(self.dev.subprocess, "run", self._run)

    def _run(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        name = Path(command[0]).name
        self.calls.append([name, *command[1:]])
        return subprocess.CompletedProcess(command, int(name in self.failing), f"{name} said this")

    def test(self, *arguments: str) -> int:
        self.calls.clear()
        return int(self.dev.test(list(arguments)))

    def selections(self) -> list[str]:
        """Of the pytest calls: the marker that they ask for, or their first folder."""
        return [call[len(self.dev.TESTS) :][-1] for call in self.calls if call[0] == "pytest"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    return Recorded(monkeypatch)


def test_the_readmes_command_checks_everything_but_slow_tests(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    assert recorded.test() == 0
    assert recorded.calls[:2] == LINTERS
    assert {call[0] for call in recorded.calls[2:]} == {"mypy", "lint-imports", "pytest"}
    assert recorded.selections() == ["not slow"]
    said = capsys.readouterr().out
    assert said.startswith("Takes at most 4 minutes on two quiet cores") and "mypy said this" in said


def test_all_is_the_readmes_command_and_then_the_rest(recorded: Recorded) -> None:
    assert recorded.test("--all") == 0
    assert recorded.selections() == ["not slow", "slow", recorded.dev.COMPILED_TESTS[-1]]
    assert recorded.test("--slow") == 0
    assert recorded.selections() == ["slow", recorded.dev.COMPILED_TESTS[-1]] and LINTERS[0] not in recorded.calls


@pytest.mark.parametrize("fails", ["ruff", "mypy", "lint-imports", "pytest"])
def test_what_fails_is_the_end_of_the_command(recorded: Recorded, fails: str) -> None:
    recorded.failing.add(fails)
    assert recorded.test("--all") == 1
    assert recorded.selections() == ([] if fails == "ruff" else ["not slow"])


def test_other_arguments_are_pytests(recorded: Recorded) -> None:
    assert recorded.test("tests/policy", "-k", "slab") == 0
    assert recorded.calls == [["pytest", "tests/policy", "-k", "slab"]]


def test_continuous_integration_runs_the_readmes_command_and_the_rest_once() -> None:
    assert re.findall(r"^python3 dev.py test\b(.*)$", CI, re.MULTILINE)[:2] == ["", " --slow"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"^python3 dev.py test +# .* 4 minutes .*two quiet cores", readme, re.MULTILINE)


STAND_IN = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
import dev
folder = Path(sys.argv.pop(1))
dev.environment = lambda *inputs: folder
sys.exit(dev.main())
"""

PROGRAM = """#!/bin/sh
echo "$$ $*"
exec sleep 60
"""


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
def test_a_server_is_the_process_that_was_started(tmp_path: Path) -> None:
    """A supervisor ends the process that it knows: a server below it lived on, with its port and its memory."""
    program = tmp_path / "fineserve-run"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    command = [sys.executable, "-c", STAND_IN, str(ROOT), str(tmp_path), "run", "serve", "file.yaml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid, *arguments = started.stdout.readline().split()
        os.kill(int(pid), signal.SIGTERM)
        assert int(pid) == started.pid and arguments == ["serve", "file.yaml"]
        assert started.wait() == -signal.SIGTERM
