"""What goes into a lane's next microbatch beside its decodes: prompt chunks by token count, or by lookahead.

Token count is chunked prefill: partial prefills, then the head of the queue, until the token budget is full. Lookahead
plans over all that waits and fits in memory, in parts of equal cost, and hands them out one by one; with little work it
falls back on the token count, as the paper does outside of bursts (KunServe, section 4.3).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from fineserve_sim.cluster.groups.queue import Lane, Queue
from fineserve_sim.cluster.groups.sequences import Sequence
from fineserve_sim.policy.groups.microbatch import Chunk, ChunkCost, LookaheadMode, Microbatch, lookahead, tokens_of

PromptChunk = tuple[Sequence, int, int]
"""A sequence, its tokens before the chunk, and the tokens of the chunk."""


class Memory(Protocol):
    """The KV memory of a group as a former needs it."""

    @property
    def free_blocks(self) -> int: ...

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks that hold ``tokens`` in all; False, and nothing taken, when they do not fit."""
        ...

    def may_start(self, sequence: Sequence) -> bool:
        """Whether the group may start a waiting sequence now."""
        ...


class Former(Protocol):
    def form(self, lane: Lane, memory: Memory) -> list[PromptChunk]:
        """The prompt chunks of the lane's next microbatch, their memory taken."""
        ...

    def forget(self) -> None:
        """A sequence that was planned with went away."""
        ...


def take_chunk(sequence: Sequence, tokens: int, memory: Memory) -> PromptChunk | None:
    """The next ``tokens`` of a prefill, if there is memory for them."""
    prefix = sequence.cached_tokens
    if tokens < 1 or not memory.grow(sequence, prefix + tokens):
        return None
    sequence.cached_tokens = prefix + tokens
    sequence.in_flight += 1
    return sequence, prefix, tokens


class TokenCount:
    """Chunked prefill with ``budget_tokens`` tokens a microbatch, decodes included."""

    def __init__(self, budget_tokens: int) -> None:
        self._budget_tokens = budget_tokens

    def forget(self) -> None:
        """Nothing is planned ahead."""

    def form(self, lane: Lane, memory: Memory) -> list[PromptChunk]:
        left = self._budget_tokens - lane.decodes.size
        chunks: list[PromptChunk] = []
        queue = lane.queue
        for sequence in queue.prefilling:
            remaining = sequence.target_tokens - sequence.cached_tokens
            if not remaining:
                continue  # its last chunk is in flight
            chunk = take_chunk(sequence, min(left, remaining), memory)
            if chunk is None:
                return chunks
            chunks.append(chunk)
            left -= chunk[2]
        while left > 0 and queue.waiting and memory.may_start(queue.waiting[0]):
            chunk = take_chunk(queue.waiting[0], min(left, queue.waiting[0].target_tokens), memory)
            if chunk is None:
                break
            queue.start()
            chunks.append(chunk)
            left -= chunk[2]
        return chunks


class Lookahead:
    """Parts of equal cost over the whole queue. A part is planned by request and tokens; memory is taken when it is
    formed, and the plan is made anew when that fails."""

    def __init__(
        self, budget_tokens: int, min_tokens: int, cost: ChunkCost, mode: LookaheadMode, block_tokens: int
    ) -> None:
        self._by_count = TokenCount(budget_tokens)
        self._min_tokens, self._cost, self._mode = min_tokens, cost, mode
        self._block_tokens = block_tokens
        self._plan: deque[Microbatch] = deque()

    def forget(self) -> None:
        self._plan.clear()

    def form(self, lane: Lane, memory: Memory) -> list[PromptChunk]:
        if not self._plan:
            work = self._work(lane.queue, memory)
            if tokens_of(work) < 2 * self._min_tokens:
                return self._by_count.form(lane, memory)
            self._plan.extend(lookahead(work, self._min_tokens, self._cost, self._mode))
        return self._take(self._plan.popleft(), lane.queue, memory)

    def _work(self, queue: Queue, memory: Memory) -> list[Chunk]:
        """All prefills that go on or could start now, as far as memory goes."""
        work = []
        free_tokens = memory.free_blocks * self._block_tokens
        for sequence in (*queue.prefilling, *queue.waiting):
            remaining = sequence.target_tokens - sequence.cached_tokens
            free_tokens -= remaining
            if free_tokens < 0:
                break
            if remaining:
                work.append(Chunk(sequence.index, sequence.cached_tokens, remaining))
        return work

    def _take(self, part: Microbatch, queue: Queue, memory: Memory) -> list[PromptChunk]:
        prefilling = {sequence.index: sequence for sequence in queue.prefilling}
        chunks: list[PromptChunk] = []
        for planned in part:
            sequence = prefilling.get(planned.request)
            starts = sequence is None
            if sequence is None:
                if not queue.waiting or not memory.may_start(queue.waiting[0]):
                    self.forget()
                    break
                sequence = queue.waiting[0]
            agrees = sequence.index == planned.request and sequence.cached_tokens == planned.prefix
            chunk = take_chunk(sequence, planned.tokens, memory) if agrees else None
            if chunk is None:
                self.forget()
                break
            if starts:
                queue.start()
            chunks.append(chunk)
        return chunks
