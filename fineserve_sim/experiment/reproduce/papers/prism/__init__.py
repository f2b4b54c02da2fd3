"""Prism's claims."""

from fineserve_sim.experiment.reproduce.papers.prism import activation, algorithms, end_to_end, sharing, traces

__all__ = ["activation", "algorithms", "end_to_end", "sharing", "traces"]
