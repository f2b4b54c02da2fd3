"""The compiled build: what it writes is what the sources write as they are, byte for byte. Skipped on the pure one."""

import os
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from fineserve_sim.build import build
from fineserve_sim.experiment import load_experiment, run_loaded
from fineserve_sim.policy import events

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ("fig10", "prism_fig08", "kunserve_fig12", "vtensor_fig11")
RUN = """
import sys
from pathlib import Path
from fineserve_sim.build import build
from fineserve_sim.experiment import load_experiment, run_loaded
assert build() == "pure Python"
run_loaded(load_experiment(Path(sys.argv[1]), [], quick=True), Path(sys.argv[2]), jobs=1, decisions=True)
"""

pytestmark = pytest.mark.skipif(build() != "compiled", reason="this is the pure build")


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_both_builds_write_the_same_files(name: str, tmp_path: Path) -> None:
    """Requests, timelines, decisions, results and figures of shared memory, fleets, groups and virtual memory."""
    file = ROOT / "experiments" / f"{name}.yaml"
    sources = os.pathsep.join((str(ROOT), str(ROOT / "traces")))
    command = [sys.executable, "-c", RUN, str(file), str(tmp_path / "pure")]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": sources}, check=True)
    run_loaded(load_experiment(file, [], quick=True), tmp_path / "compiled", jobs=1, decisions=True)
    written = {path.relative_to(tmp_path / "pure") for path in (tmp_path / "pure").rglob("*") if path.is_file()}
    assert len(written) > 5
    for path in sorted(written):
        assert (tmp_path / "pure" / path).read_bytes() == (tmp_path / "compiled" / path).read_bytes(), path


def test_events_keep_the_type_hints_that_logs_are_read_by() -> None:
    assert get_type_hints(events.GpusRepaired) == {"gpus": tuple[int, ...]}
    assert get_type_hints(events.EngineReady) == {"engine": int}
