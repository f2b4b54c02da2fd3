"""Python's garbage collector, kept from holding up a server under load.

A full collection visits every object of the process while nothing else of it runs: 0.1 s with all that a server imports, and
more with a thousand requests here. A burst of requests brings several. So objects of the start are never visited again, and
full collections wait until no client is here. The young generations, which take a millisecond, go on as ever.
"""

from __future__ import annotations

import gc
import time
from types import TracebackType
from typing import Self

_YOUNG, _MIDDLE, _NEVER = 2_000, 10, 1_000_000
"""Python's thresholds: objects until the youngest are collected, such collections until the middle ones are, and so on."""

_LATEST_S = 300.0
"""Where somebody is always here, a full collection comes after so long all the same."""


class CalmGarbage:
    """While it is entered, full collections come when ``tick`` finds a quiet moment."""

    def __enter__(self) -> Self:
        self._before = gc.get_threshold()
        gc.collect()
        gc.freeze()
        gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
        self._last_s = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        gc.set_threshold(*self._before)
        gc.unfreeze()

    def tick(self, *, busy: bool) -> None:
        """Call it often; what is collected in a quiet moment is little."""
        grown = gc.get_count()[2] > 0
        if grown and (not busy or time.monotonic() - self._last_s > _LATEST_S):
            gc.collect()
            self._last_s = time.monotonic()
