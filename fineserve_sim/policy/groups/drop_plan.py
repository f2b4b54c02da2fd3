"""KunServe's global memory manager (sections 4.1 and 4.4).

It decides when layers are dropped, which instances merge, when layers come back, and when more instances start.

    NORMAL --throttled--> drop --> PIPELINED --throttled--> drop further
    PIPELINED --usage of the cluster under half of the base KV memory--> restore --> NORMAL

A group is throttled when its KV memory is nearly full and its queue asks for at least the rest of it (an empty queue never
throttles). The two thresholds are the hysteresis: 95 % of a group's present KV memory, and 50 % of all KV memory without drop.

The drop plan says which groups of instances merge so that copies of the weights become KV memory (Fig. 6). A group holds one
full copy of the weights; its instances are a pipeline over contiguous layer ranges. Merging two groups of any sizes frees one
of their two copies. In a group of a + b instances each keeps the fraction 1/(a+b). So the a instances give b/(a+b) of a copy
and the b instances a/(a+b).

Every stage costs latency, so the two groups with the fewest instances merge first. Then the largest group is as small as the
number of merges allows. The listing adds up the freed bytes over the cluster, ignores load, and stops when one group is left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Literal

from fineserve_sim.policy.groups.dispatch import GroupEngine, Phase

RESTORE_BELOW = 0.5
"""Layers come back when KV usage is below this part of the KV memory without drop (KunServe, section 4.4)."""

Group = tuple[int, ...]
"""Ids of the instances of one group, ascending."""


@dataclass(frozen=True, slots=True)
class DropPlan:
    """The next grouping: all ``groups``, and the ``merged`` ones that are new.

    ``freed_bytes`` counts weights over the cluster; ``sufficient`` says whether they cover what was required.
    """

    groups: tuple[Group, ...]
    merged: tuple[Group, ...]
    freed_bytes: int
    sufficient: bool


def plan_drop(
    groups: Iterable[Sequence[int]],
    required_bytes: float,
    copy_bytes: int,
    *,
    node_of: Mapping[int, int] | None = None,
    max_group: int | None = None,
) -> DropPlan:
    """Merge the two smallest groups until ``required_bytes`` are freed.

    ``groups`` is the present grouping by instance ids; ``copy_bytes`` the weights of one copy over all its GPUs. Among groups
    of one size the lowest node comes first, then the lowest instance. ``max_group`` bounds the size of a group.

    A plan that is not sufficient is the largest there is: apply it, and fall back on preemption. Costs O(groups log groups),
    and for each merge the number of its instances.
    """
    nodes = node_of or {}
    before = {tuple(sorted(group)) for group in groups}
    queue = [(len(group), nodes.get(group[0], 0), group) for group in before]
    heapify(queue)
    freed_bytes = 0
    while len(queue) >= 2 and freed_bytes < required_bytes:
        first = heappop(queue)
        if max_group is not None and first[0] + queue[0][0] > max_group:
            heappush(queue, first)  # the two smallest are too large together, so are all others
            break
        merged = tuple(sorted(first[2] + heappop(queue)[2]))
        heappush(queue, (len(merged), nodes.get(merged[0], 0), merged))
        freed_bytes += copy_bytes
    after = tuple(sorted(group for _, _, group in queue))
    new = tuple(group for group in after if group not in before)
    return DropPlan(after, new, freed_bytes, freed_bytes >= required_bytes)


def even_split(layers: int, stages: int) -> tuple[range, ...]:
    """Contiguous layer ranges of ``stages`` stages, equal within one layer. Raises ValueError unless 1 <= stages <= layers."""
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be split over {stages} stages; a stage needs at least one layer")
    return tuple(range(stage * layers // stages, (stage + 1) * layers // stages) for stage in range(stages))


def pipeline_layout(held: Mapping[int, range], layers: int) -> dict[int, range]:
    """The layer range of each instance of a merged group, in pipeline order, from the layers that each holds now.

    Instances are ordered by the middle of their layers. Then groups of equal size merge without a layer moving: every
    instance keeps a part of its own range. Groups of different sizes may leave a stage short of a layer at its edge,
    where the split into whole layers rounds.
    """
    order = sorted(held, key=lambda instance: (held[instance].start + held[instance].stop, instance))
    return dict(zip(order, even_split(layers, len(order)), strict=True))


@dataclass(frozen=True, slots=True)
class KunServeDrop:
    """The global memory manager: looks at all groups now and then (``tick``) and decides what changes.

    * ``copy_bytes``: weights of one copy over its GPUs; ``block_bytes``: one KV block of the whole model.
    * ``base_bytes``: by instance, its KV memory while it holds all weights.
    * ``trigger``: the part of its KV blocks that a throttled group uses at least.
    * ``required``: free KV memory counts against the demand of the queue (net), or does not (gross).
    * ``restore_usage``: the usage of the whole cluster, or of the group alone, must be below half of its base.
    * ``restore``: whether groups are ever split again.
    """

    copy_bytes: int
    block_bytes: int
    base_bytes: Mapping[int, int]
    node_of: Mapping[int, int]
    trigger: float = 0.95
    restore_usage: Literal["cluster", "group"] = "cluster"
    required: Literal["net", "gross"] = "gross"
    max_group: int | None = None
    restore: bool = True

    def __post_init__(self) -> None:
        # The gap between the two is the hysteresis: without it groups would merge and split for ever.
        if self.trigger <= RESTORE_BELOW:
            raise ValueError(
                f"trigger is {self.trigger:g}: layers come back below {RESTORE_BELOW:g}, so it must be above"
            )

    def tick(self, groups: Sequence[GroupEngine]) -> DropPlan | list[int]:
        """What to do now: form groups by a plan, or split these engines.

        Nothing happens while a group changes, until the last KV has arrived at its new place.
        """
        if any(group.phase is Phase.CHANGING or group.load.stalled for group in groups):
            return []
        serving = [group for group in groups if group.takes_requests]
        if any(self._is_throttled(group) for group in serving):
            queued = sum(group.load.queued_blocks for group in serving)
            free = sum(group.load.free_blocks for group in serving) if self.required == "net" else 0
            present, required_bytes = [group.instances for group in serving], (queued - free) * self.block_bytes
            return plan_drop(present, required_bytes, self.copy_bytes, node_of=self.node_of, max_group=self.max_group)
        if not self.restore:
            return []
        scopes = [groups] if self.restore_usage == "cluster" else [[group] for group in groups]
        return [group.id for scope in scopes if self._is_low(scope) for group in scope if self._may_restore(group)]

    def _is_throttled(self, group: GroupEngine) -> bool:
        load = group.load
        nearly_full = load.used_blocks >= self.trigger * load.capacity_blocks
        return nearly_full and load.queued_blocks >= max(1, load.free_blocks)

    def _is_low(self, groups: Sequence[GroupEngine]) -> bool:
        """Whether these instances together hold less KV than the threshold of their memory without drop. The instances of one
        that drains count at its successors."""
        present = [group.instances for group in groups if group.phase is not Phase.DRAINING]
        base_bytes = sum(self.base_bytes[instance] for instances in present for instance in instances)
        used_blocks = sum(group.load.used_blocks for group in groups)
        return used_blocks * self.block_bytes < RESTORE_BELOW * base_bytes

    def _may_restore(self, group: GroupEngine) -> bool:
        """A pipeline without a queue, each of whose instances can hold all weights beside its KV."""
        pipelined = group.phase is Phase.SERVING and len(group.instances) > 1
        if not pipelined or group.load.queued_blocks:
            return False
        return group.load.fullest_bytes <= min(self.base_bytes[instance] for instance in group.instances)


class ScaleOut:
    """Asks for an instance when layers are dropped and KV demand still grows.

    Demand grows if, over ``samples`` looks (two at least), it was lowest at the first and is highest now. It asks at most once
    in ``pause_s``: an instance takes as long to start, and changes the picture.
    """

    def __init__(self, samples: int, pause_s: float) -> None:
        self._demand: deque[int] = deque(maxlen=max(2, samples))
        self._pause_s = pause_s
        self._asked_s = float("-inf")

    def tick(self, now: float, groups: Sequence[GroupEngine]) -> bool:
        """Whether to start an instance now."""
        demand = sum(group.load.used_blocks + group.load.queued_blocks for group in groups)
        self._demand.append(demand)
        dropped = any(len(group.instances) > 1 and group.takes_requests for group in groups)
        full = len(self._demand) == self._demand.maxlen
        grows = min(self._demand) == self._demand[0] < demand == max(self._demand)
        if not dropped or not full or not grows or now < self._asked_s + self._pause_s:
            return False
        self._asked_s = now
        return True
