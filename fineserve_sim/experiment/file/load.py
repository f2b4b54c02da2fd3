"""From the path of a file to its experiment: ``--set``, ``--quick`` and ``--seeds`` in place, everything checked."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

from fineserve_sim.experiment.file.document import Document, parse_value, read_yaml
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.file.messages import validate
from fineserve_sim.experiment.file.plan import Experiment, build


def load_experiment(
    path: Path, overrides: Sequence[tuple[str, str]] = (), quick: bool = False, seeds: int | None = None
) -> Experiment:
    """The validated experiment of a file. ``overrides`` are dotted keys with YAML values, as ``--set`` takes them, and
    win over ``quick``. Raises ConfigError for every mistake, at the line or option that made it."""
    document = read_yaml(path)
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
    return build(shortened if quick else document, path.stem, path.resolve().parent)


def _quick(document: Document) -> Document:
    """The document with the values under ``quick`` in place."""
    shortened = Document(copy.deepcopy(document.data), dict(document.places))
    wanted = document.data.get("quick", {})
    if not isinstance(wanted, dict):
        raise document.error(("quick",), "must be a mapping of dotted keys, such as workload.requests: 300")
    for key, value in wanted.items():
        shortened.set(key, value, document.place(("quick", key)))
    return shortened
