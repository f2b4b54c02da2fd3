"""Requests of an engine that wait for their prefill or are in the middle of it, and the lanes that work on them.

An engine keeps as many batches in flight as it has stages; each belongs to a *lane* (vLLM: virtual engine), which forms its
next batch when the last one has left the engine. A sequence decodes in one lane. Lanes have queues of their own, or all share
one, so that a prompt's chunks may follow each other through a pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fineserve_sim.cluster.engine.sequence import Decodes, SequenceState
from fineserve_sim.policy.memory.preemption import arrival_order

PromptChunk = tuple[SequenceState, int, int]
"""A sequence, its tokens before the chunk, and the tokens of the chunk."""


class Queue:
    """``waiting`` sequences hold no KV, ``prefilling`` ones have begun; both lists are changed, never replaced.
    ``queued_blocks``: KV blocks for the prompts of all that wait, and one more each to go on with."""

    __slots__ = ("_block_tokens", "prefilling", "queued_blocks", "waiting")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self.waiting: deque[SequenceState] = deque()
        self.prefilling: list[SequenceState] = []
        self.queued_blocks = 0

    def demand_blocks(self, sequence: SequenceState) -> int:
        """KV blocks for all that is to be prefilled, and one more."""
        return -(-sequence.target_tokens // self._block_tokens) + 1

    @property
    def head_blocks(self) -> int:
        return -(-self.waiting[0].target_tokens // self._block_tokens) + 1 if self.waiting else 0

    def append(self, sequence: SequenceState) -> None:
        self.waiting.append(sequence)
        self.queued_blocks += -(-sequence.target_tokens // self._block_tokens) + 1

    def put_back(self, sequence: SequenceState) -> None:
        """To the front: a preempted sequence goes first."""
        self.waiting.appendleft(sequence)
        self.queued_blocks += self.demand_blocks(sequence)

    def start(self) -> None:
        """The first waiting sequence begins its prefill."""
        sequence = self.waiting.popleft()
        self.queued_blocks -= -(-sequence.target_tokens // self._block_tokens) + 1
        self.prefilling.append(sequence)

    def take_waiting(self) -> list[SequenceState]:
        """Remove and return all that wait."""
        taken = list(self.waiting)
        self.waiting.clear()
        self.queued_blocks = 0
        return taken


class Lane:
    """A batch of an engine. ``chunks`` are the prompt parts of the one in flight; ``joining`` sequences decode from the next
    one on, ``leaving`` ones stop before it; ``asked``: it has a turn or a batch under way; ``launched``: its batch is in
    flight."""

    __slots__ = ("asked", "chunks", "decodes", "joining", "launched", "leaving", "moving", "queue")

    def __init__(self, queue: Queue, block_tokens: int) -> None:
        self.queue = queue
        self.decodes = Decodes(block_tokens)
        self.chunks: list[PromptChunk] = []
        self.joining: list[SequenceState] = []
        self.leaving: list[SequenceState] = []
        self.moving = False  # somebody joins or leaves
        self.asked = False
        self.launched = False

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

    def join_next(self, sequence: SequenceState) -> None:
        """It decodes from the next batch on."""
        self.joining.append(sequence)
        self.moving = True

    def leave_next(self, sequence: SequenceState) -> None:
        """It stops before the next batch."""
        self.leaving.append(sequence)
        self.moving = True

    def let_join(self) -> None:
        for sequence in self.joining:
            self.decodes.join(sequence)
        self.joining.clear()

    def victims(self, computing: Iterable[SequenceState]) -> list[SequenceState]:
        """Those whom the lane may stop: its decodes, and prefills that are not ``computing`` somewhere."""
        idle = self.queue.prefilling
        if busy := set(computing):
            idle = [sequence for sequence in idle if sequence not in busy]
        return [*self.decodes, *idle]

    def latest_decode(self) -> SequenceState:
        return max(self.decodes, key=arrival_order)
