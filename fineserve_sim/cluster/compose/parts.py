"""A composed run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.host import Cluster
from fineserve_sim.cluster.samples import Sampler
from fineserve_sim.cluster.scenario import Scenario
from fineserve_sim.cluster.sharing.contention import Contention
from fineserve_sim.cluster.step_times import StepTimes
from fineserve_sim.policy.controller import Controller
from fineserve_sim.policy.interfaces import Placement


@dataclass(frozen=True, slots=True)
class Parts:
    """``kv_capacity_bytes`` are the sizes of the KV memories of the GPUs that host engines, by GPU id; where engines come and
    go, what there could be at most. ``counters`` are what is counted besides, when the run is over and the last request came
    at that time. The fleet takes faults of ``serving`` instances, or of GPUs."""

    cluster: Cluster
    sampler: Sampler
    step_times: StepTimes
    kv_capacity_bytes: tuple[int, ...]
    placement: Placement
    serving: int = 0
    counters: Callable[[float], Mapping[str, float]] = field(default=lambda last_arrival_s: {})


def cluster_of(scenario: Scenario, clock: Clock, controller: Controller, contention: Contention) -> Cluster:
    """A cluster without engines yet, which looks as closely as the scenario asks."""
    merging = not scenario.exact_steps and scenario.engine.contention == "composition"
    return Cluster(clock, controller, contention, merging=merging, check=scenario.check, log=scenario.log)
