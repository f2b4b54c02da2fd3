"""Claims of the papers against our cells.

A claim names a measure of cells and what the paper says of it:

* value: a metric of one cell.  ratio: of one cell over another.  difference: one cell minus another.
* mean_ratio: the mean of such ratios over all cells that ``at`` leaves open (a sweep).
* max_difference: the largest difference over all cells that ``at`` leaves open (a sweep).
* order: ``of`` is at least ``over`` at every such cell; our number is the smallest difference.
* placement: which model went where, in the order of the decisions.

Verdicts on a number: *reproduced* within the tolerance, relative to the paper's number. A ratio or difference must also be
clearly beyond no effect (1, 0) on the paper's side. *Direction only* when merely on that side; otherwise *not reproduced*.
On a comparison:
"> 1" is reproduced when it holds beyond our interval and direction only within it; ">= 1" is reproduced unless the
contrary holds beyond our interval. On an order: reproduced when no point contradicts it beyond its interval and some
point confirms it beyond its interval; direction only when it holds on average. A claim that served to set the load is an
*input*: it is evidence of nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fineserve_sim.experiment.file.plan import Cell, matching
from fineserve_sim.experiment.file.schema import COMPARISON, Claim
from fineserve_sim.experiment.results.stats import Estimate, Sample, difference, ratio

_NO_EFFECT = {"ratio": 1.0, "mean_ratio": 1.0, "difference": 0.0, "max_difference": 0.0}


class Finding(NamedTuple):
    """Our side of a claim."""

    ours: Any
    half_width: float
    verdict: str
    note: str = ""


def evaluate_claims(
    claims: Sequence[Claim], cells: Sequence[Cell], placements: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Every claim with our number and its verdict, as summary.json holds it."""
    return [_entry(claim, _find(claim, cells, placements)) for claim in claims]


def _entry(claim: Claim, found: Finding) -> dict[str, Any]:
    ours = None if isinstance(found.ours, float) and not math.isfinite(found.ours) else found.ours
    return {
        "id": claim.id,
        "paper": claim.paper,
        "ours": ours,
        "half_width": found.half_width if math.isfinite(found.half_width) else None,
        "measure": claim.measure,
        "verdict": "input" if claim.calibration else found.verdict,
        "note": " ".join(part for part in (claim.note, found.note) if part),
    }


def _find(claim: Claim, cells: Sequence[Cell], placements: Sequence[Mapping[str, Any]]) -> Finding:
    if claim.measure == "placement":
        return _placement(claim, cells, placements)
    of = matching(cells, claim.of, claim.at)
    over = matching(cells, claim.over or claim.of, {**claim.at, **claim.over_at})
    if not of or (claim.over and not over):
        return Finding(math.nan, math.nan, "not reproduced", "No cell is there.")
    if claim.measure == "mean_ratio":
        ratios = [ratio(metric_of(cell, claim), metric_of(_twin(cell, over), claim)) for cell in of]
        value = _mean(ratios)
        return Finding(*value, _verdict(claim, value), f"Over {len(of)} points.")
    if claim.measure in ("max_difference", "order"):
        pairs = [(cell, difference(metric_of(cell, claim), metric_of(_twin(cell, over), claim))) for cell in of]
        return _order(pairs) if claim.measure == "order" else _largest(claim, pairs)
    value = metric_of(of[0], claim)
    if claim.measure == "ratio":
        value = ratio(value, metric_of(over[0], claim))
    elif claim.measure == "difference":
        value = difference(value, metric_of(over[0], claim))
    return Finding(*value, _verdict(claim, value))


def metric_of(cell: Cell, claim: Claim) -> Estimate:
    """The claim's metric in a cell, of one model when the claim says so."""
    entry = cell["metrics"][str(claim.metric)]
    if claim.model is not None:
        entry = entry["by_model"][claim.model]
    return estimate_of(entry)


def estimate_of(entry: Mapping[str, Any]) -> Estimate:
    """An estimate as summary.json holds it."""
    mean, half_width = (math.nan if entry[name] is None else entry[name] for name in ("mean", "half_width"))
    if "observations" not in entry:
        return Estimate(mean, half_width)
    return Sample.of(mean, half_width, [math.nan if value is None else value for value in entry["observations"]])


