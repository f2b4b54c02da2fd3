"""SGLang's continuous batching: prompts first, and room kept for the outputs of requests that run.

* **Prefill first.** While prompts can be admitted, batches hold prompts alone, up to the token budget (its chunked prefill
  size), and decodes wait. A prompt that the budget cuts goes on in the next batch. In mixed mode the decodes
  join such batches, within the budget.
* **Admission.** A prompt starts if the memory holds it, all tokens that it may generate, and a part of the tokens that running
  requests may still generate (``policy.memory.reserve``). After a refusal none is tried until a running request has left.
* **Retraction.** A decode step that finds no memory sends requests back to the end of the queue until the remaining ones can
  go on for 20 steps. They recompute their KV later, as preempted requests of vLLM do.
* **Overlap.** The scheduler puts a batch together while the one before runs. So a request that comes during a batch waits for
  the next one, too, unless the engine is idle. SGLang notices the end of a request a step late; this is left out.

Requests are served in order of arrival, SGLang's default. The limit on a request's output is its true output length here.
Benchmarks and replays of traces ask for exactly that (SGLang's own ``bench_serving`` does).

Source: SGLang's documentation (server arguments, hyperparameter tuning), its blog on the zero-overhead scheduler (v0.4), and
descriptions of its scheduler, 0.4 to 0.5.
"""

from __future__ import annotations

from fineserve_sim.cluster.engine.batching import VllmBatching
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import Lane, PromptChunk, Queue, SequenceState
from fineserve_sim.policy.memory.reserve import RETRACT_STEPS, OutputReserve, Running, retraction_order, wanted_tokens

ALL = 2**62


class SglangBatching(VllmBatching):
    """Prompts first. ``mixed``: decodes join the batches of prompts."""

    def __init__(self, engine: Engine, *, mixed: bool = False) -> None:
        super().__init__(engine)
        self._mixed = mixed
        self._reserve = OutputReserve()
        self._known = ALL  # requests at the head of the queue that were there when the last batch was launched
        self._refused_beside = 0  # running requests when one was last refused; 0: none was since one left

    def form(self, lane: Lane, now: float) -> None:
        queue, decodes = lane.queue, lane.decodes
        if self._mixed:
            self._grow(lane, now)
        lane.chunks = self.prompt_chunks(lane) if queue.waiting or queue.prefilling else []
        if decodes.size and not (self._mixed or lane.chunks):
            self._grow(lane, now)
            if not decodes.size:  # the last one gave way
                lane.chunks = self.prompt_chunks(lane)
        self._let_decode(lane, decoding=self._mixed or not lane.chunks)
        if lane.chunks or decodes.size:
            self._known = len(queue.waiting)
        else:
            self._known = ALL
            self._reserve.start_anew(decodes.iteration)
        self._engine.one_step = bool(queue.waiting) and not self._refused_beside

    def _let_decode(self, lane: Lane, *, decoding: bool) -> None:
        """The decodes take part in the next batch, or wait."""
        if decoding is not lane.decoding:
            lane.decoding = decoding
            self._engine.composition_changed = True
        if lane.chunks and decoding:
            self._reserve.hold(lane.decodes.iteration)

    def forget(self) -> None:
        self._known = 0

    def put_back(self, sequence: SequenceState, queue: Queue) -> None:
        queue.append(sequence)

    def prompt_chunks(self, lane: Lane) -> list[PromptChunk]:
        """The prompt that the last batch cut, then waiting ones in order, until budget, slots or memory end."""
        queue, left = lane.queue, self._settings.token_budget - (lane.decodes.size if self._mixed else 0)
        chunks: list[PromptChunk] = []
        for sequence in queue.prefilling:
            chunk = self._take_chunk(sequence, min(left, sequence.target_tokens - sequence.cached_tokens))
            if chunk is None:
                return chunks
            chunks.append(chunk)
            left -= chunk[2]
        known = self._known if lane.decodes.size or chunks else ALL
        if left > 0 and known > 0 and self._may_admit():
            self._admit(lane, chunks, known, left)
        return chunks

    def _may_admit(self) -> bool:
        """No prompt was refused, or a running request has left since."""
        engine = self._engine
        if self._refused_beside and engine.running < self._refused_beside:
            self._refused_beside = 0
        return not self._refused_beside

    def _admit(self, lane: Lane, chunks: list[PromptChunk], known: int, left: int) -> None:
        """Start waiting requests in order, at most ``known`` of them and ``left`` tokens, while they fit beside the memory
        kept for running requests."""
        engine, queue, decodes, kv = self._engine, lane.queue, lane.decodes, self._kv
        kept_tokens = self._reserve.kept_tokens(decodes.steps_to_come(), decodes.iteration)
        kept_tokens += sum([wanted_tokens(0, _to_come(sequence)) for sequence, _, _ in chunks])
        while left > 0 and known > 0 and queue.waiting:
            sequence = queue.waiting[0]
            wanted = wanted_tokens(sequence.target_tokens, _to_come(sequence))
            fits = min(wanted, kv.capacity_tokens() - 1) < kv.free_tokens() - kept_tokens
            chunk = self._begin_prefill(queue, left) if fits and engine.free_slots > 0 else None
            if chunk is None:
                self._refused_beside = engine.running
                return
            chunks.append(chunk)
            left, known = left - chunk[2], known - 1
            kept_tokens += wanted_tokens(0, _to_come(sequence))

    def _grow(self, lane: Lane, now: float) -> None:
        """Each decode gets the block that its next token needs."""
        growing = lane.decodes.needing_block()
        if growing and not self._kv.grow_each(growing):
            self._retract(lane, now)

    def _retract(self, lane: Lane, now: float) -> None:
        """Requests give way until the remaining ones can go on for some steps, or one is left."""
        engine, decodes = self._engine, lane.decodes
        members = {sequence.index: sequence for sequence in decodes}
        for victim in retraction_order(_running(lane)):
            if decodes.size == 1 or self._steps_fit(lane):
                break
            engine.preempt(members[victim.request], lane, now)
        growing = decodes.needing_block()
        while growing and not self._kv.grow_each(growing):  # another engine holds the memory
            engine.preempt(next(iter(decodes)), lane, now)
        self._reserve.jump(decodes.iteration, _running(lane))

    def _steps_fit(self, lane: Lane) -> bool:
        blocks = len(lane.decodes.needing_block()) + lane.decodes.blocks_ahead(RETRACT_STEPS - 1)
        return blocks <= self._kv.free_blocks()


def _to_come(sequence: SequenceState) -> int:
    """Tokens that a sequence outside of ``Decodes`` may still generate."""
    return sequence.output_tokens - sequence.generated_tokens


def _running(lane: Lane) -> list[Running]:
    decodes = lane.decodes
    return [
        Running(decodes.generated_tokens_of(one), one.output_tokens, one.prompt_tokens, one.index) for one in decodes
    ]
