"""The cost of a layout in late requests, found by simulating one island at a time.

Under a static placement, engines touch each other on their GPUs alone, and the turns of a model's instances say which request
goes to which instance before anything runs (``cluster/components.py``). So the engines that share GPUs, an *island*, can be
simulated by themselves: the late requests of a layout are the sum over its islands. A search changes one or two islands at a
time and meets most islands again, so each is simulated once.

An island's key is what its result depends on: the kind of its GPUs, the model, option and share of the requests of each engine,
and which engines share GPUs. Two islands with equal keys are the same island.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from fineserve_traces import Trace
from numpy.typing import NDArray

from fineserve_sim.cluster import Fate, RunResult, Scenario, ScenarioError
from fineserve_sim.cluster.compose.models import compose
from fineserve_sim.cluster.compose.place import Placed
from fineserve_sim.cluster.run import Run
from fineserve_sim.cluster.scenario import Floats, Ints
from fineserve_sim.cluster.sharing.domain import connected
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.planning.problem import Group, Layout, Limits, Member, Problem
from fineserve_sim.policy.interfaces import Instance, Placement

Bools = NDArray[np.bool_]


Island = tuple[Member, ...]


class Place(NamedTuple):
    """An island and the GPUs that it is on."""

    island: Island
    gpus: Group


def places_of(problem: Problem, layout: Layout) -> list[Place]:
    """The islands of a layout. An island's GPUs are of one kind, since each engine's are."""
    engines = [
        Member(model, home.option, number, tuple(problem.kind_of[group[0]] for group in home.groups), group)
        for model, home in enumerate(layout)
        for number, group in enumerate(home.groups)
    ]
    found = []
    for numbers in connected({number: engine.gpus for number, engine in enumerate(engines)}):
        members = [engines[number] for number in numbers]
        gpus = tuple(sorted({gpu for member in members for gpu in member.gpus}))
        local = {gpu: place for place, gpu in enumerate(gpus)}
        found.append(
            Place(tuple(sorted(each._replace(gpus=tuple(local[gpu] for gpu in each.gpus)) for each in members)), gpus)
        )
    return found


class Served(NamedTuple):
    """The requests of an island: their rows in the trace of a part, the member of each, and which were on time."""

    rows: Ints
    member: Ints
    on_time: Bools


def served(problem: Problem, part: int, island: Island, share: float = 1.0) -> Served | None:
    """The requests of an island in a part, or in its first ``share``; None where the engines do not fit their GPUs."""
    trace = problem.parts[part].trace
    ids = [f"{problem.models[each.model].id}#{each.number}" for each in island]
    member_of = np.full(len(trace), -1, dtype=np.int64)
    for number, each in enumerate(island):
        member_of[problem.requests_of(part, each)] = number
    rows = np.flatnonzero(member_of[: int(share * len(trace))] >= 0)
    if not len(rows):
        return Served(rows, rows, np.zeros(0, dtype=np.bool_))
    own = replace(trace.take(rows), model=member_of[rows].astype(np.int32), models=tuple(ids))
    scenario, placed = _alone(problem, island, ids)
    scenario = replace(scenario, trace=own)
    try:
        run = Run(scenario, compose(scenario, placed))
    except (ScenarioError, ValueError):
        return None
    run.to_the_end()
    ttft_s = np.array([problem.limits.ttft_s[each.model] for each in island])[own.model]
    return Served(rows, member_of[rows], kept_of(own, run.result(), ttft_s, problem.limits))


def _alone(problem: Problem, island: Island, ids: Sequence[str]) -> tuple[Scenario, Placed]:
    """A cluster of the island's GPUs and engines, each a model of its own; the requests are still all models'."""
    base = problem.scenario
    models = tuple(
        replace(served, id=id, rate_per_s=served.rate_per_s * problem.share(each))
        for id, each in zip(ids, island, strict=True)
        for served in [problem.served(each.model, each.option)]
    )
    own = next(gpu for gpu in base.gpus if gpu.spec == problem.kinds[island[0].kind])
    gpus = tuple(replace(own, id=id, node=0) for id in range(1 + max(max(each.gpus) for each in island)))
    demands = {
        served.id: replace(
            problem.demands[each.model][each.option].on(each.kind), id=served.id, rate_per_s=served.rate_per_s
        )
        for served, each in zip(models, island, strict=True)
    }
    instances = tuple(
        Instance(served.id, 0, each.gpus, served.rate_per_s, demands[served.id].engine_bytes)
        for served, each in zip(models, island, strict=True)
    )
    return replace(base, models=models, gpus=gpus, sample_s=0.0), (Placement(instances), demands)


def kept_of(trace: Trace, result: RunResult, ttft_s: Floats, limits: Limits) -> Bools:
    """Which requests kept all limits; ``ttft_s`` is the TTFT limit of each."""
    kept: Bools = (result.fate == Fate.FINISHED) & (result.first_token_s - trace.arrival_s <= ttft_s)
    if limits.tpot_s is not None:
        later = np.maximum(1, trace.output_tokens - 1)
        kept &= (result.finish_s - result.first_token_s) / later <= limits.tpot_s
    if limits.e2e_s is not None:
        kept &= result.finish_s - trace.arrival_s <= limits.e2e_s
    return kept


def late_requests(problem: Problem, part: int, island: Island, share: float = 1.0) -> tuple[int, ...] | None:
    """How many requests of each member miss a limit in a part, or in its first ``share``; None where the engines do not fit
    their GPUs."""
    found = served(problem, part, island, share)
    if found is None:
        return None
    return tuple(np.bincount(found.member[~found.on_time], minlength=len(island)).tolist())


def on_time(problem: Problem, part: int, layout: Layout) -> Bools:
    """Which requests of a part a layout keeps on time; none of a model without GPU. Raises ValueError if it does not fit."""
    kept = np.zeros(len(problem.parts[part].trace), dtype=np.bool_)
    for place in places_of(problem, layout):
        found = served(problem, part, place.island)
        if found is None:
            raise ValueError("the engines of the layout do not fit their GPUs")
        kept[found.rows] = found.on_time
    return kept


@dataclass(frozen=True, slots=True)
class Losses:
    """The cost of each member of an island: late requests, by their weights. ``fits``: whether the engines fit at all.
    ``whole``: whether all requests were simulated; else it costs this much at least."""

    by_member: tuple[float, ...]
    fits: bool = True
    whole: bool = True

    @property
    def sum(self) -> float:
        return sum(self.by_member)


@dataclass(frozen=True, slots=True)
class Task:
    """Some islands to simulate, as an executor takes them."""

    problem: Problem
    islands: Mapping[Island, float]

    def __call__(self, out: Path, tell: object) -> dict[Island, Losses]:
        return {island: losses(self.problem, island, limit) for island, limit in self.islands.items()}

    def packed(self) -> Task:
        return self


FIRST = 0.25
"""The share of each part that is simulated first: what is too late there is not simulated further."""


def losses(problem: Problem, island: Island, limit: float = math.inf) -> Losses:
    """The losses of one island over all parts, or at least ``limit`` of them."""
    for share in (FIRST, 1.0) if limit < math.inf else (1.0,):
        total = np.zeros(len(island))
        for number, part in enumerate(problem.parts):
            late = late_requests(problem, number, island, share)
            if late is None:
                return Losses(tuple(problem.lost[each.model] * problem.share(each) for each in island), fits=False)
            total += part.weight * np.array(late)
            if share < 1 and total.sum() >= limit:
                return Losses(tuple(total.tolist()), whole=False)
    return Losses(tuple(total.tolist()))


Asked = tuple[Island, float]
"""An island, and the limit as far as which its losses are asked for."""


class Kept(Protocol):
    """Losses that an earlier search found."""

    def get(self, asked: Asked) -> Losses | None: ...

    def add(self, found: Mapping[Asked, Losses]) -> None: ...


@dataclass
class Simulated:
    """The losses of islands, each simulated once, by ``executor`` or in this process, if they are not ``kept``. ``runs`` counts
    both."""

    problem: Problem
    executor: Executor | None = None
    kept: Kept | None = None
    known: dict[Island, Losses] = field(default_factory=dict)
    runs: int = 0

    def of(self, island: Island) -> Losses:
        """All that an island costs."""
        self.ensure({island: math.inf})
        return self.known[island]

    def is_known(self, island: Island, limit: float) -> bool:
        """Whether its losses are known as far as ``limit``."""
        found = self.known.get(island)
        return found is not None and (found.whole or found.sum >= limit)

    def ensure(self, islands: Mapping[Island, float]) -> None:
        """Know the losses of islands, each as far as its limit; as many at a time are simulated as there are workers."""
        new = {island: limit for island, limit in islands.items() if not self.is_known(island, limit)}
        self.runs += len(new)
        if self.kept is not None:
            found = {asked: losses for asked in new.items() if (losses := self.kept.get(asked)) is not None}
            self.known |= {island: losses for (island, _), losses in found.items()}
            new = {island: limit for island, limit in new.items() if (island, limit) not in found}
        self._simulate(new)
        if self.kept is not None and new:
            self.kept.add({(island, limit): self.known[island] for island, limit in new.items()})

    def _simulate(self, new: Mapping[Island, float]) -> None:
        if self.executor is None or self.executor.workers == 1 or len(new) < 2:
            self.known |= {island: losses(self.problem, island, limit) for island, limit in new.items()}
            return
        workers = min(self.executor.workers, len(new))
        tasks = [Task(self.problem, dict(islice(new.items(), number, None, workers))) for number in range(workers)]
        for _, losses_of in self.executor.each(tasks, Path(), lambda task, share: None):
            self.known |= losses_of

    def loss(self, layout: Layout) -> float:
        """The cost of a layout: late requests and unserved models. Infinite where it does not fit."""
        places = places_of(self.problem, layout)
        self.ensure({place.island: math.inf for place in places})
        found = [self.known[place.island] for place in places]
        if not all(each.fits for each in found):
            return math.inf
        return sum(self.problem.unserved(layout)) + sum(each.sum for each in found)

    def by_gpu(self, layout: Layout) -> Mapping[int, float]:
        """The cost of each GPU's island; GPUs without engines cost nothing."""
        return {gpu: self.of(place.island).sum for place in places_of(self.problem, layout) for gpu in place.gpus}

    def by_model(self, layout: Layout) -> Sequence[float]:
        """The cost of each model."""
        total = self.problem.unserved(layout)
        for place in places_of(self.problem, layout):
            for member, loss in zip(place.island, self.of(place.island).by_member, strict=True):
                total[member.model] += loss
        return total
