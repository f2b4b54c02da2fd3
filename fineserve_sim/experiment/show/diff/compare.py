"""Two results folders side by side.

Cells are matched by sweep, system and axes. A metric has changed when the difference of the two is beyond its 95 % interval,
taken over pairs where both have as many observations (``results/stats.py``). Without an interval (one seed) any change
counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.results.claims import estimate_of
from fineserve_sim.experiment.results.stats import difference
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.show.diff.decisions import changed_placement, first_difference
from fineserve_sim.experiment.show.diff.inputs import Change, changed_inputs
from fineserve_sim.experiment.show.labels import axis_text, quantity

Cell = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Moved:
    """A metric of a cell that differs by ``change`` ± ``half_width`` (None: one seed, so that nothing is known of it)."""

    cell: str
    metric: str
    a: float | None
    b: float | None
    change: float | None
    half_width: float | None


@dataclass(frozen=True, slots=True)
class Diff:
    """``cells``: matched ones; ``only``: cells that one side alone has; ``steady``: metrics within their intervals;
    ``decisions`` and ``claims``: a line each."""

    inputs: tuple[Change, ...]
    cells: int
    only: tuple[str, ...]
    moved: tuple[Moved, ...]
    steady: int
    decisions: tuple[str, ...]
    claims: tuple[str, ...]

    @property
    def same(self) -> bool:
        """Whether nothing at all changed but what the program ran on."""
        given = [change for change in self.inputs if not change.key.startswith("environment.")]
        return not (given or self.only or self.moved or self.decisions or self.claims)


def diff(a: Path, b: Path) -> Diff:
    """What changed from ``a`` to ``b``. Raises ValueError for a folder without results."""
    left, right = read_summary(a), read_summary(b)
    of_a, of_b = _by_place(left), _by_place(right)
    both = [(of_a[place], of_b[place]) for place in of_a if place in of_b]
    moved = [each for cells in both for each in _metrics(*cells)]
    changed = [each for each in moved if each is not None]
    return Diff(
        inputs=tuple(changed_inputs(a, b)),
        cells=len(both),
        only=tuple(_only(of_a, of_b)),
        moved=tuple(changed),
        steady=len(moved) - len(changed),
        decisions=tuple(_decisions((a, b), (left, right), both)),
        claims=tuple(_claims(left, right)),
    )


Place = tuple[str, str, tuple[tuple[str, Any], ...]]


def _by_place(summary: Mapping[str, Any]) -> dict[Place, Cell]:
    return {(cell["sweep"], cell["system"], tuple(sorted(cell["axes"].items()))): cell for cell in summary["cells"]}


def _told(cell: Cell) -> str:
    """The place of a cell, its numbers with all digits that tell it from others."""
    axes = (
        f"{quantity(axis).label} {value:.10g}" if isinstance(value, float) else axis_text(axis, value)
        for axis, value in sorted(cell["axes"].items())
    )
    return f"{cell['sweep']}: {cell['title']}, {', '.join(axes)}"


def _only(a: Mapping[Place, Cell], b: Mapping[Place, Cell]) -> Iterator[str]:
    yield from (f"only in A: {_told(cell)}" for place, cell in a.items() if place not in b)
    yield from (f"only in B: {_told(cell)}" for place, cell in b.items() if place not in a)


def _metrics(a: Cell, b: Cell) -> Iterator[Moved | None]:
    """One entry a metric that both have or one lost; None where it stayed within its interval."""
    place = _told(a)
    for metric in dict.fromkeys([*a["metrics"], *b["metrics"]]):
        left, right = a["metrics"].get(metric), b["metrics"].get(metric)
        before, after = (entry["mean"] if entry else None for entry in (left, right))
        if before is None and after is None:
            continue
        if before is None or after is None:
            yield Moved(place, metric, before, after, None, None)
            continue
        gap = difference(estimate_of(right), estimate_of(left))
        sure = abs(gap.mean) > (0.0 if math.isnan(gap.half_width) else gap.half_width)
        half_width = None if math.isnan(gap.half_width) else gap.half_width
        yield Moved(place, metric, before, after, gap.mean, half_width) if sure else None


def _decisions(
    folders: tuple[Path, Path],
    summaries: tuple[Mapping[str, Any], Mapping[str, Any]],
    cells: Sequence[tuple[Cell, Cell]],
) -> Iterator[str]:
    """Lines of placements and of commands, those that many cells share once."""
    told: dict[str, list[str]] = {}
    for a, b in cells:
        lines = changed_placement(a, summaries[0]["placements"], summaries[1]["placements"])
        if command := first_difference(folders, (a, b)):
            lines.append(command)
        for line in lines:
            told.setdefault(f"{a['title']}: {line}", []).append(_told(a))
    for line, places in told.items():
        others = f" and {len(places) - 1} other cell{'s' if len(places) > 2 else ''}" if len(places) > 1 else ""
        yield f"{line} [{places[0]}{others}]"


def _claims(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    verdicts = [{claim["id"]: claim["verdict"] for claim in summary["claims"]} for summary in (a, b)]
    for claim in dict.fromkeys([*verdicts[0], *verdicts[1]]):
        left, right = (side.get(claim, "not there") for side in verdicts)
        if left != right:
            yield f"{claim}: {left} -> {right}"
