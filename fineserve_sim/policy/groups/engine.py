"""What the controller of a single-model cluster and its policies know of one engine."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from fineserve_sim.policy.interfaces import EngineLoad


class Phase(Enum):
    """``LOADING``: its weights are on their way. ``SERVING``: takes requests. ``CHANGING``: stops to be regrouped.
    ``RESTORING``: serves while missing layers come back. ``DRAINING``: ends its requests, its instances already serve for
    themselves."""

    LOADING = auto()
    SERVING = auto()
    CHANGING = auto()
    RESTORING = auto()
    DRAINING = auto()


@dataclass(slots=True)
class GroupEngine:
    """An engine over ``instances`` by number, several as a pipeline in the order of its stages; ``load`` as last told."""

    id: int
    instances: tuple[int, ...]
    phase: Phase
    load: EngineLoad

    @property
    def takes_requests(self) -> bool:
        return self.phase is Phase.SERVING or self.phase is Phase.RESTORING
