"""Data-parallel ranks of a model (``Experts.ranks``): which clusters may have them, and where each of them is.

A placement finds GPUs for all ranks of a group together. Then each rank is an instance of its own, with an engine of its own
(``cluster/engine/ranks.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fineserve_sim.cluster.scenario import EngineSettings, Scenario, ScenarioError
from fineserve_sim.policy.interfaces import Instance
from fineserve_sim.systems import SystemSpec


def why_no_ranks(system: SystemSpec, settings: EngineSettings) -> str | None:
    """Why a cluster of this system and these engines cannot have data-parallel ranks; None if it can."""
    if system.residency is not None or system.dispatch is not None:
        axis = "residency" if system.residency is not None else "dispatch"
        return (
            f"dp is for engines that stay, and system {system.name} has {axis}; take dedicated, or a pinned placement"
        )
    for axis, chosen, known in (
        ("placement", system.placement.policy, ("dedicated", "pinned")),
        ("scheduler", system.scheduler.policy, ("fcfs",)),
        ("memory", system.memory.policy, ("private",)),
    ):
        if chosen not in known:
            return f"dp takes {axis} {' or '.join(known)}, and system {system.name} has {chosen}"
    if settings.batching != "vllm":
        return f"dp is vLLM's; leave it out with batching {settings.batching}"
    if settings.step_times is not None:
        return "dp takes predicted step times; leave engine.step_times out"
    return "dp has no cache in host memory yet; leave engine.kv_offloading out" if settings.kv_offloading else None


def check_ranks(scenario: Scenario) -> None:
    """Raises ScenarioError for data-parallel ranks that this system or these engines cannot have."""
    for served in scenario.models:
        if served.ranks > 1 and (problem := why_no_ranks(scenario.system, scenario.engine)):
            raise ScenarioError(f"model {served.id}: {problem}")


def in_ranks(scenario: Scenario, instances: Sequence[Instance]) -> tuple[Instance, ...]:
    """Instances of data-parallel ranks as one instance a rank, side by side, each on GPUs of its own."""
    served = {model.id: model for model in scenario.models}
    found: list[Instance] = []
    for instance in instances:
        model = served[instance.model]
        for rank in range(model.ranks):
            gpus = instance.gpus[rank * model.tp : (rank + 1) * model.tp]
            number, rate_per_s = instance.replica * model.ranks + rank, instance.rate_per_s / model.ranks
            found.append(
                replace(instance, replica=number, gpus=gpus, rate_per_s=rate_per_s) if model.ranks > 1 else instance
            )
    return tuple(found)
