"""Claims that take a GPU: ``fineserve-calibrate claims`` answers them where the calibrator is installed.

It runs as a program of its own, since the simulator does without the calibrator.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from fineserve_sim.experiment.reproduce.judge import Verdict

_PROGRAM = """
import sys
from fineserve_calibrate.cli import main
sys.argv = ["fineserve-calibrate", "claims", "--json"]
main()
"""
_VERDICTS: dict[str, Verdict] = {
    "holds": "reproduced",
    "fails": "not reproduced",
    "open": "not decidable here",
}


def calibrator_verdicts() -> dict[str, tuple[Verdict, str]]:
    """Verdict and reason by claim id; empty where the calibrator is not installed or fails."""
    if find_spec("fineserve_calibrate") is None:
        return {}
    try:
        done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True, timeout=300)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {row["id"]: (_VERDICTS[row["status"]], _reason(row)) for row in json.loads(done.stdout)}


def _reason(row: Mapping[str, str]) -> str:
    needs = f"Needs: {row['decide']}" if row["decide"] else ""
    return " ".join(part for part in (row["found"], needs) if part)
