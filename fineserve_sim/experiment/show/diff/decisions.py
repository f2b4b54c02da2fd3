"""The decisions of two runs of the same cell: where models were placed, and the first command that differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.run.store import Store

Cell = Mapping[str, Any]
Placements = Sequence[Mapping[str, Any]]


def changed_placement(cell: Cell, a: Placements, b: Placements) -> list[str]:
    """One line a model whose GPUs differ."""
    left, right = _gpus(cell, a), _gpus(cell, b)
    names = dict.fromkeys([*left, *right])
    return [
        f"{model}: {left.get(model, 'not there')} -> {right.get(model, 'not there')}"
        for model in names
        if left.get(model) != right.get(model)
    ]


def _gpus(cell: Cell, placements: Placements) -> dict[str, str]:
    place = {"system": cell["system"], **cell["axes"]}
    entry = next(entry for entry in placements if place.items() <= entry.items())
    found: dict[str, list[str]] = {}
    for instance in entry["instances"]:
        found.setdefault(instance["model"], []).append("+".join(map(str, instance["gpus"])))
    on = {model: "GPU " + ", ".join(sorted(gpus)) for model, gpus in found.items()}
    return on | dict.fromkeys(entry["unplaced"], "UNPLACED")


def first_difference(folders: tuple[Path, Path], cells: tuple[Cell, Cell]) -> str | None:
    """The first command of the first seed that differs; None where none does, where both are the same run, and where one has
    no decision log."""
    keys = [cell["runs"][0] for cell in cells]
    logs = [Store(folder).decisions_path(key) for folder, key in zip(folders, keys, strict=True)]
    if keys[0] == keys[1] or not all(log.exists() for log in logs):
        return None
    for number, (left, right) in enumerate(zip_longest(*map(_commands, logs))):
        if left != right:
            return f"command {number + 1}: {_told(left)} -> {_told(right)}"
    return None


def _commands(log: Path) -> Iterator[Mapping[str, Any]]:
    with log.open(encoding="utf-8") as file:
        yield from (entry for entry in map(json.loads, file) if "command" in entry)


def _told(entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return "none"
    fields = ", ".join(f"{name} {value}" for name, value in entry.items() if name not in ("now_s", "command"))
    return f"{entry['command']} at {entry['now_s']:.6g} s ({fields})"
