"""Claims of the papers that need no clock: each evaluator derives our number from our own geometry and memory classes."""

from fineserve_sim.experiment.analytic.finding import Finding, evaluators

__all__ = ["Finding", "evaluators"]
