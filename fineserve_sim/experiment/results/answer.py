"""The answer: which system on how many GPUs keeps the targets, at what cost, with what margin, and at which load it breaks.

Cells are compared at one place, their axes without the cluster's, so that the number of GPUs is part of the answer. This
place is the one that the file names, or else the one at which the systems part: where the best and the worst are furthest
from each other. There the cheapest
cell that keeps all targets is chosen; where none does, the one that comes closest on the GPUs of the file. A bound
(clairvoyant) is no choice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from fineserve_sim.experiment.results.claims import estimate_of
from fineserve_sim.experiment.results.stats import difference

Cell = Mapping[str, Any]
Targets = Mapping[str, float]
"""Shares by attainment metric."""

DEFAULT_TARGETS: Targets = {"slo_attainment": 0.95}


def answer_of(
    cells: Sequence[Cell],
    gpus: int,
    bounds: Collection[str] = (),
    targets: Targets = DEFAULT_TARGETS,
    at: Mapping[str, Any] | None = None,
) -> dict[str, Any] | None:
    """The answer of cells as summary.json lists them, or None where there is nothing to choose. ``gpus`` of the file;
    ``bounds``: systems that cannot run; ``at``: values of axes where the answer is read."""
    targets = {metric: share for metric, share in targets.items() if any(metric in cell["metrics"] for cell in cells)}
    at = at or {}
    runnable = [cell for cell in cells if cell["system"] not in bounds]
    places = _places([cell for cell in runnable if at.items() <= cell["axes"].items()])
    if not places or not targets:
        return None
    candidates = max(places.values(), key=lambda there: _parted(there, targets))
    holding = [cell for cell in candidates if holds(cell, targets)]
    chosen = _cheapest(holding) if holding else _closest(candidates, gpus, targets)
    return {
        "targets": dict(targets),
        "sweep": chosen["sweep"],
        "axes": chosen["axes"],
        **({"at": dict(at)} if at else {}),
        "requests_per_s": chosen["metrics"]["arrival_rate_per_s"]["mean"],
        "systems": len({cell["system"] for cell in candidates}),
        "most_gpus": max(len_gpus(cell) for cell in candidates),
        "choice": {
            "system": chosen["system"],
            "title": name_of(chosen, candidates),
            "gpus": len_gpus(chosen),
            "holds": bool(holding),
            "margins": {metric: _margin(chosen, metric, share) for metric, share in targets.items()},
        },
        "as_good": [
            _rival(cell, chosen, candidates) for cell in holding or candidates if _as_good(cell, chosen, targets)
        ],
        "breaks": {cell["system"]: _breaks(cell, cells, targets) for cell in [*reversed(candidates), chosen]},
    }


def len_gpus(cell: Cell) -> int:
    """GPUs of a cell's cluster."""
    return int(cell["cluster"]["count"])


def chosen_cell(summary: Mapping[str, Any]) -> Cell | None:
    """The cell that the answer of a summary chose."""
    answer, cells = summary.get("answer"), summary["cells"]
    if not answer:
        return None
    place = (answer["sweep"], answer["choice"]["system"], answer["axes"])
    found: list[Cell] = [cell for cell in cells if (cell["sweep"], cell["system"], cell["axes"]) == place]
    return found[0]


def name_of(cell: Cell, among: Sequence[Cell]) -> str:
    """The title of a cell's system, with the settings of its cluster in which ``among`` differ: ``FineServe (sharing mps)``.
    The number of GPUs is told beside it."""
    settings = [
        f"{axis.removeprefix('cluster.')} {value}"
        for axis, value in cell["axes"].items()
        if axis.startswith("cluster.") and axis != "cluster.count"
        if len({other["axes"].get(axis) for other in among}) > 1
    ]
    return f"{cell['title']} ({', '.join(settings)})" if settings else str(cell["title"])


def side_by_side(cells: Sequence[Cell]) -> bool:
    """Whether several sweeps have each system once, all at one place: what ``compare`` has with its anchors."""
    once = len({cell["system"] for cell in cells}) == len(cells)
    return once and len({cell["sweep"] for cell in cells}) > 1 and len({place_of(cell) for cell in cells}) == 1


def bounds_nothing(cell: Cell, metric: str) -> bool:
    """Whether nothing runs the cell, and ``metric`` is no attainment: these alone bound what systems reach."""
    return not cell.get("gpus", True) and not metric.endswith("_attainment")


def holds(cell: Cell, targets: Targets) -> bool:
    """Whether all targets are kept."""
    return all((cell["metrics"].get(metric, {}).get("mean") or 0.0) >= share for metric, share in targets.items())


