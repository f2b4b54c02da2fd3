"""The SimPy cluster: engines that batch as vLLM does, on GPUs that they share, driven by the policy core."""

from fineserve_sim.cluster.scenario import (
    Cause,
    Clients,
    EngineSettings,
    Fate,
    Fault,
    Gpu,
    GpuUse,
    Left,
    RunResult,
    Scenario,
    ScenarioError,
    ServedModel,
    Timeline,
    Visit,
    Visits,
)
from fineserve_sim.cluster.simulation import simulate, simulate_step_by_step, simulate_streamed

__all__ = [
    "Cause",
    "Clients",
    "EngineSettings",
    "Fate",
    "Fault",
    "Gpu",
    "GpuUse",
    "Left",
    "RunResult",
    "Scenario",
    "ScenarioError",
    "ServedModel",
    "Timeline",
    "Visit",
    "Visits",
    "simulate",
    "simulate_step_by_step",
    "simulate_streamed",
]
