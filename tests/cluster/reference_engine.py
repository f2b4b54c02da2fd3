"""One engine with a private pool, written down iteration by iteration: an oracle for the one of the simulator.

It keeps every sequence as a record and walks all of them at each step, with nothing merged and nothing kept incrementally.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fineserve_sim.cluster import EngineSettings
from fineserve_sim.latency import StepModel


@dataclass(eq=False)
class Record:
    index: int
    arrival_s: float
    prompt: int
    output: int
    generated: int = 0
    cached: int = 0
    blocks: int = 0
    preemptions: int = 0
    decoding: bool = False
    first_token_s: float | None = None
    finish_s: float | None = None

    @property
    def target(self) -> int:
        """Tokens to prefill: the prompt, and what was generated before a preemption."""
        return self.prompt + self.generated


class ReferenceEngine:
    """``rows`` are (arrival_s, prompt tokens, output tokens) in order; all of them must be able to run alone."""

    def __init__(
        self, rows: Sequence[tuple[float, int, int]], step: StepModel, settings: EngineSettings, blocks: int
    ) -> None:
        self.records = [Record(i, *row) for i, row in enumerate(rows)]
        self._step = step
        self._settings = settings
        self._blocks = blocks
        self._arriving = list(self.records)
        self._waiting: list[Record] = []
        self._running: list[Record] = []
        self._now = 0.0
        self.step_ends_s: list[float] = []

    def run(self) -> None:
        while self._arriving or self._waiting or self._running:
            if not self._waiting and not self._running:
                self._now = max(self._now, self._arriving[0].arrival_s)
            while self._arriving and self._arriving[0].arrival_s <= self._now:
                self._waiting.append(self._arriving.pop(0))
            self._iterate()

    def _iterate(self) -> None:
        preempted = self._grow_decodes()
        decodes = [r for r in self._running if r.decoding]
        chunks = self._fill_budget(self._settings.token_budget - len(decodes), admit=not preempted)
        tokens = sum(c for _, c in chunks)
        pairs = sum(sum(r.cached + i + 1 for i in range(c)) for r, c in chunks)
        sampled = len(decodes) + sum(r.cached + c == r.target for r, c in chunks)
        context = sum(r.cached for r, _ in chunks)
        self._now += self._step.step_s(len(decodes), self._attended(decodes), tokens, pairs, context, sampled)
        self.step_ends_s.append(self._now)
        for record in decodes:
            record.cached += 1
            self._emit(record)
        for record, chunk in chunks:
            record.cached += chunk
            if record.cached == record.target:
                record.decoding = True
                self._emit(record)

    def _attended(self, decodes: list[Record]) -> int:
        """What all read, and what the longest costs more where it ends last."""
        contexts, tail = [r.cached for r in decodes], self._step.tail
        if tail is None or len(contexts) < tail.least:
            return sum(contexts)
        return sum(contexts) + int(tail.sequences * (len(contexts) * max(contexts) - sum(contexts)) / len(contexts))

    def _grow_decodes(self) -> bool:
        """A slot for each decode, earliest arrival first; the latest arrival of all that run pays for it."""
        preempted = False
        for record in sorted((r for r in self._running if r.decoding), key=_age):
            while record.decoding and not self._grow(record, record.cached + 1):
                self._preempt(max(self._running, key=_age))
                preempted = True
        return preempted

    def _fill_budget(self, left: int, admit: bool) -> list[tuple[Record, int]]:
        chunks: list[tuple[Record, int]] = []
        for record in [r for r in self._running if not r.decoding]:
            chunk = min(left, record.target - record.cached)
            if chunk <= 0 or not self._grow(record, record.cached + chunk):
                return chunks
            chunks.append((record, chunk))
            left -= chunk
        while admit and left > 0 and self._waiting and len(self._running) < self._settings.max_sequences:
            record = self._waiting[0]
            chunk = min(left, record.target)
            if (record.preemptions and not self._fits_again(record)) or not self._grow(record, chunk):
                break
            self._running.append(self._waiting.pop(0))
            chunks.append((record, chunk))
            left -= chunk
        return chunks

    def _fits_again(self, record: Record) -> bool:
        """A preempted request waits until all of it fits, and its next block unless it needs none or there is none beyond."""
        free = self._blocks - sum(r.blocks for r in self._running)
        tokens = min(record.target + self._settings.block_tokens, self._blocks * self._settings.block_tokens)
        return free * self._settings.block_tokens >= tokens

    def _grow(self, record: Record, tokens: int) -> bool:
        needed = -(-tokens // self._settings.block_tokens)
        free = self._blocks - sum(r.blocks for r in self._running if r is not record)
        if needed > free:
            return False
        record.blocks = max(needed, record.blocks)
        return True

    def _preempt(self, record: Record) -> None:
        self._running.remove(record)
        record.cached = record.blocks = 0
        record.decoding = False
        record.preemptions += 1
        self._waiting.insert(0, record)

    def _emit(self, record: Record) -> None:
        record.generated += 1
        if record.first_token_s is None:
            record.first_token_s = self._now
        if record.generated == record.output:
            record.finish_s = self._now
            record.blocks = 0
            self._running.remove(record)


def _age(record: Record) -> tuple[float, int]:
    return record.arrival_s, record.index
