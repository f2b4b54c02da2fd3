"""One search for a problem: its starts, its bound, its budget and its end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from fineserve_sim.cluster import ScenarioError, simulate
from fineserve_sim.cluster.compose.facts import demands_of
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.planning.by_rules import layout_by_rules
from fineserve_sim.planning.islands import Simulated
from fineserve_sim.planning.problem import Layout, Problem, Rules
from fineserve_sim.planning.search import Best, Search, layout_of
from fineserve_sim.planning.store import Store
from fineserve_sim.planning.target import Target
from fineserve_sim.policy.interfaces import ModelDemand
from fineserve_sim.systems import load_systems

SECONDS = 60.0
"""How long a search takes where nothing else is said."""

SYSTEMS = ("fineserve", "prism", "muxserve++", "s-partition", "static*", "dedicated")
"""Systems of papers, with which a plan is compared."""

STARTS = ("balanced", *SYSTEMS)
"""Systems whose placements a search starts from."""


@dataclass(frozen=True, slots=True)
class Told:
    """How far a search is: shares of the requests by which it chooses that the best plan keeps, and that any could. ``about``:
    what is searched, where there are several searches."""

    best: Best
    share: float
    bound: float
    elapsed_s: float
    about: str = ""


@dataclass(frozen=True)
class Budget:
    """What searches may take: so many simulated islands, so many seconds, or both, whichever ends first. ``path`` keeps what
    was simulated, so that the same search goes on from there. ``tell`` hears of each better plan."""

    evaluations: int | None = None
    seconds: float | None = None
    seed: int = 0
    path: Path | None = None
    executor: Executor | None = None
    tell: Callable[[Told], None] = lambda told: None
    about: str = ""

    def part(self, of: float) -> Budget:
        """One of so many equal parts."""
        return replace(
            self,
            evaluations=None if self.evaluations is None else max(1, int(self.evaluations // of)),
            seconds=None if self.seconds is None else self.seconds / of,
        )

    def simulated(self, problem: Problem) -> Simulated:
        """Islands of a problem, with those that were simulated before."""
        return Simulated(problem, self.executor, Store(self.path, problem) if self.path else None)


def starts(problem: Problem) -> Iterator[tuple[str, Layout]]:
    """Where systems place the models, by system, worked out one after the other; one that cannot is left out. Systems know no
    rules: where there are some, a placement that keeps them comes last."""
    models = tuple(problem.served(model, option) for model, option in enumerate(problem.first))
    for name in STARTS:
        with suppress(ScenarioError):
            asked = replace(problem.scenario, models=models, system=load_systems()[name])
            placement, _ = place(asked, demands_of(asked))
            yield name, layout_of(problem, placement)
    if problem.rules != Rules():
        yield "by rules", layout_by_rules(problem)


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


def search(problem: Problem, budget: Budget, target: Target | None = None, known: Sequence[Layout] = ()) -> Best:
    """The best layout that is found within the budget, from ``known`` layouts and ``starts`` on. It ends early with a layout
    that keeps the ``target``, or where the bound says that none can. Without seconds in the budget the answer is the same on
    every machine. Ctrl-C ends it with the best so far. Raises ValueError where no start fits."""
    began_s = time.monotonic()
    simulated = budget.simulated(problem)
    own = Search(problem, simulated, budget.seed, target)
    requests = len(problem.parts[0].trace)
    bound = most_on_time(problem) / requests
    hopeless = (
        target is not None and len(problem.kinds) == 1 and (1 - bound) * requests > (1 - target.all) * problem.worth
    )
    most_s, most_runs = budget.seconds or math.inf, budget.evaluations or math.inf
    shown: Best | None = None
    try:
        for best in own.improve(chain(known, (layout for _, layout in starts(problem)))):
            elapsed_s = time.monotonic() - began_s
            if best is not shown:
                budget.tell(Told(best, 1 - best.loss / problem.worth, bound, elapsed_s, budget.about))
                shown = best
            enough = not best.loss if target is None else target.holds(best.late, problem.lost)
            if enough or hopeless or simulated.runs >= most_runs or elapsed_s >= most_s:
                break
    except KeyboardInterrupt:
        if own.best is None:
            raise
        return replace(own.best, stopped=True)
    assert own.best is not None
    return own.best


def best_system(problem: Problem) -> tuple[str, Layout]:
    """The system whose placement is best on the requests of the search, and that placement."""
    by_system, simulated = dict(starts(problem)), Simulated(problem)
    name = min((name for name in by_system if name in SYSTEMS), key=lambda name: simulated.loss(by_system[name]))
    return name, by_system[name]
