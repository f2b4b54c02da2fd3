"""``fineserve-sim diff``: what changed between two results folders, in inputs, results and decisions."""

from fineserve_sim.experiment.show.diff.compare import Diff, diff

__all__ = ["Diff", "diff"]
