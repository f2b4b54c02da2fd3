"""What the policies of a single-model cluster see of one engine: an instance, or several that run as a pipeline."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from fineserve_sim.policy.interfaces import EngineLoad


class Phase(StrEnum):
    """``LOADING``: its weights are on their way. ``SERVING``: takes requests. ``CHANGING``: stops to be regrouped.
    ``RESTORING``: serves while missing layers come back. ``DRAINING``: ends its requests, its instances already serve for
    themselves."""

    LOADING = "loading"
    SERVING = "serving"
    CHANGING = "changing"
    RESTORING = "restoring"
    DRAINING = "draining"

    @property
    def takes_requests(self) -> bool:
        return self is Phase.SERVING or self is Phase.RESTORING


class GroupView(NamedTuple):
    """One engine at one moment, over ``instances`` (ascending numbers). ``used_bytes`` of KV it holds, ``base_bytes`` is the KV
    memory of its instances when all hold all weights."""

    engine: int
    instances: tuple[int, ...]
    phase: Phase
    load: EngineLoad
    used_bytes: int
    base_bytes: int
