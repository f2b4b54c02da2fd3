"""One run: a scenario in, outcomes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from fineserve_traces import Trace

from fineserve_sim.cluster.arrivals import Joined
from fineserve_sim.cluster.clairvoyant import simulate_clairvoyant
from fineserve_sim.cluster.components import Apart, Component, Piece, taken_apart, why_whole
from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.groups import check_groups, compose_groups
from fineserve_sim.cluster.compose.models import compose, compose_fleet
from fineserve_sim.cluster.compose.place import Placed, check_ranks, place
from fineserve_sim.cluster.compose.roles import compose_roles
from fineserve_sim.cluster.run import Run
from fineserve_sim.cluster.scenario import EndedRequests, RunResult, Scenario, ScenarioError, Timeline
from fineserve_sim.systems.spec import ClairvoyantSpec

MOST_NOTES = 1 << 13
"""Steps in flight that a run keeps whose requests stream in, before their shares are put together."""


def simulate(scenario: Scenario) -> RunResult:
    """Run ``scenario`` until every request has ended, or ``drain_s`` after the last arrival; component by component where
    nothing keeps it whole. The result is the same then, apart from ``events``, since samples are taken in each component.

    Raises ScenarioError when system, models, cluster and faults do not fit together.
    """
    check_ranks(scenario)
    if isinstance(scenario.system.scheduler, ClairvoyantSpec) and scenario.system.dispatch is None:
        return simulate_clairvoyant(scenario)
    if why_whole(scenario) is not None:
        return simulate_whole(scenario)
    placed = place(scenario, demands_of(scenario))
    apart = taken_apart(scenario, placed)
    return simulate_whole(scenario, placed) if apart is None else apart.merged(_in_turn(apart))


def simulate_whole(scenario: Scenario, placed: Placed | None = None) -> RunResult:
    """As ``simulate``, all engines together."""
    if not isinstance(scenario.trace, Trace):
        raise ScenarioError(
            f"{scenario.trace.source}: requests that stream in take simulate_streamed, or read them first"
        )
    run = prepare(scenario, placed)
    run.to_the_end()
    return run.result()


def simulate_streamed(
    scenario: Scenario, ended: Callable[[EndedRequests], None], sampled: Callable[[Timeline], None]
) -> RunResult:
    """As ``simulate``, all engines together, with requests that come chunk by chunk and are not kept. ``ended`` gets columns of
    the requests that have ended, ``sampled`` the timeline some samples at a time. The result has neither."""
    run = prepare(scenario, joined=Joined(scenario.trace, ended))
    run.step_times.most_notes = MOST_NOTES
    run.parts.sampler.rows.hand_on(sampled)
    run.to_the_end()
    run.parts.sampler.rows.hand_on(sampled)
    return run.result()


def simulate_step_by_step(scenario: Scenario) -> RunResult:
    """As ``simulate``, with one event an engine iteration: the same result, bit for bit, and the check of it."""
    return simulate(replace(scenario, exact_steps=True))


def prepare(scenario: Scenario, placed: Placed | None = None, joined: Joined | None = None) -> Run:
    """A run before its first event; its requests and what became of them go through ``joined``, or are kept. ScenarioError as
    ``simulate``."""
    check_ranks(scenario)
    if scenario.system.dispatch is not None:
        check_groups(scenario)
        build = compose_groups if len(scenario.models) == 1 else compose_roles
    else:
        build = compose if scenario.system.residency is None else compose_fleet
    placed = placed or place(scenario, demands_of(scenario))
    return Run(scenario, build(scenario, placed), joined=joined)


def simulate_component(component: Component) -> Piece:
    """One component to its end."""
    run = Run(component.scenario, compose(component.scenario, component.placed), looks=component.looks)
    run.to_the_end()
    run.parts.sampler.sample([math.inf])
    notes, run.step_times.notes = run.step_times.notes, []  # weighed with those of the others
    return Piece(run.result(), notes, run.gpu_uses.sums)


def _in_turn(apart: Apart) -> Iterator[Piece]:
    """The pieces of its components, simulated one after the other, which tell how far the whole is."""
    scenario, before = apart.scenario, 0
    of_all = len(scenario.whole_trace)

    def tell(ended: int, _: int) -> None:
        if scenario.tell is not None:
            scenario.tell(before + ended, of_all)

    for component in apart.components:
        tell(0, of_all)
        yield simulate_component(replace(component, scenario=replace(component.scenario, tell=tell)))
        before += len(component.requests)
