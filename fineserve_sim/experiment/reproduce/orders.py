"""Orders: one number is at least another at every one of several points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
