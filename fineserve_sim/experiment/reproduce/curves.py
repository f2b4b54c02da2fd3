"""What claims say of curves: one lies above another at every point, or meets a level at a rate or an SLO."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from fineserve_sim.experiment.file.plan import Cell
from fineserve_sim.experiment.reproduce.finished import metric
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity
from fineserve_sim.experiment.results.stats import Estimate, difference


@dataclass(frozen=True, slots=True)
class Step:
    """At ``place``, ``higher`` should be at least ``lower``."""

    place: str
    higher: Estimate
    lower: Estimate


def order(steps: Sequence[Step], detail: str = "") -> Evaluation:
    """All steps as one claim, as ``results.claims`` judges an order. It is reproduced when no step is reversed beyond its
    interval and one is clear, and direction only when more steps hold than not."""
    gaps = [(step.place, difference(step.higher, step.lower)) for step in steps]
    reversed_ = [place for place, gap in gaps if not gap.mean >= -_slack(gap)]
    clear = sum(gap.mean > _slack(gap) for _, gap in gaps)
    held = len(gaps) - len(reversed_)
    if clear and not reversed_:
        verdict = "reproduced"
    else:
        verdict = "direction only" if clear and held > len(reversed_) else "not reproduced"
    exceptions = f" Reversed at: {'; '.join(reversed_)}." if reversed_ else ""
    note = f"Holds at {held} of {len(gaps)} points, clearly at {clear}.{exceptions}"
    quantity = Quantity(f"{held} of {len(gaps)} points", verdict=verdict)
    return Evaluation((quantity,), " ".join(part for part in (detail, note) if part))


def _slack(gap: Estimate) -> float:
    return 0.0 if math.isnan(gap.half_width) else gap.half_width


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
