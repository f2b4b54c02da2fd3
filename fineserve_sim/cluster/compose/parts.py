"""A composed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.host import Cluster
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.samples import Sampler
from fineserve_sim.cluster.step_times import StepTimes
from fineserve_sim.policy.interfaces import Placement


class Fallible(Protocol):
    """A fleet that can lose instances, by their number in the placement, or GPUs."""

    def fail(self, number: int) -> None: ...
    def repair(self, number: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """``kv_capacity_bytes`` are the sizes of the KV memories of the GPUs that host engines, by GPU id; where engines come and
    go, what there could be at most. ``iterations`` counts those of all engines that ever were, ``counters`` what is counted
    besides, when the run is over and the last request came at that time. ``fleet`` takes faults of ``serving`` instances."""

    clock: Clock
    cluster: Cluster
    outcomes: Outcomes
    sampler: Sampler
    step_times: StepTimes
    kv_capacity_bytes: tuple[int, ...]
    placement: Placement
    iterations: Callable[[], int]
    fleet: Fallible | None = None
    serving: int = 0
    counters: Callable[[float], Mapping[str, float]] = field(default=lambda last_arrival_s: {})
