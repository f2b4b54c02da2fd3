"""Work that is done elsewhere: a run, or one component of a run. Each is idempotent: done twice, it leaves the same bytes."""

from __future__ import annotations

import atexit
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fineserve_traces import whole

from fineserve_sim.cluster import RunResult, Scenario, ScenarioError
from fineserve_sim.cluster.components import Component, Piece
from fineserve_sim.cluster.simulation import simulate_component
from fineserve_sim.experiment.file.errors import ConfigError
from fineserve_sim.experiment.run.replay import Replay
from fineserve_sim.experiment.run.run import Run, scenario
from fineserve_sim.experiment.run.run_data import Limits
from fineserve_sim.experiment.run.store import Store, key_of, metrics_digest

Simulate = Callable[[Scenario], RunResult]
TellShare = Callable[[float], None]
"""Called now and then with the share of some work that is done."""


Summarise = Callable[[Scenario, int, Limits], tuple[RunResult, dict[str, Any]]]
"""Simulates and measures at once; what it comes to is a JSON document."""


class Summed(NamedTuple):
    """Metrics alone are kept of a run, which is judged by ``limits``: ``how``, a function that workers can import."""

    limits: Limits
    how: Summarise

    @property
    def digest(self) -> str:
        """One for each limits and each way to measure: metrics are of both, other than rows."""
        told = [None if each is None else sorted(each.items()) for each in self.limits.moments]
        return hashlib.sha256(json.dumps([told, self.limits.accept_cut, metrics_digest()]).encode()).hexdigest()[:8]


class Work(Protocol):
    """Something that a process does by itself, here or on another machine."""

    def __call__(self, out: Path, tell: TellShare) -> Any:
        """Do it; files go to the results folder ``out``."""

    def packed(self) -> Work:
        """The same with all that it reads from files of this machine, as data."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A run that is not stored yet. ``simulate`` is a function that workers can import."""

    run: Run
    key: str
    decisions: bool
    simulate: Simulate
    summed: Summed | None = None

    def __call__(self, out: Path, tell: TellShare) -> None:
        self._described()(out, tell)

    def packed(self) -> Work:
        return self._described().packed()

    def _described(self) -> Described:
        run, streams = self.run, self.summed is not None
        return Described(
            scenario(run, streams=streams), self.key, run.warmup, str(run), self.decisions, self.simulate, self.summed
        )


@dataclass(frozen=True, slots=True)
class Described:
    """A run as the scenario that it is, with its requests or how they are drawn."""

    scenario: Scenario
    key: str
    warmup: int
    name: str
    decisions: bool
    simulate: Simulate
    summed: Summed | None = None
    table: bytes | None = None

    def __call__(self, out: Path, tell: TellShare) -> None:
        """Simulate and store. Raises ScenarioError naming the run, OSError when the disk refuses."""
        store, described = Store(out), _telling(_with_table(self.scenario, self.table), tell)
        with named(self.name):
            if self.decisions:
                with store.decision_log(self.key) as log:
                    self._store(store, replace(described, log=log))
            else:
                self._store(store, described)

    def _store(self, store: Store, described: Scenario) -> None:
        if self.summed is None:
            store.write(self.key, self.scenario, self.warmup, self.simulate(described))
            return
        result, summary = self.summed.how(described, self.warmup, self.summed.limits)
        store.write_summary(self.key, self.scenario, self.warmup, result, summary)

    def packed(self) -> Work:
        described, table = _without_table(self.scenario)
        if isinstance(described.trace, Replay):
            described = replace(described, trace=whole(described.trace))
        return replace(self, scenario=described, table=table)


@dataclass(frozen=True, slots=True)
class Part:
    """The component ``number`` of a run, whose piece comes back; it leaves no file."""

    key: str
    name: str
    number: int
    component: Component
    table: bytes | None = None

    def __call__(self, out: Path, tell: TellShare) -> Piece:
        described = _telling(_with_table(self.component.scenario, self.table), tell)
        with named(self.name):
            return simulate_component(replace(self.component, scenario=described))

    def packed(self) -> Work:
        described, table = _without_table(self.component.scenario)
        return replace(self, component=replace(self.component, scenario=described), table=table)


@contextmanager
def named(name: str) -> Iterator[None]:
    """A ScenarioError says which run it is about."""
    try:
        yield
    except ScenarioError as problem:
        raise ScenarioError(f"{name}: {problem}") from None


def keyed(run: Run, summed: Summed | None = None) -> str:
    """The key of a run. Raises ConfigError when it has no requests."""
    try:
        key = key_of(scenario(run, streams=summed is not None), run.warmup)
        return key if summed is None else f"{key}-{summed.digest}"
    except ConfigError:
        raise
    except ValueError as problem:
        raise ConfigError("", str(run), str(problem)) from None


def _without_table(described: Scenario) -> tuple[Scenario, bytes | None]:
    """A scenario with the bytes of its table of measured step times, the one file that a simulation reads, and without the
    folder of that."""
    steps = described.engine.step_times
    if steps is None:
        return described, None
    path = Path(steps.path)
    return _naming(described, path.name), path.read_bytes()


def _with_table(described: Scenario, table: bytes | None) -> Scenario:
    """The scenario that finds ``table`` in a file of this machine."""
    steps = described.engine.step_times
    return described if table is None or steps is None else _naming(described, _written(steps.path, table))


@lru_cache(maxsize=8)
def _written(name: str, table: bytes) -> str:
    """A file with the contents ``table`` for as long as this process lives: the step times that follow from it are kept by its
    path."""
    folder = tempfile.mkdtemp(prefix="fineserve-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = Path(folder) / name
    path.write_bytes(table)
    return str(path)


def _telling(described: Scenario, tell: TellShare) -> Scenario:
    return replace(described, tell=lambda ended, of_all: tell(ended / of_all))


def _naming(described: Scenario, path: str) -> Scenario:
    engine = described.engine
    assert engine.step_times is not None
    return replace(described, engine=replace(engine, step_times=replace(engine.step_times, path=path)))
