"""The file as it was run: every default written out, and where its relative paths start, so that it runs from anywhere."""

from __future__ import annotations

from pathlib import Path

from fineserve_sim.experiment.file.document import to_yaml
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.run.files import atomic


def write_resolved(experiment: Experiment, path: Path) -> None:
    """Write the file as it was run. The sections ``quick`` and ``runtime`` are left out."""
    file = experiment.file
    if any(setup.names_files for setup in experiment.setups.values()):
        file = file.model_copy(update={"folder": str(experiment.setup.folder)})
    data = file.model_dump(mode="json", exclude_none=True, exclude={"quick", "runtime"})
    with atomic(path) as temporary:
        temporary.write_text(to_yaml(data), encoding="utf-8")
