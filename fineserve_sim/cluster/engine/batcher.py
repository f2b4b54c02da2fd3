"""Continuous batching at iteration granularity, as vLLM does it (systems.md 1.3): the only place for it.

An iteration gives every decode of a lane one token, then fills the token budget with prompt chunks, oldest first. Memory is
paged; when a decode finds no block, the request that arrived last gives way: it is recomputed later, or swapped (``swap``).
``_form`` makes the next batch, ``_complete`` takes its tokens in; how long the batch is computed in between, and on what, is
the subclass's part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.sequence import Lane, PromptChunk, Queue, SequenceState
from fineserve_sim.cluster.scenario import Left
from fineserve_sim.policy.memory.preemption import preemption_victim


class Batcher(Engine):
    """An engine that forms batches and takes their tokens in."""

    def _form(self, lane: Lane, now: float) -> None:
        """The lane's next batch: a KV slot for the next token of each decode, then prompt chunks for what the budget leaves."""
        if lane.joining or lane.leaving:
            self._let_move(lane, now)
        self._preempted = False
        growing = lane.decodes.needing_block()
        if growing and not self.kv.grow_each(growing):
            self._make_room(lane, growing, now)
        queue = lane.queue
        lane.chunks = self._prompt_chunks(lane) if queue.waiting or queue.prefilling else []

    def _let_move(self, lane: Lane, now: float) -> None:
        """Sequences join the decodes, and those that are to go elsewhere leave."""
        for sequence in lane.joining:
            lane.decodes.join(sequence)
        lane.joining.clear()
        while lane.leaving:
            self._host.leaves(self, lane, lane.leaving.pop(), now)

    def _make_room(self, lane: Lane, growing: Collection[SequenceState], now: float) -> None:
        """Requests of the lane give way, the latest arrival first, until all that grow have their block. Those with a prompt
        chunk in flight go on."""
        computing = {sequence for other in self.lanes if other.launched for sequence, _, _ in other.chunks}
        while growing and not self.kv.grow_each(growing):
            idle = [sequence for sequence in lane.queue.prefilling if sequence not in computing]
            self.preempt(preemption_victim([*lane.decodes, *idle]), lane, now)

    def _prompt_chunks(self, lane: Lane) -> list[PromptChunk]:
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
        while left > 0 and queue.waiting and self._may_start(lane):
            chunk = self._begin_prefill(queue, left)
            if chunk is None:
                break
            chunks.append(chunk)
            left -= chunk[2]
        return chunks

    def _take_chunk(self, sequence: SequenceState, tokens: int) -> PromptChunk | None:
        """The next ``tokens`` of a prefill, if there is memory for them."""
        done = sequence.cached_tokens
        if tokens < 1 or not self.kv.grow(sequence, done + tokens):
            return None
        sequence.cached_tokens = done + tokens
        return sequence, done, tokens

    def _begin_prefill(self, queue: Queue, most: int) -> PromptChunk | None:
        """The first waiting sequence starts behind what is cached of its prefix, if there is memory for its first chunk."""
        sequence = queue.waiting[0]
        reused = 0
        if sequence.prefix is not None:
            sequence.cached_tokens = reused = self.kv.reuse(sequence)
        chunk = self._take_chunk(sequence, min(most, sequence.target_tokens - reused))
        if chunk is None:
            if reused:  # cached blocks are no use to it yet, and may be to others
                self.kv.release(sequence)
                sequence.cached_tokens = 0
            return None
        self._backlog_tokens -= reused
        queue.start()
        self.composition_changed = True
        return chunk

    def _may_start(self, lane: Lane) -> bool:
        """The first that waits has a slot, nobody has an older claim to the memory, and if it lost its KV there is room for all
        of it and a block to go on: else two could evict each other for ever."""
        if self._preempted or self.free_slots < 1:
            return False
        if len(self.queues) > 1 and lane.started >= self._settings.max_sequences:
            return False
        sequence = lane.queue.waiting[0]
        wanted = sequence.target_tokens + self._settings.block_tokens
        return not sequence.preempted or self.kv.free_tokens() >= min(wanted, self.kv.capacity_tokens())

    def _complete(self, lane: Lane, now: float) -> bool:
        """The batch is done at ``now``: tokens come out, sequences finish or go on to decode. Whether memory came back."""
        lane.launched = False
        finished = lane.decodes.advance()
        if lane.chunks:
            self._host.progressed(self)
            for sequence, done, size in lane.chunks:
                self._backlog_tokens -= size
                if done + size == sequence.target_tokens:
                    self._end_prefill(lane, sequence, finished, now)
        if finished:
            self._retire(finished, now)
            self.composition_changed = True
        return bool(finished)

    def _end_prefill(self, lane: Lane, sequence: SequenceState, finished: list[SequenceState], now: float) -> None:
        """A prefill yields a token (the first one, or the next after a recomputation), and its sequence decodes."""
        lane.queue.prefilling.remove(sequence)
        self.composition_changed = True
        if sequence.prefix is not None:
            self.kv.keep(sequence)
        sequence.generated_tokens += 1
        self._host.outcomes.first_token(sequence.index, now)
        if sequence.generated_tokens == sequence.output_tokens:
            finished.append(sequence)
        else:
            self._to_decode(lane, sequence)

    def _to_decode(self, lane: Lane, sequence: SequenceState) -> None:
        """It decodes from the lane's next batch on."""
        lane.decodes.join(sequence)

    def _retire(self, finished: Iterable[SequenceState], now: float) -> None:
        for sequence in finished:
            self.kv.release(sequence)
            self._host.finished(self, sequence, now)

    def preempt(self, sequence: SequenceState, lane: Lane, now: float) -> None:
        """Recompute later: free the blocks, go to the front of the queue with the generated tokens as part of the prompt."""
        if sequence in lane.decodes:
            lane.decodes.remove(sequence)
        else:
            lane.queue.prefilling.remove(sequence)
            self._backlog_tokens -= sequence.target_tokens - sequence.cached_tokens
            self._forget_plan()
        self.kv.release(sequence)
        sequence.lose_kv()
        self.composition_changed = True
        self._preempted = True
        self._host.preempted(self, sequence, now)
        if sequence.generated_tokens and self.too_long(sequence):
            self._host.finished(self, sequence, now)  # it has outgrown the memory: cut, as at vLLM's max_model_len
        elif self.closing:
            self._host.returned(self, [sequence], now, Left.REGROUPED)
        else:
            lane.queue.put_back(sequence)
            self._backlog_tokens += sequence.target_tokens

    def too_long(self, sequence: SequenceState) -> bool:
        """The memory could not hold what the sequence is to prefill, and a token more, even if it were empty."""
        return sequence.target_tokens >= self.kv.capacity_tokens()

    def shed(self, now: float) -> list[SequenceState]:
        """The memory has shrunk: between two iterations, remove and return the prompts that are too long for it by now."""
        for lane in self.lanes:
            for sequence in filter(self.too_long, [*lane.queue.prefilling]):
                self.preempt(sequence, lane, now)
        lost = []
        for sequence in self.take_waiting():
            if not self.too_long(sequence):
                self.accept(sequence)
            elif sequence.generated_tokens:
                self._host.finished(self, sequence, now)
            else:
                lost.append(sequence)
        return lost
