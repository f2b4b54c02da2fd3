"""First come, first served: every request goes to its engine at once, and the engine's own FCFS queue does the rest.

This is the local scheduler of vLLM itself and of every baseline that has none: nothing is held back, nothing is
dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fineserve_sim.policy.interfaces import Admission, EngineState, Request


class FcfsScheduler:
    """Admits all waiting requests in the order of (arrival, id). Its scope may hold any number of engines."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, engine: int) -> None:
        """Raises ValueError if the request waits already."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is added twice: it waits already")
        self._waiting[request.id] = request

    def remove(self, request_id: int) -> bool:
        return self._waiting.pop(request_id, None) is not None

    def schedule(self, now: float, engines: Mapping[int, EngineState]) -> Admission:
        admitted = sorted(self._waiting.values(), key=lambda request: (request.arrival_s, request.id))
        self._waiting.clear()
        return Admission(admitted=admitted)

    def unchanged_until(self, now: float, engines: Mapping[int, EngineState]) -> float:
        return math.nextafter(now, math.inf) if self._waiting else math.inf
