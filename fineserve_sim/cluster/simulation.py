"""One run: a scenario in, outcomes out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from fineserve_traces import Trace, totals

from fineserve_sim.cluster.arrivals import Joined
from fineserve_sim.cluster.clairvoyant import simulate_clairvoyant
from fineserve_sim.cluster.components import Component, Placed, components, groups_of, why_whole
from fineserve_sim.cluster.compose.fleet import compose_fleet
from fineserve_sim.cluster.compose.groups import compose_groups
from fineserve_sim.cluster.compose.instances import compose, place, seats_of
from fineserve_sim.cluster.compose.memory import caches_prefixes
from fineserve_sim.cluster.compose.parts import Parts
from fineserve_sim.cluster.gpu_use import Looks, looks_at
from fineserve_sim.cluster.merge import Piece, merged
from fineserve_sim.cluster.run import MOST_NOTES, Run, plan_faults
from fineserve_sim.cluster.scenario import EndedRequests, RunResult, Scenario, ScenarioError, Timeline, wrong_fault
from fineserve_sim.latency import StepModel
from fineserve_sim.policy.interfaces import Placement
from fineserve_sim.systems.spec import ClairvoyantSpec

Spread = Callable[[Callable[[Component], Piece], Iterable[Component]], Iterable[Piece]]
"""``map``, or one that simulates components side by side, in their order (``Executor.map``)."""


def simulate(scenario: Scenario) -> RunResult:
    """Run ``scenario`` until every request has ended, or ``drain_s`` after the last arrival; component by component where
    nothing keeps it whole.

    Raises ScenarioError when system, models, cluster and faults do not fit together.
    """
    if isinstance(scenario.system.scheduler, ClairvoyantSpec) and scenario.system.dispatch is None:
        return simulate_clairvoyant(scenario)
    if why_whole(scenario) is not None:
        return simulate_whole(scenario)
    return simulate_in_components(scenario)


def simulate_whole(scenario: Scenario, placed: Placed | None = None) -> RunResult:
    """As ``simulate``, all engines together."""
    if not isinstance(scenario.trace, Trace):
        raise ScenarioError(
            f"{scenario.trace.source}: requests that stream in take simulate_streamed, or read them first"
        )
    run = prepare(scenario, placed)
    cpu_s = _to_the_end(run)
    return run.result(cpu_s)


def simulate_streamed(
    scenario: Scenario, ended: Callable[[EndedRequests], None], sampled: Callable[[Timeline], None]
) -> RunResult:
    """As ``simulate``, all engines together, with requests that come chunk by chunk and are not kept: ``ended`` gets columns of
    those that have ended, ``sampled`` the timeline some samples at a time. The result has neither."""
    run = prepare(scenario, joined=Joined(scenario.trace, ended))
    run.parts.step_times.most_notes = MOST_NOTES
    run.parts.sampler.rows.hand_on(sampled)
    cpu_s = _to_the_end(run)
    run.parts.sampler.rows.hand_on(sampled)
    return run.result(cpu_s)


def simulate_in_components(scenario: Scenario, spread: Spread = map) -> RunResult:
    """As ``simulate``, one component after the other, or where ``spread`` simulates them; there must be nothing that keeps
    the scenario whole. What comes out is the same, ``events`` apart: samples are taken in each component."""
    placed = place(scenario)
    apart = _apart(scenario, placed)
    if apart is None:
        return simulate_whole(scenario, placed)
    found = apart.components if scenario.tell is None else _in_turn(apart, scenario.tell)
    return apart.merged(spread(simulate_component, found))


class Apart(NamedTuple):
    """A run taken apart: its components, and what it takes to put their pieces together. ``steps``: by engine."""

    scenario: Scenario
    placement: Placement
    steps: Mapping[int, StepModel]
    components: Sequence[Component]

    def merged(self, pieces: Iterable[Piece]) -> RunResult:
        """The result of the whole from the pieces of all components, in their order."""
        return merged(self.scenario, self.placement, self.steps, zip(self.components, pieces, strict=True))


def _in_turn(apart: Apart, tell: Callable[[int, int], None]) -> Iterator[Component]:
    """The components, which tell how far the whole is when they are simulated one after the other."""
    before, of_all = 0, len(apart.scenario.whole_trace)
    for component in apart.components:
        tell(before, of_all)
        own = partial(_tell_of_all, tell, before, of_all)
        yield replace(component, scenario=replace(component.scenario, tell=own))
        before += len(component.requests)


def _tell_of_all(tell: Callable[[int, int], None], before: int, of_all: int, ended: int, _: int) -> None:
    tell(before + ended, of_all)


def taken_apart(scenario: Scenario) -> Apart | None:
    """The components of ``scenario``, of which there are several; None where ``simulate`` runs it whole.

    Raises ScenarioError as ``simulate``.
    """
    return None if why_whole(scenario) is not None else _apart(scenario, place(scenario))


def _apart(scenario: Scenario, placed: Placed) -> Apart | None:
    if len(groups_of(placed[0].instances)) < 2:
        return None
    seats = seats_of(scenario, placed)
    found = components(scenario, placed, seats)
    steps = {seat.engine: seat.step for seat in seats}
    return None if len(found) < 2 else Apart(scenario, placed[0], steps, found)


def simulate_component(component: Component) -> Piece:
    """One component to its end."""
    parts = compose(component.scenario, component.placed)
    run = _run_of(component.scenario, parts, len(component.requests), component.horizon_s, component.looks)
    cpu_s = _to_the_end(run)
    run.parts.sampler.sample(math.inf)
    notes, run.parts.step_times.notes = run.parts.step_times.notes, []  # weighed with those of the others
    return Piece(run.result(cpu_s), notes, run.gpu_uses.sums)


def _to_the_end(run: Run) -> float:
    """CPU seconds that it took."""
    cpu_s = time.process_time()
    run.to_the_end()
    return time.process_time() - cpu_s


def prepare(scenario: Scenario, placed: Placed | None = None, joined: Joined | None = None) -> Run:
    """A run before its first event; its requests and what became of them go through ``joined``, or are kept. ScenarioError as
    ``simulate``."""
    parts = _composed(scenario, placed)
    if wrong := wrong_fault(scenario.faults, scenario.system, parts.serving, len(scenario.gpus)):
        raise ScenarioError(f"system {scenario.system.name}, fault {wrong[0]}: {wrong[1]}")
    plan_faults(parts.cluster, scenario.faults)
    found = totals(scenario.trace)
    looks = looks_at(found, scenario.trace.models)
    return _run_of(scenario, parts, int(found.requests.sum()), found.last_s + scenario.drain_s, looks, joined)


def _run_of(
    scenario: Scenario,
    parts: Parts,
    requests: int,
    horizon_s: float,
    looks: Looks,
    joined: Joined | None = None,
) -> Run:
    """What is composed serves so many requests until ``horizon_s`` at the latest."""
    return Run(
        joined or scenario.trace,
        requests,
        parts,
        sample_s=scenario.sample_s,
        horizon_s=horizon_s,
        looks=looks,
        caches=caches_prefixes(scenario.system.memory),
        ended=joined,
        tell=scenario.tell,
    )


def _composed(scenario: Scenario, placed: Placed | None) -> Parts:
    """A cluster of one model on many instances, of models that come and go, or of models that stay."""
    if scenario.system.dispatch is not None:
        return compose_groups(scenario)
    return compose(scenario, placed) if scenario.system.residency is None else compose_fleet(scenario)


def simulate_step_by_step(scenario: Scenario) -> RunResult:
    """As ``simulate``, with one event an engine iteration: the same result, bit for bit, and the check of it."""
    return simulate(replace(scenario, exact_steps=True))
