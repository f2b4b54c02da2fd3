"""Trials of the runtime (placeholder while the rest is built)."""

from __future__ import annotations

from pathlib import Path

from fineserve_calibrate.campaign.items import Trial
from fineserve_calibrate.probes.backend import Unavailable
from fineserve_calibrate.probes.runner import Row


def run_trial(trial: Trial, folder: Path, on_cpu: bool) -> list[Row]:
    raise Unavailable("not yet")
