"""vLLM's continuous batching at iteration granularity (systems.md 1.3).

An iteration gives every decode of a lane one token, then fills the token budget with prompt chunks, oldest first. Memory is
paged. When a decode finds no block, the request that arrived last gives way.
"""

from __future__ import annotations

from collections.abc import Collection

from fineserve_sim.cluster.engine.loop import Batching, Engine
from fineserve_sim.cluster.engine.sequence import Lane, PromptChunk, Queue, SequenceState
from fineserve_sim.policy.memory.preemption import preemption_victim


class VllmBatching(Batching):
    """Decodes first, then prompt chunks with the rest of the token budget."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._kv, self._settings = engine.kv, engine.settings

    def form(self, lane: Lane, now: float) -> None:
        growing = lane.decodes.needing_block()
        if growing and not self._kv.grow_each(growing):
            tier = self._engine.tier
            if tier is None:
                self._make_room(lane, growing, now)
            else:
                tier.make_room(lane, growing, now)
        queue = lane.queue
        lane.chunks = self.prompt_chunks(lane) if queue.waiting or queue.prefilling else []

    def _make_room(self, lane: Lane, growing: Collection[SequenceState], now: float) -> None:
        """Requests of the lane give way, the latest arrival first, until all that grow have their block. Requests with a
        prompt chunk in flight go on."""
        engine = self._engine
        computing = {sequence for other in engine.lanes if other.launched for sequence, _, _ in other.chunks}
        while growing and not self._kv.grow_each(growing):
            idle = [sequence for sequence in lane.queue.prefilling if sequence not in computing]
            engine.preempt(preemption_victim([*lane.decodes, *idle]), lane, now)

    def prompt_chunks(self, lane: Lane) -> list[PromptChunk]:
        """Chunked prefill: partial prefills, then the head of the queue, until the token budget is full."""
        queue, left = lane.queue, self._settings.token_budget - lane.decodes.size
        chunks: list[PromptChunk] = []
        for sequence in queue.prefilling:
            if sequence.prefilled:
                continue  # its last chunk is in flight
            chunk = self._take_chunk(sequence, min(left, sequence.target_tokens - sequence.cached_tokens))
            if chunk is None:
                return chunks
            chunks.append(chunk)
            left -= chunk[2]
        below = self._engine.prefixes
        while left > 0 and queue.waiting and self._may_start(lane):
            if below is not None and below.has_more(queue.waiting[0]):
                if not below.fetch(queue):
                    break
                continue
            chunk = self._begin_prefill(queue, left)
            if chunk is None:
                break
            chunks.append(chunk)
            left -= chunk[2]
        return chunks

    def _take_chunk(self, sequence: SequenceState, tokens: int) -> PromptChunk | None:
        """The next ``tokens`` of a prefill, if there is memory for them."""
        done = sequence.cached_tokens
        if tokens < 1 or not self._kv.grow(sequence, done + tokens):
            return None
        sequence.cached_tokens = done + tokens
        return sequence, done, tokens

    def _begin_prefill(self, queue: Queue, most: int) -> PromptChunk | None:
        """The first waiting sequence starts after the cached part of its prefix, if there is memory for its first chunk."""
        sequence = queue.waiting[0]
        reused = 0
        if sequence.prefix is not None:
            sequence.cached_tokens = reused = self._kv.reuse(sequence)
        chunk = self._take_chunk(sequence, min(most, sequence.target_tokens - reused))
        if chunk is None:
            if reused:  # cached blocks are no use to it yet, and may be to others
                self._kv.release(sequence)
                sequence.cached_tokens = 0
            return None
        engine = self._engine
        engine.backlog_tokens -= reused
        queue.start()
        engine.composition_changed = True
        return chunk

    def _may_start(self, lane: Lane) -> bool:
        """The first that waits has a slot, and no other sequence has an older claim to the memory. If it lost its KV there is
        room for all of it and a block to go on: else two could evict each other for ever."""
        engine = self._engine
        if engine.preempted or engine.free_slots < 1 or (engine.tier is not None and engine.tier.moving):
            return False
        if len(engine.queues) > 1 and lane.started >= self._settings.max_sequences:
            return False
        sequence = lane.queue.waiting[0]
        wanted = sequence.target_tokens + self._settings.block_tokens
        return not sequence.preempted or self._kv.free_tokens() >= min(wanted, self._kv.capacity_tokens())
