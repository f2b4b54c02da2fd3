"""How sure a number of GPUs is: the fewest that would do if every step took as much less or more time as the model may be off.

Beside the interval of sampling stands the error of the model itself. The catalog has it as bands by the class of what is
predicted (``catalog/model_errors``). The time per token tells how far off step times are. The time to the first token holds
queues, which follow from step times in the simulation, too. So the band of the time per token equals the band of the steps,
and the cluster is simulated with its two ends in place of the prediction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fineserve_sim.catalog.model_errors import Predictable, model_error
from fineserve_sim.cluster import EngineSettings
from fineserve_sim.cluster.compose.memory import kinds_of
from fineserve_sim.experiment.file.resolve import Setup
from fineserve_sim.experiment.results.step_times import own_tables
from fineserve_sim.experiment.sizing.bisection import first_integer
from fineserve_sim.experiment.sizing.gpu_band import GpuBand
from fineserve_sim.experiment.sizing.probe import Attained, Prober, named
from fineserve_sim.experiment.sizing.search import GPUS, Answer, Asked, Axis, cheapest

FACTOR = "engine.step_time_factor"


def with_bands(
    found: Sequence[tuple[Answer, Prober]], axis: Axis, most_gpus: int | None
) -> Iterator[tuple[Answer, Prober]]:
    """The answers; the cheapest on each type of GPU has its band, where GPUs are searched for."""
    chosen = []
    if axis is GPUS:
        kinds = dict.fromkeys(answer.gpu for answer, _ in found)
        chosen = [cheapest([answer for answer, _ in found if answer.gpu == kind]) for kind in kinds]
    for answer, prober in found:
        best = answer.best
        if best is not None and any(answer is each for each in chosen):
            yield replace(answer, band=gpu_band(prober, answer.system, best, most_gpus)), prober
        else:
            yield answer, prober


def gpu_band(prober: Prober, system: str, best: Attained, most_gpus: int | None = None) -> GpuBand:
    """The band of an answer, which is in it: a placement for other step times may be a worse one. At most half as many GPUs
    again and two more are tried, or ``most_gpus``."""
    setup, count = prober.file().setup, int(best.value)
    error = model_error(class_of(setup, shared=best.shared))
    tried = min(count + count // 2 + 2, most_gpus or count + count // 2 + 2)
    low, high = (_fewest(prober, system, factor, count, tried) for factor in (error.low, error.high))
    return GpuBand(error, min(low or count, count), None if high is None else max(high, count), tried)


def class_of(setup: Setup, *, shared: bool) -> Predictable:
    """What is predicted of a cluster that keeps its targets: the time per token, below saturation."""
    return Predictable(
        "tpot",
        "measured" if own_tables([*kinds_of(setup.gpus)], setup.engine) else "scaled",
        _engine(setup.engine),
        "shared" if shared else "alone",
        "below",
        "dense" if all(model.spec.experts is None for model in setup.models) else "experts",
    )


def _engine(settings: EngineSettings) -> str:
    return "vllm" if settings.deployment.startswith("vllm") else "other"


def _fewest(prober: Prober, system: str, factor: float, start: int, most: int) -> int | None:
    """The fewest GPUs with steps ``factor`` times as long, from ``start`` on down while they hold, or else up; None where none
    up to ``most`` do."""
    told = named(prober.told, f"steps x {factor:.2f}")
    there = replace(prober, overrides=[*prober.overrides, (FACTOR, str(factor))], told=told)
    asked = Asked(there, system, GPUS)
    if asked.holds(start):
        while start > 1 and asked.holds(start - 1):
            start -= 1
        return start
    bound = there.bound(system, GPUS.key, most)
    if start == most or (bound is not None and bound.hopeless):
        return None
    return first_integer(start + 1, most, asked.holds, asked.alike)
