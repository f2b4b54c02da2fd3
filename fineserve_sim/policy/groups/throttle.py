"""When KunServe drops layers, when it restores them, and when it asks for more instances (sections 4.1 and 4.4).

    NORMAL --throttled--> drop --> PIPELINED --throttled--> drop further
    PIPELINED --usage of the cluster under half of the base KV memory--> restore --> NORMAL

A group is throttled when its KV memory is nearly full and its queue asks for more than is left. The two thresholds, 95 % of
what a group has now and 50 % of what all have without drop, are the hysteresis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from fineserve_sim.policy.groups.drop_plan import Group, plan_drop
from fineserve_sim.policy.groups.view import GroupView, Phase
from fineserve_sim.policy.interfaces import EngineLoad


class Merge(NamedTuple):
    """Form one engine of these instances. ``freed_bytes`` of weights over the cluster; ``sufficient``: as required."""

    instances: Group
    freed_bytes: int
    sufficient: bool


class Split(NamedTuple):
    """Bring the missing layers of an engine back to its instances and dissolve it."""

    engine: int


class KunServeDrop:
    """The global memory manager: looks at all groups now and then (``tick``) and decides what changes.

    ``copy_bytes``: weights of one copy over its GPUs; ``block_bytes``: one KV block of the whole model; ``required``:
    whether free KV memory counts against the demand of the queue (net) or not (gross); ``restore_usage``: whose usage must be
    under ``restore_below`` of its base, that of the whole cluster or of the group itself; ``restore``: whether groups are
    ever dissolved.
    """

    def __init__(
        self,
        copy_bytes: int,
        block_bytes: int,
        *,
        node_of: Mapping[int, int] | None = None,
        trigger: float = 0.95,
        restore_below: float = 0.5,
        restore_usage: Literal["cluster", "group"] = "cluster",
        required: Literal["net", "gross"] = "gross",
        max_group: int | None = None,
        restore: bool = True,
    ) -> None:
        if restore_below >= trigger:
            raise ValueError(f"restore_below {restore_below:g} must be under the trigger {trigger:g}")
        self._copy_bytes, self._block_bytes = copy_bytes, block_bytes
        self._node_of = node_of
        self._trigger, self._restore_below = trigger, restore_below
        self._required, self._max_group, self._restore = required, max_group, restore
        self._restore_usage = restore_usage

    def tick(self, groups: Sequence[GroupView]) -> list[Merge] | list[Split]:
        """What to do now. Nothing while a group is being changed, until the last KV has arrived at its new place."""
        if any(view.phase is Phase.CHANGING or view.load.stalled for view in groups):
            return []
        if any(throttled(view.load, self._trigger) for view in groups if view.phase.takes_requests):
            return self._drop(groups)
        if not self._restore or (self._restore_usage == "cluster" and not self._is_low(groups)):
            return []
        return [Split(view.engine) for view in groups if self._may_restore(view)]

    def _is_low(self, groups: Sequence[GroupView]) -> bool:
        """Whether these hold less KV together than the threshold of what they have without drop. The instances of one that
        drains count at its successors."""
        base_bytes = sum(view.base_bytes for view in groups if view.phase is not Phase.DRAINING)
        return sum(view.used_bytes for view in groups) < self._restore_below * base_bytes

    def _drop(self, groups: Sequence[GroupView]) -> list[Merge]:
        serving = [view for view in groups if view.phase.takes_requests]
        queued = sum(view.load.queued_blocks for view in serving)
        free = sum(view.load.free_blocks for view in serving) if self._required == "net" else 0
        plan = plan_drop(
            [view.instances for view in serving],
            (queued - free) * self._block_bytes,
            self._copy_bytes,
            node_of=self._node_of,
            max_group=self._max_group,
        )
        return [Merge(instances, plan.freed_bytes, plan.sufficient) for instances in plan.merged]

    def _may_restore(self, view: GroupView) -> bool:
        pipelined = view.phase is Phase.SERVING and len(view.instances) > 1
        if not pipelined or view.load.queued_blocks:
            return False
        if self._restore_usage == "group" and not self._is_low([view]):
            return False
        # each of its instances must hold all weights beside its KV
        return view.load.fullest_bytes * len(view.instances) <= view.base_bytes


def throttled(load: EngineLoad, trigger: float = 0.95) -> bool:
    """Nearly full, and the queue asks for at least what is left (so an empty queue never throttles)."""
    return (
        load.queued_blocks > 0
        and load.used_blocks >= trigger * load.capacity_blocks
        and load.queued_blocks >= load.free_blocks
    )


class ScaleOut:
    """Ask for an instance when layers are dropped and KV demand went on growing for ``samples`` looks (two at least): lowest
    at the first of them, highest now, whatever it did in between. At most once in ``pause_s`` (a new one takes as long to
    start, and changes the picture)."""

    def __init__(self, samples: int, pause_s: float) -> None:
        self._demand: deque[int] = deque(maxlen=max(2, samples))
        self._pause_s = pause_s
        self._asked_s = float("-inf")

    def tick(self, now: float, groups: Sequence[GroupView]) -> bool:
        """Whether to start an instance: the memory that dropping can free does not stop the queue from growing."""
        demand = sum(view.load.used_blocks + view.load.queued_blocks for view in groups)
        self._demand.append(demand)
        dropped = any(len(view.instances) > 1 and view.phase.takes_requests for view in groups)
        full = len(self._demand) == self._demand.maxlen
        grows = min(self._demand) == self._demand[0] < demand == max(self._demand)
        if not dropped or not full or not grows or now < self._asked_s + self._pause_s:
            return False
        self._asked_s = now
        return True
