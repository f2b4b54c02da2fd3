"""A user's wish, and the problem that a search makes of it.

The search sees the first part of a trace (``CHOSEN``), as it is and a fifth faster. A plan that holds at exactly the load of
the past alone is of no use. Reported figures come from the rest of the trace. There the plan stands beside the papers' systems
on the same GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fineserve_traces import Trace
from fineserve_traces.model_stats import rate_variance

from fineserve_sim import catalog
from fineserve_sim.catalog import ModelSpec
from fineserve_sim.cluster import Scenario, ServedModel
from fineserve_sim.experiment import Experiment, experiment_for_trace
from fineserve_sim.experiment.file.comparison import model_entries
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.planning.gpus import Kind, Numbers, cluster_of, kinds_of, name_of, named
from fineserve_sim.planning.impossible import impossible
from fineserve_sim.planning.problem import Layout, Limits, Option, Part, Problem, Rules, another_mix

CHOSEN = 2 / 3
"""The share of the requests by which a plan is chosen; the others judge it."""

FASTER, FASTER_WEIGHT = 1.2, 0.5
"""The same requests so many times as fast count, too, each late one half."""

MIXED_WEIGHT = 0.5
"""So do the same requests in another mix of models: what models get of a trace drifts."""

WINDOW_S = 5.0
"""Seconds over which rates are counted: a longer burst fills queues and KV memory, a shorter one waits in them."""

BASE = "fineserve"
"""The system whose scheduler, memory and sharing a plan has."""


@dataclass(frozen=True, slots=True)
class ModelWish:
    """A model and the ways in which it may run, the best first: precisions of the catalog and TP degrees. ``model``: as in a
    file, a name of the catalog or a mapping with its config.json."""

    id: str
    model: str | Mapping[str, Any]
    options: tuple[tuple[str, int], ...]


def model_wish(text: str) -> ModelWish:
    """``NAME=MODEL:PRECISIONS:DEGREES``. Raises ValueError for another text."""
    name, sign, described = text.partition("=")
    model, *rest = (described if sign else name).split(":")
    precisions, degrees = (*rest, "", "")[:2]
    counts = (degrees or "1").split("|")
    if not name or not model or len(rest) > 2 or not all(count.isdecimal() and int(count) for count in counts):
        raise ValueError(f"--model {text}: expected NAME=MODEL:PRECISIONS:DEGREES, such as A=llama-3.1-8b:fp8|awq:1|2")
    named = (precisions or catalog.published_precision(model)).split("|")
    options = tuple((precision, int(count)) for precision in named for count in counts)
    return ModelWish(name if sign else model, model, options)


def rules_of(
    apart: Iterable[Sequence[str]],
    pin: Mapping[str, Sequence[str | int]],
    most_per_gpu: int | None,
    models: Sequence[str],
    gpus: int,
    survives: Literal["gpu", "node"] | None = None,
) -> Rules:
    """Pairs of models that share no GPU, the GPUs that a model may stand on, engines on a GPU at most. Raises ValueError for a
    model or a GPU that is not there."""
    pairs, pinned = [], {}
    for names in apart:
        if len(names) != 2 or len(set(names)) != 2 or not set(names) <= set(models):
            raise ValueError(f"--apart {','.join(names)}: expected two of the models, as in {models[0]},{models[-1]}")
        pairs.append(frozenset(names))
    for name, given in pin.items():
        numbers = list(map(str, given))
        if name not in models or not all(number.isdecimal() and int(number) < gpus for number in numbers):
            told = f"--pin {name}={','.join(numbers)}: expected a model and GPUs from 0 to {gpus - 1}"
            raise ValueError(f"{told}, as in {models[0]}=0,1")
        pinned[name] = frozenset(map(int, numbers))
    return Rules(frozenset(pairs), pinned, most_per_gpu, survives)


@dataclass(frozen=True, slots=True)
class Wish:
    """A user's request for a plan.

    ``gpus``: how many of ``gpu``, or of each kind. ``load``: the plan is made for this many times the rate of the trace.
    ``spread``: requests are dealt out, evenly or by shares. ``margin``: steps take so many times as long as predicted.
    ``kept``: keys of a file that the plan has, too (``folder``, ``engine``, ``runtime``).
    """

    trace: Path
    models: tuple[ModelWish, ...]
    gpus: Numbers
    ttft_slo_s: float
    gpu: Kind = "h100-sxm"
    tpot_slo_s: float | None = None
    e2e_slo_s: float | None = None
    rate_scale: float = 1.0
    load: float = 1.0
    spread: bool | Mapping[str, float] = False
    margin: float | None = None
    requests: int | None = None
    rules: Rules = field(default_factory=Rules)
    kept: Mapping[str, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> list[tuple[Kind, int]]:
        """Each kind of GPU and how many there are."""
        return kinds_of(self.gpus, self.gpu)

    @property
    def count(self) -> int:
        """GPUs of all kinds."""
        return sum(count for _, count in self.kinds)

    @property
    def cluster(self) -> str:
        """The GPUs in words."""
        return named(self.gpus, self.gpu)

    @property
    def seats(self) -> list[tuple[str, int]]:
        """Each GPU by its kind and its number within its kind."""
        return [(name_of(kind), number) for kind, count in self.kinds for number in range(count)]

    def on(self, gpus: Numbers, gpu: Kind | None = None) -> Wish:
        """The same on fewer or more GPUs. A model stays pinned to the very GPUs, as far as they are there."""
        other = replace(self, gpus=gpus, gpu=self.gpu if gpu is None else gpu)
        new = _numbers(self, other)
        pinned = {id: frozenset(new[gpu] for gpu in own if gpu in new) for id, own in self.rules.pinned.items()}
        return replace(other, rules=replace(self.rules, pinned=pinned))

    def experiment(self, systems: Sequence[Any], **changed: Any) -> Experiment:
        """This wish as an experiment on ``systems``, each model in its last option for which there are GPUs enough. Raises
        ConfigError."""
        ways = [self._last_option(each) for each in self.models]
        entries = [
            {"id": each.id, "model": each.model, "precision": precision, "tp": tp}
            for each, (precision, tp) in zip(self.models, ways, strict=True)
        ]
        changes = self.settings | ({"cluster": cluster_of(self.gpus, self.gpu)} if len(self.kinds) > 1 else {})
        return experiment_for_trace(
            self.trace,
            systems,
            model_entries(entries, spread=self.spread),
            gpu=self.kinds[0][0],
            count=self.count,
            ttft_slo_s=self.ttft_slo_s,
            tpot_slo_s=self.tpot_slo_s,
            e2e_slo_s=self.e2e_slo_s,
            rate_scale=self.rate_scale * self.load,
            requests=self.requests,
            overrides=[(key, json.dumps(value)) for key, value in changes.items() if key != "runtime"],
            **changed,
        )

    def _last_option(self, model: ModelWish) -> tuple[str, int]:
        most = max(count for _, count in self.kinds)
        return next((option for option in reversed(model.options) if option[1] <= most), model.options[-1])

    @property
    def settings(self) -> dict[str, Any]:
        """What is kept of a file, with the margin in the settings of engines."""
        slower = (
            {} if self.margin is None else {"engine": {**self.kept.get("engine", {}), "step_time_factor": self.margin}}
        )
        return dict(self.kept) | slower


def _numbers(old: Wish, new: Wish) -> dict[int, int]:
    """The new number of each old GPU that is still there."""
    there = {seat: number for number, seat in enumerate(new.seats)}
    return {number: there[seat] for number, seat in enumerate(old.seats) if seat in there}


def moved(layout: Layout, old: Wish, new: Wish) -> Layout:
    """A layout for the GPUs of one wish, moved to another's GPUs. Instances whose GPUs are not there are left out."""
    number = _numbers(old, new)
    return tuple(
        home._replace(
            groups=tuple(tuple(number[gpu] for gpu in group) for group in home.groups if number.keys() >= set(group))
        )
        for home in layout
    )


