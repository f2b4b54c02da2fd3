"""KunServe's drop plan: which groups of instances merge so that copies of the weights become KV memory (Fig. 6, section
4.1).

A group holds one full copy of the weights, its instances run as a pipeline over contiguous layer ranges. Merging two
groups makes one of the two copies redundant, whatever their sizes: in a group of a + b instances everyone keeps a
1/(a+b) part, so the a instances give b/(a+b) of a copy and the b instances a/(a+b). Every stage costs latency, so the
two groups with the fewest instances merge first; then the largest group is as small as the number of merges allows.

The listing adds up what is freed over the cluster; it ignores load, and stops short when one group is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

Group = tuple[int, ...]
"""Ids of the instances of one group, ascending."""


@dataclass(frozen=True, slots=True)
class DropPlan:
    """``groups``: the grouping to be; ``merged``: those of them that are new. ``freed_bytes`` of weights over the
    cluster; ``sufficient`` says whether that covers what was required."""

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

    ``groups`` is the present grouping (instance ids), ``copy_bytes`` the weights of one copy over all its GPUs. Among
    groups of one size those of the lowest node come first, then the lowest instance. ``max_group`` bounds the size of a
    group. When the plan is not sufficient it is the largest there is: apply it, and fall back on preemption.
    Costs O(groups log groups), and for each merge the number of its instances.
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
    """Contiguous layer ranges of ``stages`` stages, equal within one layer. Raises ValueError unless 1 <= stages <=
    layers."""
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be split over {stages} stages; a stage needs at least one layer")
    return tuple(range(stage * layers // stages, (stage + 1) * layers // stages) for stage in range(stages))


def pipeline_layout(held: Mapping[int, range], layers: int) -> dict[int, range]:
    """The layer range of each instance of a merged group, in pipeline order, given what each holds now.

    Instances are ordered by the middle of what they hold. Then groups of equal size merge without a layer moving: every
    instance keeps a part of its own range. Groups of different sizes may leave a stage short of a layer at its edge,
    where the split into whole layers rounds.
    """
    order = sorted(held, key=lambda instance: (held[instance].start + held[instance].stop, instance))
    return dict(zip(order, even_split(layers, len(order)), strict=True))
