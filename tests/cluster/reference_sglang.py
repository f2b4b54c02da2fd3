"""SGLang's engine with a private pool, written down iteration by iteration: an oracle for the one of the simulator.

As in ``reference_engine``, every sequence is a record and all of them are walked at each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from reference_engine import Record

from fineserve_sim.cluster import EngineSettings
from fineserve_sim.latency import StepModel

LEAST = 0.7 * 0.14
DECAY = (0.7 - LEAST) / 600
MOST_TO_COME = 4096
STEPS_AHEAD = 20


class SglangReference:
    """``rows`` are (arrival_s, prompt tokens, output tokens) in order; all of them must be able to run alone."""

    def __init__(
        self,
        rows: Sequence[tuple[float, int, int]],
        step: StepModel,
        settings: EngineSettings,
        blocks: int,
        first_ratio: float,
    ) -> None:
        self.records = [Record(i, *row) for i, row in enumerate(rows)]
        self._step, self._settings, self._blocks = step, settings, blocks
        self._mixed = settings.batching == "sglang_mixed"
        self._arriving = list(self.records)
        self._waiting: list[Record] = []
        self._known: list[Record] = []
        self._running: list[Record] = []
        self._full_with = 0
        self._first = self._ratio = first_ratio
        self._decay_steps = 0
        self._now = 0.0
        self.step_ends_s: list[float] = []
        self.retractions = 0

    def run(self) -> None:
        while self._arriving or self._waiting or self._running:
            idle = not self._running
            if idle and not self._waiting:
                self._now = max(self._now, self._arriving[0].arrival_s)
                self._ratio, self._decay_steps = self._first, 0
            while self._arriving and self._arriving[0].arrival_s <= self._now:
                self._waiting.append(self._arriving.pop(0))
            self._iterate(idle)

    @property
    def _decodes(self) -> list[Record]:
        return [record for record in self._running if record.decoding]

    def _iterate(self, idle: bool) -> None:
        if self._mixed:
            self._grow_decodes()
        chunks = self._prompts(idle)
        if not (self._mixed or chunks):
            self._grow_decodes()
        self._known = list(self._waiting)
        decodes = self._decodes if self._mixed or not chunks else []
        tokens = sum(c for _, c in chunks)
        pairs = sum(sum(r.cached + i + 1 for i in range(c)) for r, c in chunks)
        sampled = len(decodes) + sum(r.cached + c == r.target for r, c in chunks)
        context = sum(r.cached for r, _ in chunks)
        self._now += self._step.step_s(len(decodes), sum(r.cached for r in decodes), tokens, pairs, context, sampled)
        self.step_ends_s.append(self._now)
        self._decay_steps += bool(decodes) and not chunks
        for record in decodes:
            record.cached += 1
            self._emit(record)
        for record, chunk in chunks:
            record.cached += chunk
            if record.cached == record.target:
                record.decoding = True
                self._emit(record)

    def _prompts(self, idle: bool) -> list[tuple[Record, int]]:
        beside = len(self._decodes) if self._mixed else 0
        left = self._settings.token_budget - beside
        chunks: list[tuple[Record, int]] = []
        for record in [r for r in self._running if not r.decoding]:
            chunk = min(left, record.target - record.cached)
            if chunk < 1 or not self._grow(record, record.cached + chunk):
                return chunks
            chunks.append((record, chunk))
            left -= chunk
        if self._full_with > len(self._running):
            self._full_with = 0
        free_choice = not (self._decodes or chunks)
        while left > 0 and self._waiting and not self._full_with:
            record = self._waiting[0]
            if not (idle or free_choice or record in self._known):
                break
            chunk = min(left, record.target)
            slots = len(self._running) < self._settings.max_sequences
            if not (slots and self._has_room(record, chunks) and self._grow(record, chunk)):
                self._full_with = len(self._running)
                break
            self._running.append(self._waiting.pop(0))
            chunks.append((record, chunk))
            left -= chunk
        return chunks

    def _has_room(self, record: Record, chunks: Sequence[tuple[Record, int]]) -> bool:
        block = self._settings.block_tokens
        free = (self._blocks - sum(r.blocks for r in self._running)) * block
        kept = self._ratio_now * sum(min(r.output - r.generated, MOST_TO_COME) for r in self._decodes)
        kept += sum(min(r.output - r.generated, MOST_TO_COME) for r, _ in chunks)
        wanted = record.target + min(record.output - record.generated, MOST_TO_COME)
        return min(wanted, self._blocks * block - 1) < free - kept

    @property
    def _ratio_now(self) -> float:
        if self._decay_steps == 0:
            return self._ratio
        return max(LEAST, self._ratio - DECAY * self._decay_steps)

    def _grow_decodes(self) -> None:
        """A slot for each decode; if one is missing, others go until 20 more for each fit."""
        if self._decodes and not self._fits(1):
            order = sorted(self._decodes, key=lambda r: (r.generated, -r.prompt, -r.index))
            while len(order) > 1 and not self._fits(STEPS_AHEAD):
                self._retract(order.pop(0))
            if not self._fits(1):
                self._retract(order.pop(0))
            done = sum(r.generated + STEPS_AHEAD for r in order)
            self._ratio, self._decay_steps = min(1.0, done / (sum(r.output for r in order) + 1)), 0
        for record in self._decodes:
            assert self._grow(record, record.cached + 1)

    def _fits(self, steps: int) -> bool:
        block = self._settings.block_tokens
        needed = sum(-(-(r.cached + steps) // block) - r.blocks for r in self._decodes)
        return needed <= self._blocks - sum(r.blocks for r in self._running)

    def _grow(self, record: Record, tokens: int) -> bool:
        needed = -(-tokens // self._settings.block_tokens)
        if needed > self._blocks - sum(r.blocks for r in self._running if r is not record):
            return False
        record.blocks = max(needed, record.blocks)
        return True

    def _retract(self, record: Record) -> None:
        self._running.remove(record)
        record.cached = record.blocks = 0
        record.decoding = False
        record.preemptions += 1
        self.retractions += 1
        self._waiting.append(record)

    def _emit(self, record: Record) -> None:
        record.generated += 1
        if record.first_token_s is None:
            record.first_token_s = self._now
        if record.generated == record.output:
            record.finish_s = self._now
            record.blocks = 0
            self._running.remove(record)