def _twin(cell: Cell, others: Sequence[Cell]) -> Cell:
    return next(other for other in others if other["axes"] == cell["axes"])


def _verdict(claim: Claim, ours: Estimate) -> str:
    return judged(claim.paper, ours, claim.tolerance, _NO_EFFECT.get(claim.measure))


def judged(paper: float | str, ours: Estimate, tolerance: float, neutral: float | None) -> str:
    """The verdict on one number against a number or a comparison; ``neutral`` is what means no effect, if something does."""
    if not math.isfinite(ours.mean):
        return "not reproduced"
    if isinstance(paper, str):
        return _compared(paper, ours)
    close = abs(ours.mean - paper) <= tolerance * abs(paper)
    if neutral is None:
        return "reproduced" if close else "not reproduced"
    effect = (ours.mean - neutral) * (1 if paper >= neutral else -1)
    if close and effect > _slack(ours):
        return "reproduced"
    return "direction only" if effect > 0 else "not reproduced"


def _compared(paper: str, ours: Estimate) -> str:
    comparison = COMPARISON.fullmatch(paper)
    assert comparison is not None
    sign, bound = comparison[1], float(comparison[2])
    beyond = (ours.mean - bound) * (1 if sign[0] == ">" else -1)
    if beyond > _slack(ours) or ("=" in sign and beyond >= -_slack(ours)):
        return "reproduced"
    return "direction only" if beyond > 0 else "not reproduced"


def _largest(claim: Claim, pairs: Sequence[tuple[Cell, Estimate]]) -> Finding:
    cell, value = max(pairs, key=lambda pair: -math.inf if math.isnan(pair[1].mean) else pair[1].mean)
    return Finding(*value, _verdict(claim, value), f"Largest at {_where(cell)}.")


def _order(pairs: Sequence[tuple[Cell, Estimate]]) -> Finding:
    against = [cell for cell, value in pairs if not value.mean >= -_slack(value)]
    clear = [cell for cell, value in pairs if value.mean > _slack(value)]
    smallest = min((value for _, value in pairs), key=lambda value: value.mean)
    mean = sum(value.mean for _, value in pairs) / len(pairs)
    verdict = "reproduced" if clear and not against else "direction only" if mean > 0 else "not reproduced"
    exceptions = "; ".join(_where(cell) for cell in against)
    note = f"Clear at {len(clear)} of {len(pairs)} points." + (f" Reversed at: {exceptions}." if exceptions else "")
    return Finding(*smallest, verdict, note)


def _mean(values: Sequence[Estimate]) -> Estimate:
    """The mean of independent numbers, with the interval of their sum."""
    count = len(values)
    return Estimate(
        sum(value.mean for value in values) / count, math.hypot(*(_slack(value) for value in values)) / count
    )


def _slack(value: Estimate) -> float:
    return 0.0 if math.isnan(value.half_width) else value.half_width


def _where(cell: Cell) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in cell["axes"].items())


def _placement(claim: Claim, cells: Sequence[Cell], placements: Sequence[Mapping[str, Any]]) -> Finding:
    """Reproduced for the same places in the same order, direction only for the same places in another order."""
    axes = [cell["axes"] for cell in matching(cells, claim.of, claim.at)]
    entries = [
        entry
        for entry in placements
        if entry["system"] == claim.of and any(place.items() <= entry.items() for place in axes)
    ]
    if not entries:
        return Finding(None, math.nan, "not reproduced", "No cell is there.")
    ours = [f"{found['model']}:{'+'.join(map(str, found['gpus']))}" for found in entries[0]["instances"]]
    if any(entry["instances"] != entries[0]["instances"] for entry in entries):
        return Finding(ours, math.nan, "not reproduced", "The placement differs from cell to cell.")
    same = sorted(ours) == sorted(claim.paper)
    return Finding(
        ours, math.nan, "reproduced" if ours == claim.paper else "direction only" if same else "not reproduced"
    )
