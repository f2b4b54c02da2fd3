"""dev.py: a program that it starts gets the signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DEV = Path(__file__).parents[1] / "dev.py"

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
    command = [sys.executable, "-c", STAND_IN, str(DEV.parent), str(tmp_path), "run", "serve", "file.yaml"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        pid, *arguments = started.stdout.readline().split()
        os.kill(int(pid), signal.SIGTERM)
        assert int(pid) == started.pid and arguments == ["serve", "file.yaml"]
        assert started.wait() == -signal.SIGTERM
