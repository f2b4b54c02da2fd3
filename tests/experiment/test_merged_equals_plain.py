"""The result files of fig10 do not depend on how the engine advances: merged spans and single steps give the same bytes."""

from pathlib import Path

import pytest

from fineserve_sim.cluster import simulate, simulate_step_by_step
from fineserve_sim.experiment import load_experiment, run_loaded

FIG10 = Path(__file__).parents[2] / "experiments" / "fig10.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("slo_scale", [5, 20])
def test_merged_and_plain_write_the_same_files(tmp_path: Path, slo_scale: int) -> None:
    sweeps = f"[{{name: point, axes: {{load: [A, B]}}, at: {{rate_scale: 8, slo_scale: {slo_scale}}}}}]"
    overrides = [("sweeps", sweeps), ("figures", "[]"), ("claims", "[]"), ("answer", "null")]
    for name, run in (("merged", simulate), ("plain", simulate_step_by_step)):
        experiment = load_experiment(FIG10, overrides, quick=True)
        run_loaded(experiment, tmp_path / name, jobs=1, decisions=False, simulate=run)
    written = {file.relative_to(tmp_path / "merged") for file in (tmp_path / "merged").rglob("*") if file.is_file()}
    assert len(written) > 10
    for file in sorted(written):
        assert (tmp_path / "merged" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes(), file
