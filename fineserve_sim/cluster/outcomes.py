"""What became of every request, and samples of the cluster over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from fineserve_traces import Trace

from fineserve_sim.cluster.engine import Engine
from fineserve_sim.cluster.scenario import Fate, Timeline
from fineserve_sim.policy.interfaces import KVMemory

NEVER = float("nan")


class Outcomes:
    """Per-request moments and fates, by index in the trace. A request ends once: ``end`` raises on a second time."""

    def __init__(self, trace: Trace) -> None:
        requests = len(trace.arrival_s)
        self.first_token_s = [NEVER] * requests
        self.finish_s = [NEVER] * requests
        self.fate = [int(Fate.UNFINISHED)] * requests
        self.preemptions = [0] * requests
        self.engine = [-1] * requests
        self.open = requests
        self.last_end_s = 0.0

    def first_token(self, index: int, now: float) -> None:
        """Only the first time counts: a recomputed prefill yields a later token."""
        if self.first_token_s[index] != self.first_token_s[index]:
            self.first_token_s[index] = now

    def end(self, index: int, now: float, fate: Fate) -> None:
        if self.fate[index] != Fate.UNFINISHED:
            raise AssertionError(f"request {index} ends twice: {Fate(self.fate[index]).name}, then {fate.name}")
        self.fate[index] = int(fate)
        self.open -= 1
        self.last_end_s = max(self.last_end_s, now)
        if fate is Fate.FINISHED:
            self.finish_s[index] = now


class Column(NamedTuple):
    """What one column of a timeline sums up: the engines of ``model`` that are there, and requests that wait for them."""

    model: str
    engines: Callable[[], Sequence[Engine]]
    queued: Callable[[], int]


class Sampler:
    """Rows of a ``Timeline``, one a call of ``sample``."""

    def __init__(self, columns: Sequence[Column], managers: Sequence[KVMemory]) -> None:
        self._columns = tuple(columns)
        self._managers = managers
        self._time_s: list[float] = []
        self._rows: dict[str, list[list[int]]] = {
            name: [] for name in ("waiting", "running", "kv_used_bytes", "gpu_stranded_bytes", "gpu_free_bytes")
        }

    def sample(self, now: float) -> None:
        """Note everything as it is. Engines must be settled up to this moment."""
        self._time_s.append(now)
        rows = self._rows
        engines = [(column.engines(), column.queued()) for column in self._columns]
        rows["waiting"].append([queued + sum(len(e.waiting) for e in here) for here, queued in engines])
        rows["running"].append([sum(e.running for e in here) for here, _ in engines])
        rows["kv_used_bytes"].append([sum(e.kv.used_bytes() for e in here) for here, _ in engines])
        ledgers = [manager.ledger() for manager in self._managers]
        rows["gpu_stranded_bytes"].append([ledger.stranded_bytes for ledger in ledgers])
        rows["gpu_free_bytes"].append([ledger.free_bytes for ledger in ledgers])

    def timeline(self) -> Timeline:
        columns = {name: len(self._managers if name.startswith("gpu_") else self._columns) for name in self._rows}
        return Timeline(
            time_s=np.array(self._time_s, dtype=np.float64),
            engine_models=tuple(column.model for column in self._columns),
            **{
                name: np.array(rows, dtype=np.int64).reshape(len(self._time_s), columns[name])
                for name, rows in self._rows.items()
            },
        )
