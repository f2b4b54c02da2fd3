"""The simulator beside the runtime's replay: the same file, with the steps that the campaign measured."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from fineserve_calibrate.campaign.archive import TRIALS
from fineserve_calibrate.campaign.slowdowns import Row
from fineserve_calibrate.campaign.trials import metrics
from fineserve_calibrate.probes.backend import ProbeError
from fineserve_calibrate.probes.schema import KEYS, LATENCY

READ_AS = "eager"
"""The mode under which an experiment's ``engine.step_times`` is read, whatever mode was measured."""
SIMULATE = "from fineserve_sim.cli import main; main()"
SHOWN = ("throughput_per_s", "ttft_p50_s", "tpot_p50_s", "ttft_mean_s", "tpot_mean_s", "ttft_attainment", "ttft_p99_s")


def parity(folder: Path, steps: Sequence[Row]) -> list[tuple[str, float, float]]:
    """(metric, real, simulated) of the replay in a campaign's folder; empty where there is no replay or there are no steps
    of its engines. Raises ProbeError when the file cannot be simulated."""
    replay = folder / TRIALS / "replay"
    real = replay / "real" / "summary.json"
    modes = {str(row["mode"]) for row in steps if row["dtype"] == "bfloat16"}
    if not real.exists() or not modes:
        return []
    mode = "graphs" if "graphs" in modes else READ_AS
    chosen = [row for row in steps if row["dtype"] == "bfloat16" and row["mode"] == mode]
    columns = {name: [row[name] for row in chosen] for name in (*KEYS["step"], LATENCY)}
    pq.write_table(pa.table(columns | {"mode": [READ_AS] * len(chosen)}), replay / "step.parquet")
    out = replay / "simulated"
    command = [sys.executable, "-c", SIMULATE, "run", str(replay / "replay.yaml"), "--out", str(out), "--jobs", "1"]
    run = subprocess.run(
        [*command, "--set", "engine.step_times=step.parquet"], capture_output=True, text=True, check=False
    )
    if run.returncode:
        raise ProbeError(" ".join(run.stderr.split()[-40:]) or f"the simulation ended with {run.returncode}")
    sides = [metrics(json.loads(path.read_text(encoding="utf-8"))) for path in (real, out / "summary.json")]
    return [(name, sides[0][name], sides[1][name]) for name in SHOWN if all(name in side for side in sides)]
