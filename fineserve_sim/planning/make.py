"""From a wish to its answer: the best plan on all GPUs, or the cheapest that keeps a target, judged by unseen requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fineserve_sim.planning.fewest import Answer, cheapest, fewest
from fineserve_sim.planning.find import Budget, best_system, search
from fineserve_sim.planning.gpus import price_of
from fineserve_sim.planning.impossible import check_survives
from fineserve_sim.planning.judge import Judged, judged, warnings
from fineserve_sim.planning.problem import Home
from fineserve_sim.planning.question import Question
from fineserve_sim.planning.search import Best
from fineserve_sim.planning.sure import Sure, error_of, share_band, with_gpus
from fineserve_sim.planning.target import Target
from fineserve_sim.planning.wish import ModelWish, Wish, plan_document, problem_of, unseen


@dataclass(frozen=True, slots=True)
class Found:
    """A plan: the wish with the GPUs that it takes, its layout, and how it does beside the best system on unseen requests.

    * ``promised``: the share that it keeps of the requests by which it is chosen, by their weights
    * ``sure``: the band of the model's own error
    * ``usd_per_hour``: None where the price of a GPU is not known
    """

    wish: Wish
    best: Best
    promised: float
    best_system: str
    judged: tuple[Judged, ...]
    sure: Sure
    target: Target | None = None
    usd_per_hour: float | None = None

    @property
    def homes(self) -> list[tuple[ModelWish, Home]]:
        """Each model with its home."""
        return list(zip(self.wish.models, self.best.layout, strict=True))

    @property
    def document(self) -> dict[str, Any]:
        """The plan as the text of an experiment."""
        return plan_document(self.wish, self.best.layout)

    @property
    def holds(self) -> bool:
        """Whether unseen requests keep the target, if there is one."""
        unseen_row = self.judged[0]
        return self.target is None or self.target.kept(unseen_row.plan, unseen_row.worst)

    @property
    def warnings(self) -> list[str]:
        """What to be careful about, a line each."""
        return warnings(self.judged, self.promised)


def found(asked: Question, budget: Budget) -> Found:
    """Search and judge: the best plan on the GPUs of the wish, or with a target on the fewest that keep it, of several kinds on
    the cheapest. Raises ConfigError and ValueError as ``problem_of``, ``search``, ``fewest`` and ``cheapest`` do."""
    rest = unseen(asked.wish)
    (wish, best), target = _searched(asked, budget), asked.target
    problem = problem_of(wish)
    check_survives(problem, best.layout)
    system, layout = best_system(problem)
    rows = judged(problem, rest, unseen(wish, 1) if wish.spread else None, best.layout, layout)
    sure = share_band(problem, rest, best.layout, error_of(wish, best.layout))
    if target is not None and not best.stopped:
        sure = with_gpus(sure, wish, best, target, budget, asked.prices)
    promised, usd = 1 - best.loss / problem.worth, price_of(wish.gpus, wish.gpu, asked.prices)
    return Found(wish, best, promised, system, tuple(rows), sure, target, usd)


def _searched(asked: Question, budget: Budget) -> Answer:
    wish, target = asked.wish, asked.target
    if target is None:
        return wish, search(problem_of(wish), budget)
    if len(asked.kinds) > 1:
        return cheapest(wish, asked.prices, target, budget, asked.kinds)
    return fewest(wish, target, budget)
