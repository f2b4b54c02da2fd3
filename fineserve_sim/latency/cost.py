"""Seconds with their origin.

Where the seconds of an operator come from: ``measured`` is interpolation in a table, ``fitted`` a rate fitted to end-to-end
times, ``roofline`` a launch and a rate, measured or from a data sheet, ``assumed`` neither. ``extrapolated`` is the roofline
beyond the rows of a table, at the table's last ratio to it; reports count it as roofline and name it beside.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.catalog import Quantity

Floats = NDArray[np.float64]
Codes = NDArray[np.intp]
"""Indices of ``SOURCES``."""
Source = Literal["measured", "fitted", "roofline", "assumed", "extrapolated"]
SOURCES: tuple[Source, ...] = ("measured", "fitted", "roofline", "assumed", "extrapolated")
MEASURED, FITTED, ROOFLINE, ASSUMED, EXTRAPOLATED = range(len(SOURCES))


def rate_code(rate: Quantity) -> int:
    """Where seconds computed from a rate come from: a measured rate makes a roofline, not a measurement."""
    return {"fitted": FITTED, "assumed": ASSUMED}.get(rate.kind, ROOFLINE)


class Cost(NamedTuple):
    """An operator over n batch sizes, shapes (n,): seconds in all, those during which compute units and memory bandwidth are
    needed, and where the seconds come from."""

    seconds: Floats
    compute_s: Floats
    memory_s: Floats
    source: Codes

    def times(self, count: int) -> Cost:
        """The cost of running the operator ``count`` times."""
        return Cost(count * self.seconds, count * self.compute_s, count * self.memory_s, self.source)

    def with_seconds(self, seconds: Floats, source: Codes) -> Cost:
        """Other seconds; the busy times stay rooflines, and never exceed them."""
        return Cost(seconds, np.minimum(self.compute_s, seconds), np.minimum(self.memory_s, seconds), source)
