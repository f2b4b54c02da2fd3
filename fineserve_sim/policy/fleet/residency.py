"""The words of residency under their former address."""

from fineserve_sim.policy.fleet.prism import PrismResidency
from fineserve_sim.policy.fleet.views import (
    EngineView,
    FleetView,
    Pending,
    ResidencyPolicy,
    Start,
    Status,
    Stop,
    Suggestion,
)

__all__ = [
    "EngineView",
    "FleetView",
    "Pending",
    "PrismResidency",
    "ResidencyPolicy",
    "Start",
    "Status",
    "Stop",
    "Suggestion",
]
