"""Who is on which GPU: the engines of a fleet, from the moment that they are asked for until they are gone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from fineserve_sim.policy.fleet.views import Status


@dataclass(slots=True)
class RosterEntry:
    """An engine of a model on its GPUs; ``replaces``: one that goes when it is ready; ``busy_s``: when it was last seen with a
    request, or got one."""

    model: str
    gpus: tuple[int, ...]
    status: Status
    replaces: int | None = None
    busy_s: float = 0.0


class Roster:
    """Engines by id, by model and by GPU; ids are never given twice. Every change costs a step a GPU of the engine."""

    def __init__(self, gpus: Iterable[int]) -> None:
        self.engines: dict[int, RosterEntry] = {}
        self.of_model: dict[str, set[int]] = {}
        self.on_gpu: dict[int, set[int]] = {gpu: set() for gpu in gpus}
        self._next = 0

    def enter(self, entry: RosterEntry) -> int:
        """The id of an engine of a known model that comes."""
        id = self._next
        self._next += 1
        self.engines[id] = entry
        self.of_model[entry.model].add(id)
        for gpu in entry.gpus:
            self.on_gpu[gpu].add(id)
        return id

    def remove(self, id: int) -> None:
        gone = self.engines.pop(id)
        self.of_model[gone.model].remove(id)
        for gpu in gone.gpus:
            self.on_gpu[gpu].remove(id)

    def serves(self, id: int) -> bool:
        return self.engines[id].status is Status.RESIDENT

    def any_of(self, model: str, *statuses: Status) -> bool:
        """Whether an engine of the model is in one of these states."""
        return any(self.engines[id].status in statuses for id in self.of_model[model])

    def queues_of(self, gpus: Iterable[int]) -> list[int]:
        """The GPUs, rising, in whose queues the requests for engines on ``gpus`` wait: the first of each that serves."""
        return sorted({self.engines[id].gpus[0] for gpu in gpus for id in self.on_gpu[gpu] if self.serves(id)})

    def members_of(self, queue: int) -> list[int]:
        """The engines that serve, rising, whose queue is that of this GPU."""
        return [id for id in sorted(self.on_gpu[queue]) if self.serves(id) and self.engines[id].gpus[0] == queue]