def place_of(cell: Cell) -> tuple[tuple[str, Any], ...]:
    """The place at which cells are compared: their axes without the cluster's."""
    return tuple(sorted((axis, value) for axis, value in cell["axes"].items() if not axis.startswith("cluster.")))


def spread_of(summary: Mapping[str, Any]) -> tuple[float, float]:
    """The least and the most attainment of all limits among the cells of systems that can be run, at one place."""
    found = [cell["metrics"]["slo_attainment"]["mean"] or 0.0 for cell in summary["cells"] if cell["gpus"]]
    return min(found, default=0.0), max(found, default=0.0)


def _places(cells: Sequence[Cell]) -> dict[object, list[Cell]]:
    found: dict[object, list[Cell]] = defaultdict(list)
    for cell in cells:
        there = found[str(place_of(cell))]
        if not any((other["system"], other["axes"]) == (cell["system"], cell["axes"]) for other in there):
            there.append(cell)
    return found


def _worst(cell: Cell, targets: Targets) -> float:
    """The attainment that is furthest below its target, as a distance."""
    return min((cell["metrics"].get(metric, {}).get("mean") or 0.0) - share for metric, share in targets.items())


def _parted(candidates: Sequence[Cell], targets: Targets) -> float:
    found = [_worst(cell, targets) for cell in candidates]
    return max(found) - min(found)


def _cheapest(cells: Sequence[Cell]) -> Cell:
    """The fewest dollars an hour, or the fewest GPUs where the price of one is not known; of equal ones the one with the best
    attainment."""
    priced = all(cell["cost"]["usd_per_hour"] is not None for cell in cells)

    def price(cell: Cell) -> tuple[float, float]:
        dollars_or_gpus: float = cell["cost"]["usd_per_hour"] if priced else len_gpus(cell)
        return dollars_or_gpus, -cell["metrics"]["slo_attainment"]["mean"]

    return min(cells, key=price)


def _closest(candidates: Sequence[Cell], gpus: int, targets: Targets) -> Cell:
    own = [cell for cell in candidates if len_gpus(cell) == gpus] or candidates
    return max(own, key=lambda cell: _worst(cell, targets))


def _margin(cell: Cell, metric: str, share: float) -> dict[str, Any]:
    """The margin of a cell, whose attainment is none where it has no such metric."""
    found = cell["metrics"].get(metric, {"mean": None, "half_width": None})
    return margin(found["mean"] or 0.0, found["half_width"], share)


def margin(mean: float, half_width: float | None, share: float) -> dict[str, Any]:
    """An attainment against its target; ``sure`` when what lies between is beyond the interval."""
    sure = half_width is not None and abs(mean - share) > half_width
    return {"mean": mean, "half_width": half_width, "margin": mean - share, "sure": sure}


def _as_good(cell: Cell, chosen: Cell, targets: Targets) -> bool:
    """No worse than the chosen one beyond the interval of the difference, on no more GPUs."""
    if cell is chosen or len_gpus(cell) > len_gpus(chosen):
        return False
    pairs = [(chosen["metrics"].get(metric), cell["metrics"].get(metric)) for metric in targets]
    gaps = [difference(estimate_of(of), estimate_of(over)) for of, over in pairs if of and over]
    return len(gaps) == len(targets) and all(
        gap.mean <= (gap.half_width if gap.half_width > 0 else 0.0) for gap in gaps
    )


def _rival(cell: Cell, chosen: Cell, candidates: Sequence[Cell]) -> str:
    """The name of a cell, with its number of GPUs where that is not the chosen one's."""
    gpus = "" if len_gpus(cell) == len_gpus(chosen) else f" on {len_gpus(cell)} {cell['cluster']['gpu']}"
    return f"{name_of(cell, candidates)}{gpus}"


def _but_rate(cell: Cell) -> dict[str, Any]:
    return {axis: value for axis, value in cell["axes"].items() if axis != "rate_scale"}


def _breaks(cell: Cell, cells: Sequence[Cell], targets: Targets) -> dict[str, float | None]:
    """Along the rate scales that there are at the cell's other axes: the highest up to which all hold, and the next."""
    along = {
        other["axes"]["rate_scale"]: holds(other, targets)
        for other in cells
        if other["system"] == cell["system"] and _but_rate(other) == _but_rate(cell)
    }
    rates = sorted(along)
    failing = next((rate for rate in rates if not along[rate]), None)
    held = [rate for rate in rates if failing is None or rate < failing]
    return {"holds_to": held[-1] if held else None, "fails_at": failing}
