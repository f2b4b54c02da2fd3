"""Arrivals in, outcomes out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from fineserve_traces import Requests
from simpy.events import Event

from fineserve_sim.cluster.arrivals import Arrivals
from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.compose.parts import Parts
from fineserve_sim.cluster.engine.lone import LoneEngine
from fineserve_sim.cluster.gpu_use import GpuUses, Looks, fractions
from fineserve_sim.cluster.host import ARRIVAL, TIMER, Cluster
from fineserve_sim.cluster.result import WholeTrace
from fineserve_sim.cluster.samples import sample_time_s
from fineserve_sim.cluster.scenario import Ended, Fault, RunResult

FAULT = order_of(Kind.TIMER, 1 << 19)


TOLD_S = 1.0
"""Progress is told no more often, in seconds of the clock on the wall."""

MOST_NOTES = 1 << 13
"""Steps in flight that a run keeps whose requests stream in, before their shares are put together."""


class Run:
    """A composed cluster that serves ``requests``, so many in all, sampled once in each ``sample_s`` (0: never), until all have
    ended, or to ``horizon_s``. ``looks`` say until when samples look at GPUs, ``ended`` takes the requests that have ended;
    without it they are kept for the result."""

    def __init__(
        self,
        requests: Requests,
        number: int,
        parts: Parts,
        *,
        sample_s: float,
        horizon_s: float,
        looks: Looks,
        caches: bool = False,
        ended: Callable[[Ended], None] | None = None,
        tell: Callable[[int, int], None] | None = None,
    ) -> None:
        self.parts = parts
        self._number = number
        self._arrivals = Arrivals(requests, caches=caches)
        self._until_s = looks.until_s
        self._horizon_s = horizon_s
        self._events = 0
        self._samples = 0
        self._sample_s = sample_s
        self._tell = tell
        self._told_s = time.monotonic()
        self.gpu_uses = GpuUses(parts.cluster, parts.placement, looks)
        self._whole = WholeTrace(0 if ended else number)
        parts.cluster.outcomes.begin(number, ended or self._whole)

    def to_the_end(self) -> None:
        clock, outcomes = self.parts.cluster.clock, self.parts.cluster.outcomes
        self._expect()
        if self._sample_s > 0:
            clock.at(0.0, TIMER, self._on_sample)
        while outcomes.open and math.inf > clock.peek() <= self._horizon_s:
            clock.step()
            self._events += 1
        self.parts.cluster.settle_all(self._horizon_s, order_of(Kind.START, 0))
        self._end_s = self._horizon_s if outcomes.open else outcomes.last_end_s
        self.parts.cluster.close()

    def _expect(self) -> None:
        """The next arrival is set."""
        if self._arrivals.next_s < math.inf:
            self.parts.cluster.clock.at(self._arrivals.next_s, ARRIVAL, self._on_arrival)

    def _on_arrival(self, _: Event) -> None:
        """All requests of this very moment come in."""
        arrivals, cluster = self._arrivals, self.parts.cluster
        now = arrivals.next_s
        while arrivals.next_s == now:
            request, output, prefix = arrivals.take()
            cluster.arrive(request, output, now, prefix)
        self._expect()

    def _on_sample(self, _: Event) -> None:
        clock, outcomes = self.parts.cluster.clock, self.parts.cluster.outcomes
        now: float = clock.now
        self.parts.cluster.settle_all(now, TIMER)
        if not outcomes.open:
            return
        self.parts.sampler.sample(now)
        self.parts.step_times.sample()
        self.gpu_uses.sample(now)
        self._samples += 1
        clock.at(sample_time_s(self._samples, self._sample_s), TIMER, self._on_sample)
        if self._tell is not None and time.monotonic() - self._told_s >= TOLD_S:
            self._told_s = time.monotonic()
            self._tell(self._number - outcomes.open, self._number)

    def result(self, loop_cpu_s: float) -> RunResult:
        parts = self.parts
        return RunResult(
            **self._whole.columns(),
            placement=parts.placement,
            kv_capacity_bytes=parts.kv_capacity_bytes,
            timeline=parts.sampler.rows.timeline(),
            end_s=self._end_s,
            iterations=parts.cluster.iterations(),
            events=self._events + sum(e.events for e in parts.cluster.engines.values() if isinstance(e, LoneEngine)),
            loop_cpu_s=loop_cpu_s,
            step_times=parts.step_times.shares(),
            step_samples=len(parts.step_times.notes) + parts.step_times.weighed,
            counters=parts.counters(self._until_s),
            gpu_use=fractions(self.gpu_uses.sums, self.gpu_uses.looks),
        )


def plan_faults(cluster: Cluster, faults: Sequence[Fault]) -> None:
    """What faults take is lost, and comes back; the cluster must have it."""
    for fault in faults:
        order = FAULT + fault.number
        cluster.at(fault.time_s, order, partial(cluster.fleet.fail, fault.number))
        if fault.repair_s is not None:
            cluster.at(fault.time_s + fault.repair_s, order, partial(cluster.fleet.repair, fault.number))
