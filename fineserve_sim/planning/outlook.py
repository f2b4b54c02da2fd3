"""What else a plan is asked: other placements on the same requests, twice the load, a lost GPU, and why a model is where it is.

All of it is simulated on the requests that the search never saw, but for one thing. Where else a model could stand is asked of
the requests by which the plan was chosen, since they are the reason for its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.planning.find import SYSTEMS, starts
from fineserve_sim.planning.islands import Simulated, on_time, served
from fineserve_sim.planning.judge import after_a_loss, on
from fineserve_sim.planning.problem import Group, Home, Layout, Member, Problem, residents
from fineserve_sim.policy.placement import tp_groups
from fineserve_sim.policy.placement.queueing import load_of

SITUATIONS = ("unseen requests", "twice the load", "the worst GPU is lost")
OTHER_PLACES = 3
"""So many other places of a model are simulated, those first whose GPUs lose least."""
MOST_MODELS = 24
"""Other places are simulated for so many models at most, those with most requests late."""


@dataclass(frozen=True, slots=True)
class Beside:
    """A placement under the plan's scheduler: its GPUs, and the share of the requests on time in each of ``SITUATIONS``."""

    name: str
    gpus: int
    on_time: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """The best other place of a model that was simulated, and how many more requests are late with it there."""

    gpus: Group
    more_late: int


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a model is where it is.

    ``on_time``: the share of its requests, ``alone`` without neighbours on its GPUs. ``prompts_busy``: the part of an
    instance's time that prompts alone take. ``engine_bytes``: what an instance takes of each of its GPUs beside KV.
    ``elsewhere``: None where no other GPU has room, or where it was not asked.
    """

    neighbours: tuple[str, ...]
    requests: int
    on_time: float
    alone: float
    prompts_busy: float
    engine_bytes: int
    elsewhere: Elsewhere | None
    asked: bool


@dataclass(frozen=True, slots=True)
class Outlook:
    """``beside``: the plan first, then the placements of systems, and one GPU (or TP group) a model. ``reasons``: by model."""

    beside: tuple[Beside, ...]
    reasons: tuple[Reason, ...]


def outlook(problem: Problem, rest: Trace, plan: Layout) -> Outlook:
    """Simulate it. ``rest``: the requests that the search did not see."""
    unseen = on(problem, rest)
    found = [_beside("plan", unseen, plan)]
    found += [_beside(name, unseen, layout) for name, layout in starts(problem) if name in SYSTEMS[:-1]]
    found.append(_beside("one GPU a model", *_dedicated(unseen)))
    return Outlook(tuple(found), tuple(_reasons(problem, unseen, plan)))


def _beside(name: str, problem: Problem, layout: Layout) -> Beside:
    twice = replace(problem.parts[0].trace, arrival_s=problem.parts[0].trace.arrival_s / 2)
    kept = (
        on_time(problem, 0, layout),
        on_time(on(problem, twice), 0, layout),
        after_a_loss(problem, layout),
    )
    usual, doubled, lost = (float(np.mean(each)) for each in kept)
    return Beside(name, len(problem.gpus), (usual, doubled, lost))


def _dedicated(problem: Problem) -> tuple[Problem, Layout]:
    """Each model alone on GPUs of its own, in the option that a GPU holds first, and the cluster that this takes."""
    degrees = [options[option].tp for options, option in zip(problem.options, problem.first, strict=True)]
    ends = list(accumulate(degrees))
    layout = tuple(
        Home(option, (tuple(range(end - degree, end)),))
        for option, degree, end in zip(problem.first, degrees, ends, strict=True)
    )
    largest = max(problem.gpus, key=lambda gpu: gpu.spec.memory_bytes)
    gpus = tuple(replace(largest, id=id) for id in range(ends[-1]))
    return replace(problem, scenario=replace(problem.scenario, gpus=gpus)), layout


def _reasons(problem: Problem, unseen: Problem, plan: Layout) -> Iterator[Reason]:
    kept, trace = on_time(unseen, 0, plan), unseen.parts[0].trace
    chosen = Simulated(on(problem, problem.parts[0].trace))
    late = chosen.by_model(plan)
    asked = set(sorted(range(len(plan)), key=lambda model: -late[model])[:MOST_MODELS])
    here = residents(plan)
    for model, home in enumerate(plan):
        own = trace.model == trace.models.index(problem.models[model].id)
        beside = {other for group in home.groups for gpu in group for other in here[gpu]} - {model}
        demand = problem.demands[model][home.option]
        yield Reason(
            neighbours=tuple(problem.models[other].id for other in sorted(beside)),
            requests=int(own.sum()),
            on_time=_mean(kept[own]),
            alone=_alone(unseen, model, home),
            prompts_busy=_prompts_busy(problem, model, home),
            engine_bytes=demand.engine_bytes,
            elsewhere=_elsewhere(chosen, plan, model) if model in asked else None,
            asked=model in asked,
        )


def _mean(kept: np.ndarray) -> float:
    """The share that is on time; all, where there are none."""
    return float(np.mean(kept)) if len(kept) else 1.0


def _alone(unseen: Problem, model: int, home: Home) -> float:
    """The share of a model's requests that are on time where its instances have their GPUs alone."""
    kept, kinds = [], tuple(unseen.kind_of[group[0]] for group in home.groups)
    for number, group in enumerate(home.groups):
        island = (Member(model, home.option, number, kinds, tuple(range(len(group)))),)
        found = served(unseen, 0, island)
        kept.append(np.zeros(0, dtype=np.bool_) if found is None else found.on_time)
    return _mean(np.concatenate(kept)) if kept else 0.0


def _prompts_busy(problem: Problem, model: int, home: Home) -> float:
    """The part of the time of the first instance that its prompts take, each alone on the GPU."""
    if not home.groups:
        return 0.0
    first = Member(model, home.option, 0, tuple(problem.kind_of[group[0]] for group in home.groups), ())
    load = load_of(problem.demands[model][home.option].on(first.kind), 1 / problem.share(first))
    return load.rate_per_s * load.work_s


def _elsewhere(chosen: Simulated, plan: Layout, model: int) -> Elsewhere | None:
    """The best of a few other places for the first instance of a model."""
    problem, now = chosen.problem, chosen.loss(plan)
    found = []
    for group in _other_groups(chosen, plan, model):
        moved = list(plan)
        moved[model] = plan[model]._replace(groups=(group, *plan[model].groups[1:]))
        if problem.allows(tuple(moved)):
            found.append(Elsewhere(group, round(chosen.loss(tuple(moved)) - now)))
        if len(found) == OTHER_PLACES:
            break
    return min(found, key=lambda place: place.more_late, default=None)


def _other_groups(chosen: Simulated, plan: Layout, model: int) -> Sequence[Group]:
    """Groups of GPUs of the same size on one node, those first that lose least."""
    home, losses = plan[model], chosen.by_gpu(plan)
    if not home.groups:
        return ()
    every = tp_groups(chosen.problem.slots, len(home.groups[0]))
    free = [group for group in every if not any(set(group) & set(own) for own in home.groups)]
    return sorted(free, key=lambda group: sum(losses.get(gpu, 0.0) for gpu in group))
