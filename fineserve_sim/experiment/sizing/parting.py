"""The rate at which systems are compared: the first doubling of the trace's own at which they part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.results.answer import spread_of
from fineserve_sim.experiment.results.produce import run_loaded
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.runner import OnProgress
from fineserve_sim.experiment.sizing.feasibility import feasibility
from fineserve_sim.experiment.sizing.search import runnable

PARTED, MOST_RATE_SCALE = 0.05, 64.0
"""Systems part where the best and the worst are so far apart, or none is so close to all; the fastest replay that is tried."""


def parted(
    experiment_at: Callable[[float], Experiment],
    out: Path,
    executor: Executor,
    targets: Mapping[str, float],
    on_progress: OnProgress | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Experiment:
    """The experiment at the rate at which its systems part; at rate scale 1 where they never do, or where the targets are out
    of reach. ``say`` takes a line for each rate that is left behind. Raises what ``run_loaded`` raises."""
    first = experiment_at(1.0)
    if hopeless(first, targets):
        return first
    experiment, rate_scale = first, 1.0
    while rate_scale <= MOST_RATE_SCALE:
        run_loaded(experiment, out, executor=executor, on_progress=on_progress, targets=targets)
        least, most = spread_of(read_summary(out))
        if most - least >= PARTED or most < 1 - PARTED:
            return experiment
        kept = f"{100 * least:.1f} to {100 * most:.1f} %"
        say(f"At rate scale {rate_scale:g} the systems keep {kept} within limits; faster.")
        rate_scale *= 2
        experiment = experiment_at(rate_scale)
    say(f"They part at no rate scale up to {MOST_RATE_SCALE:g}: what follows is at 1.")
    return first


def hopeless(experiment: Experiment, targets: Mapping[str, float]) -> bool:
    """Whether no system that can be run reaches the targets, even with each model alone on idle GPUs: at no rate, then."""
    systems = runnable(experiment)
    points = [point for point in experiment.points if point.system in systems]
    bounds = (feasibility(experiment, point, targets, remedies=False) for point in points)
    return all(bound is not None and bound.hopeless for bound in bounds)
