"""Requests of an engine that wait for their prefill or are in the middle of it, and the lanes that work on them.

An engine keeps as many batches in flight as it has stages; each belongs to a *lane* (vLLM: virtual engine), which forms its
next batch when the last one has left the engine. A sequence decodes in one lane. Lanes have queues of their own, or all share
one, so that a prompt's chunks may follow each other through a pipeline.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fineserve_sim.cluster.engine.sequence import Decodes, SequenceState

PromptChunk = tuple[SequenceState, int, int]
"""A sequence, its tokens before the chunk, and the tokens of the chunk."""


@dataclass(slots=True, eq=False)
class Queue:
    """``waiting`` sequences hold no KV, ``prefilling`` ones have begun; both lists are changed, never replaced.
    ``queued_blocks``: KV blocks for the prompts of all that wait, and one more each to go on with."""

    block_tokens: int
    waiting: deque[SequenceState] = field(default_factory=deque)
    prefilling: list[SequenceState] = field(default_factory=list)
    queued_blocks: int = 0

    def demand_blocks(self, sequence: SequenceState) -> int:
        """KV blocks for all that is to be prefilled, and one more."""
        return -(-sequence.target_tokens // self.block_tokens) + 1

    @property
    def head_blocks(self) -> int:
        return self.demand_blocks(self.waiting[0]) if self.waiting else 0

    def append(self, sequence: SequenceState) -> None:
        self.waiting.append(sequence)
        self.queued_blocks += self.demand_blocks(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        """To the front: a preempted sequence goes first."""
        self.waiting.appendleft(sequence)
        self.queued_blocks += self.demand_blocks(sequence)

    def start(self) -> None:
        """The first waiting sequence begins its prefill."""
        sequence = self.waiting.popleft()
        self.queued_blocks -= self.demand_blocks(sequence)
        self.prefilling.append(sequence)

    def take_waiting(self) -> list[SequenceState]:
        """Remove and return all that wait."""
        taken = list(self.waiting)
        self.waiting.clear()
        self.queued_blocks = 0
        return taken


@dataclass(slots=True, eq=False)
class Lane:
    """A batch of an engine. ``chunks`` are the prompt parts of the one in flight; ``joining`` sequences decode from the next
    one on, ``leaving`` ones stop before it; ``asked``: it waits for its turn; ``launched``: its batch is in flight."""

    queue: Queue
    decodes: Decodes
    chunks: list[PromptChunk] = field(default_factory=list)
    joining: list[SequenceState] = field(default_factory=list)
    leaving: list[SequenceState] = field(default_factory=list)
    asked: bool = False
    launched: bool = False

    @property
    def size(self) -> int:
        """Sequences that decode here."""
        return self.decodes.size + len(self.joining)

    @property
    def started(self) -> int:
        """Those, and what its queue has begun to prefill."""
        return self.size + len(self.queue.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self.decodes.size or self.joining or self.queue.prefilling or self.queue.waiting)
