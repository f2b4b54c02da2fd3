"""Requests drawn while a run reads them: the same, to the last bit, however many are there at a time.

Each model has random numbers of its own for its arrivals and for its lengths, so both can be drawn on and on. A window of time
holds what all models have in it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from fineserve_traces.schema import FloatArray, IntArray, Trace

ROWS = 32768
"""Requests of a window, more or less."""

NextLengths = Callable[[int], tuple[IntArray, IntArray]]
"""The next so many (prompt_tokens, output_tokens), int64 (n,) each."""


class Draw(NamedTuple):
    """The requests of ``model``. ``arrivals`` begins anew with all its arrivals in order, some at a time, float64 seconds;
    ``lengths`` with the lengths that go with them. Both are functions that pickle takes."""

    model: str
    arrivals: Callable[[], Iterator[FloatArray]]
    lengths: Callable[[], NextLengths]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The first ``requests`` of all ``draws`` on one clock that runs ``faster``, in arrival order (ties: in that of the draws).
    ``rate_per_s``: of all draws, about, by which windows are long. A ``Requests``."""

    draws: tuple[Draw, ...]
    requests: int
    rate_per_s: float
    source: str
    faster: float = 1.0

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(draw.model for draw in self.draws)

    def chunks(self) -> Iterator[Trace]:
        """A chunk a window, which begins with the first request that is left."""
        drawings, left = [_Drawing(draw) for draw in self.draws], self.requests
        while left:
            start_s = min(each.next_s for each in drawings)
            end_s = max(start_s + ROWS / self.rate_per_s, math.nextafter(start_s, math.inf))
            chunk = self._merged([each.until(end_s) for each in drawings], left)
            left -= len(chunk)
            yield chunk

    def _merged(self, parts: list[tuple[FloatArray, IntArray, IntArray]], most: int) -> Trace:
        arrival_s, prompt_tokens, output_tokens = map(np.concatenate, zip(*parts, strict=True))
        order = np.argsort(arrival_s, kind="stable")[:most]
        model = np.repeat(np.arange(len(parts), dtype=np.int32), [len(arrivals) for arrivals, _, _ in parts])
        return Trace(
            arrival_s=arrival_s[order] / self.faster,
            model=model[order],
            prompt_tokens=prompt_tokens[order],
            output_tokens=output_tokens[order],
            models=self.models,
            source=self.source,
        )


class _Drawing:
    """One model's requests as far as they are drawn; ``next_s`` is when the next one comes, infinite when there is none."""

    def __init__(self, draw: Draw) -> None:
        self._pieces, self._lengths = draw.arrivals(), draw.lengths()
        self._look()

    def _look(self) -> None:
        self._ahead = next((piece for piece in self._pieces if len(piece)), np.empty(0))
        self.next_s = float(self._ahead[0]) if len(self._ahead) else math.inf

    def until(self, end_s: float) -> tuple[FloatArray, IntArray, IntArray]:
        """Arrivals and lengths of those before ``end_s``."""
        found = [np.empty(0)]
        while self.next_s < end_s:
            here = int(np.searchsorted(self._ahead, end_s))
            found.append(self._ahead[:here])
            self._ahead = self._ahead[here:]
            if len(self._ahead):
                self.next_s = float(self._ahead[0])
            else:
                self._look()
        arrival_s = np.concatenate(found)
        return arrival_s, *self._lengths(len(arrival_s))


def after(rng: Generator, draws: int, draw: Callable[[Generator, int], object]) -> Generator:
    """A generator as ``rng`` is when so much was drawn from it; ``rng`` stays as it is."""
    later = copy.deepcopy(rng)
    for drawn in range(0, draws, ROWS):
        draw(later, min(ROWS, draws - drawn))
    return later
