"""Work on the local cores: one process a job, started when there is work for two."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from multiprocessing.synchronize import Event
from pathlib import Path
from types import TracebackType
from typing import Any

from fineserve_sim.experiment.file.errors import MachineError
from fineserve_sim.experiment.run.executor import LOOKS_S, W
from fineserve_sim.experiment.run.files import temporaries
from fineserve_sim.experiment.run.work import Work

RETRIES = 2
"""How often work is done again because a worker died."""

_SPAWN = multiprocessing.get_context("spawn")
_DIED = "worker processes died again and again, perhaps for want of memory; try again with fewer jobs"
_UNGUARDED = (
    'no worker process could start; a script runs experiments in parallel under `if __name__ == "__main__":` alone, '
    "since workers import it"
)


_shares: Any = ()
"""In a worker: the shares of work that are done, by slot, in memory that the parent sees."""


def _start(started: Event, shares: Any) -> None:
    """A worker's first act. Ctrl-C reaches every process of the terminal; workers finish and store what they are at, the
    parent decides."""
    global _shares  # noqa: PLW0603 - a pool's initializer has no other way
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _shares = shares
    started.set()


def _done(work: Work, out: Path, slot: int) -> Any:
    """In a worker."""
    return work(out, partial(_shares.__setitem__, slot))


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread sets handlers, and only it is interrupted
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _importable_main() -> Iterator[None]:
    """Workers import the script that started them, for what it registers. One that came from standard input is no file that
    they could read: without ``__file__`` they do without it."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or Path(file).exists():
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


class LocalProcesses:
    """``jobs`` processes (one a core if not given); what is single is done in this process. A context manager."""

    def __init__(self, jobs: int | None = None) -> None:
        self.workers = jobs or os.cpu_count() or 1
        self._pool: ProcessPoolExecutor | None = None
        self._shares: Any = ()
        self._started: Event | None = None
        self._pids: set[int | None] = set()

    def __enter__(self) -> LocalProcesses:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    @property
    def ready(self) -> bool:
        """As of ``Executor``."""
        return self._pool is not None and self._has_started

    @property
    def _has_started(self) -> bool:
        return self._started is not None and self._started.is_set()

    def each(self, works: Iterable[W], out: Path, tell: Callable[[W, float], None]) -> Iterator[tuple[W, Any]]:
        """As ``Executor.each``."""
        left = iter(works)
        first = list(islice(left, 2 if self.workers > 1 else 0))
        if len(first) < 2:
            for work in chain(first, left):
                yield work, work(out, partial(tell, work))
            return
        yield from self._in_parallel(chain(first, left), out, tell)

    def _in_parallel(self, works: Iterator[W], out: Path, tell: Callable[[W, float], None]) -> Iterator[tuple[W, Any]]:
        running: dict[Future[Any], tuple[int, W]] = {}
        waiting: deque[W] = deque()
        deaths = 0
        try:
            while True:
                try:
                    self._fill(running, waiting, works, out)
                    if not running:
                        return
                    for future in wait(running, LOOKS_S, FIRST_COMPLETED).done:
                        found = future.result()
                        yield running.pop(future)[1], found
                    for slot, work in running.values():
                        if self._shares[slot]:
                            tell(work, self._shares[slot])
                except BrokenProcessPool:
                    deaths += 1
                    if deaths > RETRIES or not self._has_started:
                        raise MachineError("", "", _DIED if self._has_started else _UNGUARDED) from None
                    self._bury(out)
                    waiting.extend(work for _, work in running.values())
                    running.clear()
        finally:
            for future in running:
                future.cancel()

    def _fill(
        self, running: dict[Future[Any], tuple[int, W]], waiting: deque[W], works: Iterator[W], out: Path
    ) -> None:
        """Hand out work until there is some for every worker and some more, what waits first."""
        for slot in set(range(2 * self.workers)) - {slot for slot, _ in running.values()}:
            if not waiting:
                waiting.extend(islice(works, 1))
            if not waiting:
                return
            running[self._submit(waiting[0], out, slot)] = slot, waiting[0]
            waiting.popleft()

    def _submit(self, work: W, out: Path, slot: int) -> Future[Any]:
        with _interrupts_ignored(), _importable_main():  # workers inherit both from their first moment on
            if self._pool is None:
                self._started = self._started or _SPAWN.Event()
                self._shares = _SPAWN.RawArray("d", 2 * self.workers)
                self._pool = ProcessPoolExecutor(self.workers, _SPAWN, _start, (self._started, self._shares))
            self._shares[slot] = 0.0
            try:
                future = self._pool.submit(_done, work, out, slot)
            except BrokenProcessPool:
                raise
            except RuntimeError:
                if multiprocessing.current_process().name == "MainProcess":
                    raise
                sys.exit(1)  # a worker that is importing an unguarded script; its parent says so
        self._pids |= {child.pid for child in multiprocessing.active_children()}
        return future

    def _bury(self, out: Path) -> None:
        """A worker has died, and all others with it; the next work starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None
        for unfinished in temporaries(out, self._pids):
            unfinished.unlink()
