"""One question of a search: does this system meet all targets at this value?

Seeds are run one after the other, and a cell is given up, or accepted, as soon as the seeds that are left cannot change the
answer: a target of 99 % over three runs of 2,000 requests is lost with the 61st miss. The answer is exactly that of all seeds,
because every seed has as many requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.file.errors import ConfigError, ScenarioError
from fineserve_sim.experiment.file.load import load_experiment
from fineserve_sim.experiment.file.plan import Experiment
from fineserve_sim.experiment.results.produce import run_loaded
from fineserve_sim.experiment.run.runner import OnProgress

METRICS = {"ttft": "ttft_attainment", "tpot": "tpot_attainment"}


class SizingError(ValueError):
    """A search that cannot be made; one line."""


@dataclass(frozen=True, slots=True)
class Goal:
    """At least ``share`` of all requests meet the limit of ``metric``."""

    metric: str
    share: float

    def __str__(self) -> str:
        return f"{self.metric} >= {100 * self.share:g} %"


def goal(text: str) -> Goal:
    """``ttft:0.99``. Raises SizingError for anything else."""
    name, _, share = text.partition(":")
    try:
        value = float(share)
    except ValueError:
        value = 0.0
    if name not in METRICS or not 0 < value <= 1:
        raise SizingError(f"--target {text}: expected ttft:SHARE or tpot:SHARE with a share up to 1, such as ttft:0.99")
    return Goal(METRICS[name], value)


@dataclass(frozen=True, slots=True)
class Attained:
    """What a probe found: the share of requests within each limit, over the seeds that were run; GPU hours a million tokens.

    ``early``: fewer than all seeds decided it. ``problem``: why it could not run (a model that fits on no GPU, say).
    """

    value: float
    holds: bool
    shares: Mapping[str, float]
    gpu_hours_per_mtoken: float | None
    seeds: int
    early: bool
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Prober:
    """Asks questions about the systems of one experiment file. ``at`` fixes other axes; results are kept in ``out``."""

    path: Path
    out: Path
    goals: Sequence[Goal]
    overrides: Sequence[tuple[str, str]] = ()
    at: Mapping[str, Any] | None = None
    quick: bool = False
    jobs: int | None = None
    on_progress: OnProgress | None = None

    def file(self) -> Experiment:
        """The experiment as the file has it. Raises ConfigError for a mistake in it, SizingError for a target without limit."""
        found = load_experiment(self.path, [*self.overrides, ("claims", "[]")], self.quick)
        limited = found.setup.slo.tpot_s is not None or found.setup.slo.tpot is not None
        if any(goal.metric == METRICS["tpot"] for goal in self.goals) and not limited:
            raise SizingError(f"{self.path}: a target for TPOT needs slo.tpot_s or slo.tpot in the file")
        return found

    def ask(self, system: str, key: str, value: float) -> Attained:
        """Run seed after seed until the answer is sure. A scenario that cannot run does not hold."""
        try:
            return self._ask(system, key, value)
        except (ScenarioError, ConfigError) as problem:
            return Attained(value, False, {}, None, 0, True, str(problem))

    def _ask(self, system: str, key: str, value: float) -> Attained:
        place = {**(self.at or {}), key: value}
        seeds = self._experiment(system, place, None).file.seeds
        for count in range(1, seeds + 1):
            run_loaded(self._experiment(system, place, count), self.out, jobs=self.jobs, on_progress=self.on_progress)
            (cell,) = _summary(self.out)["cells"]
            metrics, requests = cell["metrics"], cell["requests"]
            shares = {goal.metric: metrics[goal.metric]["mean"] for goal in self.goals}
            total = requests // count * seeds
            sure = [_sure(round(shares[goal.metric] * requests), requests, total, goal.share) for goal in self.goals]
            if False in sure or all(sure):
                break
        hours = metrics["gpu_hours_per_mtoken"]["mean"]
        return Attained(value, all(sure), shares, hours, seeds=count, early=count < seeds)

    def _experiment(self, system: str, place: Mapping[str, Any], seeds: int | None) -> Experiment:
        """One system at one place."""
        axes = {axis: given for axis, given in place.items() if axis != "cluster.count"}
        overrides = [
            *self.overrides,
            ("sweeps", json.dumps([{"name": "size", "at": axes, "systems": [system]}])),
            ("claims", "[]"),
            ("figures", "[]"),
        ]
        if "cluster.count" in place:
            overrides.append(("cluster.count", str(int(place["cluster.count"]))))
        return load_experiment(self.path, overrides, self.quick, seeds)


def _sure(hits: int, requests: int, total: int, share: float) -> bool | None:
    """Whether at least ``share`` of ``total`` requests will have met the limit; None while the rest can still change it."""
    if hits >= share * total:
        return True
    return False if hits + (total - requests) < share * total else None


def _summary(out: Path) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return found
