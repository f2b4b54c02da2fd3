"""A thread that calls back at the next of several times."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Alarm:
    """Calls ``ring()`` as soon as the earliest time set has come; all times set up to then are forgotten. Times are
    ``time.monotonic()`` seconds. What ``ring`` raises goes to ``on_trouble``, and the thread goes on."""

    def __init__(self, ring: Callable[[], None], on_trouble: Callable[[Exception], None]) -> None:
        self._ring = ring
        self._on_trouble = on_trouble
        self._next_s = float("inf")
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="alarm", daemon=True)
        self._thread.start()

    def set(self, at_s: float) -> None:
        with self._changed:
            if at_s < self._next_s:
                self._next_s = at_s
                self._changed.notify()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> None:
        """Rings no more once this returns."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while self._wait():
            try:
                self._ring()
            except Exception as problem:
                self._on_trouble(problem)

    def _wait(self) -> bool:
        """Until it is time; False once closed."""
        with self._changed:
            while not self._closed:
                left_s = self._next_s - time.monotonic()
                if left_s <= 0:
                    self._next_s = float("inf")
                    return True
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
            return False
