"""Slowdowns read off the table ``sharing``, and what the simulator says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fineserve_calibrate.campaign.items import Seat, parse_seat, seat_text
from fineserve_calibrate.campaign.predictions import Active, Predictor
from fineserve_calibrate.probes.engines import Composition

Row = Mapping[str, Any]
ALONE = "none"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """One engine beside others: mean step time against alone. ``alone`` is under the same sharing and cap; ``predicted`` is
    None where the simulator does not know the device."""

    sharing: str
    mode: str
    engines: tuple[Active, ...]
    """At work; the first is the one whose steps these are."""
    alone_s: float
    shared_s: float
    predicted: float | None

    @property
    def measured(self) -> float:
        return self.shared_s / self.alone_s

    @property
    def error(self) -> float | None:
        """predicted / measured - 1."""
        return None if self.predicted is None else self.predicted / self.measured - 1

    @property
    def capped(self) -> bool:
        return any(seat.percent != 100 for seat, _ in self.engines)

    @property
    def phases(self) -> str:
        """The engine's own phase, and how many of all engines prefill."""
        mine = "decode" if self.engines[0][1].decodes else "prefill"
        return f"{mine}, {sum(not load.decodes for _, load in self.engines)} of {len(self.engines)} prefill"

    @property
    def text(self) -> str:
        return " + ".join(seat_text(*engine) for engine in self.engines)


def own(row: Row) -> Active:
    """Seat and load of the engine whose steps a row holds."""
    load = Composition(int(row["decodes"]), int(row["context"]), int(row["prefill_tokens"]))
    return Seat(str(row["dtype"]), int(row["percent"])), load


def others(row: Row) -> tuple[Active, ...]:
    """The engines beside it. Raises ValueError for a row that names none as they are written."""
    names = [] if row["neighbours"] == ALONE else str(row["neighbours"]).split(" + ")
    return tuple((seat, load) for seat, load in map(parse_seat, names) if load)


def alone_s(rows: Sequence[Row]) -> dict[tuple[str, str, Active], float]:
    """Mean seconds of an engine alone by (sharing, mode, seat and load): the median over the scenes that it was in."""
    found: dict[tuple[str, str, Active], list[float]] = {}
    for row in rows:
        if not others(row):
            found.setdefault((str(row["sharing"]), str(row["mode"]), own(row)), []).append(float(row["mean_s"]))
    return {key: median(seconds) for key, seconds in found.items()}


def slowdowns(rows: Sequence[Row], predictor: Predictor | None) -> list[Slowdown]:
    """Of every row that was not alone and whose engine was measured alone, too: under the same sharing and cap."""
    alone, found = alone_s(rows), list[Slowdown]()
    for row in rows:
        sharing, mode, engines = str(row["sharing"]), str(row["mode"]), (own(row), *others(row))
        if len(engines) > 1 and (sharing, mode, engines[0]) in alone:
            predicted = predictor.slowdown(sharing, mode, engines, 0) if predictor else None
            taken_s = alone[sharing, mode, engines[0]]
            found.append(Slowdown(sharing, mode, engines, taken_s, float(row["mean_s"]), predicted))
    return found


def caps(rows: Sequence[Row], predictor: Predictor | None) -> list[tuple[Active, str, float, float | None]]:
    """(seat and load, mode, slowdown, predicted) of engines alone under a part of the SMs, against all of them."""
    alone, found = alone_s(rows), list[tuple[Active, str, float, float | None]]()
    for (sharing, mode, (seat, load)), seconds in alone.items():
        whole = alone.get((sharing, mode, (Seat(seat.dtype), load)))
        if seat.percent != 100 and whole:
            predicted = predictor.capped(sharing, mode, (seat, load)) if predictor else None
            found.append(((seat, load), mode, seconds / whole, predicted))
    return found
