"""KunServe's claims."""

from fineserve_sim.experiment.reproduce.papers.kunserve import ablation, end_to_end, formulas, throttling

__all__ = ["ablation", "end_to_end", "formulas", "throttling"]
