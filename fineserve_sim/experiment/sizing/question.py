"""What a search is asked: of a trace, an experiment file or a results folder, with limits, load and place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fineserve_sim.experiment.file.comparison import experiment_for_trace, model_entries
from fineserve_sim.experiment.file.metric_names import overall
from fineserve_sim.experiment.results.answer import DEFAULT_TARGETS, chosen_cell
from fineserve_sim.experiment.results.summary import read_summary
from fineserve_sim.experiment.results.writer import write_resolved
from fineserve_sim.experiment.run.files import prepare
from fineserve_sim.experiment.show.answer import lowered
from fineserve_sim.experiment.show.labels import axis_text
from fineserve_sim.experiment.sizing.probe import goals
from fineserve_sim.experiment.sizing.search import Axis

SYSTEMS = ("fineserve", "prism*", "prism", "muxserve++", "dedicated")
"""Tried on a trace where no system is named."""

SEEDS = 3
"""Deals of a trace's requests to models that share them; a trace that names its models has no randomness."""

MOST_GPUS = 16
"""Tried at most for a trace where no number is given."""

SLO_SCALE = 20.0
"""The scale of derived limits where none is given."""

Place = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits in seconds, or the scale of derived ones."""

    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    e2e_slo_s: float | None = None
    slo_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Models and load: for a trace alone."""

    models: Sequence[str | Mapping[str, Any]] | None = None
    requests: int | None = None
    spread: bool | Mapping[str, float] = False
    rate_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """The experiment file that is asked about, and what is replaced in it. ``place``: values of its other axes.
    ``most_gpus``: tried at most (None: as the file has it). ``said``: the place, where a run chose it."""

    path: Path
    overrides: list[tuple[str, str]]
    place: Place
    most_gpus: int | None
    said: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    """The options of a search that depend on its source. ``at``: values of other axes. ``margin``: steps take so many times as
    long as predicted."""

    limits: Limits = field(default_factory=Limits)
    load: Load = field(default_factory=Load)
    systems: Sequence[str] | None = None
    seeds: int | None = None
    at: Mapping[str, Any] | None = None
    most_gpus: int | None = None
    margin: float | None = None

    def of(self, source: Path, folder: Path, axis: Axis) -> Question:
        """The question about a source; that about a trace is written into the results folder, so that it can be repeated.
        Raises ValueError for options that mean nothing for this source, ConfigError for a trace that is none."""
        path = file_of(source)
        if path is None:
            return self._of_trace(source, folder)
        self._check_file(path)
        place, said = _answered_at(source, axis, self.at or {}) if source.is_dir() else ({}, "")
        return Question(path, self._overrides(), place | dict(self.at or {}), self.most_gpus, said)

    def _of_trace(self, trace: Path, folder: Path) -> Question:
        limits, load, place = self.limits, self.load, dict(self.at or {})
        if load.rate_scale is not None and "rate_scale" in place:
            raise ValueError(
                "--rate-scale with --at rate_scale: both say how fast the trace is replayed; give one of them"
            )
        if not load.models:
            raise ValueError(f"{trace}: a trace needs --model, once for each of its models, such as A=llama-3.1-8b:fp8")
        most = self.most_gpus or MOST_GPUS
        experiment = experiment_for_trace(
            trace,
            self.systems or SYSTEMS,
            model_entries(load.models, spread=load.spread),
            seeds=self.seeds or (SEEDS if load.spread else 1),
            count=most,
            requests=load.requests,
            ttft_slo_s=limits.ttft_slo_s,
            tpot_slo_s=limits.tpot_slo_s,
            e2e_slo_s=limits.e2e_slo_s,
            slo_scale=slo_scale_of(limits.slo_scale, limits.ttft_slo_s),
            margin=self.margin,
        )
        prepare(folder)
        write_resolved(experiment, folder / "question.yaml")
        place |= {} if load.rate_scale is None else {"rate_scale": load.rate_scale}
        return Question(folder / "question.yaml", [], place, most)

    def _check_file(self, path: Path) -> None:
        load = self.load
        given = (load.models, load.requests, load.spread, load.rate_scale)
        for name, value in zip(("--model", "--requests", "--spread", "--rate-scale"), given, strict=True):
            if value:
                raise ValueError(f"{name}: for a trace alone; {path} has models and load of its own")
        if self.limits.slo_scale is not None:
            raise ValueError("--slo-scale: for a trace alone; give --at slo_scale=VALUE")

    def _overrides(self) -> list[tuple[str, str]]:
        """What the options replace in an experiment file."""
        pairs: list[tuple[str, str]] = []
        for key, limit_s in (("ttft", self.limits.ttft_slo_s), ("tpot", self.limits.tpot_slo_s)):
            if limit_s is not None:
                pairs += [(f"slo.{key}_s", str(limit_s)), (f"slo.{key}", "null")]
        if self.limits.e2e_slo_s is not None:
            pairs.append(("slo.e2e_s", str(self.limits.e2e_slo_s)))
        pairs += [("systems", json.dumps(list(self.systems)))] if self.systems else []
        pairs += [] if self.margin is None else [("engine.step_time_factor", str(self.margin))]
        return [*pairs, *([("seeds", str(self.seeds))] if self.seeds else [])]


