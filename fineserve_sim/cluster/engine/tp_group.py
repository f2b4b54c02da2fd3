"""The GPUs of one instance of a model as one compute queue and one memory.

It computes one job at a time, in the order of requests. Usually jobs are the batches of one engine. While a restored pipeline
drains, batches of the pipeline and of the engine that comes after it take turns.

Its memory is one pool of bytes for weights and KV, summed over its TP ranks: layers that are not resident are KV
memory. Weights outside the layers (embeddings, output head) are spread over the layers, so that a layer is the same
bytes everywhere and a merge frees one copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.policy.memory.paged import BytePool


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Bytes of the model over all TP ranks of an instance. ``pool_bytes``: what weights and KV share; ``rest_bytes``
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


Turn = tuple[float, Callable[[float], None]]
"""Seconds that a job takes, and what is called at their end, with the time."""

Job = Callable[[float], Turn | None]
"""Called with the time when it is its turn on the GPUs; None: nothing to do."""


class TpGroup:
    """``resident`` layers hold weights; ``kv`` is the memory beside them. ``busy_s``: computed so far."""

    def __init__(self, id: int, node: int, gpus: tuple[int, ...], sizes: ModelBytes, clock: Clock) -> None:
        self.id = id
        self.node = node
        self.gpus = gpus
        self.sizes = sizes
        self.alive = True
        self.kv = BytePool(0)
        self.busy_s = 0.0
        self._clock = clock
        self._jobs: deque[Job] = deque()
        self._awaited: object = None  # what the clock was told last; it may have been given up since
        self._end_order = order_of(Kind.STEP_END, id)
        self._start_order = order_of(Kind.START, id)
        self.load(frozenset(range(sizes.layers)))

    def load(self, resident: frozenset[int]) -> None:
        """These layers hold weights from now on; the rest is KV memory."""
        self.resident = resident
        taken = self.sizes.rest_bytes + len(resident) * self.sizes.layer_bytes
        self.kv.limit_bytes = self.sizes.pool_bytes - taken

    def request(self, job: Job) -> None:
        """Queue a job. If idle it begins at this very moment, after everything else that happens in it."""
        self._jobs.append(job)
        if self._awaited is None:
            self._awaited = self._go_on_at(self._clock.now, self._start_order, None)

    def fail(self) -> None:
        """The instance is lost, with the job that it computes, its queue and its memory."""
        self.alive = False
        self._jobs.clear()
        self._awaited = None
        self.load(frozenset())

    def check(self) -> None:
        """Raise AssertionError if the memory contradicts itself."""
        used_bytes, limit_bytes = self.kv.used_bytes, self.kv.limit_bytes
        assert 0 <= used_bytes <= limit_bytes, f"instance {self.id} holds {used_bytes} KV bytes of {limit_bytes}"

    def _go_on_at(self, time_s: float, order: int, end: Callable[[float], None] | None) -> object:
        """Go on at that time; the job in hand, if there is one, has this ``end``. Returns an object that identifies this
        wait."""
        awaited = object()
        self._clock.at(time_s, order, partial(self._go_on, awaited, end))
        return awaited

    def _go_on(self, awaited: object, end: Callable[[float], None] | None, now: float) -> None:
        """Call the ``end`` of the job in hand, and begin the next job, unless the instance was lost meanwhile."""
        if awaited is not self._awaited:
            return
        if end is not None:
            end(now)
        self._awaited = None
        while self._jobs and self._awaited is None:
            turn = self._jobs.popleft()(now)
            if turn is not None:
                seconds, at_end = turn
                self.busy_s += seconds
                self._awaited = self._go_on_at(now + seconds, self._end_order, at_end)
