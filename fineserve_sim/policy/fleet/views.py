"""What a residency policy sees of a fleet, and what it may suggest.

An *engine* is one stay of a model on GPUs: activated (loading), then ready (resident), then evicted, at once or after it
ended its requests (draining). Requests of a model without an engine wait; such a model is *pending*. A policy suggests to
start and stop engines; the controller, which owns the fleet, does what is possible and refuses the rest.

Policies read attributes and items alone, and keep none: the controller shows the records of engines that it keeps up to date.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol


class Status(StrEnum):
    """Where an engine is in its life; nothing is dispatched to one that drains."""

    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class EngineView:
    """``idle_s``: seconds since a request ran in it or waited for it; 0 while one does. ``requests``: how many do."""

    engine: int
    model: str
    gpus: tuple[int, ...]
    status: Status
    idle_s: float
    requests: int


class Pending(NamedTuple):
    """Requests of a model that no engine serves or will serve: how many, since when, the arrival time of the oldest."""

    model: str
    requests: int
    since_s: float
    oldest_arrival_s: float


@dataclass(frozen=True, slots=True)
class FleetView:
    """All that a residency policy sees at one moment.

    ``engines`` in the order of their ids, ``pending`` in the order in which models began to wait, ``rates_per_s`` the moving
    averages by model, ``free_bytes`` by GPU what weights could take now (a GPU that is lost is not in it), ``pressed`` the GPUs
    where a request waited for memory alone since the last look.
    """

    engines: tuple[EngineView, ...]
    pending: tuple[Pending, ...]
    rates_per_s: Mapping[str, float]
    free_bytes: Mapping[int, int]
    pressed: frozenset[int]


class Start(NamedTuple):
    """Activate a model on these GPUs, instead of the engine ``replaces`` if one is named (a move)."""

    model: str
    gpus: tuple[int, ...]
    replaces: int | None = None


class Stop(NamedTuple):
    """Evict an engine; see ``commands.Evict`` for ``drain``."""

    engine: int
    drain: bool = True


Suggestion = Start | Stop


class ResidencyPolicy(Protocol):
    def suggest(self, now: float, view: FleetView) -> Sequence[Suggestion]:
        """What to do now, in this order. A suggestion may count on the memory that those before it free."""


def next_multiple(period_s: float, now: float) -> float:
    """The first after ``now``; counted, for a fraction's multiples are not what adding it up comes to."""
    number = int(now / period_s)
    while number * period_s <= now:
        number += 1
    return number * period_s
