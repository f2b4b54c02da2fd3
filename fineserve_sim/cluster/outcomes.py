"""The outcome of every request: kept while it is open, handed on in columns when it has ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from fineserve_sim.cluster.scenario import Cause, Ended, Fate, Left, Visits

NEVER: Final = float("nan")
BATCH: Final = 8192
"""Ended requests that are handed on together."""
_ENDED = (np.int64, np.float64, np.float64, np.int8, np.int64, np.int32, np.int8, np.int64, np.float64, np.int64)
"""Of the columns of ``Ended``, and of when the last visit began and the tokens before it."""
_LEFT = (np.int64, np.int32, np.float64, np.float64, np.int64, np.int8)
"""Of the columns of ``Visits``."""

_LAST_LEFT = np.full(len(Fate), Left.OPEN, dtype=np.int8)
_LAST_LEFT[[Fate.FINISHED, Fate.CUT]] = Left.FINISHED, Left.CUT


@dataclass(slots=True, eq=False)
class _Open:
    """A request under way: its last engine (-1: none), since when it is there (NaN: it is there no more, or not yet), and its
    tokens before."""

    engine: int
    since_s: float = NEVER
    before: int = 0
    first_token_s: float = NEVER
    preemptions: int = 0


class Outcomes:
    """Moments, fates and visits of the requests under way, by number. ``open`` counts these, requests that wait for their
    first engine (the cluster keeps them) and requests still to come. A request ends once: ``end`` raises on a second time.

    ``stages``: the instances of each engine (``Visit``). Only the last visit of a request under way is kept. An earlier one is
    written down when it ends, so a request that never moves costs no more.
    """

    _sink: Callable[[Ended], None]

    def __init__(self) -> None:
        self._hears: Callable[[int, float], None] | None = None
        self.open = 0
        self.last_end_s = 0.0
        self.stages: dict[int, tuple[int, ...]] = {}
        self._under_way: dict[int, _Open] = {}
        self._left: list[tuple[int, int, float, float, int, int]] = []
        self._ended: list[tuple[int, float, float, int, int, int, int, int, float, int]] = []

    def begin(
        self, requests: int, sink: Callable[[Ended], None], hears: Callable[[int, float], None] | None = None
    ) -> None:
        """So many requests will come; their outcomes go to ``sink``. ``hears`` is called at each end, with the request and the
        time."""
        self.open = requests
        self._sink, self._hears = sink, hears

    def arrive(self, index: int, engine: int = -1) -> None:
        """A request is under way without an engine; it waited for this one, if for any."""
        self._under_way[index] = _Open(engine)

    def enter(self, index: int, engine: int, now: float, generated_tokens: int) -> None:
        """A visit begins, the first one where the request comes just now; it has so many tokens."""
        request = self._under_way.get(index)
        if request is None:
            self._under_way[index] = _Open(engine, now, generated_tokens)
        else:
            request.engine, request.since_s, request.before = engine, now, generated_tokens

    def leave(self, index: int, now: float, generated_tokens: int, left: Left) -> None:
        """A visit ends, if the request is at an engine, and the request goes on."""
        request = self._under_way[index]
        if request.since_s >= 0.0:
            tokens = generated_tokens - request.before
            self._left.append((index, request.engine, request.since_s, now, tokens, int(left)))
            request.since_s, request.before = NEVER, generated_tokens

    def move(self, index: int, engine: int, now: float, generated_tokens: int, left: Left) -> None:
        """A request goes on at this engine."""
        self.leave(index, now, generated_tokens, left)
        self.enter(index, engine, now, generated_tokens)

    def first_token(self, index: int, now: float) -> None:
        """Only the first time counts: a recomputed prefill yields a later token."""
        request = self._under_way[index]
        if not request.first_token_s >= 0.0:
            request.first_token_s = now

    def preempted(self, index: int) -> None:
        """The request lost its KV once more."""
        self._under_way[index].preemptions += 1

    def end(self, index: int, now: float, fate: Fate, cause: Cause = Cause.NONE, *, generated_tokens: int = 0) -> None:
        """``generated_tokens``: of a request that finished or was cut."""
        request = self._under_way.pop(index, None)
        if request is None:
            raise AssertionError(f"request {index} is not there, or ends twice: {fate.name}")
        finish_s = now if generated_tokens else NEVER
        first_s, preemptions, engine = request.first_token_s, request.preemptions, request.engine
        since_s, before = request.since_s, request.before
        row = index, first_s, finish_s, int(fate), preemptions, engine, int(cause), generated_tokens, since_s, before
        self._ended.append(row)
        self.last_end_s = max(self.last_end_s, now)
        self.open -= 1
        if len(self._ended) >= BATCH:
            self._hand_on()
        if self._hears is not None:
            self._hears(index, now)

    def close(self, end_s: float) -> None:
        """The run is over: requests that are still there do not finish. They are handed on in the order of their numbers."""
        self._hears = None
        for index in sorted(self._under_way):
            self.end(index, end_s, Fate.UNFINISHED)
        self._hand_on()

    def _hand_on(self) -> None:
        if self._ended:
            *columns, since_s, before = _columns(self._ended, _ENDED)
            visits = Visits.joined(
                [Visits.of_columns(_columns(self._left, _LEFT), self.stages), self._last(columns, since_s, before)]
            )
            first_stage = {engine: stages[0] for engine, stages in self.stages.items()}
            columns[5] = np.array([first_stage.get(engine, engine) for engine in columns[5].tolist()], dtype=np.int32)
            self._ended.clear()
            self._left.clear()
            self._sink(replace(Ended(*columns), visits=visits))

    def _last(self, columns: list[Any], since_s: Any, before: Any) -> Visits:
        """The last visits of the requests that have ended at an engine."""
        request, _, finish_s, fate, _, engine, _, generated_tokens = columns
        left = _LAST_LEFT[fate]
        open_ = np.isnan(finish_s)
        to_s, tokens = np.where(open_, self.last_end_s, finish_s), np.where(open_, 0, generated_tokens - before)
        there = since_s >= 0.0
        columns = [column[there] for column in (request, engine, since_s, to_s, tokens, left)]
        return Visits.of_columns(columns, self.stages)


def _columns(rows: list[Any], dtypes: tuple[Any, ...]) -> list[Any]:
    if not rows:
        return [np.empty(0, dtype) for dtype in dtypes]
    return [np.array(column, dtype) for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)]
