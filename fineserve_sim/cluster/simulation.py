"""One run: a scenario in, outcomes out."""

from __future__ import annotations

import time
from dataclasses import replace

from fineserve_sim.cluster.clairvoyant import simulate_clairvoyant
from fineserve_sim.cluster.compose.fleet import compose_fleet
from fineserve_sim.cluster.compose.groups import compose_groups
from fineserve_sim.cluster.compose.instances import compose
from fineserve_sim.cluster.compose.parts import Parts
from fineserve_sim.cluster.compose.virtual_memory import caches_prefixes
from fineserve_sim.cluster.run import Run, plan_faults, prefixes_of
from fineserve_sim.cluster.scenario import RunResult, Scenario, ScenarioError, wrong_fault
from fineserve_sim.systems.spec import ClairvoyantSpec


def simulate(scenario: Scenario) -> RunResult:
    """Run ``scenario`` until every request has ended, or ``drain_s`` after the last arrival.

    Raises ScenarioError when system, models, cluster and faults do not fit together.
    """
    if isinstance(scenario.system.scheduler, ClairvoyantSpec) and scenario.system.dispatch is None:
        return simulate_clairvoyant(scenario)
    run = prepare(scenario)
    cpu_s = time.process_time()
    run.to_the_end()
    return run.result(time.process_time() - cpu_s)


def prepare(scenario: Scenario) -> Run:
    """A run before its first event. Raises ScenarioError as ``simulate``."""
    parts = _composed(scenario)
    if scenario.faults and parts.fleet is None:
        raise ScenarioError(
            f"system {scenario.system.name}: faults are for clusters of one model (systems with dispatch)"
        )
    if wrong := wrong_fault(scenario.faults, parts.serving):
        raise ScenarioError(f"system {scenario.system.name}, fault {wrong[0]}: {wrong[1]}")
    plan_faults(parts, scenario.faults)
    if caches_prefixes(scenario.system.memory):
        parts.cluster.prefixes = prefixes_of(scenario.trace)
    return Run(scenario.trace, parts, sample_s=scenario.sample_s, drain_s=scenario.drain_s)


def _composed(scenario: Scenario) -> Parts:
    """A cluster of one model on many instances, of models that come and go, or of models that stay."""
    if scenario.system.dispatch is not None:
        return compose_groups(scenario)
    return compose(scenario) if scenario.system.residency is None else compose_fleet(scenario)


def simulate_step_by_step(scenario: Scenario) -> RunResult:
    """As ``simulate``, with one event an engine iteration: the same result, bit for bit, and the check of it."""
    return simulate(replace(scenario, exact_steps=True))
