"""Base SLOs: absolute numbers of the file, or quantiles of reference runs, which are therefore simulated first.

An isolated reference runs each model by itself, one request after the other, so its TTFT is the prefill latency. A reference
alone runs each model by itself, under its own arrivals at rate scale 1, on GPUs that no other model uses. A reference
under the same load runs all models with the very arrivals of the cells that use it. The last two run every seed; the quantile
is taken over the measured requests of all seeds, and a request without a first token counts as infinitely late. So
does, for its time per token, a request that did not finish; requests of one token have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from fineserve_sim.experiment.file.errors import NoLimitError
from fineserve_sim.experiment.file.plan import Experiment, Point
from fineserve_sim.experiment.file.resolve import ResolvedModel
from fineserve_sim.experiment.file.schema import Reference, TpotReference
from fineserve_sim.experiment.run.run import Run
from fineserve_sim.experiment.run.run_data import Floats, RunData

Read = Callable[[Run], RunData]


class BaseSlo(NamedTuple):
    """The limit of a model at SLO scale 1 and where it comes from. ``fixed``: no SLO scale applies to it."""

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
        for model in experiment.setup_of(point).models
        for reference in _references(experiment, point, model)
        for system in reference.system
        for run in _runs_of(experiment, point, reference, system, model.id)
    )
    return list(dict.fromkeys(runs))


def _references(experiment: Experiment, point: Point, model: ResolvedModel) -> Iterator[Reference | TpotReference]:
    slo = experiment.setup_of(point).slo
    if slo.ttft and model.entry.ttft_slo_s is None:
        yield slo.ttft.reference
    if slo.tpot:
        yield slo.tpot.reference


def _runs_of(
    experiment: Experiment, point: Point, reference: Reference | TpotReference, system: str, model: str
) -> list[Run]:
    """The reference runs of one system for one model at one point; no SLO is known to them yet."""
    setup = experiment.setup_of(point)
    setup = replace(setup, engine=replace(setup.engine, step_time_factor=1.0))  # a margin moves no limit
    where = (setup, point.overrides, system)
    unlimited = (math.inf,) * len(setup.models)
    seeds = range(experiment.file.seeds)
    if reference.load == "isolated":
        return [Run(*where, None, 1.0, 0, unlimited, isolated=model)]
    if reference.load == "alone":
        return [Run(*where, point.load, 1.0, seed, unlimited, alone=model) for seed in seeds]
    return [Run(*where, point.load, point.rate_scale, seed, unlimited) for seed in seeds]


def base_slos(experiment: Experiment, point: Point, read: Read) -> dict[str, BaseSlo]:
    """The base TTFT SLO of every model at one point. ``read`` gives a finished reference run.

    Raises NoLimitError when so few reference requests got a first token that the quantile does not exist.
    """
    slo, found = experiment.setup_of(point).slo, {}
    for model in experiment.setup_of(point).models:
        if model.entry.ttft_slo_s is not None:
            found[model.id] = BaseSlo(model.entry.ttft_slo_s, "absolute, of the model", fixed=True)
        elif slo.ttft_s is not None:
            found[model.id] = BaseSlo(slo.ttft_s, "absolute")
        else:
            assert slo.ttft is not None
            found[model.id] = _derived(experiment, point, slo.ttft.reference, model.id, read)
    return found


def tpot_slos(experiment: Experiment, point: Point, read: Read) -> dict[str, BaseSlo]:
    """The base TPOT SLO of every model at one point, of none without a limit. NoLimitError as in ``base_slos``."""
    slo, found = experiment.setup_of(point).slo, {}
    for model in experiment.setup_of(point).models:
        if slo.tpot_s is not None:
            found[model.id] = BaseSlo(slo.tpot_s, "absolute", fixed=True)
        elif slo.tpot is not None:
            derived = _derived(experiment, point, slo.tpot.reference, model.id, read)
            scale = slo.tpot.scale
            found[model.id] = (
                derived if scale is None else BaseSlo(derived.base_s * scale, derived.reference, fixed=True)
            )
    return found


def e2e_limits(experiment: Experiment, point: Point) -> dict[str, float]:
    """Seconds from arrival to the last token by model; empty without a limit."""
    setup = experiment.setup_of(point)
    return {} if setup.slo.e2e_s is None else {model.id: setup.slo.e2e_s for model in setup.models}


def _derived(
    experiment: Experiment, point: Point, reference: Reference | TpotReference, model: str, read: Read
) -> BaseSlo:
    """The quantile under the best of the reference's systems, or the least base SLO where this is more."""
    if isinstance(reference, TpotReference):
        part, moment, least_s = "tpot", _tpot_s, 0.0
    else:
        part, moment, least_s = "ttft", _ttft_s, reference.least_s
    values = {
        system: _quantile(
            _runs_of(experiment, point, reference, system, model), model, reference.quantile, read, moment
        )
        for system in reference.system
    }
    best = min(values, key=lambda system: values[system])
    if not np.isfinite(values[best]):
        runs = _runs_of(experiment, point, reference, best, model)
        problem = f"none follows for model {model}: {_lost(experiment, point, model, [read(run) for run in runs])}"
        problem += f" under {best}, {reference.load} load; give a limit in seconds, slo.{part}_s or --{part}-slo"
        raise NoLimitError(experiment.document.place(("slo", part)), f"slo.{part}.reference", problem)
    percent = f"P{100 * reference.quantile:g}"
    described = f"{percent} {part.upper()} of {best}, {reference.load} load"
    return BaseSlo(max(values[best], least_s), described if not least_s else f"{described}, at least {least_s:g} s")


def _lost(experiment: Experiment, point: Point, model: str, runs: list[RunData]) -> str:
    """Which part of a model's requests was not served, and whether its context is too short for their prompts."""
    prompts: list[int] = []
    requests = 0
    for data in runs:
        own = data.measured & (data.model == data.models.index(model) if model in data.models else False)
        requests += int(own.sum())
        prompts += data.prompt_tokens[own & np.isnan(data.finish_s)].tolist()
    told = f"{100 * len(prompts) / max(1, requests):.3g} % of its requests are not served"
    (spec,) = (each.spec for each in experiment.setup_of(point).models if each.id == model)
    longest = max(prompts, default=0)
    if longest < spec.max_context_tokens:
        return told
    return f"{told} (prompts of up to {longest:,} tokens; its context is {spec.max_context_tokens:,})"


def _quantile(runs: list[Run], model: str, quantile: float, read: Read, moment: Callable[[RunData], Floats]) -> float:
    pooled = []
    for run in runs:
        data = read(run)
        own = data.measured & (data.model == data.models.index(model) if model in data.models else False)
        latency_s = moment(data)[own]
        pooled.append(latency_s[~np.isnan(latency_s)])
    latency_s = np.concatenate(pooled)
    return float(np.quantile(latency_s, quantile, method="inverted_cdf")) if len(latency_s) else float("inf")


def _ttft_s(run: RunData) -> Floats:
    return np.nan_to_num(run.ttft_s, nan=np.inf)


def _tpot_s(run: RunData) -> Floats:
    """NaN for requests of one token, which have no time per token; infinite for requests that did not finish."""
    several = np.where(np.isnan(run.finish_s), np.inf, run.tpot_s)
    return np.where(run.output_tokens > 1, several, np.nan)
