"""A plan's inputs from an existing experiment: its models, GPUs and engines, and the settings that ``fineserve-run`` needs.

So a plan can be made for models that the catalog does not have, and is served as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineserve_sim.experiment import load_experiment
from fineserve_sim.planning.gpus import Kind
from fineserve_sim.planning.wish import ModelWish, model_wish

KEPT = ("engine", "runtime")
"""Parts of the file that a plan has as they are."""


@dataclass(frozen=True, slots=True)
class Like:
    """The models of a file, each in the one way in which it runs there, and its GPU (None: it has several kinds). ``kept`` are
    keys of a plan, of which ``folder`` says where relative paths start."""

    models: tuple[ModelWish, ...]
    gpu: Kind | None
    kept: Mapping[str, Any]


def like(path: Path) -> Like:
    """Read ``path``. Raises ConfigError for a file that is no experiment, or has models that a plan does not know."""
    experiment = load_experiment(path)
    data, document = experiment.document.data, experiment.document
    models = []
    for index, entry in enumerate(data["models"]):
        if entry.get("tp", 1) == "auto":
            raise document.error(("models", index, "tp"), "auto; a plan needs a number of GPUs")
        if "speculative" in entry:
            raise document.error(("models", index, "speculative"), "a plan knows no draft models; leave it out")
        if (entry.get("dp") or 1) != 1:
            raise document.error(("models", index, "dp"), "a plan knows no data-parallel ranks; leave it out")
        models.append(ModelWish(entry["id"], entry["model"], ((entry["precision"], entry.get("tp", 1)),)))
    folder = path.resolve().parent / data.get("folder", "")
    return Like(
        tuple(models),
        data["cluster"].get("gpu"),
        {"folder": str(folder)} | {key: data[key] for key in KEPT if key in data},
    )


def wanted(models: Sequence[str] | None, file: Path | None) -> tuple[tuple[ModelWish, ...], Like | None]:
    """The models that are named (``model_wish``), or a file's models, with what else is taken from it. Raises ValueError where
    both are given or none is."""
    if (file is None) == (not models):
        raise ValueError("--model: name each model, or take those of an experiment by --like FILE; one of the two")
    if file is None:
        return tuple(map(model_wish, models or ())), None
    taken = like(file)
    return taken.models, taken
