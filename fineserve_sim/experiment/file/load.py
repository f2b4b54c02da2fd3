"""From the path of a file to its experiment: ``--set``, ``--quick`` and ``--seeds`` in place, everything checked."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fineserve_sim.experiment.file.document import Document, parse_value, read_yaml
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.file.messages import validate
from fineserve_sim.experiment.file.plan import Experiment, build


def load_experiment(
    path: Path, overrides: Sequence[tuple[str, str]] = (), quick: bool = False, seeds: int | None = None
) -> Experiment:
    """The validated experiment of a file. ``overrides`` are dotted keys with YAML values, as ``--set`` takes them, and
    win over ``quick``. Raises ConfigError for every mistake, at the line or option that made it."""
    return _loaded(read_yaml(path), path.stem, path.resolve().parent, overrides, quick, seeds)


def experiment_from(
    data: Mapping[str, Any],
    name: str = "experiment",
    overrides: Sequence[tuple[str, str]] = (),
    quick: bool = False,
    seeds: int | None = None,
) -> Experiment:
    """The validated experiment of a mapping as a file would hold it; otherwise like ``load_experiment``. Relative paths
    start at the current folder, and what is wrong is told by its key instead of its line."""
    return _loaded(Document(_plain(data), {(): name}), name, Path.cwd(), overrides, quick, seeds)


def _plain(value: Any) -> Any:
    """A value of Python as YAML would give it: own mappings and lists, paths as texts, numbers of NumPy as Python's."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return value.item() if isinstance(value, np.generic) else value


def _loaded(
    document: Document, name: str, folder: Path, overrides: Sequence[tuple[str, str]], quick: bool, seeds: int | None
) -> Experiment:
    if quick and not document.data.get("quick"):
        raise document.error((), "--quick: the file has no section quick, such as quick: {workload.requests: 300}")
    shortened = _quick(document)
    for key, text in overrides:
        place = f"--set {key}={text}"
        if key.partition(".")[0] == "quick":
            raise ConfigError(place, key, "set the key itself instead of its quick value")
        for each in (document, shortened):
            each.set(key, parse_value(text, place), place)
    if seeds is not None:
        document.set("seeds", seeds, f"--seeds {seeds}")
        shortened.set("seeds", seeds, f"--seeds {seeds}")
    validate(shortened)  # a mistake under quick shows before somebody needs it
    return build(shortened if quick else document, name, folder)


def _quick(document: Document) -> Document:
    """The document with the values under ``quick`` in place."""
    shortened = Document(copy.deepcopy(document.data), dict(document.places))
    wanted = document.data.get("quick", {})
    if not isinstance(wanted, dict):
        raise document.error(("quick",), "must be a mapping of dotted keys, such as workload.requests: 300")
    for key, value in wanted.items():
        shortened.set(key, value, document.place(("quick", key)))
    return shortened
