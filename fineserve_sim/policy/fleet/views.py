"""A residency policy's view of a fleet, and the suggestions that it may make.

An *engine* is one stay of a model on GPUs:

    Start -> LOADING -> RESIDENT -> (Stop, drain) -> DRAINING -> gone
                |           +-----> (Stop at once) -----------> gone
                +-----------------> (Stop, or a fault) -------> gone

Requests of a model without an engine wait; such a model is *pending*. A policy suggests to start and stop engines. The
controller owns the fleet: it carries out the possible suggestions and ignores the rest.

A view shows the controller's own records, which change later. So a policy reads attributes and keeps no record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol


class Status(StrEnum):
    """The state of an engine. No request is dispatched to one that drains."""

    LOADING = "loading"
    RESIDENT = "resident"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class EngineView:
    """An engine as a policy sees it.

    ``requests`` counts the requests that run in it or wait for it. ``idle_s`` is 0 while there are any, else the seconds
    since.
    """

    engine: int
    model: str
    gpus: tuple[int, ...]
    status: Status
    idle_s: float
    requests: int


class Pending(NamedTuple):
    """A model with waiting requests that no engine serves or loads for.

    ``since_s`` is when the first of them began to wait; ``oldest_arrival_s`` when the oldest arrived.
    """

    model: str
    requests: int
    since_s: float
    oldest_arrival_s: float


@dataclass(frozen=True, slots=True)
class FleetView:
    """All that a residency policy sees at one moment.

    * ``engines``: in the order of their ids.
    * ``pending``: in the order in which models began to wait.
    * ``rates_per_s``: moving average of arrivals, by model.
    * ``free_bytes``: by GPU, the bytes that weights could take now. A lost GPU is not in it.
    * ``pressed``: the GPUs on which a request waited for memory alone since the last look.
    """

    engines: tuple[EngineView, ...]
    pending: tuple[Pending, ...]
    rates_per_s: Mapping[str, float]
    free_bytes: Mapping[int, int]
    pressed: frozenset[int]


class Start(NamedTuple):
    """Activate a model on these GPUs. A move names the engine that it ``replaces``."""

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
        """The suggestions for now, in order. A suggestion may use the memory that earlier ones free."""


def next_multiple(period_s: float, now: float) -> float:
    """The first multiple of ``period_s`` after ``now``. It is counted: adding up a fraction drifts."""
    number = int(now / period_s)
    while number * period_s <= now:
        number += 1
    return number * period_s
