"""How sure a plan is: its shares on time and its number of GPUs, if steps were shorter or longer by the model's error.
``size`` has the same classes of errors, and explains them (``experiment/sizing/sure.py``)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.catalog.model_errors import ErrorClass, model_error
from fineserve_sim.experiment.show.answer import percent
from fineserve_sim.experiment.show.model_error import error_text
from fineserve_sim.experiment.sizing.bisection import cheapest_mix
from fineserve_sim.experiment.sizing.gpu_band import GpuBand
from fineserve_sim.experiment.sizing.sure import class_of
from fineserve_sim.planning.fewest import ask, part_of
from fineserve_sim.planning.find import Budget
from fineserve_sim.planning.gpus import Numbers, named
from fineserve_sim.planning.islands import on_time
from fineserve_sim.planning.judge import on, with_longer_steps
from fineserve_sim.planning.problem import Layout, Problem, residents
from fineserve_sim.planning.search import Best
from fineserve_sim.planning.target import Target
from fineserve_sim.planning.wish import BASE, Wish, moved


@dataclass(frozen=True, slots=True)
class Sure:
    """The band of a plan: the shares of unseen requests on time with steps as slow and as fast as ``error`` says. ``gpus``:
    the band of their number, where the fewest or the cheapest were asked for."""

    error: ErrorClass
    low: float
    high: float
    gpus: GpuBand | MixBand | None = None

    def __str__(self) -> str:
        return f"{100 * self.low:.1f} to {percent(self.high)} with the model's error"

    @property
    def beside_gpus(self) -> str:
        """What is said behind a number of GPUs."""
        return "" if self.gpus is None else f" ({self.gpus} with the model's error)"

    @property
    def why(self) -> str:
        """The model's error in a sentence."""
        return error_text(self.told())

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        error = self.error.of._asdict() | self.error.model_dump(exclude={"of"})
        gpus = {} if self.gpus is None else {"gpus": self.gpus.told()}
        return {"low": self.low, "high": self.high, "error": error} | gpus


def error_of(wish: Wish, layout: Layout) -> ErrorClass:
    """How far the model may be off for this plan."""
    shared = any(len(models) > 1 for models in residents(layout).values())
    return model_error(class_of(wish.experiment([BASE]).setup, shared=shared))


def share_band(problem: Problem, rest: Trace, layout: Layout, error: ErrorClass) -> Sure:
    """The band of the share of ``rest`` that a layout keeps, which is in it."""
    unseen = on(problem, rest)
    ends = [unseen, *(with_longer_steps(unseen, factor) for factor in (error.low, error.high))]
    shares = [float(np.mean(on_time(each, 0, layout))) for each in ends]
    return Sure(error, min(shares), max(shares))


def with_gpus(sure: Sure, wish: Wish, best: Best, target: Target, budget: Budget, prices: Mapping[str, float]) -> Sure:
    """With the band of the GPUs that keep a target."""
    if len(wish.kinds) > 1:
        return replace(sure, gpus=mix_band(wish, best, target, budget, sure.error, prices))
    return replace(sure, gpus=gpu_band(wish, best, target, budget, sure.error))


def gpu_band(wish: Wish, best: Best, target: Target, budget: Budget, error: ErrorClass) -> GpuBand | None:
    """The band of the fewest GPUs, which is in it; each number of GPUs has the part of the budget that it has in ``fewest``. At
    most half as many again and two more are tried. None where the user stops it."""
    count = wish.count
    tried = count + count // 2 + 2

    def holds(gpus: int, factor: float) -> bool:
        return _holds(wish, best, gpus, factor, target, budget)

    try:
        fewest = count
        while fewest > 1 and holds(fewest - 1, error.low):
            fewest -= 1
        most = next((gpus for gpus in range(count, tried + 1) if holds(gpus, error.high)), None)
    except KeyboardInterrupt:
        return None
    return GpuBand(error, fewest, most, tried)


@dataclass(frozen=True, slots=True)
class MixBand:
    """A band of GPUs of several kinds, by kind. ``fewest``: GPUs of the answer that suffice with steps as fast as ``error``
    says. ``most``: GPUs that suffice with steps as slow, the answer's and more; None where not all ``tried`` do."""

    error: ErrorClass
    fewest: Mapping[str, int]
    most: Mapping[str, int] | None
    tried: Mapping[str, int]

    def __str__(self) -> str:
        if self.fewest == self.most:
            return _named(self.most)
        return f"{_named(self.fewest)} to {'over ' * (self.most is None)}{_named(self.most or self.tried)}"

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        error = self.error.of._asdict() | self.error.model_dump(exclude={"of"})
        numbers = {"fewest": self.fewest, "most": self.most, "tried": self.tried}
        return {**numbers, "error": error, "text": str(self)}


def _named(numbers: Mapping[str, int]) -> str:
    return named({gpu: count for gpu, count in numbers.items() if count}, "")


def mix_band(
    wish: Wish, best: Best, target: Target, budget: Budget, error: ErrorClass, prices: Mapping[str, float]
) -> MixBand | None:
    """The band of a mix of kinds, which is in it: the cheapest part of it that would do, and the cheapest with more. At most
    half as many again and one more of each kind are tried. None where the user stops it."""
    own = {str(gpu): count for gpu, count in wish.kinds}
    none, tried = dict.fromkeys(own, 0), {gpu: count + count // 2 + 1 for gpu, count in own.items()}

    def cheapest(least: Mapping[str, int], most: Mapping[str, int], factor: float) -> Mapping[str, int] | None:
        def holds(*steps: int) -> bool:
            numbers = {gpu: least[gpu] + step - 1 for gpu, step in zip(own, steps, strict=True)}
            gpus = {gpu: count for gpu, count in numbers.items() if count}
            return bool(gpus) and _holds(wish, best, gpus, factor, target, budget)

        spans = [most[gpu] - least[gpu] + 1 for gpu in own]
        found = cheapest_mix([prices[gpu] for gpu in own], spans, math.inf, holds)
        return None if found is None else {gpu: least[gpu] + step - 1 for gpu, step in zip(own, found, strict=True)}

    try:
        return MixBand(error, cheapest(none, own, error.low) or own, cheapest(own, tried, error.high), tried)
    except KeyboardInterrupt:
        return None


def _holds(wish: Wish, best: Best, gpus: Numbers, factor: float, target: Target, budget: Budget) -> bool:
    """Whether a plan keeps the target on these GPUs with steps that take ``factor`` times as long. Where they hold the best
    plan, the search starts from it, too. Raises KeyboardInterrupt where the search is stopped."""
    there = with_steps(wish.on(gpus, next(iter(gpus)) if isinstance(gpus, Mapping) else None), factor)
    known = [moved(best.layout, wish, there)] if {*wish.seats} <= {*there.seats} else []
    asked = ask(there, target, part_of(budget, wish.count), known)
    if asked.stopped:
        raise KeyboardInterrupt
    return asked.holds


def with_steps(wish: Wish, factor: float) -> Wish:
    """The wish with steps that take so many times as long."""
    own = wish.settings.get("engine", {}).get("step_time_factor", 1.0)
    return replace(wish, margin=own * factor)
