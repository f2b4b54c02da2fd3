"""Finds the engines whose load changed since the controller was told: something happened to them, or their span passed a
boundary.

The cost of telling grows with the number of these engines, not of all engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from fineserve_sim.cluster.engine.loop import NEVER, Engine, EngineHost
from fineserve_sim.policy.interfaces import EngineLoad


class LoadWatch:
    """``touch`` notes engines, ``changed`` gives their loads as they are then."""

    def __init__(self) -> None:
        self._touched: set[int] = set()
        self._due: list[tuple[float, int, int]] = []  # when a load changes inside a span: time, order, engine
        self._watched_s: dict[int, float] = {}  # the entry of each engine in it that counts
        self._told: dict[int, EngineLoad] = {}

    def touch(self, engines: Iterable[Engine]) -> None:
        """The load of an engine inside a span changes again at its next boundary, which may be settled before the controller
        is told."""
        for engine in engines:
            index = engine.index
            self._touched.add(index)
            boundary_s = engine.executor.next_boundary_s
            if boundary_s < self._watched_s.get(index, NEVER):
                self._watched_s[index] = boundary_s
                heappush(self._due, (boundary_s, engine.executor.order, index))

    def changed(self, host: EngineHost, now: float) -> dict[int, EngineLoad]:
        """The changed loads by engine, up to the event under way."""
        due, watched_s, engines = self._due, self._watched_s, host.engines
        while due:
            at_s, order, index = due[0]
            if at_s > now or (at_s == now and order >= host.order):
                break
            heappop(due)
            if watched_s.get(index) == at_s:
                del watched_s[index]
                if engine := engines.get(index):
                    host.settle_now(engine, now)
                    host.touch(engine)
        loads = {index: engines[index].load() for index in sorted(self._touched) if index in engines}
        self._touched.clear()
        self._told |= loads
        return loads

    def check(self, host: EngineHost, now: float) -> None:
        """Raise AssertionError if the load of an engine is not what was told last."""
        for index, engine in host.engines.items():
            host.settle_now(engine, now)
            load = engine.load()
            assert load == self._told.get(index), f"engine {index}: told {self._told.get(index)}, is {load}"
