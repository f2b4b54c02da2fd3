"""One stored run with everything that was kept of it: requests, samples, decisions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.run.run_data import Limits, RunData
from fineserve_sim.experiment.run.store import Store


class RunError(ValueError):
    """A run or a request that is not there; one line."""


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run of a cell. ``engine_gpus`` and ``engine_instance_models``: GPUs and model of each engine of the first placement;
    ``unplaced``: models that had no engine in it."""

    title: str
    seed: int
    key: str
    data: RunData
    limits: Limits
    engine_gpus: tuple[tuple[int, ...], ...]
    engine_instance_models: tuple[str, ...]
    unplaced: tuple[str, ...]
    decisions_path: Path
    folder: Path
    system: str
    axes: Mapping[str, Any]

    @property
    def ttft_slo_s(self) -> Mapping[str, float]:
        """TTFT limits by model."""
        return self.limits.ttft_s or {}

    @property
    def of_groups(self) -> bool:
        """Whether it is a run of a single-model cluster, in which requests wait in the queues of groups."""
        return "migrations" in self.data.counters

    def decisions(self) -> Iterator[Mapping[str, Any]]:
        """Every event and command in order. Raises RunError where the run was made without --decisions."""
        if not self.decisions_path.exists():
            raise RunError(f"{self.decisions_path}: no decision log; run the experiment again with --decisions")
        with self.decisions_path.open(encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)


def stored_run(out: Path, system: str | None = None, seed: int = 0, at: Mapping[str, str] | None = None) -> StoredRun:
    """The first run in a results folder that fits. ``at`` has axes and their values as text.

    Raises RunError naming what there is when nothing fits, ValueError for a folder without results.
    """
    cells = read_summary(out)["cells"]
    fitting = [cell for cell in cells if system in (None, cell["system"]) and is_at(cell["axes"], at or {})]
    if not fitting:
        systems = ", ".join(dict.fromkeys(cell["system"] for cell in cells))
        axes = {axis: list(dict.fromkeys(cell["axes"].get(axis) for cell in cells)) for axis in cells[0]["axes"]}
        raise RunError(f"{out}: no cell fits; systems: {systems}; axes: {axes}")
    return run_of(out, fitting[0], seed)


def run_of(out: Path, cell: Mapping[str, Any], seed: int = 0) -> StoredRun:
    """The run of a cell of summary.json. Raises RunError for a seed that it has not."""
    if not 0 <= seed < len(cell["runs"]):
        raise RunError(f"{out}: no seed {seed}; there are {len(cell['runs'])}, from 0 on")
    store, key = Store(out), cell["runs"][seed]
    placement = store.meta(key)["placement"]
    instances = placement["instances"]
    place = ", ".join(f"{axis} {value}" for axis, value in cell["axes"].items())
    return StoredRun(
        title=f"{cell['title']}, {place}, seed {seed}",
        seed=seed,
        key=key,
        data=store.read(key),
        limits=_limits(cell),
        engine_gpus=tuple(tuple(instance["gpus"]) for instance in instances),
        engine_instance_models=tuple(instance["model"] for instance in instances),
        unplaced=tuple(placement["unplaced"]),
        decisions_path=store.decisions_path(key),
        folder=out,
        system=cell["system"],
        axes=cell["axes"],
    )


def _limits(cell: Mapping[str, Any]) -> Limits:
    """As the cell was judged: where no output that was cut is a miss, all are as good as whole ones."""
    cut = cell["misses"]["cut_memory"] + cell["misses"]["cut_context"]
    moments = (cell["ttft_slo_s"], cell.get("tpot_slo_s"), cell.get("e2e_slo_s"))
    return Limits(*moments, accept_cut=not cut, reach_tokens=cell.get("reach_tokens"))


def is_at(axes: Mapping[str, Any], at: Mapping[str, str]) -> bool:
    """Whether axes have the values that a user typed."""
    return all(_same(axes.get(axis), text) for axis, text in at.items())


def _same(value: object, text: str) -> bool:
    """Whether a value of an axis is the one that a user typed: 2 is 2.0."""
    if str(value) == text:
        return True
    try:
        return isinstance(value, int | float) and float(value) == float(text)
    except ValueError:
        return False
