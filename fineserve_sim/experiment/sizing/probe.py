"""One question of a search: does this system meet all targets at this value?

The first seed is run by itself, the others together. A cell is given up, or accepted, as soon as the seeds that are left
cannot change the answer. A target of 99 % over three runs of 2,000 requests is lost with the 61st miss. The answer is exactly
that of all seeds. Limits are the same at any number of seeds: reference runs have all seeds of the file. Where seeds have
unlike numbers of requests (phases, arrivals of many models), all are run. Simulations are kept in the folder, so that a search
goes on where it stopped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fineserve_sim.cluster import simulate
from fineserve_sim.cluster.compose.memory import kinds_of
from fineserve_sim.experiment.file.errors import ConfigError, MachineError, ScenarioError
from fineserve_sim.experiment.file.load import load_experiment
from fineserve_sim.experiment.file.metric_names import EACH, overall
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.results.cost import price_of
from fineserve_sim.experiment.results.metrics import Measures, estimate, measure
from fineserve_sim.experiment.results.misses import CAUSES
from fineserve_sim.experiment.results.step_times import own_tables, pooled, tables_of
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.executors import lent
from fineserve_sim.experiment.run.files import prepare
from fineserve_sim.experiment.run.runner import OnProgress, Progress, Session
from fineserve_sim.experiment.run.slo import reference_runs
from fineserve_sim.experiment.run.store import Store
from fineserve_sim.experiment.sizing.feasibility import Change, Feasibility, Slow, feasibility

METRICS = {"ttft": "ttft_attainment", "tpot": "tpot_attainment", "e2e": "e2e_attainment", "all": "slo_attainment"}
_KEYS = {"tpot_attainment": ("tpot_s", "tpot"), "e2e_attainment": ("e2e_s",)}
"""Keys of ``slo`` of which one must be given for a target."""


class SizingError(ValueError):
    """A search that cannot be made; one line."""


@dataclass(frozen=True, slots=True)
class Goal:
    """At least ``share`` of all requests meet the limit of ``metric``, or of the requests of each model."""

    metric: str
    share: float

    def __str__(self) -> str:
        return f"{self.metric} >= {100 * self.share:g} %"


def goal(text: str) -> Goal:
    """``ttft:0.99``, or ``each:ttft:0.99`` of each model. Raises SizingError for anything else."""
    first, _, rest = text.partition(":")
    each = first == "each" and ":" in rest
    name, _, share = (rest if each else text).partition(":")
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if name not in METRICS or not 0 < value <= 1:
        known = ", ".join(f"{each}:SHARE" for each in METRICS)
        raise SizingError(
            f"--target {text}: expected {known}, with a share above 0 and up to 1, such as ttft:0.99, or each:ttft:0.99 "
            "for each model"
        )
    return Goal(EACH * each + METRICS[name], value)


def goals(texts: Sequence[str]) -> list[Goal]:
    """``["ttft:0.95,tpot:0.9"]``; a moment twice is an error."""
    found = [goal(part.strip()) for text in texts for part in text.split(",")]
    for at, each in enumerate(found):
        if each.metric in (other.metric for other in found[:at]):
            raise SizingError(f"--target: {told_moment(each.metric)} is given twice")
    return found


def told_moment(metric: str) -> str:
    """What a target is called in a command: ``ttft``, ``slo`` or ``each ttft``."""
    return metric.removesuffix("_attainment").replace("_", " ")


@dataclass(frozen=True, slots=True)
class Attained:
    """What a probe found: the share of requests within each limit with its half-width, over the seeds that were run. It has
    GPU hours a million tokens, dollars an hour, and what its misses come from, too.

    ``early``: fewer than all seeds decided it. ``problem``: why it could not run (a model that fits on no GPU, say).
    ``missed_by``: misses by model. ``worst``: the model with the least share within all limits, and that share; None of one
    model. ``shared``: whether a GPU has several engines. ``step_times``: what they rest on, as ``measured_text`` takes it.
    """

    value: float
    holds: bool
    shares: Mapping[str, float]
    gpu_hours_per_mtoken: float | None
    seeds: int
    early: bool
    problem: str = ""
    half_widths: Mapping[str, float | None] | None = None
    usd_per_hour: float | None = None
    usd_per_mtoken: float | None = None
    misses: Mapping[str, int] | None = None
    unplaced: tuple[str, ...] = ()
    missed_by: Mapping[str, int] | None = None
    worst: tuple[str, float] | None = None
    shared: bool = False
    step_times: Mapping[str, Any] | None = None

    def like(self, other: Attained) -> bool:
        """Whether both came to the very same, as clusters do of which one has more empty GPUs."""
        own = (self.seeds, self.shares, self.missed_by, self.misses)
        return bool(self.shares) and own == (other.seeds, other.shares, other.missed_by, other.misses)

    @property
    def why(self) -> str:
        """Why it does not hold, in a few words."""
        if self.problem or self.misses is None:
            return self.problem
        total = sum(self.misses.values())
        counts = sorted(self.misses.items(), key=lambda item: -item[1])
        told = ", ".join(f"{100 * count / total:.0f} % {cause}" for cause, count in counts[:3] if count)
        shares = ", ".join(f"{100 * share:.1f} %" for share in self.shares.values())
        homeless = f"; no GPU for {', '.join(self.unplaced)}" if self.unplaced else ""
        return f"{shares} within, of the misses {told}{homeless}"


Told = Callable[[str, "Attained"], None]
"""Called with what was asked and what was found."""


def named(told: Told | None, name: str) -> Told | None:
    """``told`` with a name before what is asked."""
    return told if told is None or not name else lambda asked, found: told(f"{name}, {asked}", found)


@dataclass(frozen=True, slots=True)
class Prober:
    """Asks questions about the systems of one experiment file. ``at`` fixes other axes; simulations are kept in ``out``, and
    run on ``executor``, or in ``jobs`` processes. ``given``: the cluster is, so that a number of GPUs says no more than what it
    has."""

    path: Path
    out: Path
    goals: Sequence[Goal]
    overrides: Sequence[tuple[str, str]] = ()
    at: Mapping[str, Any] | None = None
    quick: bool = False
    jobs: int | None = None
    executor: Executor | None = None
    on_progress: OnProgress | None = None
    told: Told | None = None
    given: bool = False

    def file(self) -> Experiment:
        """The experiment as the file has it. Raises ConfigError for a mistake in it, SizingError for a target without limit or
        a place that is none."""
        found = load_experiment(self.path, [*self.overrides, *_BARE], self.quick)
        self._check_place()
        for goal in self.goals:
            keys = _KEYS.get(overall(goal.metric), ())
            if keys and all(getattr(found.setup.slo, key) is None for key in keys):
                needed = " or ".join(f"slo.{key}" for key in keys)
                moment = overall(goal.metric).removesuffix("_attainment").upper()
                raise SizingError(f"{self.path}: a target for {moment} needs {needed}")
        return found

    def _check_place(self) -> None:
        """Other axes have values that they can have."""
        sweep = json.dumps([{"name": "size", "at": dict(self.at or {})}])
        try:
            load_experiment(self.path, [*self.overrides, *_BARE, ("sweeps", sweep)], self.quick)
        except ConfigError as problem:
            raise SizingError(f"--at {problem.key.removeprefix('sweeps.0.at.')}: {problem.problem}") from None

    def ask(self, system: str, key: str, value: float, *, fully: bool = False) -> Attained:
        """Run seed after seed until the answer is sure, or all (``fully``). A scenario that cannot run does not hold. Raises
        MachineError where it is the machine that cannot: this says nothing of the value."""
        try:
            found = self._ask(system, key, value, fully)
        except MachineError:
            raise
        except (ScenarioError, ConfigError) as problem:
            found = Attained(value, False, {}, None, 0, True, str(problem))
        if self.told is not None:
            self.told(f"{system}, {key.removeprefix('cluster.')} {value:g}", found)
        return found

    def _ask(self, system: str, key: str, value: float, fully: bool) -> Attained:
        place = {**(self.at or {}), key: value}
        experiment = self._experiment(system, place)
        seeds = experiment.file.seeds
        for count in (1, seeds):
            runs, metas = self._run(experiment, count)
            sure = [_sure_of(runs, seeds, goal, alike=alike(experiment)) for goal in self.goals]
            if not fully and (False in sure or all(sure)):
                break
        found = {goal.metric: estimate(runs, goal.metric) for goal in self.goals}
        hours = estimate(runs, "gpu_hours_per_mtoken").mean
        setup = experiment.setup
        usd, moving = price_of(setup).usd_per_gpu_hour, setup.systems[system].residency is not None
        kinds = [*kinds_of(setup.gpus)]
        return Attained(
            value,
            all(sure),
            {metric: one.mean for metric, one in found.items()},
            hours if math.isfinite(hours) else None,
            seeds=len(runs),
            early=len(runs) < seeds,
            half_widths={
                metric: one.half_width if math.isfinite(one.half_width) else None for metric, one in found.items()
            },
            usd_per_hour=None if usd is None else usd * setup.bought,
            usd_per_mtoken=usd * hours if usd is not None and math.isfinite(hours) else None,
            misses={cause: sum(run.misses[""][cause] for run in runs) for cause in CAUSES},
            unplaced=() if moving else tuple(metas[0]["placement"]["unplaced"]),
            shared=moving or _shares(metas[0]["placement"]["instances"]),
            step_times=pooled(metas)
            | {"tables_of": tables_of(kinds, setup.engine), "own": own_tables(kinds, setup.engine)},
            missed_by={name: sum(sum(run.misses[name].values()) for run in runs) for name in runs[0].misses if name},
            worst=_worst_of(runs),
        )

    def _run(self, experiment: Experiment, seeds: int) -> tuple[list[Measures], list[dict[str, Any]]]:
        """The first runs of the one cell of an experiment, and what is stored beside each."""
        store = Store(self.out)
        prepare(self.out)
        progress = Progress(len(reference_runs(experiment)) + seeds, self.on_progress)
        with lent(self.executor, self.jobs) as executor:
            session = Session(store, self.out, executor, False, simulate, progress)
            (outcome,) = session.simulate_all(experiment, seeds)
        metas = [store.meta(key) for key in outcome.keys]
        runs = [
            measure(store.read(key), outcome.limits_s, *outcome.limits[1:], meta["placement"]["unplaced"])
            for key, meta in zip(outcome.keys, metas, strict=True)
        ]
        return runs, metas

    @property
    def targets(self) -> dict[str, float]:
        """Shares by metric."""
        return {goal.metric: goal.share for goal in self.goals}

    def changed(self, changes: Sequence[Change], gpus: int | None = None) -> Prober:
        """The same questions about models of other precisions or degrees. ``gpus``: of the file, where there is another number
        of them."""
        number = {model.id: at for at, model in enumerate(self.file().file.models)}
        overrides = [(f"models.{number[change.model]}.{change.key}", str(change.value)) for change in changes]
        overrides += [] if gpus is None else [("cluster.count", str(gpus))]
        told = named(self.told, ", ".join(map(str, changes)))
        return replace(self, overrides=[*self.overrides, *overrides], told=told)

    def bound(self, system: str, key: str, value: float, slow: Slow | None = None) -> Feasibility | None:
        """Each model alone on idle GPUs, as at this value. None where nothing is known, or where other values have other
        requests."""
        try:
            experiment = self.experiment(system, key, value)
            (point,) = experiment.points
            return feasibility(experiment, point, self.targets, slow) if alike(experiment) else None
        except ConfigError:
            return None  # a question at this value says why

    def experiment(self, system: str, key: str, value: float) -> Experiment:
        """One system at one value, with all seeds."""
        return self._experiment(system, {**(self.at or {}), key: value})

    def _experiment(self, system: str, place: Mapping[str, Any]) -> Experiment:
        """One system at one place."""
        axes = {axis: given for axis, given in place.items() if axis != "cluster.count"}
        sweep = [{"name": "size", "at": axes, "systems": [system]}]
        overrides = [*self.overrides, *_BARE, ("sweeps", json.dumps(sweep))]
        if "cluster.count" in place and not self.given:
            overrides.append(("cluster.count", str(int(place["cluster.count"]))))
        return load_experiment(self.path, overrides, self.quick)


def _shares(instances: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a GPU has more than one engine."""
    gpus = [gpu for instance in instances for gpu in instance["gpus"]]
    return len(set(gpus)) < len(gpus)


