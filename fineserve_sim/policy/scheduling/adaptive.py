"""SLO-aware adaptive batching: the local scheduler of FineServe (paper section 6.3, Algorithm 2), one per engine.

A batch S that is prefilled in chunks finishes as a whole, at now + TTFT(S). So it is enough that this time lies before
the earliest deadline in S (the anchor). Starting from all waiting requests that could make it alone, the longest one
leaves S until the batch is on time. With slots and memory for them, the other requests start, earliest deadline first.

Why this need not walk the queue. Requests leave S in one fixed order: longest first, among equals the latest deadline
first. So S is always a prefix of the queue in *length order* (tokens, deadline, id). A longer prefix has more tokens and
no later anchor. Hence "on time" holds up to some prefix and for none beyond, and bisection finds that prefix. It reads sums
of tokens and query-key pairs and minima of deadlines, kept for each block of rows. The same blocks tell where a request may
have become infeasible: a block whose longest prompt would be on time for its earliest deadline holds none.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, islice
from typing import Literal, Protocol

from fineserve_sim.policy.interfaces import Admission, EngineState, PrefillLatency, Request, prompt_pairs

_Row = tuple[int, float, int]
"""(prompt tokens, deadline_s, request id): sorts by length."""

_BLOCK_ROWS = 128
"""Rows of a full block: around the square root of the longest queue that we care about (10^4)."""


class _Ttft(Protocol):
    def __call__(self, tokens: int, pairs: int | None = None) -> float:
        """TTFT of prompts with so many tokens and query-key pairs in all, by default of one prompt."""


_Sums = tuple[int, int, float]
"""Sums over some rows: tokens, query-key pairs, and the earliest deadline."""


class AdaptiveBatching:
    """Algorithm 2 for one engine.

    It drops for good a request that would miss its deadline even if it started alone now. A request that leaves the batch to
    save the anchor, or for lack of slots and memory, waits for the next call. While the decodes take every token of a step,
    no request starts, and one is dropped only if it would be late even beside no decode.

    * ``slo_s``: the TTFT SLO of the model.
    * ``prefill``: its chunked-prefill latency. TTFT of a set is the latency of its prompts beside the running decodes, times
      the present slowdown.
    * ``when_prefilling``: what happens while admitted prompts are not yet computed. "skip" admits and drops nothing. "union"
      counts their tokens into the batch as one prompt, but not into the test of a request alone.
    * ``block_tokens``: KV tokens that every running request is left for its next block.

    Raises ValueError for an SLO or block size that is not positive, or an unknown option.
    """

    def __init__(
        self,
        slo_s: float,
        prefill: PrefillLatency,
        *,
        when_prefilling: Literal["skip", "union"] = "skip",
        block_tokens: int = 16,
    ) -> None:
        if slo_s <= 0:
            raise ValueError(f"slo_s is {slo_s}: a TTFT SLO must be positive")
        if block_tokens < 1:
            raise ValueError(f"block_tokens is {block_tokens}: a KV block holds at least one token")
        if when_prefilling not in ("skip", "union"):
            raise ValueError(f"when_prefilling is {when_prefilling!r}: use 'skip' or 'union'")
        self._slo_s = slo_s
        self._prefill = lru_cache(4096)(prefill)  # one call and ``unchanged_until`` after it ask for the same few
        self._skips_prefill = when_prefilling == "skip"
        self._block_tokens = block_tokens
        self._waiting: dict[int, Request] = {}
        self._by_length = _LengthOrder()
        self._by_deadline: list[tuple[float, int, int]] = []  # (deadline_s, id, prompt tokens)
        self._answered: tuple[float, EngineState] | None = None  # what the last call saw; None once the queue changes

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, engine: int) -> None:
        """Raises ValueError if the request waits already."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is added twice: it waits already")
        self._answered = None
        self._waiting[request.id] = request
        deadline_s = request.arrival_s + self._slo_s
        self._by_length.add((request.prompt_tokens, deadline_s, request.id))
        insort(self._by_deadline, (deadline_s, request.id, request.prompt_tokens))

    def remove(self, request_id: int) -> bool:
        if waits := request_id in self._waiting:
            self._answered = None
            self._take(request_id)
        return waits

    def schedule(self, now: float, engines: Mapping[int, EngineState]) -> Admission:
        """Raises ValueError unless ``engines`` is the one engine of this scheduler."""
        state = self._judged(engines)
        if state is None or self._answered == (now, state):
            return Admission()
        self._answered = (now, state)
        ttft = self._ttft(state)
        dropped = [self._take(id) for id in self._infeasible(now, ttft)]
        admitted = [self._take(id) for id in self._startable(now, state, ttft)]
        return Admission(admitted, dropped)

    def unchanged_until(self, now: float, engines: Mapping[int, EngineState]) -> float:
        """The earlier of two moments: a request becomes infeasible, or the front of the batch leaves it.

        A front that lacks memory holds up the requests behind it. As time passes the batch only shrinks, so it may leave.
        """
        state = self._judged(engines)
        if state is None:
            return math.inf
        soon = math.nextafter(now, math.inf)
        ttft = self._ttft(state)
        change_s = self._first_expiry(ttft)
        last = self._batch_end(now, state, ttft)
        if last is not None:
            deadline_s, id, tokens = next(self._in_batch(last))
            if tokens <= self._max_tokens(state):
                return soon
            through, pairs = self._by_length.through((tokens, deadline_s, id))
            begun = state.prefill_tokens
            change_s = min(change_s, _before(deadline_s, ttft(begun + through, prompt_pairs(begun) + pairs)))
        return max(soon, change_s)

    def _judged(self, engines: Mapping[int, EngineState]) -> EngineState | None:
        """The state by which to judge waiting requests; None while none is judged."""
        if len(engines) != 1:
            raise ValueError(f"adaptive batching schedules one engine, but was shown {len(engines)}: {sorted(engines)}")
        (state,) = engines.values()
        if not self._waiting or (self._skips_prefill and state.prefill_tokens > 0):
            return None
        if self._ttft(state)(self._by_length.blocks[-1].longest) == math.inf:
            return state._replace(decoding=0, free_slots=0)
        return state

    def _ttft(self, state: EngineState) -> _Ttft:
        prefill, decoding, slowdown = self._prefill, state.decoding, state.slowdown

        def ttft(tokens: int, pairs: int | None = None) -> float:
            return prefill(tokens, decoding, prompt_pairs(tokens) if pairs is None else pairs) * slowdown

        return ttft

    def _max_tokens(self, state: EngineState) -> int:
        return state.free_kv_tokens - self._block_tokens * state.running

    def _take(self, request_id: int) -> Request:
        """The request, which no longer waits."""
        request = self._waiting.pop(request_id)
        deadline_s = request.arrival_s + self._slo_s
        self._by_length.discard((request.prompt_tokens, deadline_s, request.id))
        del self._by_deadline[bisect_left(self._by_deadline, (deadline_s, request.id))]
        return request

    def _infeasible(self, now: float, ttft: _Ttft) -> list[int]:
        """Ids, in deadline order, of the requests that miss their deadline even alone (D of the listing)."""
        found: list[tuple[float, int]] = []
        for block in self._by_length.blocks:
            finish_s = now + ttft(block.longest)
            if finish_s >= block.earliest_s:
                for tokens, deadline_s, id in block.rows:
                    if deadline_s <= finish_s and now + ttft(tokens) >= deadline_s:
                        found.append((deadline_s, id))
        return [id for _, id in sorted(found)]

    def _batch_end(self, now: float, state: EngineState, ttft: _Ttft) -> _Row | None:
        """Last row, in length order, of the batch that is on time for its anchor. None when the batch is empty, or when
        slots or memory let no request start."""
        blocks = self._by_length.blocks
        if not blocks or state.free_slots <= 0 or self._max_tokens(state) < blocks[0].rows[0][0]:
            return None
        begun = state.prefill_tokens
        return self._by_length.longest_prefix(
            lambda sums: now + ttft(sums[0], sums[1]) < sums[2], (begun, prompt_pairs(begun), math.inf)
        )

    def _in_batch(self, last: _Row) -> Iterator[tuple[float, int, int]]:
        """Rows (deadline_s, id, tokens) of the batch that ends with ``last``, in deadline order."""
        longest = last[0]
        for row in self._by_deadline:
            if row[2] <= longest and (row[2], row[0], row[1]) <= last:
                yield row

    def _startable(self, now: float, state: EngineState, ttft: _Ttft) -> list[int]:
        """Ids of the requests to start, in deadline order: the batch, cut to slots and memory. A first request that
        finds no memory holds back those behind it."""
        last = self._batch_end(now, state, ttft)
        ids: list[int] = []
        left = self._max_tokens(state)
        for _, id, tokens in islice(self._in_batch(last), state.free_slots) if last else ():
            left -= tokens
            if left < 0:
                break
            ids.append(id)
        return ids

    def _first_expiry(self, ttft: _Ttft) -> float:
        """A time before which no waiting request becomes infeasible."""
        first_s = math.inf
        for block in sorted(self._by_length.blocks, key=lambda block: block.earliest_s - ttft(block.longest)):
            duration_s = ttft(block.longest)
            if block.earliest_s - duration_s >= first_s:
                break
            for tokens, deadline_s, _ in block.rows:
                if deadline_s - duration_s < first_s:
                    first_s = min(first_s, _before(deadline_s, ttft(tokens)))
        return first_s


