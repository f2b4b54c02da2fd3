"""Models of a fleet, and who is on which GPU: engines from the moment that they are asked for until they are gone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from fineserve_sim.policy.fleet.views import EngineView, Status
from fineserve_sim.policy.interfaces import ModelDemand, Request


class MovingRate:
    """Events per second over the last ``window_s`` seconds.

    The part of the window that lies before time 0 counts at ``expected_per_s``, the rate that an operator told in advance: a
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
    """``max_tokens``: its longest sequence; ``replaces``: one that goes when it is ready; ``busy_s``: when it was last seen
    with a request, or got one; ``scope``: the engines that its scheduler serves, none unless it serves."""

    max_tokens: int = 0
    replaces: int | None = None
    busy_s: float = 0.0
    scope: tuple[int, ...] = ()


@dataclass(slots=True)
class ModelEntry:
    """``max_tokens``: its longest sequence, alone on the largest GPU; ``held``: its requests that wait because no engine serves
    it, from ``held_since_s`` on. Engines in the order of their ids."""

    demand: ModelDemand
    max_tokens: int
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

    def __init__(self, gpus: Iterable[int]) -> None:
        self.models: dict[str, ModelEntry] = {}
        self.engines: dict[int, EngineEntry] = {}
        self.on_gpu: dict[int, dict[int, EngineEntry]] = {gpu: {} for gpu in gpus}
        self._next = 0

    def enter(self, model: str, gpus: tuple[int, ...], status: Status) -> EngineEntry:
        """An engine of a known model comes."""
        entry = EngineEntry(self._next, model, gpus, status, max_tokens=self.models[model].max_tokens)
        self._next += 1
        for book in self._books_of(entry):
            book[entry.engine] = entry
        return entry

    def remove(self, gone: EngineEntry) -> None:
        for book in self._books_of(gone):
            del book[gone.engine]

    def _books_of(self, entry: EngineEntry) -> list[dict[int, EngineEntry]]:
        return [self.engines, self.models[entry.model].engines, *(self.on_gpu[gpu] for gpu in entry.gpus)]

    def taken_bytes(self, gpu: int) -> int:
        """What engines take there beside KV."""
        return sum(self.models[engine.model].demand.weight_bytes for engine in self.on_gpu[gpu].values())

    def queues_of(self, gpus: Iterable[int]) -> list[list[EngineEntry]]:
        """The queues that requests for engines on ``gpus`` wait in: by GPU, the engines that serve and have it first."""
        firsts = {entry.gpus[0] for gpu in gpus for entry in self.on_gpu[gpu].values() if entry.serves}
        return [
            [entry for entry in self.on_gpu[first].values() if entry.serves and entry.gpus[0] == first]
            for first in sorted(firsts)
        ]
