"""One run: arrivals in, outcomes out."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
from fineserve_traces import Trace
from simpy.events import Event

from fineserve_sim.cluster.clairvoyant import simulate_clairvoyant
from fineserve_sim.cluster.clock import Kind, order_of
from fineserve_sim.cluster.compose import Parts, compose
from fineserve_sim.cluster.fleet_compose import compose_fleet
from fineserve_sim.cluster.groups import simulate_groups
from fineserve_sim.cluster.lone_engine import LoneEngine
from fineserve_sim.cluster.scenario import RunResult, Scenario, ScenarioError
from fineserve_sim.cluster.sequence import Prefix
from fineserve_sim.cluster.virtual_memory import caches_prefixes
from fineserve_sim.policy.interfaces import Request
from fineserve_sim.systems.spec import ClairvoyantSpec

ARRIVAL = order_of(Kind.ARRIVAL, 0)
TIMER = order_of(Kind.TIMER, 0)


def simulate(scenario: Scenario) -> RunResult:
    """Run ``scenario`` until every request has ended, or ``drain_s`` after the last arrival.

    Raises ScenarioError when a model fits on no GPU of the cluster, and for faults of a system without dispatch.
    """
    if scenario.system.dispatch is not None:
        return simulate_groups(scenario).result
    if scenario.faults:
        raise ScenarioError(
            f"system {scenario.system.name}: faults are for clusters of one model (systems with dispatch)"
        )
    if isinstance(scenario.system.scheduler, ClairvoyantSpec):
        return simulate_clairvoyant(scenario)
    parts = compose(scenario) if scenario.system.residency is None else compose_fleet(scenario)
    run = _Run(scenario, parts)
    cpu_s = time.process_time()
    run.to_the_end()
    return run.result(time.process_time() - cpu_s)


def simulate_step_by_step(scenario: Scenario) -> RunResult:
    """As ``simulate``, with one event an engine iteration: the same result, bit for bit, and the check of it."""
    return simulate(replace(scenario, exact_steps=True))


def _prefixes(trace: Trace) -> list[Prefix]:
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


class _Run:
    def __init__(self, scenario: Scenario, parts: Parts) -> None:
        trace = scenario.trace
        self._scenario = scenario
        self._parts = parts
        self._arrival_s: list[float] = trace.arrival_s.tolist()
        self._model: list[int] = trace.model.tolist()
        self._prompt: list[int] = trace.prompt_tokens.tolist()
        self._output: list[int] = trace.output_tokens.tolist()
        self._models = trace.models
        if caches_prefixes(scenario.system.memory):
            parts.cluster.prefixes = _prefixes(trace)
        self._horizon_s = self._arrival_s[-1] + scenario.drain_s
        self._next = 0
        self._events = 0
        self._samples = 0

    def to_the_end(self) -> None:
        clock = self._parts.clock
        clock.at(self._arrival_s[0], ARRIVAL, self._on_arrival)
        if self._scenario.sample_s > 0:
            clock.at(0.0, TIMER, self._on_sample)
        outcomes = self._parts.outcomes
        while outcomes.open and math.inf > clock.peek() <= self._horizon_s:
            clock.step()
            self._events += 1
        self._parts.cluster.settle_all(self._horizon_s, order_of(Kind.START, 0))

    def _on_arrival(self, _: Event) -> None:
        """All requests of this very moment come in, and the next arrival is set."""
        now = self._arrival_s[self._next]
        cluster = self._parts.cluster
        while self._next < len(self._arrival_s) and self._arrival_s[self._next] == now:
            index = self._next
            self._next += 1
            output = self._output[index]
            prompt = self._prompt[index]
            request = Request(index, self._models[self._model[index]], now, prompt)
            cluster.arrive(request, output, now, ARRIVAL)
        if self._next < len(self._arrival_s):
            self._parts.clock.at(self._arrival_s[self._next], ARRIVAL, self._on_arrival)

    def _on_sample(self, _: Event) -> None:
        clock = self._parts.clock
        now: float = clock.now
        self._parts.cluster.settle_all(now, TIMER)
        if self._parts.outcomes.open:
            self._parts.sampler.sample(now)
            self._parts.step_times.sample()
            self._samples += 1
            clock.at(self._samples * self._scenario.sample_s, TIMER, self._on_sample)

    def result(self, loop_cpu_s: float) -> RunResult:
        parts = self._parts
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
            iterations=parts.cluster.iterations(),
            events=self._events + sum(e.events for e in parts.cluster.engines.values() if isinstance(e, LoneEngine)),
            loop_cpu_s=loop_cpu_s,
            step_times=parts.step_times.shares(),
            step_samples=parts.step_times.samples,
        )
