"""Links between GPUs, nodes and host memory: bytes take time, and the order of transfers is a choice.

A link carries one chunk at a time, in one direction, at its full rate. Each transfer is cut into chunks of its own size.
After each chunk the link looks again, and the waiting transfer of the highest priority goes on (the lowest number;
first come, first served among equals). So an urgent transfer waits for one chunk at most, and a transfer without chunks
is not interrupted: that is the difference between KunServe's coordinated exchange and a plain queue. The bytes that a link
carries in all are its rate times its busy time, in any order.

Links belong to GPUs. Every cluster has one table of them (``Links``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.scenario import Gpu

ACTIVATION, KV, WEIGHTS = 0, 1, 2
"""Priorities on links when transfers are coordinated."""

Done = Callable[[float], None]
"""Called with the time at which the last byte has arrived."""


@dataclass(slots=True, eq=False)
class Transfer:
    """A transfer under way; ``left_bytes`` are not yet delivered."""

    left_bytes: int
    chunk_bytes: int
    on_done: Done | None

    def cancel(self) -> None:
        """Send nothing more (a chunk in flight ends), and never call ``on_done``."""
        self.on_done = None


class Link:
    """One direction of a link. ``entity`` (>= 1) orders its events among events of other links at the same moment.

    Raises ValueError for a rate that is not positive.
    """

    def __init__(self, clock: Clock, bytes_per_s: float, entity: int) -> None:
        if not bytes_per_s > 0:
            raise ValueError(f"a link carries {bytes_per_s:g} bytes/s; it must be more than 0")
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._order = order_of(Kind.TIMER, entity)
        self._turns = count()
        self._waiting: list[tuple[int, int, Transfer]] = []
        self._carrying: tuple[int, int, Transfer] | None = None

    def send(self, bytes: int, priority: int, chunk_bytes: int | None, on_done: Done) -> Transfer:
        """Queue ``bytes`` in chunks of ``chunk_bytes`` (None: all in one). A smaller ``priority`` goes first. Raises
        ValueError for negative bytes or chunks under one byte."""
        if bytes < 0 or (chunk_bytes is not None and chunk_bytes < 1):
            raise ValueError(f"a transfer of {bytes} bytes in chunks of {chunk_bytes}; need bytes >= 0 and chunks >= 1")
        transfer = Transfer(bytes, max(1, bytes) if chunk_bytes is None else chunk_bytes, on_done)
        heappush(self._waiting, (priority, next(self._turns), transfer))
        self._carry_next()
        return transfer

    @property
    def queued_bytes(self) -> int:
        """Bytes that were sent and have not arrived."""
        queue = self._waiting if self._carrying is None else [*self._waiting, self._carrying]
        return sum(transfer.left_bytes for _, _, transfer in queue if transfer.on_done is not None)

    def _carry_next(self) -> None:
        while self._waiting and self._carrying is None:
            turn = heappop(self._waiting)
            if turn[2].on_done is not None:
                self._carrying = turn
                chunk_bytes = min(turn[2].chunk_bytes, turn[2].left_bytes)
                self._clock.at(self._clock.now + chunk_bytes / self.bytes_per_s, self._order, self._on_chunk)

    def _on_chunk(self, now: float) -> None:
        assert self._carrying is not None
        turn, self._carrying = self._carrying, None
        transfer = turn[2]
        transfer.left_bytes -= min(transfer.chunk_bytes, transfer.left_bytes)
        if transfer.left_bytes:
            heappush(self._waiting, turn)
        self._carry_next()
        if not transfer.left_bytes and transfer.on_done is not None:
            transfer.on_done(now)


class GpuLinks(NamedTuple):
    """The links of some GPUs taken together: to other nodes, to GPUs of the same node, to and from host memory, and from one
    place of their own memory to another."""

    network: Link
    node: Link
    to_host: Link
    from_host: Link
    own: Link


class Links:
    """The links of a cluster, by the GPUs at which they begin. ``host_bytes_per_s``: in place of the PCIe rate of each GPU."""

    def __init__(self, clock: Clock, gpus: Iterable[Gpu], host_bytes_per_s: float | None = None) -> None:
        self._clock, self._host_bytes_per_s = clock, host_bytes_per_s
        self._gpus = {gpu.id: gpu for gpu in gpus}
        self._made: dict[tuple[int, ...], GpuLinks] = {}

    def of(self, gpus: tuple[int, ...]) -> GpuLinks:
        """The links of these GPUs of one node together. TP ranks send their shards side by side, at the slowest one's pace."""
        if gpus not in self._made:
            ranks = [self._gpus[gpu] for gpu in gpus]
            host = self._host_bytes_per_s or min(rank.spec.pcie_bytes_per_s for rank in ranks)
            network = min(rank.network_bytes_per_s for rank in ranks)
            own = min(rank.spec.memory_bytes_per_s for rank in ranks) / 2  # a copy reads and writes
            rates = (network, min(rank.spec.peer_bytes_per_s for rank in ranks), host, host, own)  # as the fields
            first = 1 + min(gpus) * len(rates)
            made = [Link(self._clock, rate * len(gpus), first + kind) for kind, rate in enumerate(rates)]
            self._made[gpus] = GpuLinks(*made)
        return self._made[gpus]

    def between(self, sender: tuple[int, ...], receiver: tuple[int, ...]) -> Link:
        """The link from some GPUs to others: inside the node, or the network. From GPUs to themselves, a copy in their
        memory."""
        links = self.of(sender)
        if sender == receiver:
            return links.own
        return links.node if self._gpus[sender[0]].node == self._gpus[receiver[0]].node else links.network
