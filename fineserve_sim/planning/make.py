"""From a wish to its answer: the best plan on all GPUs, or the cheapest that keeps a target, judged by unseen requests.

More GPUs are never worse than fewer (a plan may leave some empty), so the fewest are found by bisection. Where several types
of GPU are given, each is searched with so many GPUs at most as cost less than the best answer until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fineserve_sim import catalog
from fineserve_sim.experiment.run.executor import Executor
from fineserve_sim.planning.islands import Simulated
from fineserve_sim.planning.judge import Judged, judged
from fineserve_sim.planning.problem import Home, Layout, Problem
from fineserve_sim.planning.reach import out_of_reach
from fineserve_sim.planning.search import Best
from fineserve_sim.planning.wish import (
    SECONDS,
    SYSTEMS,
    ModelWish,
    Told,
    Wish,
    model_wish,
    most_on_time,
    plan_document,
    problem_of,
    rules_of,
    search,
    starts,
    unseen,
)

__all__ = [
    "SECONDS",
    "Found",
    "ModelWish",
    "Told",
    "Wish",
    "best_system",
    "cheapest",
    "fewest",
    "found",
    "model_wish",
    "most_on_time",
    "plan_document",
    "prices_by_type",
    "problem_of",
    "rules_of",
    "search",
    "starts",
    "unseen",
]


def fewest(
    wish: Wish,
    target: float,
    executor: Executor | None = None,
    *,
    evaluations: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    tell: Callable[[Told], None] = lambda told: None,
    path: Path | None = None,
) -> tuple[Wish, Best]:
    """The wish with the fewest GPUs, at most its own, on which a plan keeps the ``target``, and that plan. The number is found
    by bisection; each number of GPUs has an equal part of the budget. Raises ValueError where no plan on all GPUs keeps it,
    at once where none can."""
    if why := out_of_reach(problem_of(wish), target):
        raise ValueError(f"no plan on any number of GPUs: {why}")
    steps = wish.gpus.bit_length() + 1
    searched = partial(
        search,
        executor=executor,
        evaluations=None if evaluations is None else max(1, evaluations // steps),
        seconds=None if seconds is None else seconds / steps,
        enough=target,
        seed=seed,
        tell=tell,
        path=path,
    )
    found: tuple[Wish, Best] | None = None
    low, high, tried = 1, wish.gpus, wish.gpus
    while low <= high:
        asked = replace(wish, gpus=tried)
        best = _best(asked, searched)
        if best is not None and best.loss <= (1 - target) * problem_of(asked).worth:
            found, high = (asked, best), tried - 1
        elif best is not None and best.stopped:
            break
        elif found is None:
            raise ValueError(f"no plan on {wish.gpus} GPUs keeps {100 * target:g} % as far as was searched")
        else:
            low = tried + 1
        tried = (low + high) // 2
        if best is not None and best.stopped:
            break
    if found is None:
        raise KeyboardInterrupt
    return found


def cheapest(
    wish: Wish,
    prices: Mapping[str, float],
    target: float,
    executor: Executor | None = None,
    *,
    evaluations: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    tell: Callable[[Told], None] = lambda told: None,
    path: Path | None = None,
) -> tuple[Wish, Best]:
    """The wish with the type of GPU on which the ``target`` costs least, the fewest of them, and the plan. All GPUs are of one
    type. ``prices``: dollars an hour by GPU, each type with an equal part of the budget. Raises ValueError where none keeps the
    target, with the reason of each."""
    answer: tuple[Wish, Best] | None = None
    least_usd, reasons = math.inf, []
    for gpu, usd in prices.items():
        affordable = wish.gpus if answer is None else min(wish.gpus, math.ceil(least_usd / usd) - 1)
        if affordable < 1:
            continue
        try:
            found = fewest(
                replace(wish, gpu=gpu, gpus=affordable),
                target,
                executor,
                evaluations=None if evaluations is None else max(1, evaluations // len(prices)),
                seconds=None if seconds is None else seconds / len(prices),
                seed=seed,
                tell=tell,
                path=path,
            )
        except ValueError as problem:
            reasons.append(f"{gpu}: {problem}")
            continue
        answer, least_usd = found, found[0].gpus * usd
        if found[1].stopped:
            break
    if answer is None:
        raise ValueError("; ".join(reasons))
    return answer


def prices_by_type(types: Sequence[str], given: Mapping[str, float], target: float | None) -> dict[str, float]:
    """Dollars an hour by type of GPU. Raises ValueError for several types without a target, or one of them without a price."""
    if len(types) > 1 and target is None:
        raise ValueError(
            "--gpu: of several types of GPU the cheapest is chosen, which needs --target, the share to keep"
        )
    listed = catalog.list_prices().usd_per_gpu_hour
    known = {gpu: usd for gpu in types if (usd := given.get(gpu, given.get("", listed.get(gpu)))) is not None}
    if len(types) > 1 and (unknown := [gpu for gpu in types if gpu not in known]):
        raise ValueError(
            f"--gpu {unknown[0]}: the catalog has no price of it; give one, as in --price {unknown[0]}=2.5"
        )
    return known


def _best(wish: Wish, searched: Callable[[Problem], Best]) -> Best | None:
    """The best plan on exactly these GPUs; None where they have too little memory."""
    try:
        problem = problem_of(wish)
    except ValueError:
        return None
    return searched(problem)


def best_system(problem: Problem) -> tuple[str, Layout]:
    """The system whose placement is best on the requests of the search, and that placement."""
    by_system, simulated = dict(starts(problem)), Simulated(problem)
    name = min((name for name in by_system if name in SYSTEMS), key=lambda name: simulated.loss(by_system[name]))
    return name, by_system[name]


@dataclass(frozen=True, slots=True)
class Found:
    """A plan: the wish with the GPUs that it takes, its layout, and how it does beside the best system on unseen requests.
    ``promised``: the share that it keeps of the requests by which it is chosen, by their weights."""

    wish: Wish
    best: Best
    promised: float
    best_system: str
    judged: tuple[Judged, ...]

    @property
    def homes(self) -> list[tuple[ModelWish, Home]]:
        """Each model with its home."""
        return list(zip(self.wish.models, self.best.layout, strict=True))


def found(
    wish: Wish,
    target: float | None = None,
    executor: Executor | None = None,
    *,
    evaluations: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    tell: Callable[[Told], None] = lambda told: None,
    path: Path | None = None,
    prices: Mapping[str, float] | None = None,
) -> Found:
    """Search and judge: the best plan on the GPUs of the wish, or with a ``target`` on the fewest that keep it, of several
    types with ``prices`` on the cheapest. Raises ConfigError and ValueError as ``problem_of``, ``search``, ``fewest`` and
    ``cheapest`` do."""
    budget: dict[str, Any] = {"evaluations": evaluations, "seconds": seconds, "seed": seed, "tell": tell, "path": path}
    if target is None:
        best = search(problem_of(wish), executor, **budget)
    elif prices is not None and len(prices) > 1:
        wish, best = cheapest(wish, prices, target, executor, **budget)
    else:
        wish, best = fewest(wish, target, executor, **budget)
    problem = problem_of(wish)
    if exposed := [problem.models[model].id for model in problem.exposed(best.layout)]:
        raise ValueError(
            f"no plan survives the loss of a {problem.rules.survives}, as far as was searched: "
            f"one takes all of {', '.join(exposed)}"
        )
    system, layout = best_system(problem)
    rows = judged(problem, unseen(wish), unseen(wish, 1) if wish.spread else None, best.layout, layout)
    return Found(wish, best, 1 - best.loss / problem.worth, system, tuple(rows))
