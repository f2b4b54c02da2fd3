"""What is wrong with one run beside another: words that the meanings share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import NamedTuple

import numpy as np

from fineserve_sim.cluster import Fate, RunResult

ULP = 1e-9
"""Times are sums of steps; what is summed first may differ."""

OF_REQUESTS = ("fate", "first_token_s", "finish_s", "cause", "generated_tokens", "preemptions")


class Meaning(NamedTuple):
    """``law`` draws one situation for one of ``systems`` and says what is wrong with it, or None."""

    law: Callable[[Random, str], str | None]
    systems: tuple[str, ...]


def answered(result: RunResult) -> np.ndarray:
    """Requests that were answered in full, as the program tells it."""
    return result.fate == Fate.FINISHED


def fate(result: RunResult, request: int) -> str:
    return Fate(result.fate[request]).name


def lost(better: RunResult, base: RunResult) -> str | None:
    """The first request that was answered in full, and is not any more."""
    for request in np.flatnonzero(answered(base) & ~answered(better)):
        return f"request {request} was FINISHED, and is {fate(better, request)}"
    return None


def later(better: RunResult, base: RunResult) -> str | None:
    """The first request that was answered in full and is not, or later."""
    if problem := lost(better, base):
        return problem
    for name in ("first_token_s", "finish_s"):
        now_s, was_s = getattr(better, name), getattr(base, name)
        for request in np.flatnonzero(answered(base) & (now_s > was_s * (1 + ULP))):
            return f"request {request}: {name} was {was_s[request]}, and is {now_s[request]}"
    return None


def longer(better: RunResult, base: RunResult, *, tolerance: float) -> str | None:
    """Whether the last request ends later by more than this part, though all the same work was done."""
    if not (answered(base).all() and (base.generated_tokens == better.generated_tokens).all()):
        return None
    was_s, now_s = base.finish_s.max(), better.finish_s.max()
    return f"the last request ended at {was_s}, and does at {now_s}" if now_s > was_s * (1 + tolerance) else None


def differing(
    one: RunResult, other: RunResult, of_one: Sequence[int] | None = None, of_other: Sequence[int] | None = None
) -> str | None:
    """The first request that came out otherwise; ``of_one`` and ``of_other`` are the rows that belong together."""
    return next(_differences(one, other, of_one, of_other), None)


def _differences(
    one: RunResult, other: RunResult, of_one: Sequence[int] | None, of_other: Sequence[int] | None
) -> Iterator[str]:
    for name in OF_REQUESTS:
        a, b = getattr(one, name), getattr(other, name)
        a, b = a if of_one is None else a[of_one], b if of_other is None else b[of_other]
        for request in np.flatnonzero(~np.isclose(a, b, rtol=ULP, atol=0.0, equal_nan=True)):
            yield f"request {request}: {name} is {a[request]} here and {b[request]} there"
