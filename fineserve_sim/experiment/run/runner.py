"""Simulate an experiment: reference runs, then the SLOs that follow from them, then all cells."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from fineserve_sim.experiment.file.plan import Experiment, Point
from fineserve_sim.experiment.run.alone import reach_tokens
from fineserve_sim.experiment.run.executor import LOOKS_S, Executor
from fineserve_sim.experiment.run.run import Run
from fineserve_sim.experiment.run.run_data import Limits, RunData
from fineserve_sim.experiment.run.slo import BaseSlo, base_slos, e2e_limits, reference_runs, tpot_slos
from fineserve_sim.experiment.run.spread import Spread
from fineserve_sim.experiment.run.store import Store
from fineserve_sim.experiment.run.work import Cell, Simulate, Summarise, Summed, keyed

OnProgress = Callable[[float, int, str], None]
"""Called with simulations done, with their shares those under way; simulations in all; and the one just done."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished point: the base SLOs of each model (TPOT and end to end: of none where there is no limit), and the key of its
    run for each seed."""

    point: Point
    slos: Mapping[str, BaseSlo]
    tpot_slos: Mapping[str, BaseSlo]
    keys: tuple[str, ...]
    e2e_limits_s: Mapping[str, float] = field(default_factory=dict)
    accept_cut: bool = False
    reach_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def limits_s(self) -> dict[str, float]:
        return {name: slo.at(self.point.slo_scale) for name, slo in self.slos.items()}

    @property
    def tpot_limits_s(self) -> dict[str, float]:
        return {name: slo.at(self.point.slo_scale) for name, slo in self.tpot_slos.items()}

    @property
    def limits(self) -> Limits:
        return Limits(self.limits_s, self.tpot_limits_s, self.e2e_limits_s, self.accept_cut, self.reach_tokens)


class Progress:
    """Counts simulations done and tells the caller; of those under way once in a while."""

    def __init__(self, total: int, tell: OnProgress | None) -> None:
        self.done = 0
        self.total = total
        self._tell = tell
        self._last = ""
        self._told_s = time.monotonic()

    def count(self, run: Run) -> None:
        self.done += 1
        self._last = str(run)
        if self._tell is not None:
            self._tell(self.done, self.total, self._last)

    def under_way(self, simulations: float) -> None:
        if self._tell is not None and time.monotonic() - self._told_s >= LOOKS_S:
            self._told_s = time.monotonic()
            self._tell(self.done + simulations, self.total, self._last)


@dataclass(frozen=True, slots=True)
class Session:
    """One call of ``run_loaded``."""

    store: Store
    out: Path
    executor: Executor
    decisions: bool
    simulate: Simulate
    progress: Progress
    summarise: Summarise | None = None

    def simulate_all(self, experiment: Experiment, seeds: int | None = None) -> list[Outcome]:
        """Reference runs first, then every cell under the SLOs that they give; the outcome of each point. ``seeds``: run the
        cells with the first seeds alone. The references have all seeds of the file, so the SLOs stay the same."""
        count = experiment.file.seeds if seeds is None else seeds
        references = reference_runs(experiment)
        key_of_reference = dict(zip(references, self._ensure(references, decisions=False), strict=True))
        stored = lru_cache(maxsize=32)(self.store.read)

        def read(run: Run) -> RunData:
            return stored(key_of_reference[run])

        points = experiment.points
        slos = [base_slos(experiment, point, read) for point in points]
        tpots = [tpot_slos(experiment, point, read) for point in points]
        cells = [_cells(experiment, *limits, count) for limits in zip(points, slos, tpots, strict=True)]
        limits = zip(points, slos, tpots, strict=True)
        accept_cut = experiment.file.slo.cut == "whole"
        outcomes = [
            _within_reach(experiment, Outcome(point, slo, tpot, (), e2e_limits(experiment, point), accept_cut))
            for point, slo, tpot in limits
        ]
        summed = [
            None if self.summarise is None else Summed(outcome.limits, self.summarise)
            for outcome, runs in zip(outcomes, cells, strict=True)
            for _ in runs
        ]
        keys = iter(self._ensure([run for runs in cells for run in runs], self.decisions, summed))
        return [
            replace(outcome, keys=tuple(next(keys) for _ in runs))
            for outcome, runs in zip(outcomes, cells, strict=True)
        ]

    def _ensure(self, runs: Sequence[Run], decisions: bool, summed: Sequence[Summed | None] = ()) -> list[str]:
        """Simulate the runs that are not stored yet, equal ones once. Returns the key of each, in order. Runs that are
        ``summed`` keep their metrics alone."""
        how = summed or [None] * len(runs)
        keys = [keyed(*each) for each in zip(runs, how, strict=True)]
        missing: dict[str, list[Run]] = {}
        how_of: dict[str, Summed | None] = dict(zip(keys, how, strict=True))
        for run, key in zip(runs, keys, strict=True):
            if self.store.has(key, decisions):
                self.progress.count(run)
            else:
                missing.setdefault(key, []).append(run)
        cells = [Cell(group[0], key, decisions, self.simulate, how_of[key]) for key, group in missing.items()]
        for cell in Spread(cells, self.executor, self.out, self.progress.under_way).stored():
            for run in missing[cell.key]:
                self.progress.count(run)
        return keys


def _within_reach(experiment: Experiment, outcome: Outcome) -> Outcome:
    """With the longest prompts that idle engines have a first token of in time."""
    setup = experiment.setup_of(outcome.point)
    system = setup.systems[outcome.point.system]
    return replace(outcome, reach_tokens=reach_tokens(setup, system, outcome.limits_s))


def _cells(
    experiment: Experiment, point: Point, slos: Mapping[str, BaseSlo], tpot_slos: Mapping[str, BaseSlo], seeds: int
) -> list[Run]:
    setup = experiment.setup_of(point)

    def limits_s(found: Mapping[str, BaseSlo]) -> tuple[float, ...]:
        return tuple(found[model.id].at(point.slo_scale) for model in setup.models)

    where = (setup, point.overrides, point.system, point.load, point.rate_scale)
    of_tokens = limits_s(tpot_slos) if tpot_slos else None
    return [Run(*where, seed, limits_s(slos), tpot_slo_s=of_tokens) for seed in range(seeds)]
