"""``fineserve-sim size``: the fewest GPUs, the highest rate or the tightest SLO at which a system still meets its targets."""

from fineserve_sim.experiment.sizing.probe import Attained, Goal, SizingError, goal, goals
from fineserve_sim.experiment.sizing.search import Answer, Axis, axis_of, cheapest, size, to_take

__all__ = [
    "Answer",
    "Attained",
    "Axis",
    "Goal",
    "SizingError",
    "axis_of",
    "cheapest",
    "goal",
    "goals",
    "size",
    "to_take",
]
