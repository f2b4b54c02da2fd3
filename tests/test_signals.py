"""Tests of Ctrl-C hold however the tests were started: signals that were ignored then are not ignored in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BACKGROUND = ("sh", "-c", 'trap "" INT HUP; exec "$@"', "sh")
TEST = """
import subprocess, sys

def test_a_program_that_a_test_starts_can_be_interrupted():
    code = "import signal; print(*(signal.getsignal(each) is not signal.SIG_IGN for each in (signal.SIGINT, signal.SIGHUP)))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said == "True True\\n"
"""


def test_signals_that_a_background_shell_ignores_act_in_tests(tmp_path: Path) -> None:
    """As `nohup python3 dev.py test &` in a script starts them."""
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_inner.py").write_text(TEST, encoding="utf-8")
    command = [*BACKGROUND, sys.executable, "-m", "pytest", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
