"""Arrivals in, outcomes out."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import numpy as np
from fineserve_traces import totals

from fineserve_sim.cluster.arrivals import Arrivals, ClosedLoops, Joined
from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.compose.memory import caches_prefixes, offloads
from fineserve_sim.cluster.host import ARRIVAL, TIMER, Cluster
from fineserve_sim.cluster.looks import GpuUses, Looks, StepTimes, fractions, looks_at
from fineserve_sim.cluster.samples import Sampler, sample_time_s
from fineserve_sim.cluster.scenario import OUTCOMES, Ended, RunResult, Scenario, ScenarioError, Visits, wrong_fault
from fineserve_sim.policy.interfaces import Placement

FAULT = order_of(Kind.TIMER, 1 << 19)

MOST_SAMPLES = 100_000
"""A run that would have more samples, after 28 hours at one a second, has them further apart. So a gap of a year between two
requests costs no more than a day."""

MOST_ALIKE = 1000
"""Samples that are taken as one, so that a run that hands its samples on keeps few of them."""

YOUNG_OBJECTS = 50_000
"""New objects, less those that went, between two searches for cycles. The usual 700 cost a run up to a twentieth of its
time."""

TOLD_S = 1.0
"""Progress is told no more often, in seconds of the clock on the wall."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A composed cluster. ``kv_capacity_bytes`` are the sizes of the KV memories of the GPUs that host engines, by GPU id;
    where engines come and go, the most that there could be. ``counters`` gives the other counters of a run that is over, from
    the time of its last arrival. The fleet takes faults of ``serving`` instances, or of GPUs."""

    cluster: Cluster
    sampler: Sampler
    kv_capacity_bytes: tuple[int, ...]
    placement: Placement
    serving: int = 0
    counters: Callable[[float], Mapping[str, float]] = field(default=lambda last_arrival_s: {})


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Python looks for cycles among objects whenever it has 700 more. A run has many small objects, and hardly a cycle."""
    usual = gc.get_threshold()
    gc.set_threshold(max(usual[0], YOUNG_OBJECTS) if usual[0] else 0, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class WholeTrace:
    """Takes ended requests in any order. ``columns`` are the columns of ``RunResult``, in the order of the whole trace.
    Requests that never end stay unfinished, without moments. ``visits`` come part by part."""

    def __init__(self, requests: int) -> None:
        self.first_token_s = np.full(requests, np.nan)
        self.finish_s = np.full(requests, np.nan)
        self.fate = np.zeros(requests, dtype=np.int8)
        self.preemptions = np.zeros(requests, dtype=np.int64)
        self.engine = np.full(requests, -1, dtype=np.int32)
        self.cause = np.zeros(requests, dtype=np.int8)
        self.generated_tokens = np.zeros(requests, dtype=np.int64)
        self.visits: list[Visits] = []

    def __call__(self, ended: Ended) -> None:
        for name in OUTCOMES:
            getattr(self, name)[ended.request] = getattr(ended, name)
        self.visits.append(ended.visits)

    @property
    def columns(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OUTCOMES} | {"visits": Visits.joined(self.visits)}


class Run:
    """A composed cluster before the first event of ``scenario``, whose faults are set. ``looks`` has the time until which
    samples look at GPUs; the run ends ``drain_s`` later at the latest. A scenario that is a part of another gets the looks of
    the whole. ``joined`` has the requests and takes their outcomes; without it the outcomes are kept for the result. Raises
    ScenarioError for a fault that this cluster cannot have."""

    def __init__(
        self, scenario: Scenario, parts: Parts, *, looks: Looks | None = None, joined: Joined | None = None
    ) -> None:
        self.parts = parts
        self._scenario = scenario
        self._plan_faults()
        found = totals(scenario.trace)
        self._looks = looks or looks_at(found, scenario.trace.models)
        caches, own = caches_prefixes(scenario.system.memory), offloads(scenario) is not None
        self._closed: ClosedLoops | None = None
        self._arrivals: Arrivals | ClosedLoops
        if scenario.clients is None:
            self._number = int(found.requests.sum())
            self._arrivals = Arrivals(joined or scenario.trace, caches=caches, own=own)
        else:
            self._number = scenario.clients.requests
            self._arrivals = self._closed = ClosedLoops(scenario.whole_trace, scenario.clients, caches=caches, own=own)
        self._to_come = self._number
        self._expected_s = math.inf
        self._until_s = self._looks.until_s
        self._horizon_s = self._until_s + scenario.drain_s
        self._events = 0
        self._samples = 0
        self._sample_s = max(scenario.sample_s, self._looks.until_s / MOST_SAMPLES)
        self._told_s = time.monotonic()
        in_groups = scenario.system.dispatch is not None  # whose steps are not told apart
        self.step_times = StepTimes(tuple if in_groups else parts.cluster.engines.values)
        self.gpu_uses = GpuUses(parts.cluster, parts.placement, self._looks)
        self._whole = WholeTrace(0 if joined else self._number)
        hears = None if self._closed is None else self._on_answer
        parts.cluster.outcomes.begin(self._number, joined or self._whole, hears)

    def _plan_faults(self) -> None:
        """Schedule the loss of each fault, and its repair."""
        scenario, cluster = self._scenario, self.parts.cluster
        if wrong := wrong_fault(scenario.faults, scenario.system, self.parts.serving, len(scenario.gpus)):
            raise ScenarioError(f"system {scenario.system.name}, fault {wrong[0]}: {wrong[1]}")
        for fault in scenario.faults:
            order = FAULT + fault.number
            cluster.at(fault.time_s, order, partial(cluster.fleet.fail, fault.number))
            if fault.repair_s is not None:
                cluster.at(fault.time_s + fault.repair_s, order, partial(cluster.fleet.repair, fault.number))

    def to_the_end(self) -> None:
        with _rare_collections():
            self._pass_events()

    def _pass_events(self) -> None:
        began_s = time.process_time()
        clock, outcomes = self.parts.cluster.clock, self.parts.cluster.outcomes
        self._expect()
        if self._scenario.sample_s > 0:
            clock.at(0.0, TIMER, self._on_sample)
        while outcomes.open and math.inf > clock.peek() <= self._horizon_s:
            clock.step()
            self._events += 1
        self.parts.cluster.settle_all(self._horizon_s, order_of(Kind.START, 0))
        self._end_s = self._horizon_s if outcomes.open else outcomes.last_end_s
        self.parts.cluster.close(self._end_s)
        self._loop_cpu_s = time.process_time() - began_s

    def _expect(self) -> None:
        """Schedule the next arrival, unless an earlier one is scheduled."""
        if self._arrivals.next_s < self._expected_s:
            self._expected_s = self._arrivals.next_s
            self.parts.cluster.clock.at(self._expected_s, ARRIVAL, self._on_arrival)

    def _on_arrival(self, now: float) -> None:
        """All requests of this very moment come in; a moment for which an earlier one was set meanwhile has none."""
        if now != self._expected_s:
            return
        arrivals, cluster = self._arrivals, self.parts.cluster
        while arrivals.next_s == now:
            request, output, prefix = arrivals.take()
            self._to_come -= 1
            cluster.arrive(request, output, now, prefix)
        self._expected_s = math.inf
        self._expect()
        if self._closed is not None:
            self._until_s, self._horizon_s = now, now + self._scenario.drain_s
            self.gpu_uses.until_s = now if self._closed.all_sent else math.inf

    def _on_answer(self, request: int, now: float) -> None:
        """A client has its answer: when it sends its next request is known."""
        assert self._closed is not None
        self._closed.answered(request, now)
        self._expect()

    def _on_sample(self, now: float) -> None:
        clock, outcomes, tell = self.parts.cluster.clock, self.parts.cluster.outcomes, self._scenario.tell
        self.parts.cluster.settle_all(now, TIMER)
        if not outcomes.open:
            return
        times = [now, *self._samples_alike()]
        self.parts.sampler.sample(times)
        self.step_times.sample(len(times))
        self.gpu_uses.sample(times)
        self._samples += len(times)
        self._events += len(times) - 1
        clock.at(sample_time_s(self._samples, self._sample_s), TIMER, self._on_sample)
        if tell is not None and time.monotonic() - self._told_s >= TOLD_S:
            self._told_s = time.monotonic()
            tell(self._number - outcomes.open, self._number)

    def _samples_alike(self) -> list[float]:
        """The times of the samples to come that will be as the one under way: no request is in the cluster, and no event is
        before them. So idle time costs next to nothing, unless a policy ticks in it."""
        if self.parts.cluster.outcomes.open > self._to_come:
            return []
        until_s, number = self.parts.cluster.clock.peek(), self._samples + 1
        times = (sample_time_s(each, self._sample_s) for each in range(number, number + MOST_ALIKE))
        return list(takewhile(lambda time_s: time_s < until_s and time_s <= self._horizon_s, times))

    def result(self) -> RunResult:
        parts, columns = self.parts, self._whole.columns
        sent = None if self._closed is None else self._closed.sent()
        if sent is not None:  # of those that no client came to send, nothing is told
            columns |= {name: columns[name][: len(sent)] for name in OUTCOMES}
        return RunResult(
            **columns,
            sent=sent,
            placement=parts.placement,
            kv_capacity_bytes=parts.kv_capacity_bytes,
            timeline=parts.sampler.rows.timeline(),
            end_s=self._end_s,
            iterations=parts.cluster.iterations(),
            events=self._events + sum(engine.executor.events for engine in parts.cluster.engines.values()),
            loop_cpu_s=self._loop_cpu_s,
            step_times=self.step_times.shares(),
            step_samples=len(self.step_times.notes) + self.step_times.weighed,
            counters=parts.counters(self._until_s),
            gpu_use=fractions(self.gpu_uses.sums, self.gpu_uses.looks),
        )
