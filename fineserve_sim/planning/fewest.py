"""The fewest GPUs, or the kinds and numbers of them that cost least, on which a plan keeps a target.

More GPUs are never worse than fewer, since a plan may leave some empty. So the fewest of one kind are found by bisection, and
the mixes of several kinds by walks along their staircases. Each kind, and each mix of kinds, is searched only as far as it
costs less than the best answer until then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

from fineserve_sim import catalog
from fineserve_sim.experiment.sizing.bisection import cheapest_mix
from fineserve_sim.planning.find import Budget, search
from fineserve_sim.planning.problem import Layout
from fineserve_sim.planning.reach import out_of_reach
from fineserve_sim.planning.search import Best
from fineserve_sim.planning.target import Target
from fineserve_sim.planning.wish import Wish, moved, problem_of

Answer = tuple[Wish, Best]
"""The wish with the GPUs that it takes, and the plan on them."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The outcome of a search on some GPUs. ``why``: why it does not hold, empty where it does. ``best``: None where the models
    do not fit."""

    wish: Wish
    best: Best | None
    why: str = ""

    @property
    def holds(self) -> bool:
        return not self.why

    @property
    def stopped(self) -> bool:
        return self.best is not None and self.best.stopped

    @property
    def answer(self) -> Answer:
        assert self.best is not None
        return self.wish, self.best


def ask(wish: Wish, target: Target, budget: Budget, known: Sequence[Layout] = ()) -> Asked:
    """Whether a plan on exactly these GPUs keeps the target, as far as is searched."""
    try:
        problem = problem_of(wish)
    except ValueError as reason:
        return Asked(wish, None, str(reason))
    slower = "" if wish.margin is None else f", steps x {wish.margin:.2f}"
    best = search(problem, replace(budget, about=f"{wish.cluster}{slower}: "), target, known)
    if target.holds(best.late, problem.lost):
        return Asked(wish, best)
    kept = target.told(best.late, problem.lost)
    return Asked(
        wish, best, f"no plan on {wish.cluster} keeps {target} as far as was searched: the best found keeps {kept}"
    )


def part_of(budget: Budget, gpus: int) -> Budget:
    """The part of the evaluations for each number of GPUs up to ``most``: a bisection's questions, and one more each way for
    the band."""
    return budget.part(gpus.bit_length() + 3)


def fewest(wish: Wish, target: Target, budget: Budget) -> Answer:
    """The smallest part of the wish's GPUs on which a plan keeps the target. Each number of GPUs has an equal part of
    the budget. Raises ValueError where no plan on all GPUs keeps it, at once where none can, and KeyboardInterrupt where the
    search was stopped without one."""
    if why := _hopeless(wish, target):
        raise ValueError(why)
    each = part_of(budget, wish.count)
    asked = ask(wish, target, each)
    if not asked.holds:
        raise KeyboardInterrupt if asked.stopped else ValueError(asked.why)
    return _fewer(asked, target, each)


def _hopeless(wish: Wish, target: Target) -> str | None:
    """Why no number of such GPUs keeps the target, if nothing does. Raises ValueError as ``problem_of``."""
    why = out_of_reach(problem_of(wish), target)
    return why and f"no plan on any number of GPUs: {why}"


def _fewer(asked: Asked, target: Target, each: Budget) -> Answer:
    """The smallest part of GPUs of one kind on which a plan keeps the target, where one on all of them does."""
    wish, answer = asked.wish, asked.answer
    low, high = 1, wish.count
    while low < high and not asked.stopped:
        middle = (low + high) // 2
        asked = ask(wish.on(middle), target, each)
        if asked.holds:
            answer, high = asked.answer, middle
        else:
            low = middle + 1
    return _stopped(answer) if asked.stopped else answer


def _stopped(answer: Answer) -> Answer:
    """The best so far of searches that were stopped."""
    return answer[0], replace(answer[1], stopped=True)


def cheapest(
    wish: Wish, prices: Mapping[str, float], target: Target, budget: Budget, kinds: Sequence[str] = ()
) -> Answer:
    """The GPUs on which the target costs least. Each kind is tried alone. A wish with numbers by kind tries each mix of two
    kinds or more, too; a wish with one number has it of each of ``kinds``. Each kind and each mix has an equal part of the
    budget. Raises ValueError where none keeps the target, with the reason of each kind and of all together; at once where no
    mix can, and as ``problem_of`` where there is none."""
    numbers = wish.gpus if isinstance(wish.gpus, Mapping) else dict.fromkeys(kinds, wish.gpus)
    sizes = range(2, len(numbers) + 1) if isinstance(wish.gpus, Mapping) else range(0)
    mixes = [mix for size in sizes for mix in combinations(numbers, size)]
    if mixes and (why := out_of_reach(problem_of(wish), target)):
        raise ValueError(f"no plan on any mix of these GPUs: {why}")
    found = _Cheapest(wish, numbers, prices, target, budget.part(len(numbers) + len(mixes)))
    try:
        for gpu in numbers:
            found.ask_alone(gpu)
        if mixes and (found.answer is not None or found.ask_all()):
            for mix in mixes:
                found.ask_mixed(mix)
    except KeyboardInterrupt:
        if found.answer is None:
            raise
        return _stopped(found.answer)
    if found.answer is None:
        raise ValueError("; ".join(f"{own}: {why}" for own, why in found.reasons.items()))
    return found.answer


@dataclass
class _Cheapest:
    """A search for the GPUs that cost least, of at most these ``numbers`` by kind. ``answer``: the cheapest so far that keeps
    the target; only what costs less is asked. ``tried``: each with its plan. ``reasons``: why kinds do not keep it.
    ``budget``: of a kind or a mix. Each question raises KeyboardInterrupt where it is stopped."""

    wish: Wish
    numbers: Mapping[str, int]
    prices: Mapping[str, float]
    target: Target
    budget: Budget
    answer: Answer | None = None
    tried: list[Answer] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    @property
    def usd(self) -> float:
        """Dollars an hour of the answer; infinite where there is none."""
        return math.inf if self.answer is None else sum(self.prices[str(gpu)] * n for gpu, n in self.answer[0].kinds)

    def ask_alone(self, gpu: str) -> None:
        """The fewest GPUs of one kind."""
        most = self.numbers[gpu]
        if self.answer is not None:
            most = min(most, math.ceil(self.usd / self.prices[gpu]) - 1)
        if not most:
            return
        wish, each = self._on({gpu: most}), part_of(self.budget, most)
        try:
            why = _hopeless(wish, self.target)
        except ValueError as impossible:
            why = str(impossible)
        if why:
            self.reasons[gpu] = why
            return
        asked = self._ask(wish, each)
        if asked.holds:
            self.answer = _fewer(asked, self.target, each)
            if self.answer[1].stopped:
                raise KeyboardInterrupt

    def ask_all(self) -> bool:
        """Whether all GPUs together keep the target."""
        return self._ask(self.wish, self.budget.part(_most_asked(self.numbers))).holds

    def ask_mixed(self, mix: Sequence[str]) -> None:
        """Mixes with at least one GPU of each of these kinds."""
        most = {gpu: self.numbers[gpu] for gpu in mix}
        each = self.budget.part(_most_asked(most))

        def holds(*counts: int) -> bool:
            return self._ask(self._on(dict(zip(mix, counts, strict=True))), each).holds

        cheapest_mix([self.prices[gpu] for gpu in mix], [*most.values()], self.usd, holds)

    def _on(self, numbers: Mapping[str, int]) -> Wish:
        first, *others = numbers
        if isinstance(self.wish.gpus, int):
            return replace(self.wish, gpu=first).on(numbers[first])
        return self.wish.on(numbers if others else numbers[first], first)

    def _ask(self, wish: Wish, budget: Budget) -> Asked:
        """What these GPUs come to: no less than a part of them. They are the answer where they keep the target."""
        parts = [(best, part) for part, best in self.tried if {*part.seats} <= {*wish.seats}]
        best, part = min(parts, key=lambda found: found[0].loss, default=(None, wish))
        asked = ask(wish, self.target, budget, [] if best is None else [moved(best.layout, part, wish)])
        if asked.best is not None:
            self.tried.append(asked.answer)
        if asked.holds:
            self.answer = asked.answer
        else:
            self.reasons[" + ".join(str(gpu) for gpu, _ in wish.kinds)] = asked.why
        if asked.stopped:
            raise KeyboardInterrupt
        return asked


def _most_asked(numbers: Mapping[str, int]) -> int:
    """How many mixes of so many GPUs are asked at most: a staircase of two kinds for each number of the others."""
    first, second, *others = numbers.values()
    return (first + second) * math.prod(others)


def prices_by_kind(kinds: Sequence[str], given: Mapping[str, float], target: Target | None) -> dict[str, float]:
    """Dollars an hour by kind of GPU. Raises ValueError for a price of another GPU, and where the cheapest of several kinds is
    asked for and one has no price."""
    listed = catalog.list_prices().usd_per_gpu_hour
    known = {gpu: usd for gpu in kinds if (usd := given.get(gpu, given.get("", listed.get(gpu)))) is not None}
    if unused := [gpu for gpu in given if gpu and gpu not in kinds]:
        raise ValueError(f"--price {unused[0]}: no GPU of the plan is {unused[0]}; they are {', '.join(kinds)}")
    if target is not None and len(kinds) > 1 and (unknown := [gpu for gpu in kinds if gpu not in known]):
        raise ValueError(f"--price: the catalog has no price of {unknown[0]}; give one, as in --price {unknown[0]}=2.5")
    return known