def problem_of(wish: Wish) -> Problem:
    """The problem that the search solves. Raises ConfigError for a wish that means nothing, ValueError for an option that a
    model cannot run in, or where no plan is possible."""
    trace = whole_of(wish).whole_trace
    return problem_on(wish, trace.take(np.arange(max(1, round(CHOSEN * len(trace))))))


def whole_of(wish: Wish, system: str = BASE, seed: int = 0) -> Scenario:
    """All requests of a wish on its GPUs, under a system. ``seed``: of how they are dealt out to the models."""
    experiment = wish.experiment([system])
    (point,) = experiment.points
    setup = experiment.setup_of(point)
    limits = (wish.ttft_slo_s,) * len(setup.models)
    return scenario(Run(setup, point.overrides, system, point.load, point.rate_scale, seed, limits))


def problem_on(wish: Wish, chosen: Trace) -> Problem:
    """What is searched by these requests: as they are, faster, and in another mix. Raises as ``problem_of``."""
    whole = whole_of(wish)
    faster = replace(chosen, arrival_s=chosen.arrival_s / FASTER)
    options = tuple(
        tuple(_option(model.id, served.model, precision, tp) for precision, tp in model.options)
        for model, served in zip(wish.models, whole.models, strict=True)
    )
    problem = Problem(
        replace(whole, trace=chosen, models=tuple(_as_seen(served, chosen) for served in whole.models)),
        options,
        (Part(chosen), Part(faster, FASTER_WEIGHT), Part(another_mix(chosen, seed=2), MIXED_WEIGHT)),
        Limits((wish.ttft_slo_s,) * len(options), wish.tpot_slo_s, wish.e2e_slo_s),
        wish.rules,
    )
    if why := impossible(problem):
        raise ValueError(f"no plan: {why}")
    return problem


