"""KunServe's lookahead (section 4.3) for a pipeline of vLLM's: parts of the waiting prompts that take its stages equally long.

The core's former cuts all that waits and fits in memory into parts of equal cost; a step gets one of them. What a chunk costs
is fitted to the engine's own steps. A part has about half of the engine's token budget or more, and never over all of it: vLLM
sizes its buffers by the budget. With little work the token count decides, as the paper does outside of bursts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from fineserve_runtime.step_times import RecentFit
from fineserve_sim.policy.groups.microbatch import Chunk, ChunkCost, LookaheadMode, Microbatch, lookahead, tokens_of


class LookaheadParts:
    """The plan of one engine whose steps have ``budget_tokens`` at most."""

    def __init__(self, budget_tokens: int, mode: LookaheadMode) -> None:
        self._least_tokens, self._mode = max(1, budget_tokens // 2), mode
        self._fit = RecentFit()
        self._plan: deque[Microbatch] = deque()
        self._part: dict[int, int] | None = None

    @property
    def cost(self) -> ChunkCost:
        """Seconds of a query-key pair, a token and a chunk, by the steps so far."""
        gamma, beta, alpha = self._fit.solve()
        return ChunkCost(alpha, beta, gamma)

    def observe(self, chunks: Iterable[Chunk], seconds: float) -> None:
        """A step of these chunks took so long; a decode is a chunk of one token."""
        count = tokens = pairs = 0
        for _, prefix, size in chunks:
            count, tokens = count + 1, tokens + size
            pairs += prefix * size + size * (size + 1) // 2
        if count:
            self._fit.observe((float(count), float(tokens), float(pairs)), seconds)

    def begin(self, work: Sequence[Chunk]) -> None:
        """The next step: ``work`` is what waits, in order, as far as memory goes."""
        if not self._plan and tokens_of(work) >= 2 * self._least_tokens and any(self.cost):
            self._plan.extend(lookahead(work, self._least_tokens, self.cost, self._mode))
        self._part = {chunk.request: chunk.tokens for chunk in self._plan.popleft()} if self._plan else None

    def share(self, request: int, tokens: int) -> int:
        """How many of its next ``tokens`` the request computes in this step. A single token, which a decode or a sequence
        with its KV has, never waits for its part."""
        if self._part is None or tokens <= 1:
            return tokens
        return min(tokens, self._part.get(request, 0))

    def end(self, scheduled: Mapping[int, int]) -> None:
        """What the step got. Where it is not the part, for want of memory or budget, the plan is void."""
        if self._part is not None and any(scheduled.get(id, 0) < tokens for id, tokens in self._part.items()):
            self._plan.clear()
        self._part = None
