"""Which group gets a new request: round robin, least loaded by KV demand, or Llumnix's freeness.

KV demand counts what running requests hold and what queued ones will ask for: all of them, or the head of the queue
alone (``queued``).

    load     = (used + queued) / capacity                       the smallest wins
    freeness = (capacity - used - queued) / max(1, running)     the largest wins (Llumnix)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from fineserve_sim.policy.groups.view import GroupView

Queued = Literal["all", "head"]


class DispatchPolicy(Protocol):
    def choose(self, groups: Sequence[GroupView]) -> int:
        """The ``group`` id of one of ``groups`` (not empty, ascending ids)."""
        ...


class RoundRobin:
    """One after the other, as a plain load balancer in front of independent engines does."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, groups: Sequence[GroupView]) -> int:
        after = [view.group for view in groups if view.group > self._last]
        self._last = after[0] if after else groups[0].group
        return self._last


class LeastLoaded:
    """The smallest KV demand relative to capacity; the lowest id among equals."""

    def __init__(self, queued: Queued = "all") -> None:
        self._queued = queued

    def choose(self, groups: Sequence[GroupView]) -> int:
        def load(view: GroupView) -> tuple[float, int]:
            return (view.used_blocks + queued_blocks(view, self._queued)) / max(1, view.capacity_blocks), view.group

        return min(groups, key=load).group


class LeastQueued:
    """The fewest queued blocks an instance, among the groups whose memory has room for their queue (all groups if none
    has).

    No system of the papers: it tells what KunServe loses by a dispatcher that sees memory and not the prefills that
    wait.
    """

    def choose(self, groups: Sequence[GroupView]) -> int:
        roomy = [view for view in groups if view.used_blocks + view.queued_blocks < view.capacity_blocks]

        def queue(view: GroupView) -> tuple[float, float, int]:
            return view.queued_blocks / len(view.instances), view.used_blocks / max(1, view.capacity_blocks), view.group

        return min(roomy or groups, key=queue).group


class MostFree:
    """Llumnix: the largest freeness; the lowest id among equals."""

    def __init__(self, queued: Queued = "head") -> None:
        self._queued = queued

    def choose(self, groups: Sequence[GroupView]) -> int:
        return max(groups, key=lambda view: (freeness(view, self._queued), -view.group)).group


def queued_blocks(view: GroupView, queued: Queued) -> int:
    return view.queued_blocks if queued == "all" else view.head_blocks


def freeness(view: GroupView, queued: Queued = "head") -> float:
    """Free blocks a running request, in KV blocks; negative when the queue wants more than there is."""
    return (view.capacity_blocks - view.used_blocks - queued_blocks(view, queued)) / max(1, view.running)
