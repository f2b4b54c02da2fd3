"""The benchmark of parity gives both sides the same memory."""

from __future__ import annotations

from pathlib import Path

from filekit import write_model
from fineserve_runtime.config import load_file

from benchmarks.runtime_parity import REGION_BYTES, SLAB_BYTES, SYSTEMS, UNMEASURED, draw_trace, experiment
from fineserve_sim.cluster.compose.memory import peak_activation_bytes, resident_bytes, usable_bytes
from fineserve_sim.experiment.run.run import Run, scenario


def test_the_simulated_kv_memory_is_that_of_the_region(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "trace.csv").write_text(draw_trace(4.0, 4.0))
    file = tmp_path / "parity.yaml"
    file.write_text(experiment(tmp_path / "model"))
    setup = load_file(file, changes=UNMEASURED, serving=False).experiment.setup
    for system in SYSTEMS:
        played = scenario(Run(setup, (), system, None, 1.0, 0, (0.5, 0.5)))
        fixed = [
            resident_bytes(model, played.engine) + peak_activation_bytes(model, played.engine)
            for model in played.models
        ]
        assert usable_bytes(played.gpus[0], played.engine) - sum(fixed) == REGION_BYTES - SLAB_BYTES
