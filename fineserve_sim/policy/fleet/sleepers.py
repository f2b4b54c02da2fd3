"""vLLM's sleep levels: engines that left their GPUs and kept their processes, and where their weights are meanwhile.

An engine that sleeps at level 1 keeps its weights in host memory; one at level 2 discards them. Both levels keep the process,
with its context and its captured graphs. So an engine wakes as fast as its weights come, where a new one starts first:

    host   asleep at level 1      weights from host memory
    disk   asleep at level 2      weights from disk
    gone   no process there       a process starts, weights from disk

Source: vLLM's documentation, Sleep Mode. Wakes took 0.1 to 6 s from level 1 and 0.8 to 2.6 s from level 2, for models of 0.6B
to 235B on A4000 and A100 (blog.vllm.ai, 2025-10-26).

An engine falls asleep on its own GPUs and wakes there alone. Host memory keeps the weights that were needed last. Where it is
full, the weights of the longest sleepers of the node are discarded. A model larger than all of it sleeps at level 2. Sleepers
end, the longest asleep first, where a GPU has too many, or where their processes take more than half of what is free for KV
(our choice).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

KEPT_SHARE = 0.5
"""What sleepers on a GPU may keep, of the bytes that would be free for KV without them."""


class Tier(StrEnum):
    """Where the weights of a model are while no engine has them."""

    HOST = "host"
    DISK = "disk"
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class Sleeper:
    """An engine asleep. Its process keeps ``process_bytes`` of each of its GPUs, all of one node. ``weight_bytes``: of all
    its GPUs together."""

    engine: int
    model: str
    gpus: tuple[int, ...]
    process_bytes: int
    weight_bytes: int

    @property
    def place(self) -> tuple[str, tuple[int, ...]]:
        return self.model, self.gpus


class Sleepers:
    """``node_of`` by GPU. ``host_bytes``: what the host memory of each node has for weights. ``processes``: the most sleepers
    of a GPU, without a limit if None. Raises ValueError for negative limits.

    Every call costs a step for each sleeper.
    """

    def __init__(self, node_of: Mapping[int, int], host_bytes: int, processes: int | None = None) -> None:
        if host_bytes < 0 or (processes is not None and processes < 0):
            raise ValueError(f"sleep: host_bytes={host_bytes} and processes={processes} must be 0 or more")
        self.host_bytes, self.processes = host_bytes, processes
        self._node_of = dict(node_of)
        self._asleep: dict[int, Sleeper] = {}  # by engine, the longest asleep first
        self._in_host: set[int] = set()

    def __len__(self) -> int:
        return len(self._asleep)

    def __contains__(self, engine: int) -> bool:
        return engine in self._asleep

    def process_bytes(self, gpu: int) -> int:
        """What sleepers keep of a GPU."""
        return sum(sleeper.process_bytes for sleeper in self._on(gpu))

    def tier(self, engine: int) -> Tier:
        if engine not in self._asleep:
            return Tier.GONE
        return Tier.HOST if engine in self._in_host else Tier.DISK

    def sleep(self, sleeper: Sleeper, free_bytes: Mapping[int, int]) -> list[Sleeper]:
        """An engine falls asleep on GPUs that would have ``free_bytes`` without any sleeper. Returns the sleepers that end for
        it. Where its own process is too large, it is gone. Raises ValueError for an engine that is asleep."""
        if sleeper.engine in self._asleep:
            raise ValueError(f"engine {sleeper.engine} sleeps already")
        if self.processes == 0 or any(_most(free_bytes[gpu]) < sleeper.process_bytes for gpu in sleeper.gpus):
            return []
        ended = self._end([other for other in self._asleep.values() if other.place == sleeper.place])
        self._asleep[sleeper.engine] = sleeper
        for gpu in sleeper.gpus:
            if self.processes is not None:
                ended += self._end(self._on(gpu)[: -self.processes])
            ended += self.make_room(gpu, free_bytes[gpu])
        self._keep_in_host(sleeper)
        return ended

    def wake(self, model: str, gpus: tuple[int, ...]) -> tuple[Tier, Sleeper | None]:
        """An engine of the model is wanted on these GPUs: the one that slept there, with the tier of its weights. None: none
        slept there, and a new one starts."""
        for sleeper in self._asleep.values():
            if sleeper.place == (model, gpus):
                tier = self.tier(sleeper.engine)
                self._end([sleeper])
                return tier, sleeper
        return Tier.GONE, None

    def make_room(self, gpu: int, free_bytes: int) -> list[Sleeper]:
        """The GPU would have so many bytes free without any sleeper. Returns the sleepers that end there, the longest asleep
        first."""
        left_bytes, ending = self.process_bytes(gpu), []
        for sleeper in self._on(gpu):
            if left_bytes <= _most(free_bytes):
                break
            ending.append(sleeper)
            left_bytes -= sleeper.process_bytes
        return self._end(ending)

    def lose(self, gpu: int) -> list[Sleeper]:
        """The GPU is lost, and the sleepers there end."""
        return self._end(self._on(gpu))

    def _on(self, gpu: int) -> list[Sleeper]:
        return [sleeper for sleeper in self._asleep.values() if gpu in sleeper.gpus]

    def _end(self, ended: list[Sleeper]) -> list[Sleeper]:
        for sleeper in ended:
            del self._asleep[sleeper.engine]
            self._in_host.discard(sleeper.engine)
        return ended

    def _keep_in_host(self, sleeper: Sleeper) -> None:
        """Keep the weights in host memory, if they fit. Weights of engines that slept longer are discarded for them."""
        if sleeper.weight_bytes > self.host_bytes:
            return
        self._in_host.add(sleeper.engine)
        here = self._host_of(self._node_of[sleeper.gpus[0]])
        left_bytes = sum(other.weight_bytes for other in here)
        for other in here:
            if left_bytes <= self.host_bytes:
                break
            self._in_host.remove(other.engine)
            left_bytes -= other.weight_bytes

    def _host_of(self, node: int) -> list[Sleeper]:
        """The sleepers with weights in the host memory of a node."""
        return [
            sleeper
            for sleeper in self._asleep.values()
            if sleeper.engine in self._in_host and self._node_of[sleeper.gpus[0]] == node
        ]

    def check(self) -> None:
        """Raise AssertionError if host memory or a GPU has more than it may, or a model sleeps twice in one place."""
        places = {sleeper.place for sleeper in self._asleep.values()}
        assert len(places) == len(self._asleep), "a model sleeps twice in one place"
        assert self._in_host <= self._asleep.keys(), "host memory keeps weights of an engine that is not asleep"
        for gpu, node in self._node_of.items():
            kept_bytes = sum(sleeper.weight_bytes for sleeper in self._host_of(node))
            assert kept_bytes <= self.host_bytes, f"node {node} keeps {kept_bytes} of {self.host_bytes} bytes"
            number = len(self._on(gpu))
            assert self.processes is None or number <= self.processes, f"{number} sleepers on GPU {gpu}"


def _most(free_bytes: int) -> float:
    return KEPT_SHARE * free_bytes
