"""What the policies of a single-model cluster see of a group of instances: one instance, or several that run as a
pipeline."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Phase(Enum):
    """``SERVING``: takes requests. ``CHANGING``: stops to be regrouped. ``RESTORING``: serves while missing layers come
    back. ``DRAINING``: ends its requests, its instances already serve for themselves."""

    SERVING = "serving"
    CHANGING = "changing"
    RESTORING = "restoring"
    DRAINING = "draining"


class GroupView(NamedTuple):
    """One group at one moment. Blocks are KV blocks of the whole model; ``queued_blocks`` hold the prompts of all its
    waiting requests, ``head_blocks`` that of the first. ``stalled`` requests wait for KV that is on its way.
    ``base_bytes`` is the KV memory of its instances when all hold all weights; ``shortest`` is the running request
    with the fewest tokens, if any may be moved."""

    group: int
    instances: tuple[int, ...]
    phase: Phase
    capacity_blocks: int
    used_blocks: int
    queued_blocks: int
    head_blocks: int
    running: int
    used_bytes: int
    base_bytes: int
    stalled: int = 0
    shortest: int | None = None
    shortest_blocks: int = 0

    @property
    def free_blocks(self) -> int:
        return self.capacity_blocks - self.used_blocks

    @property
    def takes_requests(self) -> bool:
        return self.phase in (Phase.SERVING, Phase.RESTORING)
