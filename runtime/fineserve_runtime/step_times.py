"""How long a prefill will take on a real engine: a linear model of its steps, fitted to measured ones.

A step that computes p prompt tokens beside d decodes takes ``a + b p + c d`` seconds: the host's floor and one pass
over the weights, the work of a prompt token, and what a decode adds. The three numbers are non-negative least squares
over the steps seen, the latest weighing most (`RecentFit`). What others on the
same device take away is in the measurements, so the controller's slowdown factor stays 1.

Pure: the same rows in the same order give the same predictions, which is what replaying a decision log relies on.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

_MEMORY_STEPS = 256
"""A step seen so many steps ago weighs 1/e of the present one."""

_SUBSETS = [subset for size in (3, 2, 1) for subset in combinations(range(3), size) if subset != (2,)]
"""The third unknown alone explains no step: one without it takes time, whatever noise may say."""

Three = tuple[float, float, float]


class RecentFit:
    """Non-negative least squares of three unknowns over the rows seen, the latest weighing most.

    The optimum is found by looking at each subset of the unknowns (Karush-Kuhn-Tucker: those left out are zero), which is
    exact and needs no iteration.
    """

    def __init__(self) -> None:
        self._normal = [[0.0] * 3 for _ in range(3)]
        self._moment = [0.0] * 3
        self._found: Three | None = (0.0, 0.0, 0.0)  # None: to be found

    def observe(self, row: Three, seconds: float) -> None:
        keep = 1 - 1 / _MEMORY_STEPS
        for i in range(3):
            self._moment[i] = keep * self._moment[i] + row[i] * seconds
            for j in range(3):
                self._normal[i][j] = keep * self._normal[i][j] + row[i] * row[j]
        self._found = None

    def solve(self) -> Three:
        """The seconds of a unit of each; zeros before the first row."""
        if self._found is None:
            self._found = self._least_squares()
        return self._found

    def _least_squares(self) -> Three:
        best, best_gain = (0.0, 0.0, 0.0), 0.0
        for subset in _SUBSETS:
            solved = _solve([[self._normal[i][j] for j in subset] for i in subset], [self._moment[i] for i in subset])
            if solved is None or min(solved) <= 0:
                continue
            gain = sum(value * self._moment[i] for value, i in zip(solved, subset, strict=True))  # explained squares
            if gain > best_gain * (1 + 1e-12):
                found = dict(zip(subset, solved, strict=True))
                best, best_gain = (found.get(0, 0.0), found.get(1, 0.0), found.get(2, 0.0)), gain
        return best


class MeasuredStep(NamedTuple):
    """One engine step: prompt tokens computed in it, sequences that decoded in it, and how long it took."""

    prefill_tokens: int
    decodes: int
    duration_s: float


class StepTimes:
    """Seconds of steps and prefills of one engine whose steps hold at most ``token_budget`` tokens.

    Raises ValueError without rows, or for a row or budget that is not positive.
    """

    def __init__(self, token_budget: int, rows: Iterable[MeasuredStep]) -> None:
        if token_budget < 1:
            raise ValueError(f"token_budget is {token_budget}: a step holds at least one token")
        self._token_budget = token_budget
        self._fit = RecentFit()
        count = 0
        for row in rows:
            self.observe(row)
            count += 1
        if not count:
            raise ValueError("step times need at least one measured step")

    def observe(self, row: MeasuredStep) -> None:
        """Take in one more measured step."""
        if row.prefill_tokens < 0 or row.decodes < 0 or row.duration_s <= 0:
            raise ValueError(f"{row}: a step has no negative tokens and takes a positive time")
        self._fit.observe((1.0, float(row.prefill_tokens), float(row.decodes)), row.duration_s)

    def step_s(self, prefill_tokens: int, decodes: int) -> float:
        base_s, per_token_s, per_decode_s = self.fit()
        return base_s + per_token_s * prefill_tokens + per_decode_s * decodes

    def __call__(self, tokens: int, decoding: int, pairs: int = 0) -> float:
        """Seconds to prefill ``tokens`` prompt tokens in chunks beside ``decoding`` decodes (a ``PrefillLatency``).
        Measured steps do not say what attention to earlier chunks takes, so ``pairs`` counts for nothing."""
        if not tokens:
            return 0.0
        chunk = self._token_budget - decoding
        if chunk <= 0:
            return math.inf
        full, rest = divmod(tokens, chunk)
        return full * self.step_s(chunk, decoding) + (self.step_s(rest, decoding) if rest else 0.0)

    def fit(self) -> Three:
        """Seconds of a step, of a prompt token in it, and of a decode in it."""
        return self._fit.solve()


def _solve(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gauss elimination of a symmetric system of at most three unknowns; None when it is (nearly) singular."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for i in range(size):
        if rows[i][i] <= 1e-9 * matrix[i][i] or rows[i][i] <= 0:
            return None
        for below in range(i + 1, size):
            factor = rows[below][i] / rows[i][i]
            rows[below] = [b - factor * a for a, b in zip(rows[i], rows[below], strict=True)]
    found = [0.0] * size
    for i in reversed(range(size)):
        known = sum(rows[i][j] * found[j] for j in range(i + 1, size))
        found[i] = (rows[i][size] - known) / rows[i][i]
    return found


def read_table(path: Path) -> Mapping[str, tuple[MeasuredStep, ...]]:
    """Measured steps by model. Raises ValueError naming the line that is wrong."""
    rows: dict[str, list[MeasuredStep]] = {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    step = MeasuredStep(int(row["prefill_tokens"]), int(row["decodes"]), float(row["duration_s"]))
                    rows.setdefault(row["model"], []).append(step)
                except (KeyError, TypeError, ValueError):
                    expected = "expected columns model, prefill_tokens, decodes, duration_s"
                    raise ValueError(f"{path}:{number}: {expected}, not {dict(row)}") from None
    except OSError as problem:
        raise ValueError(f"{path}: {problem.strerror}") from None
    return {model: tuple(steps) for model, steps in rows.items()}
