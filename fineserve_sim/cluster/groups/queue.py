"""Requests of a group that wait for their prefill or are in the middle of it, and the lanes that work on them.

A pipeline of S stages keeps up to S microbatches in flight; each belongs to a *lane* (vLLM: virtual engine), which
forms its next microbatch when the last one has left the pipeline. A sequence decodes in one lane. Lanes have queues of
their own (``token_count``), or all share one, so that a prompt's chunks may follow each other through the pipeline
(``lookahead``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fineserve_sim.cluster.groups.sequences import Sequence, by_arrival
from fineserve_sim.cluster.sequence import Decodes


class Queue:
    """``queued_blocks``: KV blocks for the prompts of all waiting sequences, and one more each to go on with."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.queued_blocks = 0

    def demand(self, sequence: Sequence) -> int:
        """KV blocks for all that is to be prefilled, and one more."""
        return -(-sequence.target_tokens // self._block_tokens) + 1

    @property
    def head_blocks(self) -> int:
        return self.demand(self.waiting[0]) if self.waiting else 0

    def append(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        self.queued_blocks += self.demand(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """To the front: a preempted sequence goes first."""
        self.waiting.appendleft(sequence)
        self.queued_blocks += self.demand(sequence)

    def start(self) -> Sequence:
        """The first waiting sequence begins its prefill."""
        sequence = self.waiting.popleft()
        self.queued_blocks -= self.demand(sequence)
        self.prefilling.append(sequence)
        return sequence

    def take_waiting(self) -> list[Sequence]:
        """Remove and return all that wait."""
        taken = list(self.waiting)
        self.waiting.clear()
        self.queued_blocks = 0
        return taken


class Lane:
    """``joining`` sequences decode from the lane's next microbatch on; ``asked``: it has a turn or a microbatch under
    way."""

    __slots__ = ("asked", "decodes", "joining", "leaving", "queue")

    def __init__(self, queue: Queue, block_tokens: int) -> None:
        self.queue = queue
        self.decodes: Decodes[Sequence] = Decodes(block_tokens)
        self.joining: list[Sequence] = []
        self.leaving: list[Sequence] = []
        self.asked = False

    @property
    def size(self) -> int:
        """Sequences that decode here."""
        return self.decodes.size + len(self.joining)

    @property
    def has_work(self) -> bool:
        return bool(self.decodes.size or self.joining or self.queue.prefilling or self.queue.waiting)

    def let_join(self) -> None:
        for sequence in self.joining:
            self.decodes.join(sequence)
        self.joining.clear()

    def latest(self) -> Sequence | None:
        """The sequence that arrived last among those that the lane may stop: its decodes, and prefills with no chunk
        in flight."""
        idle = [sequence for sequence in self.queue.prefilling if not sequence.in_flight]
        candidates: Iterable[Sequence] = (*self.decodes, *idle)
        return max(candidates, key=by_arrival, default=None)
