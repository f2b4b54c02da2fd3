"""KunServe's lookahead (section 4.3): prompt chunks of equal cost, planned over all that waits and fits in memory.

The plan is handed out part by part, a part a batch, by request and tokens; memory is taken when a batch is formed, and the
plan is made anew when that fails. With little work the token count decides, as the paper does outside of bursts.
"""

from __future__ import annotations

from collections import deque

from fineserve_sim.cluster.engine.batcher import Batcher
from fineserve_sim.cluster.engine.queue import PromptChunk, Queue
from fineserve_sim.policy.groups.microbatch import Chunk, ChunkCost, LookaheadMode, Microbatch, lookahead, tokens_of


class Lookahead:
    """Parts of about ``min_tokens`` tokens or more, of equal ``cost``."""

    def __init__(self, min_tokens: int, cost: ChunkCost, mode: LookaheadMode) -> None:
        self._min_tokens, self._cost, self._mode = min_tokens, cost, mode
        self._plan: deque[Microbatch] = deque()

    def forget(self) -> None:
        """A sequence that was planned with went away, or came."""
        self._plan.clear()

    def form(self, queue: Queue, engine: Batcher) -> list[PromptChunk] | None:
        """The prompt chunks of the next batch, their memory taken. None: too little work to plan with."""
        if not self._plan:
            work = self._work(queue, engine)
            if tokens_of(work) < 2 * self._min_tokens:
                return None
            self._plan.extend(lookahead(work, self._min_tokens, self._cost, self._mode))
        return self._take(self._plan.popleft(), queue, engine)

    def _work(self, queue: Queue, engine: Batcher) -> list[Chunk]:
        """All prefills that go on or could start now, as far as memory goes."""
        work = []
        free_tokens = engine.kv.free_tokens()
        for sequence in (*queue.prefilling, *queue.waiting):
            remaining = sequence.target_tokens - sequence.cached_tokens
            free_tokens -= remaining
            if free_tokens < 0:
                break
            if remaining:
                work.append(Chunk(sequence.index, sequence.cached_tokens, remaining))
        return work

    def _take(self, part: Microbatch, queue: Queue, engine: Batcher) -> list[PromptChunk]:
        chunks: list[PromptChunk] = []
        prefilling = {sequence.index: sequence for sequence in queue.prefilling}
        for planned in part:
            sequence = prefilling.get(planned.request)
            if sequence is not None:
                agrees = sequence.cached_tokens == planned.prefix
                chunk = engine.take_chunk(sequence, planned.tokens) if agrees else None
            elif queue.waiting and queue.waiting[0].index == planned.request and engine.may_start(queue.waiting[0]):
                chunk = engine.begin_prefill(queue, planned.tokens)
            else:
                chunk = None
            if chunk is None:
                self.forget()
                break
            chunks.append(chunk)
        return chunks
