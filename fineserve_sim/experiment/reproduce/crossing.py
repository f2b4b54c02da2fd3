"""Where a curve over one axis meets a level: the largest rate, or the tightest SLO, with so much attainment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from fineserve_sim.experiment.file.cells import Cell
from fineserve_sim.experiment.reproduce.finished import metric


class Crossing(NamedTuple):
    """``at``: where the level is met, by straight lines between the points. ``beyond``: not inside the curve's range, whose
    end it then is: the level holds at all points ("all") or at none ("none")."""

    at: float
    beyond: str = ""


def crossing(cells: Sequence[Cell], axis: str, name: str, level: float, *, rising: bool) -> Crossing:
    """Where a metric meets ``level`` along an axis. ``rising``: it grows with the axis, and the first point is looked for;
    else it falls, and the last point at which all before it hold."""
    points = sorted((float(cell["axes"][axis]), metric(cell, name).mean) for cell in cells)
    if not rising:
        points.reverse()  # from the hard end to the easy one, as with a rising curve
    if points[-1][1] < level:
        return Crossing(points[-1][0], "none")
    met = len(points)
    while met and points[met - 1][1] >= level:
        met -= 1
    if not met:
        return Crossing(points[0][0], "all")
    (hard, below), (easy, above) = list(pairwise(points))[met - 1]
    return Crossing(hard + (level - below) / (above - below) * (easy - hard))
