"""Arrivals in, outcomes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from fineserve_traces import Trace
from simpy.events import Event

from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.compose.parts import Parts
from fineserve_sim.cluster.engine.lone import LoneEngine
from fineserve_sim.cluster.engine.sequence import Prefix
from fineserve_sim.cluster.gpu_use import GpuUses
from fineserve_sim.cluster.scenario import Fault, RunResult
from fineserve_sim.policy.interfaces import Request

ARRIVAL = order_of(Kind.ARRIVAL, 0)
TIMER = order_of(Kind.TIMER, 0)
FAULT = order_of(Kind.TIMER, 1 << 19)


def prefixes_of(trace: Trace) -> list[Prefix]:
    """What the trace knows of each request's tokens; empty when it knows nothing. A block that its prompt fills in part says
    nothing of what comes behind the prompt."""
    ids, id_tokens = trace.prefix_hashes, trace.prefix_block_tokens
    if ids is None or id_tokens is None:
        return []
    prompts = trace.prompt_tokens.tolist()
    prefixes = []
    for own, prompt in zip(ids, prompts, strict=True):
        covered = len(own) * id_tokens
        partial = prompt < covered < prompt + id_tokens
        prefixes.append(Prefix(own, id_tokens, prompt if partial else covered))
    return prefixes


class Run:
    """A composed cluster that serves ``trace``, sampled every ``sample_s`` (0: never), until all requests have ended or
    ``drain_s`` after the last arrival."""

    def __init__(self, trace: Trace, parts: Parts, *, sample_s: float, drain_s: float) -> None:
        self.parts = parts
        self._arrival_s: list[float] = trace.arrival_s.tolist()
        self._model: list[int] = trace.model.tolist()
        self._prompt: list[int] = trace.prompt_tokens.tolist()
        self._output: list[int] = trace.output_tokens.tolist()
        self._models = trace.models
        self._horizon_s = self._arrival_s[-1] + drain_s
        self._next = 0
        self._events = 0
        self._samples = 0
        self._sample_s = sample_s
        self._gpu_uses = GpuUses(parts.cluster, parts.placement, trace)

    def to_the_end(self) -> None:
        clock = self.parts.clock
        clock.at(self._arrival_s[0], ARRIVAL, self._on_arrival)
        if self._sample_s > 0:
            clock.at(0.0, TIMER, self._on_sample)
        outcomes = self.parts.outcomes
        while outcomes.open and math.inf > clock.peek() <= self._horizon_s:
            clock.step()
            self._events += 1
        self.parts.cluster.settle_all(self._horizon_s, order_of(Kind.START, 0))

    def _on_arrival(self, _: Event) -> None:
        """All requests of this very moment come in, and the next arrival is set."""
        now = self._arrival_s[self._next]
        cluster = self.parts.cluster
        while self._next < len(self._arrival_s) and self._arrival_s[self._next] == now:
            index = self._next
            self._next += 1
            output = self._output[index]
            prompt = self._prompt[index]
            request = Request(index, self._models[self._model[index]], now, prompt)
            cluster.arrive(request, output, now, ARRIVAL)
        if self._next < len(self._arrival_s):
            self.parts.clock.at(self._arrival_s[self._next], ARRIVAL, self._on_arrival)

    def _on_sample(self, _: Event) -> None:
        clock = self.parts.clock
        now: float = clock.now
        self.parts.cluster.settle_all(now, TIMER)
        if self.parts.outcomes.open:
            self.parts.sampler.sample(now)
            self.parts.step_times.sample()
            if now <= self._arrival_s[-1]:
                self._gpu_uses.sample()
            self._samples += 1
            clock.at(self._samples * self._sample_s, TIMER, self._on_sample)

    def result(self, loop_cpu_s: float) -> RunResult:
        parts = self.parts
        outcomes = parts.outcomes
        return RunResult(
            first_token_s=np.array(outcomes.first_token_s, dtype=np.float64),
            finish_s=np.array(outcomes.finish_s, dtype=np.float64),
            fate=np.array(outcomes.fate, dtype=np.int8),
            preemptions=np.array(outcomes.preemptions, dtype=np.int64),
            engine=np.array(outcomes.engine, dtype=np.int32),
            placement=parts.placement,
            kv_capacity_bytes=parts.kv_capacity_bytes,
            timeline=parts.sampler.timeline(),
            end_s=self._horizon_s if outcomes.open else outcomes.last_end_s,
            iterations=parts.iterations(),
            events=self._events + sum(e.events for e in parts.cluster.engines.values() if isinstance(e, LoneEngine)),
            loop_cpu_s=loop_cpu_s,
            step_times=parts.step_times.shares(),
            step_samples=parts.step_times.samples,
            counters=parts.counters(self._arrival_s[-1]),
            gpu_use=self._gpu_uses.fractions(),
        )


def plan_faults(parts: Parts, faults: Sequence[Fault]) -> None:
    """Instances will be lost, and come back; there must be as many as ``parts`` serves."""
    for fault in faults:
        assert parts.fleet is not None
        order = FAULT + fault.instance
        parts.clock.at(fault.time_s, order, partial(_call, parts.fleet.fail, fault.instance))
        if fault.repair_s is not None:
            at_s = fault.time_s + fault.repair_s
            parts.clock.at(at_s, order, partial(_call, parts.fleet.repair, fault.instance))


def _call(happens: Callable[[int], None], instance: int, _: Event) -> None:
    happens(instance)
