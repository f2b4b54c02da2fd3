"""Shares of the requests that a plan is to keep on time: of all of them, of each model's, or both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.experiment.file.metric_names import EACH
from fineserve_sim.experiment.show.answer import percent, targets_text
from fineserve_sim.experiment.sizing import SizingError, goals

METRIC = "slo_attainment"


@dataclass(frozen=True, slots=True)
class Target:
    """The share of ``all`` requests, and of ``each`` model's requests, each counted by its weight; 0 asks for nothing."""

    all: float = 0.0
    each: float = 0.0

    @property
    def shares(self) -> dict[str, float]:
        """By metric, as ``size`` has them."""
        asked = {METRIC: self.all, EACH + METRIC: self.each}
        return {metric: share for metric, share in asked.items() if share}

    def __str__(self) -> str:
        return targets_text(self.shares)

    def too_late(self, late: Sequence[float], requests: Sequence[float]) -> float:
        """How many requests of single models are late beyond what ``each`` allows. Both are weights by model."""
        pairs = zip(late, requests, strict=True) if self.each else ()
        return sum(missed - (1 - self.each) * of for missed, of in pairs if _kept(missed, of) < self.each)

    def holds(self, late: Sequence[float], requests: Sequence[float]) -> bool:
        """Whether so many late requests by model are few enough."""
        return _kept(sum(late), sum(requests)) >= self.all and not self.too_late(late, requests)

    def kept(self, share: float, worst: float) -> bool:
        """Whether a share of all requests, and that of the worst model, are enough."""
        return share >= self.all and worst >= self.each

    def told(self, late: Sequence[float], requests: Sequence[float]) -> str:
        """What is kept in place of what is asked: ``93.1 %``, or ``90.2 % of the worst model's``."""
        told = [percent(_kept(sum(late), sum(requests)))] if self.all else []
        if self.each:
            worst = min(map(_kept, late, requests))
            told.append(f"{percent(worst)} of the worst model's")
        return ", ".join(told)


def _kept(late: float, requests: float) -> float:
    """The share that is on time, as precise as a share that is given: 0.55 of 100 requests is a little more than 55."""
    return (requests - late) / requests if requests else 1.0


def target_of(texts: Sequence[str] | float | Mapping[str, float] | None) -> Target | None:
    """``["all:0.95,each:all:0.9"]``, ``{"all": 0.95}`` or a share of all requests by itself, as text or number. None asks for
    nothing. Raises SizingError for other moments, and as ``goals``."""
    if texts is None or texts == []:
        return None
    if isinstance(texts, Mapping):
        texts = [f"{moment}:{share}" for moment, share in texts.items()]
    shares = {
        goal.metric: goal.share
        for goal in goals(list(map(_in_full, [str(texts)] if isinstance(texts, int | float) else texts)))
    }
    if other := [metric for metric in shares if metric.removeprefix(EACH) != METRIC]:
        moment = other[0].removesuffix("_attainment").replace("_", ":")
        raise SizingError(
            f"--target {moment}:{shares[other[0]]:g}: a plan keeps all limits together; take all:SHARE or each:all:SHARE"
        )
    return Target(shares.get(METRIC, 0.0), shares.get(EACH + METRIC, 0.0))


def _in_full(text: str) -> str:
    """``0.95`` as ``all:0.95``."""
    return text if ":" in text else f"all:{text}"
