"""Where a monotone yes-or-no question turns, in as few questions as possible.

Along an axis on which things get easier, the answer turns once from no to yes. Two values that answer differently bracket the
turn; halving the bracket finds it. Common random numbers (the same requests at every value) make the answers of one system
monotone in practice, though no law says so. What is found is a turn, checked on both sides of it. More GPUs may even be worse,
where a policy places more replicas on them: before it is said that nothing holds, some fewer are asked as well. Where these
come to the very same, the rest of the GPUs stays empty, and nothing more is asked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Holds = Callable[[float], bool]
Alike = Callable[[float, float], bool]
"""Whether two values that were asked came to the very same."""

OTHERS = 8
"""At least so many integers below, evenly spread, and fewer than twice as many, are asked where the highest does not hold."""


def first_integer(low: int, high: int, holds: Holds, alike: Alike = lambda some, others: False) -> int | None:
    """The smallest integer from ``low`` to ``high`` at which ``holds``. None when it holds neither at ``high`` nor at those
    asked in between: the highest of these alone where it is ``alike``."""
    if not holds(high):
        stride = max(1, (high - low) // OTHERS)
        between = range(low, high, stride)
        if between and not holds(between[-1]) and alike(between[-1], high):
            return None
        below = next((value for value in between if holds(value)), None)
        if below is None:
            return None
        low, high = max(low, below - stride + 1), below
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return high


def cheapest_pair(
    costs: tuple[float, float],
    most: tuple[int, int],
    below: float,
    holds: Callable[[int, int], bool],
    together: float = math.inf,
) -> tuple[int, int] | None:
    """The cheapest pair of numbers of two things at which ``holds`` and that costs less than ``below``: at least one of each,
    at most so many of each and ``together``. None where there is none.

    More of either is taken to help, so that the pairs that hold lie above a falling staircase. A walk along it meets the
    cheapest: one fewer of the first where a pair holds, one more of the second where it does not. It asks fewer times than
    there are of both.
    """
    best, (first, last) = None, most
    second = 1
    while first and second <= last:
        cost = first * costs[0] + second * costs[1]
        if first + second > together or cost >= below:
            first -= 1
        elif holds(first, second):
            best, below = (first, second), cost
            first -= 1
        else:
            second += 1
    return best


def cheapest_mix(
    costs: Sequence[float], most: Sequence[int], below: float, holds: Callable[..., bool]
) -> tuple[int, ...] | None:
    """The same of any number of things from two on: by the number of the last, one walk for the others."""
    if len(costs) == 2:
        return cheapest_pair((costs[0], costs[1]), (most[0], most[1]), below, holds)
    best = None
    for last in range(1, most[-1] + 1):
        spent = last * costs[-1]
        found = cheapest_mix(costs[:-1], most[:-1], below - spent, lambda *others, last=last: holds(*others, last))
        if found is not None:
            best = (*found, last)
            below = sum(cost * count for cost, count in zip(costs, best, strict=True))
    return best


def easiest_turn(start: float, easier: float, limit: float, precision: float, holds: Holds) -> float | None:
    """The hardest value at which ``holds``, to within a factor of 1 + ``precision``; None when none up to ``limit`` does.

    ``easier`` is the factor of a step towards easier values (above or below 1). The search leaves ``start`` in such steps until
    the answer changes, at most to ``limit`` times ``start`` or its inverse, and then halves the bracket in the logarithm. When
    even the hardest of them holds, that is the answer.
    """
    steps = max(1, math.ceil(math.log(limit) / abs(math.log(easier))))
    value, held = start, holds(start)
    factor = 1 / easier if held else easier
    for _ in range(steps):
        following = value * factor
        if holds(following) != held:
            good, bad = (value, following) if held else (following, value)
            return _halved(good, bad, precision, holds)
        value = following
    return value if held else None


def _halved(good: float, bad: float, precision: float, holds: Holds) -> float:
    while abs(math.log(bad / good)) > math.log1p(precision):
        middle = math.sqrt(good * bad)
        if holds(middle):
            good = middle
        else:
            bad = middle
    return good
