"""Placements by the clock: each entry of a timetable says where models are from its time on.

Such a timetable is what ``fineserve-sim plan --windows`` writes. Between its entries nothing moves.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fineserve_sim.policy.fleet.toward import Spot, toward
from fineserve_sim.policy.fleet.views import FleetView, Suggestion
from fineserve_sim.policy.interfaces import ModelDemand


@dataclass(frozen=True)
class Timetable:
    """``entries``: from so many seconds on, these spots; the first from 0 on, in the order of their times. ``models`` by id,
    their ``weight_bytes`` being all that an engine takes beside KV. Raises ValueError for entries that are out of order, or
    name a model that is not there."""

    models: Mapping[str, ModelDemand]
    entries: Sequence[tuple[float, Sequence[Spot]]]

    def __post_init__(self) -> None:
        times = [from_s for from_s, _ in self.entries]
        if not times or times[0] != 0 or any(later <= earlier for earlier, later in pairwise(times)):
            told = ", ".join(f"{time:g}" for time in times) or "no time"
            raise ValueError(f"entries begin at {told} s: use 0 first, then later ones")
        unknown = sorted({model for _, spots in self.entries for model, _ in spots} - self.models.keys())
        if unknown:
            raise ValueError(f"entries name {', '.join(unknown)}; models are {', '.join(self.models)}")

    def suggest(self, now: float, view: FleetView) -> list[Suggestion]:
        """What leads to the entry of this time."""
        place = bisect_right(self.entries, now, key=lambda entry: entry[0]) - 1
        weight_bytes = {id: model.weight_bytes for id, model in self.models.items()}
        return list(toward(self.entries[place][1], view, weight_bytes))
