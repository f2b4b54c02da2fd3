"""Sequences inside an engine: a queue of sequences that wait or are in prefill, and a set of sequences that decode.

An engine with n running decodes must not touch n objects a step. All decodes of a lane advance together, so one iteration
counter says where each of them stands. A sequence that joined at iteration J with c cached tokens has its *origin* at J - c.
Before iteration i it holds i - origin tokens. Two things follow:

* It finishes at an iteration that is known when it joins. A sorted list has the next ends.
* It needs a new KV block whenever the tokens that it holds are a multiple of the block size. Sequences with the same origin
  modulo the block size need blocks at the same iterations, so one bucket a residue finds them.

A step costs nothing per sequence.

An engine keeps as many batches in flight as it has stages. Each belongs to a *lane* (vLLM: virtual engine), which forms its
next batch when the last one has left the engine. A sequence decodes in one lane. Lanes have queues of their own, or all share
one, so that a prompt's chunks may follow each other through a pipeline.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count
from typing import NamedTuple

from fineserve_sim.latency.attention import Tail
from fineserve_sim.policy.interfaces import Request


class Prefix(NamedTuple):
    """The known prefixes of a sequence: ``ids``, one for each ``id_tokens`` tokens. The ids say nothing beyond
    ``known_tokens``. Equal ids mean equal tokens from the first one on."""

    ids: tuple[int, ...]
    id_tokens: int
    known_tokens: int


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request inside an engine.

    ``asked_tokens``, its output if nothing cuts it off, is the oracle: the engine alone holds it, no policy sees it. Its
    present engine ends it after ``output_tokens``, which are fewer where the engine holds fewer.

    ``target_tokens`` are to be prefilled: the prompt, and after a loss of KV the generated tokens too. ``cached_tokens`` have
    their KV in memory, or in a step that is under way. While a sequence decodes, ``Decodes`` knows ``cached_tokens`` and
    ``generated_tokens`` by its ``origin``, and writes both down when it leaves. ``prefix`` has its known prefixes.
    ``blocks`` holds the block ids, where blocks have names, one list a memory.
    """

    index: int
    arrival_s: float
    prompt_tokens: int
    asked_tokens: int
    prefix: Prefix | None = None
    output_tokens: int = field(init=False)
    target_tokens: int = field(init=False)
    cached_tokens: int = 0
    generated_tokens: int = 0
    preempted: bool = False
    origin: int = 0
    blocks: Sequence[list[int]] = ()

    def __post_init__(self) -> None:
        self.target_tokens = self.prompt_tokens
        self.output_tokens = self.asked_tokens

    @property
    def prefilled(self) -> bool:
        """All that it must prefill is cached. The sequence must be outside ``Decodes``."""
        return self.cached_tokens >= self.target_tokens

    def lose_kv(self) -> None:
        """Its KV is gone: prompt and generated tokens are to be prefilled (again)."""
        self.target_tokens = self.prompt_tokens + self.generated_tokens
        self.cached_tokens = 0
        self.preempted = True


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that no engine has had yet, with the facts for its sequence. It is small, since an overload has many of them.

    ``output_tokens`` is the oracle. ``engine`` is the engine that it was bound to when it came, -1 for none."""

    request: Request
    output_tokens: int
    prefix: Prefix | None
    engine: int = -1

    def sequence(self) -> SequenceState:
        request, output_tokens = self.request, self.output_tokens
        return SequenceState(request.id, request.arrival_s, request.prompt_tokens, output_tokens, self.prefix)


Growth = tuple[float, int, Collection[SequenceState]]
"""At this time, sequences of the engine with this id take a block each."""


class Decodes:
    """The decoding sequences of one engine, or of one lane of a pipeline. ``iteration`` counts steps done;
    ``context_tokens`` is the sum of cached tokens.

    ``tail`` says when the longest of uneven sequences delays a step, which costs as much as more context. How much longer than
    the mean it is does not change while no sequence joins or leaves, as all grow together.
    """

    __slots__ = (
        "_block_tokens",
        "_buckets",
        "_due",
        "_joins",
        "_oldest",
        "_sizes",
        "_tail",
        "context_tokens",
        "iteration",
        "size",
    )

    def __init__(self, block_tokens: int, tail: Tail | None = None) -> None:
        self._block_tokens, self._tail = block_tokens, tail
        self._oldest = 0  # the least origin, that of the longest sequence, where lengths count
        self._buckets: list[dict[SequenceState, None]] = [{} for _ in range(block_tokens)]
        self._sizes = [0] * block_tokens
        self._due: list[tuple[int, int, SequenceState]] = []  # (-finish iteration, -turn): the next to end is the last
        self._joins = count()
        self.iteration = 0
        self.context_tokens = 0
        self.size = 0

    def join(self, sequence: SequenceState) -> None:
        """A sequence with all its KV in place, ``generated_tokens`` of its output done, decodes from the next step on."""
        cached = sequence.cached_tokens
        sequence.origin = self.iteration - cached
        if self._tail is not None and (not self.size or sequence.origin < self._oldest):
            self._oldest = sequence.origin
        bucket = sequence.origin % self._block_tokens
        self._buckets[bucket][sequence] = None
        self._sizes[bucket] += 1
        finish = self.iteration + sequence.output_tokens - sequence.generated_tokens
        insort(self._due, (-finish, -next(self._joins), sequence))
        self.context_tokens += cached
        self.size += 1

    def advance(self, steps: int = 1) -> list[SequenceState]:
        """So many steps are done: every sequence has as many tokens more. Removes and returns the sequences whose last token
        has come, in the order in which they joined."""
        self.iteration += steps
        self.context_tokens += steps * self.size
        finished = []
        while self._due and -self._due[-1][0] <= self.iteration:
            sequence = self._due.pop()[2]
            self._remove(sequence)
            finished.append(sequence)
        return finished

    def remove(self, sequence: SequenceState) -> None:
        """Take a sequence out before its end, and write down its generated and cached tokens."""
        self._due = [entry for entry in self._due if entry[2] is not sequence]
        self._remove(sequence)

    def needing_block(self, steps_ahead: int = 0) -> dict[SequenceState, None]:
        """The sequences that open a new block with their next token, or so many tokens after it, in the order in which they
        joined."""
        return self._buckets[(self.iteration + steps_ahead) % self._block_tokens]

    def cached_tokens_of(self, sequence: SequenceState) -> int:
        """Tokens of a member with KV in memory now."""
        return self.iteration - sequence.origin

    def generated_tokens_of(self, sequence: SequenceState) -> int:
        """Tokens that a member has generated by now; the last one has no KV yet."""
        return self.cached_tokens_of(sequence) + 1 - sequence.prompt_tokens

    def held_blocks(self, without: Collection[SequenceState], ahead: int) -> list[tuple[int, int]]:
        """The blocks that hold the KV of each other member after so many more iterations, and its index."""
        block_tokens, then = self._block_tokens, self.iteration + ahead
        return [(-((one.origin - then) // block_tokens), one.index) for _, _, one in self._due if one not in without]

    @property
    def attended_tokens(self) -> int:
        """The context of a batch of equal sequences whose attention takes as long."""
        tail, context_tokens, size = self._tail, self.context_tokens, self.size
        if tail is None or size < tail.least:
            return context_tokens
        return context_tokens + tail.tokens(size, self.iteration - self._oldest, context_tokens)

    def steps_to_finish(self) -> int:
        """Iterations until the next sequence ends; at least 1. The set must not be empty."""
        return -self._due[-1][0] - self.iteration

    def steps_to_come(self) -> list[int]:
        """Iterations until each sequence ends, in no order that means anything."""
        return [-finish - self.iteration for finish, _, _ in self._due]

    def phases(self) -> Iterator[tuple[int, int, int]]:
        """The next iterations if no sequence joins: (iterations, decodes, their ``attended_tokens`` at first) between one
        sequence's end and the next."""
        iteration, context_tokens, decodes = self.iteration, self.context_tokens, self.size
        tail = self._tail
        oldest = [*accumulate([one.origin for _, _, one in self._due], min)] if tail is not None else []
        for finish, _, sequence in reversed(self._due):
            ahead = -finish - iteration
            if ahead:
                more = 0
                if tail is not None and decodes >= tail.least:
                    more = tail.tokens(decodes, iteration - oldest[decodes - 1], context_tokens)
                yield ahead, decodes, context_tokens + more
                iteration = -finish
                context_tokens += ahead * decodes
            decodes -= 1
            context_tokens -= sequence.prompt_tokens + sequence.output_tokens - 1

    def blocks_ahead(self, boundaries: int) -> int:
        """Blocks that the next ``boundaries`` boundaries between iterations will take, the present iteration's apart."""
        cycles, rest = divmod(boundaries, self._block_tokens)
        first = (self.iteration + 1) % self._block_tokens
        last = first + rest
        extra = sum(self._sizes[first:last])
        if last > self._block_tokens:
            extra += sum(self._sizes[: last - self._block_tokens])
        return cycles * self.size + extra

    def pass_boundaries(self, ends_s: list[float], engine: int) -> list[Growth]:
        """Advance over the boundaries between iterations at these times. Returns the boundaries that open blocks, with
        ``engine`` and the sequences that need one."""
        growths: list[Growth] = []
        buckets, block_tokens, iteration = self._buckets, self._block_tokens, self.iteration
        for end_s in ends_s:
            iteration += 1
            if bucket := buckets[iteration % block_tokens]:
                growths.append((end_s, engine, bucket))
        self.context_tokens += (iteration - self.iteration) * self.size
        self.iteration = iteration
        return growths

    def __contains__(self, sequence: SequenceState) -> bool:
        return sequence in self._buckets[sequence.origin % self._block_tokens]

    def __iter__(self) -> Iterator[SequenceState]:
        return chain.from_iterable(self._buckets)

    def _remove(self, sequence: SequenceState) -> None:
        if self._tail is not None and sequence.origin == self._oldest:
            self._oldest = min([one.origin for _, _, one in self._due], default=0)
        bucket = sequence.origin % self._block_tokens
        del self._buckets[bucket][sequence]
        self._sizes[bucket] -= 1
        sequence.cached_tokens = self.iteration - sequence.origin
        sequence.generated_tokens = sequence.cached_tokens + 1 - sequence.prompt_tokens  # the last token has no KV yet
        self.context_tokens -= sequence.cached_tokens
        self.size -= 1


