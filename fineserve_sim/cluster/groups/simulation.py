"""One run of a single-model cluster: arrivals and faults in, outcomes out. Obeys the laws of
``cluster/simulation.py``."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from simpy.events import Event

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.groups.compose import GroupParts, compose_groups
from fineserve_sim.cluster.groups.counters import counters
from fineserve_sim.cluster.groups.regroup import Report
from fineserve_sim.cluster.scenario import (
    Fault,
    Ints,
    RunResult,
    Scenario,
    ScenarioError,
    Timeline,
    wrong_fault,
)
from fineserve_sim.policy.interfaces import Request

ARRIVAL = order_of(Kind.ARRIVAL, 0)
TIMER = order_of(Kind.TIMER, 0)
FAULT = order_of(Kind.TIMER, (1 << 19))


@dataclass(frozen=True, slots=True, eq=False)
class GroupRun:
    """A finished run with what only groups have. Per sample of the timeline, shape (T,): ``demand_bytes`` of KV
    (running requests and the heads of the queues), ``capacity_bytes`` for KV, and ``groups``, how many serve."""

    result: RunResult
    report: Report
    demand_bytes: Ints
    capacity_bytes: Ints
    groups: Ints
    migrations: int


def simulate_groups(scenario: Scenario) -> GroupRun:
    """Run ``scenario`` until every request has ended, or ``drain_s`` after the last arrival.

    Raises ScenarioError when system, model, cluster and faults do not fit together.
    """
    run = _Run(scenario, compose_groups(scenario))
    cpu_s = time.process_time()
    run.to_the_end()
    return run.finished(time.process_time() - cpu_s)


class _Run:
    def __init__(self, scenario: Scenario, parts: GroupParts) -> None:
        trace = scenario.trace
        self._scenario, self._parts = scenario, parts
        self._arrival_s: list[float] = trace.arrival_s.tolist()
        self._prompt: list[int] = trace.prompt_tokens.tolist()
        self._output: list[int] = trace.output_tokens.tolist()
        self._horizon_s = self._arrival_s[-1] + scenario.drain_s
        self._next = 0
        self._events = 0
        self._samples = _Samples(parts)
        spares = 0 if scenario.system.scaling is None else scenario.system.scaling.instances
        if wrong := wrong_fault(scenario.faults, len(parts.cluster.instances) - spares):
            raise ScenarioError(f"system {scenario.system.name}, fault {wrong[0]}: {wrong[1]}")
        for fault in scenario.faults:
            self._plan(fault)

    def _plan(self, fault: Fault) -> None:
        cluster, clock = self._parts.cluster, self._parts.clock
        order = FAULT + fault.instance
        clock.at(fault.time_s, order, lambda _: cluster.fail(fault.instance))
        if fault.repair_s is not None:
            clock.at(fault.time_s + fault.repair_s, order, lambda _: cluster.repair(fault.instance))

    def to_the_end(self) -> None:
        clock = self._parts.clock
        clock.at(self._arrival_s[0], ARRIVAL, self._on_arrival)
        if self._scenario.sample_s > 0:
            clock.at(0.0, TIMER, self._on_sample)
        outcomes = self._parts.outcomes
        while outcomes.open and clock.peek() <= self._horizon_s:
            clock.step()
            self._events += 1

    def _on_arrival(self, _: Event) -> None:
        """All requests of this very moment come in, and the next arrival is set."""
        now = self._arrival_s[self._next]
        (model,) = self._scenario.models
        while self._next < len(self._arrival_s) and self._arrival_s[self._next] == now:
            index = self._next
            self._next += 1
            self._parts.cluster.arrive(Request(index, model.id, now, self._prompt[index]), self._output[index], now)
        if self._next < len(self._arrival_s):
            self._parts.clock.at(self._arrival_s[self._next], ARRIVAL, self._on_arrival)

    def _on_sample(self, _: Event) -> None:
        clock = self._parts.clock
        if self._parts.outcomes.open:
            self._samples.take(clock.now)
            clock.at(len(self._samples.time_s) * self._scenario.sample_s, TIMER, self._on_sample)

    def finished(self, loop_cpu_s: float) -> GroupRun:
        parts = self._parts
        outcomes, cluster = parts.outcomes, parts.cluster
        for group in cluster.groups.values():
            cluster.regrouping.report.count(group)
        samples = self._samples
        demand_bytes = np.array(samples.demand, dtype=np.int64)
        capacity_bytes = np.array(samples.capacity, dtype=np.int64)
        result = RunResult(
            first_token_s=np.array(outcomes.first_token_s, dtype=np.float64),
            finish_s=np.array(outcomes.finish_s, dtype=np.float64),
            fate=np.array(outcomes.fate, dtype=np.int8),
            preemptions=np.array(outcomes.preemptions, dtype=np.int64),
            engine=np.array(outcomes.engine, dtype=np.int32),
            placement=parts.placement,
            kv_capacity_bytes=(parts.base_kv_bytes,) * sum(len(instance.gpus) for instance in cluster.instances),
            timeline=self._samples.timeline(),
            end_s=self._horizon_s if outcomes.open else outcomes.last_end_s,
            iterations=cluster.iterations,
            events=self._events,
            loop_cpu_s=loop_cpu_s,
            counters=counters(cluster, np.array(samples.time_s), demand_bytes, capacity_bytes, self._arrival_s[-1]),
        )
        return GroupRun(
            result,
            cluster.regrouping.report,
            demand_bytes=demand_bytes,
            capacity_bytes=capacity_bytes,
            groups=np.array(samples.groups, dtype=np.int64),
            migrations=cluster.migrations.moved,
        )


class _Samples:
    """Rows of a ``Timeline``, one column an instance; what a group has is put down to its first instance, KV to each
    its own."""

    def __init__(self, parts: GroupParts) -> None:
        self._parts = parts
        self.time_s: list[float] = []
        self._waiting: list[list[int]] = []
        self._running: list[list[int]] = []
        self._kv_used: list[list[int]] = []
        self._kv_free: list[list[int]] = []
        self.demand: list[int] = []
        self.capacity: list[int] = []
        self.groups: list[int] = []

    def take(self, now: float) -> None:
        cluster, sizes = self._parts.cluster, self._parts.sizes
        waiting, running = [0] * len(cluster.instances), [0] * len(cluster.instances)
        demand_blocks = 0
        for group in cluster.groups.values():
            first = group.instances[0].id
            waiting[first] += group.queued
            running[first] += group.running
            demand_blocks += group.used_blocks + sum(queue.head_blocks for queue in group.queues)
        self.time_s.append(now)
        self._waiting.append(waiting)
        self._running.append(running)
        self._kv_used.append([instance.kv_used_bytes for instance in cluster.instances])
        self._kv_free.append(
            [instance.kv_free_bytes // len(instance.gpus) for instance in cluster.instances for _ in instance.gpus]
        )
        self.demand.append(demand_blocks * sizes.block_bytes)
        self.capacity.append(sum(instance.kv_capacity_bytes for instance in cluster.instances if instance.alive))
        self.groups.append(len(cluster.groups))

    def timeline(self) -> Timeline:
        instances = self._parts.cluster.instances
        samples, gpus = len(self.time_s), sum(len(instance.gpus) for instance in instances)

        def table(rows: list[list[int]], columns: int) -> Ints:
            return np.array(rows, dtype=np.int64).reshape(samples, columns)

        (model,) = {instance.model for instance in self._parts.placement.instances}
        return Timeline(
            time_s=np.array(self.time_s, dtype=np.float64),
            engine_models=(model,) * len(instances),
            waiting=table(self._waiting, len(instances)),
            running=table(self._running, len(instances)),
            kv_used_bytes=table(self._kv_used, len(instances)),
            gpu_stranded_bytes=np.zeros((samples, gpus), dtype=np.int64),
            gpu_free_bytes=table(self._kv_free, gpus),
        )
