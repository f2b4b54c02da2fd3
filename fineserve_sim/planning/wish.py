"""What a user asks for, the problem that it makes, and one search for it.

The search sees the first part of a trace (``CHOSEN``), as it is and a fifth faster. A plan that holds at exactly the load of
the past alone is of no use. What is reported comes from the rest of the trace, where the plan stands beside the systems of the
papers, all of them on the same GPUs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from fineserve_traces import Trace

from fineserve_sim import catalog
from fineserve_sim.catalog import ModelSpec
from fineserve_sim.cluster import Scenario, ScenarioError, ServedModel, simulate
from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.experiment import Experiment, experiment_for_trace
from fineserve_sim.experiment.file.comparison import model_entries
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.planning.islands import Simulated
from fineserve_sim.planning.problem import Layout, Limits, Option, Part, Problem, Rules, another_mix, impossible
from fineserve_sim.planning.search import Best, Search, layout_of
from fineserve_sim.planning.store import Store
from fineserve_sim.policy.interfaces import ModelDemand
from fineserve_sim.systems import load_systems

CHOSEN = 2 / 3
"""The share of the requests by which a plan is chosen; the others judge it."""

FASTER, FASTER_WEIGHT = 1.2, 0.5
"""The same requests so many times as fast count, too, each late one half."""

MIXED_WEIGHT = 0.5
"""So do the same requests in another mix of models: what models get of a trace drifts."""

SECONDS = 60.0
"""How long a search takes where nothing else is said."""

BASE = "fineserve"
"""The system whose scheduler, memory and sharing a plan has."""

SYSTEMS = ("fineserve", "prism", "muxserve++", "s-partition", "static*", "dedicated")
"""Systems of papers, with which a plan is compared."""

STARTS = ("balanced", *SYSTEMS)
"""Systems whose placements a search starts from."""


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
    """What a plan is asked for. ``load``: the plan is made for this many times the rate of the trace. ``spread``: requests are
    dealt out, evenly or by shares. ``margin``: steps take so many times as long as predicted. ``kept``: keys of a file that
    the plan has, too (``folder``, ``engine``, ``runtime``)."""

    trace: Path
    models: tuple[ModelWish, ...]
    gpus: int
    ttft_slo_s: float
    gpu: str | Mapping[str, Any] = "h100-sxm"
    tpot_slo_s: float | None = None
    e2e_slo_s: float | None = None
    rate_scale: float = 1.0
    load: float = 1.0
    spread: bool | Mapping[str, float] = False
    margin: float | None = None
    requests: int | None = None
    rules: Rules = field(default_factory=Rules)
    kept: Mapping[str, Any] = field(default_factory=dict)

    def experiment(self, systems: Sequence[Any], **changed: Any) -> Experiment:
        """This wish as an experiment on ``systems``, each model in its last option, the smallest one. Raises ConfigError."""
        entries = [
            {"id": each.id, "model": each.model, "precision": each.options[-1][0], "tp": each.options[-1][1]}
            for each in self.models
        ]
        return experiment_for_trace(
            self.trace,
            systems,
            model_entries(entries, spread=self.spread),
            gpu=self.gpu,
            count=self.gpus,
            ttft_slo_s=self.ttft_slo_s,
            tpot_slo_s=self.tpot_slo_s,
            e2e_slo_s=self.e2e_slo_s,
            rate_scale=self.rate_scale * self.load,
            requests=self.requests,
            overrides=[(key, json.dumps(value)) for key, value in self.settings.items() if key != "runtime"],
            **changed,
        )

    @property
    def settings(self) -> dict[str, Any]:
        """What is kept of a file, with the margin in the settings of engines."""
        slower = (
            {} if self.margin is None else {"engine": {**self.kept.get("engine", {}), "step_time_factor": self.margin}}
        )
        return dict(self.kept) | slower


def problem_of(wish: Wish) -> Problem:
    """What the search solves. Raises ConfigError for a wish that means nothing, ValueError for an option that a model cannot
    run in, or where no plan is possible."""
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
    """A model with the rate that the trace has of it: nothing is known of later requests."""
    requests = max(1, int(np.count_nonzero(trace.model == trace.models.index(served.id))))
    return replace(served, rate_per_s=requests / max(1e-9, float(trace.arrival_s[-1])))


def _option(id: str, model: ModelSpec, precision: str, tp: int) -> Option:
    try:
        catalog.check_tp(model, tp)
        return Option(catalog.precision_of(precision, model), tp)
    except ValueError as problem:
        raise ValueError(f"--model {id}: {problem}") from None


def starts(problem: Problem) -> Iterator[tuple[str, Layout]]:
    """Where systems place the models, by system, worked out one after the other; one that cannot is left out."""
    models = tuple(problem.served(model, option) for model, option in enumerate(problem.first))
    for name in STARTS:
        with suppress(ScenarioError):
            asked = replace(problem.scenario, models=models, system=load_systems()[name])
            placement, _ = place(asked, demands_of(asked))
            yield name, layout_of(problem, placement)


def most_on_time(problem: Problem) -> int:
    """How many requests of the first part can be on time at all, by the clairvoyant bound, each model in its fastest option."""
    models = tuple(problem.served(model, _fastest(demands)) for model, demands in enumerate(problem.demands))
    arrived = problem.parts[0].trace
    result = simulate(replace(problem.scenario, models=models, trace=arrived, system=load_systems()["clairvoyant"]))
    limits_s = np.array([problem.limits.ttft_s[problem.number_of[name]] for name in arrived.models])[arrived.model]
    return int(np.count_nonzero(result.first_token_s - arrived.arrival_s <= limits_s))


def _fastest(demands: Sequence[ModelDemand]) -> int:
    """The option that computes most prompts a second on each of its GPUs."""

    def gpu_s(option: int) -> float:
        return min(point.ttft_s / point.batch for point in demands[option].profile) * demands[option].tp

    return min(range(len(demands)), key=gpu_s)


@dataclass(frozen=True, slots=True)
class Told:
    """How far a search is: shares of the requests by which it chooses that the best plan keeps, and that any could."""

    best: Best
    share: float
    bound: float
    elapsed_s: float


def search(
    problem: Problem,
    executor: Executor | None = None,
    *,
    evaluations: int | None = None,
    seconds: float | None = None,
    enough: float = 1.0,
    seed: int = 0,
    tell: Callable[[Told], None] = lambda told: None,
    path: Path | None = None,
) -> Best:
    """The best layout that is found with so many simulated islands, or in so many seconds. The search ends early with a layout
    that keeps ``enough``, a share of the requests by their weights. Without ``seconds`` the answer is the same on every
    machine. Ctrl-C ends it with the best so far; ``path`` keeps what was simulated. Raises ValueError where no start fits."""
    began_s = time.monotonic()
    simulated = Simulated(problem, executor, Store(path, problem) if path else None)
    own = Search(problem, simulated, seed)
    bound = most_on_time(problem) / len(problem.parts[0].trace)
    shown: Best | None = None
    try:
        for best in own.improve(layout for _, layout in starts(problem)):
            elapsed_s = time.monotonic() - began_s
            if best is not shown:
                tell(Told(best, 1 - best.loss / problem.worth, bound, elapsed_s))
                shown = best
            spent = evaluations is not None and simulated.runs >= evaluations
            if spent or (seconds is not None and elapsed_s >= seconds) or best.loss <= (1 - enough) * problem.worth:
                break
    except KeyboardInterrupt:
        if own.best is None:
            raise
        return replace(own.best, stopped=True)
    assert own.best is not None
    return own.best


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
        "cluster": {"gpu": wish.gpu, "count": wish.gpus},
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