PromptChunk = tuple[SequenceState, int, int]
"""A sequence, its tokens before the chunk, and the tokens of the chunk."""


@dataclass(slots=True, eq=False)
class Queue:
    """``waiting`` sequences hold no KV, ``prefilling`` ones have begun. Both lists are changed, never replaced.
    ``queued_blocks``: KV blocks for the prompts of all that wait, and one more each to go on with."""

    block_tokens: int
    waiting: deque[SequenceState] = field(default_factory=deque)
    prefilling: list[SequenceState] = field(default_factory=list)
    queued_blocks: int = 0

    def demand_blocks(self, sequence: SequenceState) -> int:
        """KV blocks for all that is to be prefilled, and one more."""
        return -(-sequence.target_tokens // self.block_tokens) + 1

    @property
    def head_blocks(self) -> int:
        return self.demand_blocks(self.waiting[0]) if self.waiting else 0

    def append(self, sequence: SequenceState) -> None:
        self.waiting.append(sequence)
        self.queued_blocks += self.demand_blocks(sequence)

    def put_back(self, sequence: SequenceState) -> None:
        """Put a preempted sequence at the front, so that it goes first."""
        self.waiting.appendleft(sequence)
        self.queued_blocks += self.demand_blocks(sequence)

    def start(self) -> None:
        """The first waiting sequence begins its prefill."""
        self.prefilling.append(self.take_first())

    def take_first(self) -> SequenceState:
        """Remove and return the first waiting sequence."""
        sequence = self.waiting.popleft()
        self.queued_blocks -= self.demand_blocks(sequence)
        return sequence

    def take_waiting(self) -> list[SequenceState]:
        """Remove and return all that wait."""
        taken = list(self.waiting)
        self.waiting.clear()
        self.queued_blocks = 0
        return taken


@dataclass(slots=True, eq=False)
class Lane:
    """A place for one batch in flight of an engine.

    ``chunks`` are the prompt parts of the batch in flight. ``joining`` sequences decode from the next batch on; ``leaving``
    ones stop before it. ``asked``: the lane waits for its turn. ``launched``: its batch is in flight. ``decoding``: the decodes
    take part in it, as in each batch of vLLM; ``prompt_batches`` counts batches without decodes."""

    queue: Queue
    decodes: Decodes
    chunks: list[PromptChunk] = field(default_factory=list)
    joining: list[SequenceState] = field(default_factory=list)
    leaving: list[SequenceState] = field(default_factory=list)
    asked: bool = False
    launched: bool = False
    decoding: bool = True
    prompt_batches: int = 0

    @property
    def under_way(self) -> bool:
        """Each decode has a token in flight."""
        return self.launched and self.decoding

    @property
    def size(self) -> int:
        """Sequences that decode here."""
        return self.decodes.size + len(self.joining)

    @property
    def started(self) -> int:
        """Sequences that decode here, and sequences that its queue has begun to prefill."""
        return self.size + len(self.queue.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self.decodes.size or self.joining or self.queue.prefilling or self.queue.waiting)