def _worst_of(runs: Sequence[Measures]) -> tuple[str, float] | None:
    shares = {name: estimate(runs, "slo_attainment", name).mean for name in runs[0].models}
    asked = {name: share for name, share in shares.items() if math.isfinite(share)}
    return min(asked.items(), key=lambda item: item[1]) if len(asked) > 1 else None


_BARE = (("claims", "[]"), ("figures", "[]"), ("answer", "null"))
"""A search looks at none of them."""


def alike(experiment: Experiment) -> bool:
    """Whether all seeds have as many requests; else the durations of the file set their number."""
    work = experiment.setup.workload
    return work.trace is not None or work.requests is not None


def _sure_of(runs: Sequence[Measures], seeds: int, goal: Goal, *, alike: bool) -> bool | None:
    """Whether the goal will hold over all seeds, of which these are the first; None while that is not known."""
    if goal.metric.startswith(EACH):
        return _sure_of_each(runs, seeds, Goal(overall(goal.metric), goal.share))
    requests = sum(run.counts["arrived"] for run in runs)
    hits = sum(run.hits[goal.metric][""].sum() for run in runs)
    if len(runs) == seeds:
        return _sure(hits, requests, requests, goal.share)
    return _sure(hits, requests, requests // len(runs) * seeds, goal.share) if alike else None


def _sure_of_each(runs: Sequence[Measures], seeds: int, goal: Goal) -> bool | None:
    """The same of each model. How many requests it has in the seeds to come is known of none: only all seeds decide."""
    if len(runs) < seeds:
        return None
    counts = [
        [
            sum(part)
            for part in zip(
                *((run.hits[goal.metric][name].sum(), len(run.hits[goal.metric][name])) for run in runs), strict=True
            )
        ]
        for name in runs[0].models
    ]
    return all(hits / of >= goal.share for hits, of in counts if of)


def _sure(hits: int, requests: int, total: int, share: float) -> bool | None:
    """Whether at least ``share`` of ``total`` requests will have met the limit; None while the rest can still change it. Shares
    are compared, as 0.55 of 100 requests is a little more than 55."""
    if hits / total >= share:
        return True
    return False if (hits + total - requests) / total < share else None
