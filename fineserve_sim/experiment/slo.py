"""Base SLOs: absolute numbers of the file, or quantiles of reference runs, which are therefore simulated first.

An isolated reference runs each model by itself, one request after the other, so its TTFT is the prefill latency. A
reference under the same load runs all models with the very arrivals of the cells that use it, every seed; its quantile
is taken over the measured requests of all seeds, and a request without a first token counts as infinitely late.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from fineserve_sim.experiment.errors import ConfigError
from fineserve_sim.experiment.metrics import RunData
from fineserve_sim.experiment.plan import Experiment, Point
from fineserve_sim.experiment.runs import Run

Read = Callable[[Run], RunData]


class BaseSlo(NamedTuple):
    """The TTFT limit of a model at SLO scale 1 and where it comes from. ``fixed``: no SLO scale applies to it."""

    base_s: float
    reference: str
    fixed: bool = False

    def at(self, slo_scale: float) -> float:
        return self.base_s if self.fixed else self.base_s * slo_scale


def reference_runs(experiment: Experiment) -> list[Run]:
    """Every run that some cell's SLO is derived from, once; empty when all SLOs are absolute."""
    runs = (
        run
        for point in experiment.points
        for system in _references(experiment, point)
        for group in _runs_of(experiment, point, system).values()
        for run in group
    )
    return list(dict.fromkeys(runs))


def _references(experiment: Experiment, point: Point) -> list[str]:
    ttft = experiment.setup_of(point).slo.ttft
    return ttft.reference.system if ttft else []


def _runs_of(experiment: Experiment, point: Point, system: str) -> dict[str, list[Run]]:
    """The reference runs of one system for one point, by the models that need them; no SLO is known to them yet."""
    setup = experiment.setup_of(point)
    assert setup.slo.ttft is not None
    where = (setup, point.overrides, system)
    unlimited = (math.inf,) * len(setup.models)
    needing = [model.id for model in setup.models if model.entry.ttft_slo_s is None]
    if setup.slo.ttft.reference.load == "isolated":
        return {name: [Run(*where, None, 1.0, 0, unlimited, isolated=name)] for name in needing}
    seeds = range(experiment.file.seeds)
    same = [Run(*where, point.load, point.rate_scale, seed, unlimited) for seed in seeds]
    return dict.fromkeys(needing, same)


def base_slos(experiment: Experiment, point: Point, read: Read) -> dict[str, BaseSlo]:
    """The base SLO of every model at one point. ``read`` gives a finished reference run.

    Raises ConfigError when so few reference requests got a first token that the quantile does not exist.
    """
    return dict(_base_slos(experiment, point, read))


def _base_slos(experiment: Experiment, point: Point, read: Read) -> Iterator[tuple[str, BaseSlo]]:
    setup = experiment.setup_of(point)
    runs = {system: _runs_of(experiment, point, system) for system in _references(experiment, point)}
    for model in setup.models:
        if model.entry.ttft_slo_s is not None:
            yield model.id, BaseSlo(model.entry.ttft_slo_s, "absolute, of the model", fixed=True)
        elif setup.slo.ttft_s is not None:
            yield model.id, BaseSlo(setup.slo.ttft_s, "absolute")
        else:
            assert setup.slo.ttft is not None
            reference = setup.slo.ttft.reference
            values = {
                system: _quantile(by_model[model.id], model.id, reference.quantile, read)
                for system, by_model in runs.items()
            }
            best = min(values, key=lambda system: values[system])
            if not np.isfinite(values[best]):
                problem = f"under {best} at {point}, too few requests of model {model.id} got a first token"
                raise ConfigError(experiment.document.place(("slo", "ttft")), "slo.ttft.reference", problem)
            percent = f"P{100 * reference.quantile:g}"
            yield model.id, BaseSlo(values[best], f"{percent} TTFT of {best}, {reference.load} load")


def _quantile(runs: list[Run], model: str, quantile: float, read: Read) -> float:
    ttft_s = []
    for run in runs:
        data = read(run)
        own = data.measured & (data.model == data.models.index(model) if model in data.models else False)
        ttft_s.append(np.nan_to_num(data.ttft_s[own], nan=np.inf))
    pooled = np.concatenate(ttft_s)
    return float(np.quantile(pooled, quantile, method="inverted_cdf")) if len(pooled) else float("inf")
