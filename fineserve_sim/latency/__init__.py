"""How long an engine step takes, where every number of it comes from, and profiles computed from it."""

from fineserve_sim.latency.accounting import Batch
from fineserve_sim.latency.profile import batch_prefill_s, profile, profile_of
from fineserve_sim.latency.rates import Provenance
from fineserve_sim.latency.speculative import step_model_of
from fineserve_sim.latency.step import StepModel
from fineserve_sim.latency.tables import measured_on

__all__ = [
    "Batch",
    "Provenance",
    "StepModel",
    "batch_prefill_s",
    "measured_on",
    "profile",
    "profile_of",
    "step_model_of",
]
