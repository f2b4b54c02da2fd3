"""Our numbers against a target: reproduced, direction only, or not reproduced.

A number is reproduced within the tolerance, a range inside it, a comparison beyond our interval, an order at every point.
``results.claims`` has these rules. Direction only means on the paper's side of no effect. A claim of several
numbers is reproduced when all of them are, and has the direction only when none of them lacks it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from fineserve_sim.experiment.reproduce.ledger import HOLDS, Target
from fineserve_sim.experiment.results.claims import judged
from fineserve_sim.experiment.results.stats import Estimate

Verdict = Literal["reproduced", "direction only", "not reproduced", "not decidable here", "input"]
UNDECIDED: Verdict = "not decidable here"
VERDICTS: tuple[Verdict, ...] = ("reproduced", "direction only", "not reproduced", "not decidable here", "input")


@dataclass(frozen=True, slots=True)
class Quantity:
    """One of our numbers with its interval (NaN: none), or whether a law holds. ``verdict``: that of an order, found point
    by point; ``label``: which of several it is; ``part``: which entry of the target it answers, where not its own place."""

    value: float | bool | str
    half_width: float = math.nan
    label: str = ""
    verdict: str | None = None
    part: int | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Our side of a claim: its numbers in the order of the target's, and from what they follow. ``verdict``: found elsewhere,
    or that it is not decidable here; otherwise ``judge`` finds it from the numbers."""

    quantities: tuple[Quantity, ...] = ()
    detail: str = ""
    verdict: Verdict | None = None


def numbers(*values: float, detail: str = "") -> Evaluation:
    """An evaluation of plain numbers."""
    return Evaluation(tuple(Quantity(float(value)) for value in values), detail)


def holds(value: bool, detail: str) -> Evaluation:
    """An evaluation of a law or an order."""
    return Evaluation((Quantity(value),), detail)


def undecided(reason: str) -> Evaluation:
    """No answer, and why there is none here."""
    return Evaluation(detail=reason, verdict=UNDECIDED)


def judge(target: Target, evaluation: Evaluation) -> Verdict:
    """The verdict on a claim. Raises ValueError when there are not as many numbers as the target has."""
    if evaluation.verdict == UNDECIDED:
        return UNDECIDED
    verdict = evaluation.verdict or _of_numbers(target, evaluation.quantities)
    return verdict if target.role == "claim" else "input"


def _of_numbers(target: Target, found: Sequence[Quantity]) -> Verdict:
    return _worst([_one(target, part, each) for part, each in zip(_parts(target, found), found, strict=True)])


def _parts(target: Target, found: Sequence[Quantity]) -> list[int]:
    """For each number the entry of the target that it answers: its own, its place, or the only one."""
    if len(target.expect) == 1:
        parts = [0] * len(found)
    else:
        parts = [place if each.part is None else each.part for place, each in enumerate(found)]
    if set(parts) != set(range(len(target.expect))):
        raise ValueError(f"{target.id}: {len(found)} numbers for {len(target.expect)} targets")
    return parts


def _worst(verdicts: Sequence[str]) -> Verdict:
    for verdict in ("not reproduced", "direction only"):
        if verdict in verdicts:
            return verdict
    return "reproduced"


def _one(target: Target, part: int, found: Quantity) -> str:
    expected, neutral = target.expect[part], target.neutral_of(part)
    if expected == HOLDS:
        return found.verdict or ("reproduced" if found.value is True else "not reproduced")
    if isinstance(found.value, str | bool):
        return found.verdict or "not reproduced"
    ours = Estimate(found.value * target.scale, found.half_width * target.scale)
    if isinstance(expected, tuple):
        return _inside(expected, ours, neutral)
    return judged(expected, ours, target.tolerance, neutral)


def _inside(expected: tuple[float, float], ours: Estimate, neutral: float | None) -> str:
    low, high = expected
    if low <= ours.mean <= high:
        return "reproduced"
    same_side = neutral is not None and (ours.mean - neutral) * (low - neutral) > 0
    return "direction only" if same_side else "not reproduced"
