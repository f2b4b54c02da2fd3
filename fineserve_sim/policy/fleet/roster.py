"""Models of a fleet, and the engines on each GPU from the moment that they are asked for until they are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fineserve_sim.policy.controller import Route, check_state
from fineserve_sim.policy.fleet.views import EngineView, Status
from fineserve_sim.policy.interfaces import GpuSlot, LocalScheduler, ModelDemand, Request


@dataclass(frozen=True, slots=True)
class FleetModel:
    """The controller's knowledge of a model. ``demand.weight_bytes`` is all that an engine takes on each of its GPUs beside
    KV: weights, context, activations. ``max_tokens`` is its longest sequence."""

    demand: ModelDemand
    max_tokens: int


class EngineBinding(NamedTuple):
    """A resident engine for which a scheduler is made. ``kv_tokens`` are the tokens that its memory holds while no other
    engine holds any."""

    engine: int
    model: str
    gpus: tuple[int, ...]
    kv_tokens: int


SchedulerMaker = Callable[[Sequence[EngineBinding]], Mapping[tuple[int, ...], LocalScheduler | None]]
"""Local schedulers for engines whose first GPUs are the same; each key names the engines that one serves. None: nothing is
held back (see ``Controller``)."""


class MovingRate:
    """Events per second over the last ``window_s`` seconds.

    The part of the window that lies before time 0 counts at ``expected_per_s``, the rate that an operator told in advance. A
    young average then starts there instead of jumping with the first events. Times must not decrease. Raises ValueError
    for a window that is not positive.
    """

    def __init__(self, window_s: float, expected_per_s: float = 0.0) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s is {window_s}: a moving average needs a positive window")
        self._window_s = window_s
        self._expected_per_s = expected_per_s
        self._times: deque[float] = deque()

    def note(self, now: float) -> None:
        """An event happens at ``now`` (seconds)."""
        self._times.append(now)

    def per_s(self, now: float) -> float:
        """The average at ``now``. An event counts for ``window_s`` seconds, its own moment included."""
        times = self._times
        while times and times[0] <= now - self._window_s:
            times.popleft()
        unseen_s = max(0.0, self._window_s - now)
        return (len(times) + self._expected_per_s * unseen_s) / self._window_s


@dataclass(slots=True, eq=False)
class EngineEntry(EngineView):
    """An engine from the command that starts it until it is gone.

    ``route`` leads to it while it serves. ``kv_tokens``: tokens that its memory holds (see ``EnginesResized``). ``replaces``:
    the engine that goes when this one is ready. ``busy_s``: when it was last seen with a request, or got one. ``scope``: the
    engines that its scheduler serves, none unless it serves.
    """

    route: Route
    kv_tokens: int
    replaces: int | None = None
    busy_s: float = 0.0
    scope: tuple[int, ...] = ()


@dataclass(slots=True)
class ModelEntry:
    """``max_tokens``: its longest sequence, and ``kv_tokens`` of an engine, alone on the largest GPU; ``held``: its requests
    that wait because no engine serves it, from ``held_since_s`` on. Engines in the order of their ids."""

    demand: ModelDemand
    max_tokens: int
    kv_tokens: int
    rate: MovingRate
    engines: dict[int, EngineEntry] = field(default_factory=dict)
    held: dict[int, Request] = field(default_factory=dict)
    held_since_s: float = 0.0

    @property
    def is_coming(self) -> bool:
        """An engine of it serves, or will."""
        return any(engine.status is not Status.DRAINING for engine in self.engines.values())


class Roster:
    """Models by id; engines by id, by model and by GPU, in the order of their ids, which are never given twice. Every change
    costs a step a GPU of the engine."""

    def __init__(self, gpus: Iterable[GpuSlot]) -> None:
        self.gpus = {gpu.id: gpu for gpu in gpus}
        self.models: dict[str, ModelEntry] = {}
        self.engines: dict[int, EngineEntry] = {}
        self.on_gpu: dict[int, dict[int, EngineEntry]] = {gpu: {} for gpu in self.gpus}
        self.given = 0  # ids so far
        self._largest_bytes = max(gpu.memory_bytes for gpu in self.gpus.values())

    def add_model(self, id: str, model: FleetModel, rate_window_s: float) -> None:
        demand = model.demand
        kv_tokens = (self._largest_bytes - demand.weight_bytes) // demand.token_bytes
        rate = MovingRate(rate_window_s, demand.rate_per_s)
        self.models[id] = ModelEntry(demand, min(model.max_tokens, kv_tokens), kv_tokens, rate)

    def enter(self, model: str, gpus: tuple[int, ...], status: Status) -> EngineEntry:
        """An engine of a known model comes."""
        facts = self.models[model]
        route = Route(self.given, facts.demand.rate_per_s, facts.max_tokens)
        entry = EngineEntry(self.given, model, gpus, status, 0.0, 0, route, facts.kv_tokens)
        self.given += 1
        for book in self._books_of(entry):
            book[entry.engine] = entry
        return entry

    def resize(self, engine: EngineEntry, kv_tokens: int) -> None:
        """The engine's memory holds so many tokens from now on: its scheduler and its route go by that number."""
        engine.kv_tokens = kv_tokens
        engine.route.max_tokens = min(self.models[engine.model].max_tokens, kv_tokens)

    def told_of(self, id: int, *statuses: Status) -> EngineEntry | None:
        """The engine that an event names; None if it is gone. ValueError if it never was, or is in no such state."""
        engine = self.engines.get(id)
        check_state(id, engine.status if engine else None, statuses, self.given)
        return engine

    def remove(self, gone: EngineEntry) -> None:
        for book in self._books_of(gone):
            del book[gone.engine]

    def _books_of(self, entry: EngineEntry) -> list[dict[int, EngineEntry]]:
        return [self.engines, self.models[entry.model].engines, *(self.on_gpu[gpu] for gpu in entry.gpus)]

    def queues_of(self, gpus: Iterable[int]) -> list[list[EngineBinding]]:
        """The queues that requests for engines on ``gpus`` wait in: by GPU, the engines that serve and have it first."""
        firsts = sorted({engine.gpus[0] for gpu in gpus for engine in self._serving_on(gpu)})
        return [[_binding(e) for e in self._serving_on(first) if e.gpus[0] == first] for first in firsts]

    def _serving_on(self, gpu: int) -> list[EngineEntry]:
        return [engine for engine in self.on_gpu[gpu].values() if engine.status is Status.RESIDENT]


def _binding(engine: EngineEntry) -> EngineBinding:
    """The binding of an engine. An engine without memory for KV gets no requests, but has a scheduler."""
    return EngineBinding(engine.engine, engine.model, engine.gpus, max(1, engine.kv_tokens))
