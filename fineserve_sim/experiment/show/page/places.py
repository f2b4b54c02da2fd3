"""The places of an experiment, numbered: each point of its sweeps once, with the cell of every system there.

What is shown by place (memory, distributions, requests) is heavy, so a large grid keeps only some of its places. The page
opens at the one of the answer, or else at which the systems differ most (of equals the last), which is always kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fineserve_sim.experiment.results.answer import side_by_side
from fineserve_sim.experiment.show.labels import axis_text

Cell = Mapping[str, Any]
"""One entry of ``cells`` in summary.json."""

MOST_PLACES = 40


@dataclass(frozen=True, slots=True)
class Place:
    """One point: its axes in words (those that vary) and the cell of each system."""

    title: str
    cells: Mapping[str, Cell]

    @property
    def spread(self) -> float:
        """How far attainments lie apart here."""
        reached = [cell["metrics"]["ttft_attainment"]["mean"] or 0.0 for cell in self.cells.values()]
        return max(reached) - min(reached)


@dataclass(frozen=True, slots=True)
class Places:
    """``shown`` of ``total`` places; ``first`` is the index at which the page opens."""

    shown: tuple[Place, ...]
    first: int
    total: int


def places_of(cells: Sequence[Cell], answered: Cell | None = None) -> Places:
    """All places in the order of the sweeps, thinned evenly where there are too many. ``answered``: the cell of the answer, at
    whose place the page opens."""
    found: dict[str, dict[str, Cell]] = {}
    together = side_by_side(cells)  # dedicated GPUs stand beside the others, however many they are
    varying = [
        axis
        for axis in dict.fromkeys(axis for cell in cells for axis in cell["axes"])
        if len({str(cell["axes"].get(axis)) for cell in cells}) > 1 and not (together and axis.startswith("cluster."))
    ]
    for cell in cells:
        title = ", ".join(axis_text(axis, cell["axes"][axis]) for axis in varying if axis in cell["axes"])
        found.setdefault(title, {}).setdefault(cell["system"], cell)
    every = [Place(title, systems) for title, systems in found.items()]
    here = [index for index, place in enumerate(every) if any(cell is answered for cell in place.cells.values())]
    widest = here[0] if here else max(range(len(every)), key=lambda index: (every[index].spread, index))
    step = -(-len(every) // MOST_PLACES)
    kept = sorted({*range(0, len(every), step), widest})
    return Places(tuple(every[index] for index in kept), kept.index(widest), len(every))
