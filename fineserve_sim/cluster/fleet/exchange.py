"""KV follows its layers when engines merge (KunServe, section 4.2).

All instances send at once, each request goes on as soon as its own KV is complete, oldest first. *Coordinated*: in chunks of
about one stage's time, activations first. *Bulk*: one queue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import NamedTuple

from fineserve_sim.cluster.engine.links import Done, Link, Transfer
from fineserve_sim.cluster.engine.pipeline import ACTIVATION, KV, PipelineEngine
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.policy.memory.preemption import arrival_order

Moving = tuple[SequenceState, tuple[int, ...]]
"""A sequence, and the instances that hold its KV."""


class TransferRules(NamedTuple):
    """``coordinated``: transfers by priority, in chunks that take a link ``chunk_s``; else in one queue. ``remap_s``:
    how long it takes to turn dropped layers into KV memory."""

    coordinated: bool
    chunk_s: float
    remap_s: float

    def chunk_bytes(self, link: Link) -> int:
        return max(1, round(link.bytes_per_s * self.chunk_s))

    def send(self, link: Link, bytes: int, priority: int, done: Done) -> Transfer:
        if self.coordinated:
            return link.send(bytes, priority, self.chunk_bytes(link), done)
        return link.send(bytes, ACTIVATION, None, done)


@dataclass(slots=True)
class Report:
    """What regrouping did: seconds of each exchange from the remap to its last byte, its bytes, merges, splits, and
    stage seconds of pipelines while requests wait (computed, and passed)."""

    exchange_s: list[float] = field(default_factory=list)
    exchange_bytes: int = 0
    weight_bytes: int = 0
    drops: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    restores: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    pipelined_busy_s: float = 0.0
    pipelined_s: float = 0.0

    def count(self, engine: PipelineEngine) -> None:
        """Take up the time of a pipeline that ends."""
        if len(engine.stages) > 1:
            self.pipelined_busy_s += engine.busy_s
            self.pipelined_s += engine.working_s * len(engine.stages)


@dataclass(slots=True, eq=False)
class Exchange:
    """The exchange after one merge, from ``began_s`` on. ``told(began_s, now)`` hears of its last byte; ``due`` are the
    transfers that a sequence waits for."""

    merged: PipelineEngine
    rules: TransferRules
    report: Report
    told: Callable[[float, float], None]
    began_s: float
    due: Counter[SequenceState] = field(default_factory=Counter)

    def carry_over(self, started: Sequence[Moving], held: Mapping[int, range]) -> None:
        """Started sequences go on in the merged engine, when it has all their KV. ``held``: who had which layers."""
        merged, moving = self.merged, list[Moving]()
        for sequence, holders in sorted(started, key=lambda pair: arrival_order(pair[0])):
            if not merged.kv.hold(sequence):  # ranges that round to whole layers may leave a stage short
                sequence.lose_kv()
                merged.accept(sequence)
                continue
            merged.stalled[sequence] = None
            moving.append((sequence, holders))
        for (sender, _), (receiver, own) in permutations(zip(merged.stages, merged.layout, strict=True), 2):
            had, link = held[sender.id], sender.link_to(receiver)
            layers = len(range(max(had.start, own.start), min(had.stop, own.stop)))
            senders = [sequence for sequence, holders in moving if layers and sender.id in holders]
            for batch, bytes in self._batches(senders, sender.sizes.token_layer_bytes * layers, link):
                self.due.update(batch)
                self.report.exchange_bytes += bytes
                self.rules.send(link, bytes, KV, partial(self._arrived, batch))
        for sequence, _ in moving:
            if sequence not in self.due:
                merged.adopt(sequence, self.began_s)

    def _batches(
        self, sequences: Sequence[SequenceState], token_bytes: float, link: Link
    ) -> Iterator[tuple[list[SequenceState], int]]:
        """Requests that travel together, in order, up to about a chunk, in bulk each by itself; and their bytes."""
        limit = self.rules.chunk_bytes(link) if self.rules.coordinated else 0
        batch: list[SequenceState] = []
        bytes = 0.0
        for sequence in sequences:
            batch.append(sequence)
            bytes += sequence.cached_tokens * token_bytes
            if bytes >= limit:
                yield batch, round(bytes)
                batch, bytes = [], 0.0
        if batch:
            yield batch, round(bytes)

    def _arrived(self, batch: list[SequenceState], now: float) -> None:
        self.due.subtract(batch)
        complete = [sequence for sequence in batch if not self.due[sequence]]
        for sequence in complete:
            del self.due[sequence]
        if not self.due:
            self.report.exchange_s.append(now - self.began_s)
            self.told(self.began_s, now)
        for sequence in complete:
            if sequence in self.merged.stalled and not self.merged.gone:
                self.merged.adopt(sequence, now)
