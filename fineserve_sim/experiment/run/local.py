"""Simulations on the local cores: each worker simulates one run at a time and stores it itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from fineserve_sim.cluster import RunResult, Scenario, ScenarioError
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.experiment.run.store import Store, key_of

Simulate = Callable[[Scenario], RunResult]

_SPAWN = multiprocessing.get_context("spawn")
_DIED = "a worker process died, perhaps for want of memory; try again with fewer jobs"
_UNGUARDED = (
    'no worker process could start; a script runs experiments in parallel under `if __name__ == "__main__":` alone, '
    "since workers import it"
)


class Task(NamedTuple):
    """A run that is not stored yet, and where it goes."""

    run: Run
    key: str
    out: Path
    decisions: bool
    simulate: Simulate


def keyed(run: Run) -> str:
    """The key of a run. Raises ConfigError when it has no requests."""
    try:
        return key_of(scenario(run), run.warmup)
    except ConfigError:
        raise
    except ValueError as problem:
        raise ConfigError("", str(run), str(problem)) from None


def execute(task: Task) -> None:
    """Simulate and store one run. Raises ScenarioError naming the run, OSError when the disk refuses."""
    store = Store(task.out)
    described = scenario(task.run)
    try:
        if task.decisions:
            with store.decision_log(task.key) as log:
                result = task.simulate(_logging(described, log))
        else:
            result = task.simulate(described)
    except ScenarioError as problem:
        raise ScenarioError(f"{task.run}: {problem}") from None
    store.write(task.key, described, task.run.warmup, result)


def _logging(described: Scenario, log: Callable[[dict[str, object]], None]) -> Scenario:
    return replace(described, log=log)


def _start(started: Event) -> None:
    """A worker's first act. Ctrl-C reaches every process of the terminal; workers finish and store what they are at, the
    parent decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    started.set()


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


class Workers:
    """``jobs`` processes, started when first needed; one job runs in this process. A context manager."""

    def __init__(self, jobs: int | None) -> None:
        self._jobs = jobs or os.cpu_count() or 1
        self._pool: Executor | None = None
        self._started: Event | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, tasks: Sequence[Task]) -> Iterator[Task]:
        """Do all ``tasks`` and yield each when it is stored, in order of completion. Raises what ``execute`` raises."""
        if self._jobs == 1 or len(tasks) <= 1:
            for task in tasks:
                execute(task)
                yield task
            return
        yield from self._in_parallel(tasks)

    def _in_parallel(self, tasks: Iterable[Task]) -> Iterator[Task]:
        waiting: dict[Future[None], Task] = {}
        try:
            with _interrupts_ignored(), _importable_main():  # workers inherit both from their first moment on
                if self._pool is None:
                    self._started = _SPAWN.Event()
                    self._pool = ProcessPoolExecutor(self._jobs, _SPAWN, _start, (self._started,))
                waiting |= {self._submit(self._pool, task): task for task in tasks}
            while waiting:
                done, _ = wait(waiting, return_when=FIRST_COMPLETED)
                for future in sorted(done, key=lambda future: waiting[future].key):
                    future.result()
                    yield waiting.pop(future)
        except BrokenProcessPool:
            raise ConfigError("", "", _DIED if self._started and self._started.is_set() else _UNGUARDED) from None
        finally:
            for future in waiting:
                future.cancel()

    def _submit(self, pool: Executor, task: Task) -> Future[None]:
        try:
            return pool.submit(execute, task)
        except BrokenProcessPool:
            raise
        except RuntimeError:
            if multiprocessing.current_process().name == "MainProcess":
                raise
            sys.exit(1)  # a worker that is importing an unguarded script; its parent says so
