"""FineServe's claims."""

from fineserve_sim.experiment.reproduce.papers.fineserve import algorithm2, figures, formulas

__all__ = ["algorithm2", "figures", "formulas", "rooflines"]
