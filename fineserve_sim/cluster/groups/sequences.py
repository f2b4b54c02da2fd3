"""Sequences of a group of instances, and those of them that decode together.

As in an engine alone (``cluster/sequence.py``), all decodes of a lane advance together, and one iteration counter says
where each stands: a step costs nothing per sequence. What differs: sequences move, in the middle of decoding, between
lanes, groups and host memory, and hold a number of KV blocks rather than blocks with names, because a group may change
the bytes behind them.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain, count


class Sequence:
    """One request inside the cluster. ``output_tokens`` is the oracle: no policy sees it.

    ``target_tokens`` are to be prefilled: the prompt, and after a loss of KV the generated tokens too.
    ``cached_tokens`` have their KV (or have it under way in a microbatch); while the sequence decodes, ``Decodes``
    knows the number. ``in_flight`` counts its prompt chunks in microbatches, ``due`` the transfers it waits for;
    ``host_blocks`` are swapped out.
    """

    __slots__ = (
        "arrival_s",
        "blocks",
        "bucket",
        "cached_tokens",
        "due",
        "finish_iteration",
        "generated_tokens",
        "host_blocks",
        "in_flight",
        "index",
        "output_tokens",
        "preempted",
        "prompt_tokens",
        "target_tokens",
    )

    def __init__(self, index: int, arrival_s: float, prompt_tokens: int, output_tokens: int) -> None:
        self.index = index
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.target_tokens = prompt_tokens
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.blocks = 0
        self.host_blocks = 0
        self.in_flight = 0
        self.due = 0
        self.preempted = False
        self.finish_iteration = -1
        self.bucket = -1

    @property
    def decodes(self) -> bool:
        """Its prefill is done. Asked of a sequence outside ``Decodes``."""
        return self.cached_tokens >= self.target_tokens

    def lose_kv(self) -> None:
        """Its KV is gone: prompt and generated tokens are to be prefilled (again)."""
        self.target_tokens = self.prompt_tokens + self.generated_tokens
        self.cached_tokens = 0
        self.host_blocks = 0
        self.in_flight = 0
        self.due = 0
        self.preempted = True


def by_arrival(sequence: Sequence) -> tuple[float, int]:
    return sequence.arrival_s, sequence.index


class Decodes:
    """The decoding sequences of one lane. ``iteration`` counts steps done; ``context_tokens`` sums their cached
    tokens."""

    __slots__ = ("_block_tokens", "_buckets", "_due", "_joins", "context_tokens", "iteration", "size")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._buckets: list[dict[Sequence, None]] = [{} for _ in range(block_tokens)]
        self._due: list[tuple[int, int, Sequence]] = []
        self._joins = count()
        self.iteration = 0
        self.context_tokens = 0
        self.size = 0

    def join(self, sequence: Sequence) -> None:
        """From the next step on, ``sequence`` (its KV in place) yields a token a step."""
        sequence.finish_iteration = self.iteration + sequence.output_tokens - sequence.generated_tokens
        sequence.bucket = (self.iteration - sequence.cached_tokens) % self._block_tokens
        self._buckets[sequence.bucket][sequence] = None
        heappush(self._due, (sequence.finish_iteration, next(self._joins), sequence))
        self.context_tokens += sequence.cached_tokens
        self.size += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; what it has generated and cached by now is written down."""
        del self._buckets[sequence.bucket][sequence]
        sequence.bucket = -1
        sequence.generated_tokens = sequence.output_tokens - (sequence.finish_iteration - self.iteration)
        sequence.cached_tokens = sequence.prompt_tokens + sequence.generated_tokens - 1  # the last token has no KV yet
        sequence.target_tokens = sequence.cached_tokens
        self.context_tokens -= sequence.cached_tokens
        self.size -= 1

    def advance(self) -> None:
        """A step is done: every sequence has a token more."""
        self.iteration += 1
        self.context_tokens += self.size

    def pop_finished(self) -> list[Sequence]:
        """Remove and return the sequences whose last token has come, in the order in which they joined."""
        finished = []
        while self._due and self._due[0][0] <= self.iteration:
            due, _, sequence = heappop(self._due)
            if sequence.finish_iteration == due and self._holds(sequence):
                self.remove(sequence)
                finished.append(sequence)
        return finished

    def growing(self, steps_ahead: int = 0) -> dict[Sequence, None]:
        """The sequences that open a new KV block at the next step, or so many steps after it."""
        return self._buckets[(self.iteration + steps_ahead) % self._block_tokens]

    def cached_tokens_of(self, sequence: Sequence) -> int:
        """Tokens of a member with KV in memory now."""
        generated = sequence.output_tokens - (sequence.finish_iteration - self.iteration)
        return sequence.prompt_tokens + generated - 1

    def _holds(self, sequence: Sequence) -> bool:
        return sequence.bucket >= 0 and sequence in self._buckets[sequence.bucket]

    def __contains__(self, sequence: Sequence) -> bool:
        return self._holds(sequence)

    def __iter__(self) -> Iterator[Sequence]:
        return chain.from_iterable(self._buckets)