class _Block:
    """Some rows in length order, with the sums that the searches need."""

    def __init__(self, rows: list[_Row]) -> None:
        self.rows = rows
        self.tokens = sum(row[0] for row in rows)
        self.pairs = sum(prompt_pairs(row[0]) for row in rows)
        self.earliest_s = min(row[1] for row in rows)

    @property
    def longest(self) -> int:
        return self.rows[-1][0]


class _LengthOrder:
    """All waiting rows, sorted, cut into blocks that are never empty."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []

    def add(self, row: _Row) -> None:
        if not self.blocks:
            self.blocks.append(_Block([row]))
            return
        index = min(self._index(row), len(self.blocks) - 1)
        block = self.blocks[index]
        insort(block.rows, row)
        block.tokens += row[0]
        block.pairs += prompt_pairs(row[0])
        block.earliest_s = min(block.earliest_s, row[1])
        if len(block.rows) > _BLOCK_ROWS:
            half = _BLOCK_ROWS // 2
            self.blocks[index : index + 1] = [_Block(block.rows[:half]), _Block(block.rows[half:])]

    def discard(self, row: _Row) -> None:
        index = self._index(row)
        block = self.blocks[index]
        del block.rows[bisect_left(block.rows, row)]
        block.tokens -= row[0]
        block.pairs -= prompt_pairs(row[0])
        if not block.rows:
            del self.blocks[index]
        elif row[1] == block.earliest_s:
            block.earliest_s = min(other[1] for other in block.rows)

    def longest_prefix(self, on_time: Callable[[_Sums], bool], before: _Sums) -> _Row | None:
        """Last row of the longest prefix for which ``on_time(before and its sums)`` holds; None when it holds for no row.
        ``on_time`` must turn false once, from shorter to longer prefixes."""
        parts = [(block.tokens, block.pairs, block.earliest_s) for block in self.blocks]
        whole, sums = _accepted(parts, on_time, before)
        if whole < len(self.blocks):
            rows = self.blocks[whole].rows
            count, _ = _accepted([(row[0], prompt_pairs(row[0]), row[1]) for row in rows], on_time, sums)
            if count:
                return rows[count - 1]
        return self.blocks[whole - 1].rows[-1] if whole else None

    def through(self, row: _Row) -> tuple[int, int]:
        """Tokens and query-key pairs of all rows up to and with ``row``."""
        index = self._index(row)
        rows = self.blocks[index].rows
        parts = [*self.blocks[:index], _Block(rows[: bisect_left(rows, row) + 1])]
        return sum(part.tokens for part in parts), sum(part.pairs for part in parts)

    def _index(self, row: _Row) -> int:
        """The first block whose last row is not before ``row``."""
        if len(self.blocks) == 1:  # as most queues
            return 0 if row <= self.blocks[0].rows[-1] else 1
        return bisect_left(self.blocks, row, key=lambda block: block.rows[-1])


def _accepted(parts: Sequence[_Sums], on_time: Callable[[_Sums], bool], before: _Sums) -> tuple[int, _Sums]:
    """How many leading parts are on time after the sums ``before`` them, and the sums through them."""
    if len(parts) == 1:  # as most queues
        sums = _plus(before, parts[0])
        return (1, sums) if on_time(sums) else (0, before)
    through = list(accumulate(parts, _plus, initial=before))
    count = bisect_left(range(1, len(through)), True, key=lambda count: not on_time(through[count]))
    return count, through[count]


def _plus(some: _Sums, more: _Sums) -> _Sums:
    return some[0] + more[0], some[1] + more[1], min(some[2], more[2])


def _before(deadline_s: float, duration_s: float) -> float:
    """Just before the latest start of something that takes ``duration_s``: at any time below, rounding included,
    the sum of time and duration is below the deadline."""
    return deadline_s - duration_s - 4 * math.ulp(deadline_s)
