"""Cells by place: the cells of a system in a sweep at some values of its axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Cell = Mapping[str, Any]


def matching(cells: Sequence[Cell], system: str, at: Mapping[str, Any]) -> list[Cell]:
    """The cells of a system at a place, each once though two sweeps may list it."""
    found = [
        cell
        for cell in cells
        if cell["system"] == system
        and at.get("sweep", cell["sweep"]) == cell["sweep"]
        and all(cell["axes"].get(axis) == value for axis, value in at.items() if axis != "sweep")
    ]
    return list({str(sorted(cell["axes"].items())): cell for cell in found}.values())
