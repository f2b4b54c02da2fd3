"""Microbatches for a pipeline: by token count, or KunServe's lookahead over all that waits (section 4.3, Fig. 11).

A pipeline idles where neighbouring microbatches take unequal time. Equal token counts are not equal times: a chunk
attends to all tokens before it. The cost of c tokens after p others is (eq. 1)

    cost(p, c) = alpha * (p * c + (c * c + c) / 2) + beta * c + gamma

and the cost of a microbatch is the sum over its chunks (eq. 3). The later version of the paper takes off a ``shared`` part
for all chunks but one. Lookahead halves the waiting work by cost, again and again, and keeps the order of requests.

The listing halves each part until that part is small enough. Parts of equal cost hold unequal tokens, so some are halved once
more than others, and costs end up apart by powers of two. Three readings:

* ``balanced`` (the default) fixes the depth from the total instead.
* ``literal`` is the listing.
* ``direct`` cuts ceil(tokens / min_tokens) parts of equal cost in one pass (the count of App. A).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from math import ceil, floor, inf, log2
from typing import Literal, NamedTuple

LookaheadMode = Literal["balanced", "literal", "direct"]


class Chunk(NamedTuple):
    """A part of a request: ``tokens`` to compute after ``prefix`` tokens already done. A decode is one token."""

    request: int
    prefix: int
    tokens: int


Microbatch = list[Chunk]


class ChunkCost(NamedTuple):
    """Coefficients of eq. (1), in seconds: per query-key pair, per token, per chunk.

    ``shared`` are the seconds that each chunk of a microbatch but the first saves.
    """

    alpha: float
    beta: float
    gamma: float
    shared: float = 0.0

    def chunk(self, prefix: int, tokens: int) -> float:
        """Seconds of one chunk."""
        return self.alpha * (prefix * tokens + (tokens * tokens + tokens) / 2) + self.beta * tokens + self.gamma

    def batch(self, batch: Sequence[Chunk]) -> float:
        """Seconds of one microbatch; 0 when it is empty."""
        seconds = sum([self.chunk(chunk.prefix, chunk.tokens) for chunk in batch])
        return seconds - max(0, len(batch) - 1) * self.shared


def token_count(work: Sequence[Chunk], budget_tokens: int) -> list[Microbatch]:
    """Cut ``work``, in order, into microbatches of ``budget_tokens`` tokens (the last may hold fewer), as chunked
    prefill does."""
    if budget_tokens < 1:
        raise ValueError(f"budget is {budget_tokens} tokens; a microbatch needs at least 1")
    batches: list[Microbatch] = []
    left = 0
    for request, prefix, remaining in work:
        done = 0
        while done < remaining:
            if left == 0:
                batches.append([])
                left = budget_tokens
            tokens = min(left, remaining - done)
            batches[-1].append(Chunk(request, prefix + done, tokens))
            done += tokens
            left -= tokens
    return batches


def lookahead(
    work: Sequence[Chunk], min_tokens: int, cost: ChunkCost, mode: LookaheadMode = "balanced"
) -> list[Microbatch]:
    """Cut ``work`` into microbatches of equal cost, in order, of about ``min_tokens`` tokens or more on average.

    Little work (under two times ``min_tokens``) stays one microbatch. Chunks of a request stay in order, so
    microbatches must be launched in order. Raises ValueError for ``min_tokens`` below 1.
    """
    if min_tokens < 1:
        raise ValueError(f"min_tokens is {min_tokens}; a microbatch needs at least 1 token")
    tokens = tokens_of(work)
    if not tokens:
        return []
    if mode == "direct":
        return _equal_cuts(work, ceil(tokens / min_tokens), cost)
    if mode == "literal":
        return _halved(list(work), inf, min_tokens, cost)
    return _halved(list(work), floor(log2(tokens / min_tokens)), 0, cost)


def tokens_of(batch: Sequence[Chunk]) -> int:
    """Tokens of a microbatch."""
    return sum(chunk.tokens for chunk in batch)


def split(batch: Sequence[Chunk], target: float, cost: ChunkCost) -> tuple[Microbatch, Microbatch]:
    """Cut a microbatch where the cost of its first part reaches ``target``: whole chunks, then as many tokens of the
    next one as still cost no more."""
    spent = 0.0
    for index, (request, prefix, tokens) in enumerate(batch):
        saved = cost.shared if index else 0.0
        price = cost.chunk(prefix, tokens) - saved
        if spent + price > target:
            left = target - spent + saved
            head = bisect_right(range(1, tokens), left, key=partial(cost.chunk, prefix))
            cut = [Chunk(request, prefix, head)] if head else []
            return [*batch[:index], *cut], [Chunk(request, prefix + head, tokens - head), *batch[index + 1 :]]
        spent += price
    return list(batch), []


def _halved(batch: Microbatch, times: float, min_tokens: int, cost: ChunkCost) -> list[Microbatch]:
    """Halve by cost, ``times`` or until no more than ``min_tokens`` tokens are left in a part."""
    halves = _equal_cuts(batch, 2, cost) if times >= 1 and tokens_of(batch) > min_tokens else []
    if len(halves) < 2:
        return [batch]
    return [part for half in halves for part in _halved(half, times - 1, min_tokens, cost)]


def _equal_cuts(work: Sequence[Chunk], parts: int, cost: ChunkCost) -> list[Microbatch]:
    batches: list[Microbatch] = []
    rest = list(work)
    for left in range(parts, 1, -1):
        first, rest = split(rest, cost.batch(rest) / left, cost)
        batches.append(first)
    return [batch for batch in (*batches, rest) if batch]
