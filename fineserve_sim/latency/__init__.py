"""How long an engine step takes, where every number of it comes from, and profiles computed from it."""

from fineserve_sim.latency.profile import batch_prefill_s, profile
from fineserve_sim.latency.rates import Provenance
from fineserve_sim.latency.step import StepModel

__all__ = ["Provenance", "StepModel", "batch_prefill_s", "profile"]
