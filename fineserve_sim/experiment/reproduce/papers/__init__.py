"""What decides each claim, a folder a paper; importing one registers its functions. ``DECIDERS``: all, by the claims' ids."""

from fineserve_sim.experiment.reproduce.papers import fineserve, kunserve, prism, vtensor
from fineserve_sim.experiment.reproduce.registry import REGISTERED as DECIDERS

__all__ = ["DECIDERS", "fineserve", "kunserve", "prism", "vtensor"]