def _as_seen(served: ServedModel, trace: Trace) -> ServedModel:
    """A model with the rate and the bursts that the trace has of it: nothing is known of later requests."""
    arrival_s = trace.arrival_s[trace.model == trace.models.index(served.id)]
    duration_s = max(1e-9, float(trace.arrival_s[-1]))
    return replace(
        served,
        rate_per_s=max(1, len(arrival_s)) / duration_s,
        rate_variance=rate_variance(arrival_s, WINDOW_S, duration_s),
    )


def _option(id: str, model: ModelSpec, precision: str, tp: int) -> Option:
    try:
        catalog.check_tp(model, tp)
        return Option(catalog.precision_of(precision, model), tp)
    except ValueError as problem:
        raise ValueError(f"--model {id}: {problem}") from None


def plan_document(wish: Wish, layout: Layout) -> dict[str, Any]:
    """A layout as the text of an experiment: what ``run``, ``compare`` and ``size`` take."""
    models, groups = [], {}
    for each, home in zip(wish.models, layout, strict=True):
        precision, tp = each.options[home.option]
        entry: dict[str, Any] = {"id": each.id, "model": each.model, "precision": precision, "tp": tp}
        models.append(entry)
        if home.groups:
            groups[each.id] = [list(group) for group in home.groups]
    workload: dict[str, Any] = {"trace": str(wish.trace.resolve())}
    workload |= {"assign": "share"} if wish.spread else {}
    workload |= {} if wish.requests is None else {"requests": wish.requests}
    limits = {"ttft_s": wish.ttft_slo_s, "tpot_s": wish.tpot_slo_s, "e2e_s": wish.e2e_slo_s}
    return {
        "fineserve": 1,
        "title": f"A plan for {wish.trace.name}",
        "cluster": cluster_of(wish.gpus, wish.gpu),
        "models": model_entries(models, spread=wish.spread),
        "workload": workload,
        "slo": {name: limit_s for name, limit_s in limits.items() if limit_s is not None},
        "systems": [
            {"name": "plan", "title": "Plan", "base": BASE, "placement": {"policy": "pinned", "groups": groups}}
        ],
        "seeds": 1,
        "sweeps": [{"name": "run", "at": {"rate_scale": wish.rate_scale}, "systems": ["plan"]}],
    } | wish.settings


def unseen(wish: Wish, seed: int = 0) -> Trace:
    """The requests that the search does not see. ``seed``: of how they are dealt out to the models."""
    whole = whole_of(wish, seed=seed).whole_trace
    first = max(1, round(CHOSEN * len(whole)))
    if first >= len(whole):
        raise ValueError(f"{wish.trace}: {len(whole)} requests are too few to choose a plan and to judge it; give more")
    rest = whole.take(np.arange(first, len(whole)))
    return replace(rest, arrival_s=rest.arrival_s - rest.arrival_s[0])
