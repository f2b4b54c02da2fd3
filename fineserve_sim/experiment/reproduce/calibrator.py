"""Claims that take a GPU: ``fineserve-calibrate claims`` answers them where the calibrator is installed.

It runs as a program of its own, since the simulator does without the calibrator.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec

from fineserve_sim.experiment.reproduce.judge import Evaluation, Verdict

NOT_INSTALLED = "Needs fineserve-calibrate: fineserve-calibrate claims, after fineserve-calibrate --gpu h100."
"""Why a claim that takes a GPU stays open where the calibrator does not answer it."""

_COMMAND = (sys.executable, "-m", "fineserve_calibrate.cli", "claims", "--json")
_VERDICTS: Mapping[str, Verdict] = {
    "holds": "reproduced",
    "fails": "not reproduced",
    "open": "not decidable here",
}


def answers() -> dict[str, Evaluation]:
    """The calibrator's answer to each of its claims, by id; empty where it is not installed or fails."""
    if find_spec("fineserve_calibrate") is None:
        return {}
    try:
        done = subprocess.run(_COMMAND, capture_output=True, text=True, check=True, timeout=300)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {row["id"]: _evaluation(row) for row in json.loads(done.stdout)}


def _evaluation(row: Mapping[str, str]) -> Evaluation:
    needs = f"Needs: {row['decide']}" if row["decide"] else ""
    reason = " ".join(part for part in (row["found"], needs) if part)
    return Evaluation(detail=reason, verdict=_VERDICTS[row["status"]])
