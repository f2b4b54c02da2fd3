"""KunServe's lookahead (section 4.3): vLLM's batching, with prompt chunks that take the stages of a pipeline equally long.

The plan covers all prompts that go on or wait, as far as they fit in memory. Each batch gets one part of it, by request and
tokens. Memory is taken when a batch is formed; when that fails, the plan is void. With little work the chunks follow the token
count, as in the paper outside of bursts.
"""

from __future__ import annotations

from collections import deque

from fineserve_sim.cluster.engine.batching import VllmBatching
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import Lane, PromptChunk, Queue
from fineserve_sim.policy.groups.microbatch import Chunk, ChunkCost, LookaheadMode, Microbatch, lookahead, tokens_of


class LookaheadBatching(VllmBatching):
    """Prompt chunks by a plan over several batches, in parts of about ``min_tokens`` tokens or more, of equal ``cost``."""

    def __init__(self, engine: Engine, min_tokens: int, cost: ChunkCost, mode: LookaheadMode) -> None:
        super().__init__(engine)
        self._min_tokens, self._cost, self._mode = min_tokens, cost, mode
        self._plan: deque[Microbatch] = deque()

    def forget(self) -> None:
        self._plan.clear()

    def prompt_chunks(self, lane: Lane) -> list[PromptChunk]:
        if not self._plan:
            work = self._work(lane.queue)
            if tokens_of(work) < 2 * self._min_tokens:
                return super().prompt_chunks(lane)
            self._plan.extend(lookahead(work, self._min_tokens, self._cost, self._mode))
        return self._planned_chunks(self._plan.popleft(), lane)

    def _work(self, queue: Queue) -> list[Chunk]:
        """All prefills that go on or could start now, as far as memory goes."""
        work = []
        free_tokens = self._kv.free_tokens()
        for sequence in (*queue.prefilling, *queue.waiting):
            remaining = sequence.target_tokens - sequence.cached_tokens
            free_tokens -= remaining
            if free_tokens < 0:
                break
            if remaining:
                work.append(Chunk(sequence.index, sequence.cached_tokens, remaining))
        return work

    def _planned_chunks(self, part: Microbatch, lane: Lane) -> list[PromptChunk]:
        chunks: list[PromptChunk] = []
        queue = lane.queue
        prefilling = {sequence.index: sequence for sequence in queue.prefilling}
        for planned in part:
            chunk = None
            if sequence := prefilling.get(planned.request):
                if sequence.cached_tokens == planned.prefix:
                    chunk = self._take_chunk(sequence, planned.tokens)
            elif queue.waiting and queue.waiting[0].index == planned.request and self._may_start(lane):
                chunk = self._begin_prefill(queue, planned.tokens)
            if chunk is None:
                self.forget()
                break
            chunks.append(chunk)
        return chunks
