"""Finished experiments as evaluators read them: cells by place, metrics with intervals, single runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fineserve_sim.experiment.file.plan import Cell, matching
from fineserve_sim.experiment.reproduce.judge import Quantity
from fineserve_sim.experiment.results.claims import estimate_of
from fineserve_sim.experiment.results.stats import Estimate, ratio
from fineserve_sim.experiment.run.run_data import RunData
from fineserve_sim.experiment.run.store import Store


class MissingError(ValueError):
    """An experiment that did not run, or a cell that it does not have: the claim cannot be decided; one line."""


class Results:
    """The results folders of experiments below ``out``, by name of their file. ``problems``: why one has none, in a line."""

    def __init__(self, out: Path, problems: Mapping[str, str] | None = None) -> None:
        self._out = out
        self._problems = problems or {}
        self._summary = lru_cache(maxsize=None)(self._read_summary)
        self._run = lru_cache(maxsize=8)(self._read_run)

    def has(self, name: str) -> bool:
        """Whether an experiment has results."""
        return name not in self._problems and (self._out / name / "summary.json").exists()

    def summary(self, name: str) -> Mapping[str, Any]:
        """summary.json of an experiment. Raises MissingError where it did not run."""
        return self._summary(name)

    def _read_summary(self, name: str) -> Mapping[str, Any]:
        if name in self._problems:
            raise MissingError(self._problems[name])
        path = self._out / name / "summary.json"
        if not path.exists():
            raise MissingError(f"experiments/{name}.yaml was not run")
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def cells(self, name: str, system: str, **at: Any) -> list[Cell]:
        """A system's cells at a place (sweep and axes), at least one. Raises MissingError where there is none."""
        found = matching(self.summary(name)["cells"], system, at)
        if not found:
            raise MissingError(f"experiments/{name}.yaml has no cell of {system} at {at}")
        return found

    def cell(self, name: str, system: str, **at: Any) -> Cell:
        """The one cell at a place; the first in the order of the file where the place leaves several."""
        return self.cells(name, system, **at)[0]

    def systems(self, name: str) -> list[str]:
        """Systems of an experiment in the order of its cells."""
        return list(dict.fromkeys(str(cell["system"]) for cell in self.summary(name)["cells"]))

    def runs(self, name: str, cell: Cell) -> list[RunData]:
        """The runs of a cell, one a seed."""
        return [self._run(name, key) for key in cell["runs"]]

    def _read_run(self, name: str, key: str) -> RunData:
        return Store(self._out / name).read(key)


def metric(cell: Cell, name: str, model: str | None = None) -> Estimate:
    """A metric of a cell, of one model or all. Raises MissingError for a metric without value there."""
    entry = cell["metrics"].get(name, {})
    entry = entry.get("by_model", {}).get(model, {}) if model else entry
    if entry.get("mean") is None:
        raise MissingError(f"{cell['system']} has no {name} in sweep {cell['sweep']}")
    return estimate_of(entry)


def quantity(value: Estimate, label: str = "", scale: float = 1.0) -> Quantity:
    """An estimate as a quantity of an evaluation."""
    return Quantity(value.mean * scale, value.half_width * abs(scale), label)


def ratio_of(of: Cell, over: Cell, name: str, label: str = "") -> Quantity:
    """A metric of one cell over another's."""
    return quantity(ratio(metric(of, name), metric(over, name)), label)


def percent_above(of: Cell, over: Cell, name: str, label: str = "") -> Quantity:
    """By how many per cent a metric of one cell is above another's."""
    found = ratio(metric(of, name), metric(over, name))
    return Quantity(100 * (found.mean - 1), 100 * found.half_width, label)


def ends(found: Sequence[Quantity]) -> tuple[Quantity, ...]:
    """The least and the largest of several numbers."""
    ordered = sorted(found, key=lambda each: float(each.value))
    return (ordered[0], ordered[-1]) if len(ordered) > 1 else tuple(ordered)


def tokens_per_s(run: RunData, start_s: float, end_s: float) -> float:
    """Output tokens a second between two times. A request's tokens are spread evenly from its first to its last."""
    duration_s = np.maximum(run.finish_s - run.first_token_s, 1e-9)
    inside_s = np.minimum(run.finish_s, end_s) - np.maximum(run.first_token_s, start_s)
    return float(np.nansum(run.generated_tokens * np.clip(inside_s / duration_s, 0, 1)) / (end_s - start_s))
