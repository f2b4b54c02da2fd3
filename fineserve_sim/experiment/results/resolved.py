"""The file as it was run: every default written out, paths made absolute so that it runs from anywhere."""

from __future__ import annotations

from pathlib import Path

import yaml

from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.run.files import atomic


def write_resolved(experiment: Experiment, path: Path) -> None:
    """The file as it was run: every default written out, relative paths made absolute so that it runs from anywhere."""
    data = experiment.file.model_dump(mode="json", exclude_none=True, exclude={"quick", "runtime"})
    folder = experiment.setup.folder
    for key in ("trace", "data_dir"):
        if key in data["workload"]:
            data["workload"][key] = str(folder / data["workload"][key])
    if "step_times" in data["engine"]:
        data["engine"]["step_times"] = str(folder / data["engine"]["step_times"])
    for model in data["models"]:
        if isinstance(model["model"], dict):
            model["model"]["config"] = str(folder / model["model"]["config"])
    with atomic(path) as temporary:
        temporary.write_text(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120), encoding="utf-8")
