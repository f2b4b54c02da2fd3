"""KV follows its layers when engines merge (KunServe, section 4.2).

All instances send at once, each request goes on as soon as its own KV is complete, oldest first. *Coordinated*: in chunks of
about one stage's time, activations first. *Bulk*: one queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from fineserve_sim.cluster.engine.links import Done, Link, Transfer
from fineserve_sim.cluster.engine.pipeline import ACTIVATION, KV, PipelineEngine
from fineserve_sim.cluster.engine.sequence import SequenceState
from fineserve_sim.cluster.engine.tp_group import TpGroup
from fineserve_sim.policy.memory.preemption import arrival_order

Moving = tuple[SequenceState, tuple[TpGroup, ...]]
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


class Exchange:
    """The exchange after one merge. ``told(began_s, now)`` hears of its last byte."""

    def __init__(self, rules: TransferRules, report: Report, told: Callable[[float, float], None]) -> None:
        self._rules, self._report, self._told = rules, report, told
        self._pending = 0
        self._due: dict[SequenceState, int] = {}  # transfers that a sequence waits for

    def carry_over(self, merged: PipelineEngine, started: Sequence[Moving], held: dict[int, range], now: float) -> None:
        """Started sequences go on in the merged engine, when it has all their KV. ``held``: who had which layers."""
        moving: list[Moving] = []
        came: dict[tuple[int, int], int] = {}
        for sequence, holders in sorted(started, key=lambda pair: arrival_order(pair[0])):
            if not merged.kv.hold(sequence, came):  # ranges that round to whole layers may leave a stage short
                sequence.lose_kv()
                merged.accept(sequence)
                continue
            merged.stalled[sequence] = None
            moving.append((sequence, holders))
        layout = {stage.id: layers for stage, layers in zip(merged.stages, merged.layout, strict=True)}
        for sender in merged.stages:
            for receiver in merged.stages:
                layers = _common(held[sender.id], layout[receiver.id]) if sender is not receiver else 0
                own = [sequence for sequence, holders in moving if layers and sender in holders]
                self._send(merged, sender, receiver, own, layers, now)
        for sequence, _ in moving:
            if sequence not in self._due:
                merged.adopt(sequence, now)

    def _send(
        self,
        merged: PipelineEngine,
        sender: TpGroup,
        receiver: TpGroup,
        own: Sequence[SequenceState],
        layers: int,
        now: float,
    ) -> None:
        link = sender.link_to(receiver)
        for batch, bytes in self._batches(own, sender.sizes.token_layer_bytes * layers, link):
            self._pending += 1
            for sequence in batch:
                self._due[sequence] = self._due.get(sequence, 0) + 1
            self._report.exchange_bytes += bytes
            self._rules.send(link, bytes, KV, partial(self._arrived, merged, batch, now))

    def _batches(
        self, sequences: Sequence[SequenceState], token_bytes: float, link: Link
    ) -> Iterator[tuple[list[SequenceState], int]]:
        """Requests that travel together, in order, up to about a chunk, in bulk each by itself; and their bytes."""
        limit = self._rules.chunk_bytes(link) if self._rules.coordinated else 0
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

    def _arrived(self, merged: PipelineEngine, batch: list[SequenceState], began_s: float, now: float) -> None:
        self._pending -= 1
        if not self._pending:
            self._report.exchange_s.append(now - began_s)
            self._told(began_s, now)
        if merged.gone:
            return
        for sequence in batch:
            self._due[sequence] -= 1
            if not self._due[sequence] and sequence in merged.stalled:
                merged.adopt(sequence, now)


def _common(first: range, second: range) -> int:
    """Layers in both ranges."""
    return max(0, min(first.stop, second.stop) - max(first.start, second.start))
