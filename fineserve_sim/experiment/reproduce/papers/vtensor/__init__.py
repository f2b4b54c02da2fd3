"""vTensor's claims."""

from fineserve_sim.experiment.reproduce.papers.vtensor import memory, throughput

__all__ = ["memory", "throughput"]
