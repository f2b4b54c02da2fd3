"""What became of every request: kept while it is open, handed on in columns when it has ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import numpy as np

from fineserve_sim.cluster.scenario import Cause, Ended, Fate

NEVER = float("nan")
BATCH = 8192
"""Ended requests that are handed on together."""
_DTYPES = (np.int64, np.float64, np.float64, np.int8, np.int64, np.int32, np.int8, np.int64)
"""Of the columns of ``Ended``."""


class Outcomes:
    """Moments and fates of the requests under way, by number; ``open`` counts these, those that wait for their first engine
    (the cluster keeps them) and those still to come. A request ends once: ``end`` raises on a second time."""

    _sink: Callable[[Ended], None]

    def __init__(self) -> None:
        self.open = 0
        self.last_end_s = 0.0
        self.first_token_s: dict[int, float] = {}
        self.engine: dict[int, int] = {}
        self.preemptions: defaultdict[int, int] = defaultdict(int)
        self._ended: list[tuple[int, float, float, int, int, int, int, int]] = []

    def begin(self, requests: int, sink: Callable[[Ended], None]) -> None:
        """So many will come; what becomes of them goes to ``sink``."""
        self.open = requests
        self._sink = sink

    def arrive(self, index: int, engine: int = -1) -> None:
        """A request is under way, at this engine if any."""
        self.engine[index] = engine

    def first_token(self, index: int, now: float) -> None:
        """Only the first time counts: a recomputed prefill yields a later token."""
        if index not in self.first_token_s:
            self.first_token_s[index] = now

    def end(self, index: int, now: float, fate: Fate, cause: Cause = Cause.NONE, *, generated_tokens: int = 0) -> None:
        """``generated_tokens``: of a request that finished or was cut."""
        engine = self.engine.pop(index, None)
        if engine is None:
            raise AssertionError(f"request {index} is not there, or ends twice: {fate.name}")
        first_token_s, preemptions = self.first_token_s.pop(index, NEVER), self.preemptions.pop(index, 0)
        finish_s = now if generated_tokens else NEVER
        moments = index, first_token_s, finish_s
        self._ended.append((*moments, int(fate), preemptions, engine, int(cause), generated_tokens))
        self.last_end_s = max(self.last_end_s, now)
        self.open -= 1
        if len(self._ended) >= BATCH:
            self._hand_on()

    def close(self) -> None:
        """The run is over: those that are still there do not finish. They are told in the order of their numbers."""
        for index in sorted(self.engine):
            self.end(index, self.last_end_s, Fate.UNFINISHED)
        self._hand_on()

    def _hand_on(self) -> None:
        if self._ended:
            columns = zip(zip(*self._ended, strict=True), _DTYPES, strict=True)
            ended = Ended(*(np.array(column, dtype) for column, dtype in columns))
            self._ended.clear()
            self._sink(ended)