def slo_scale_of(slo_scale: float | None, ttft_slo_s: float | None) -> float:
    """The SLO scale of derived limits. Raises ValueError where a TTFT limit in seconds leaves nothing to scale."""
    if slo_scale is not None and ttft_slo_s is not None:
        raise ValueError("--slo-scale with --ttft-slo: a limit in seconds is not scaled; give one of them")
    return SLO_SCALE if slo_scale is None else slo_scale


def shares_of(targets: Sequence[str] | None, tpot: object, e2e: object) -> Mapping[str, float]:
    """Targets by metric. Raises ValueError for a target without a limit."""
    if not targets:
        return DEFAULT_TARGETS
    found = {goal.metric: goal.share for goal in goals(targets)}
    for moment, limit in (("tpot", tpot), ("e2e", e2e)):
        if f"{moment}_attainment" in map(overall, found) and limit is None:
            raise ValueError(
                f"--target {moment}: there is no such limit; give one, as --{moment}-slo or slo.{moment}_s"
            )
    return found


def check_trace(targets: Sequence[str] | None, limits: Limits, *, quick: bool) -> None:
    """Raises ValueError for what only an experiment file has, and for a target without its limit."""
    if quick:
        raise ValueError("--quick: for an experiment file alone; of a trace, --requests takes the first so many")
    shares_of(targets, limits.tpot_slo_s, limits.e2e_slo_s)


def file_of(source: Path) -> Path | None:
    """The experiment file that ``source`` is, or has as a results folder; None for a trace. Raises ValueError for a folder
    without one."""
    if source.is_dir():
        resolved = source / "resolved.yaml"
        if not resolved.is_file():
            raise ValueError(f"{source}: no resolved.yaml here; give a trace, an experiment file, or a results folder")
        return resolved
    return source if source.suffix in (".yaml", ".yml") else None


def _answered_at(folder: Path, axis: Axis, at: Mapping[str, Any]) -> tuple[Place, str]:
    """The place at which the run of a folder answered, but for what is searched or asked for, and a line that names it."""
    summary = read_summary(folder) if (folder / "summary.json").is_file() else None
    cell = None if summary is None else chosen_cell(summary)
    if cell is None:
        return {}, ""
    left_out = {axis.key, *at} | (set() if cell["derived"] else {"slo_scale"})
    place = {key: value for key, value in cell["axes"].items() if key not in left_out and value is not None}
    named = ", ".join(lowered(axis_text(key, value)) for key, value in place.items())
    return place, f"At {named}, where the run in {folder} answered; --at names another place." if place else ""
