"""The axes of a sweep: three of the load, and any dotted key of the parts of a run."""

from __future__ import annotations

import math
from typing import Any

from fineserve_sim.experiment.file import schema
from fineserve_sim.experiment.file.document import Document, KeyPath
from fineserve_sim.experiment.file.errors import nearest
from fineserve_sim.experiment.file.resolve import Setup

LOAD_AXES = ("load", "rate_scale", "slo_scale")
SWEEPABLE = ("cluster", "engine", "models", "workload", "slo", "faults", "systems")


def check_sweep(document: Document, path: KeyPath, sweep: schema.Sweep, setup: Setup) -> None:
    """Raise ConfigError unless every axis of the sweep can be varied, by its values, and none is given twice."""
    for axis, values in sweep.axes.items():
        check_axis(document, (*path, "axes", axis), axis, values, setup)
    for axis, value in sweep.at.items():
        check_axis(document, (*path, "at", axis), axis, [value], setup)
    if twice := set(sweep.axes) & set(sweep.at):
        raise document.error((*path, "at", min(twice)), "given both as an axis and here")


def check_axis(document: Document, path: KeyPath, axis: str, values: list[Any], setup: Setup) -> None:
    """Raise ConfigError unless ``axis`` can be varied and ``values`` suit it."""
    head = axis.split(".", 1)[0]
    if axis not in LOAD_AXES and ("." not in axis or head not in SWEEPABLE):
        expected = f"{', '.join(LOAD_AXES)}, or a dotted key such as engine.token_budget"
        close = nearest(axis, LOAD_AXES)
        raise document.error(path, f"unknown axis; {close if close.startswith('did') else 'expected ' + expected}")
    if len(set(values)) < len(values):
        raise document.error(path, "a value is given twice")
    for value in values:
        if axis == "load" and value not in setup.loads:
            raise document.error(path, f"unknown load {value!r}; {nearest(value, setup.loads)}")
        if axis in ("rate_scale", "slo_scale") and not _positive(value):
            raise document.error(path, f"must be a number greater than 0, not {value!r}")


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
