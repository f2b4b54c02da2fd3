"""One instance of the model: its GPUs as one compute queue and one memory, and its links.

An instance computes one job at a time, in the order in which they were asked for. Usually they are the microbatches of
its group; while a restored group drains, those of the old pipeline and of the instance alone take turns.

Its memory is one pool of bytes for weights and KV, summed over its TP ranks: layers that are not resident are KV
memory. Weights outside the layers (embeddings, output head) are spread over the layers, so that a layer is the same
bytes everywhere and a merge frees one copy.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from simpy.events import Event

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.links import Link


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Bytes of the model over all TP ranks of an instance. ``kv_pool_bytes``: what weights and KV share; ``rest_bytes``
    of weights are left when ``layer_bytes`` is rounded to whole bytes."""

    layers: int
    layer_bytes: int
    rest_bytes: int
    block_layer_bytes: int
    token_layer_bytes: float
    pool_bytes: int
    hidden_bytes: int

    @property
    def copy_bytes(self) -> int:
        """One copy of the weights."""
        return self.layers * self.layer_bytes + self.rest_bytes

    @property
    def base_kv_bytes(self) -> int:
        """KV memory of an instance that holds all weights."""
        return self.pool_bytes - self.copy_bytes

    @property
    def block_bytes(self) -> int:
        """One KV block over all layers."""
        return self.layers * self.block_layer_bytes


class Job(Protocol):
    """A turn on an instance's GPUs."""

    def begin(self, now: float) -> float | None:
        """Seconds that it takes, now that it is its turn, or None: nothing to do."""
        ...

    def end(self, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class InstanceLinks:
    """What leaves an instance, to others over the network and inside the node, and to and from host memory."""

    network: Link
    node: Link
    to_host: Link
    from_host: Link


class Instance:
    """``resident`` layers hold weights; ``kv_used_bytes`` are taken by the groups that the instance is part of."""

    def __init__(
        self, id: int, node: int, gpus: tuple[int, ...], sizes: ModelBytes, links: InstanceLinks, clock: Clock
    ) -> None:
        self.id = id
        self.node = node
        self.gpus = gpus
        self.sizes = sizes
        self.links = links
        self.alive = True
        self.resident = frozenset(range(sizes.layers))
        self.kv_used_bytes = 0
        self.busy_s = 0.0
        self._clock = clock
        self._jobs: deque[Job] = deque()
        self._current: Job | None = None
        self._event: Event | None = None
        self._end_order = order_of(Kind.STEP_END, id)
        self._start_order = order_of(Kind.START, id)

    @property
    def kv_capacity_bytes(self) -> int:
        """KV memory beside the resident weights."""
        return self.sizes.pool_bytes - self.sizes.rest_bytes - len(self.resident) * self.sizes.layer_bytes

    @property
    def kv_free_bytes(self) -> int:
        return self.kv_capacity_bytes - self.kv_used_bytes

    def link_to(self, other: Instance) -> Link:
        """The link from here to another instance: inside the node, or the network."""
        return self.links.node if other.node == self.node else self.links.network

    def request(self, job: Job) -> None:
        """Queue a job. If idle it begins at this very moment, after everything else that happens in it."""
        self._jobs.append(job)
        if self._event is None:
            self._event = self._clock.at(self._clock.now, self._start_order, self._on_start)

    def fail(self) -> None:
        """Lost, with what it computes and all that is queued."""
        self.alive = False
        self._jobs.clear()
        self._current = None
        self._event = None
        self.kv_used_bytes = 0

    def revive(self) -> None:
        """Back, with nothing in its memory."""
        self.alive = True
        self.resident = frozenset()

    def check(self) -> None:
        """Raise AssertionError if the memory contradicts itself."""
        assert 0 <= self.kv_used_bytes <= self.kv_capacity_bytes, (
            f"instance {self.id} holds {self.kv_used_bytes} KV bytes of {self.kv_capacity_bytes}"
        )

    def _on_start(self, event: Event) -> None:
        if event is self._event:
            self._event = None
            self._next()

    def _on_end(self, event: Event) -> None:
        if event is not self._event:
            return
        job, self._current = self._current, None
        assert job is not None
        job.end(self._clock.now)
        self._event = None
        self._next()

    def _next(self) -> None:
        now: float = self._clock.now
        while self._jobs and self._event is None:
            job = self._jobs.popleft()
            seconds = job.begin(now)
            if seconds is not None:
                self._current = job
                self.busy_s += seconds
                self._event = self._clock.at(now + seconds, self._end_order, self._on_end)
