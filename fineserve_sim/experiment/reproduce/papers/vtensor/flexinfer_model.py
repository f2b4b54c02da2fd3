"""FlexInfer's request scheduling over vTensor memory (vTensor, Algorithm 1), one engine.

    prefill:  a prefix is cached: PrefixMatch            decode:  no memory: Release the request of lowest priority
              otherwise:  Create, Extend, Extend                  Extend
    finished: PrefixRecord                               released: Release

The listing cannot be meant literally; ``Readings`` names each place, with the reading that makes sense as its default and the
listing as its alternative. The letters follow the specification (systems.md 9.3).

A request's virtual range spans the maximum sequence length and costs no memory; freed ranges are used again (vSet).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

from fineserve_sim.policy.memory.vtensor import VTensorManager


@dataclass(frozen=True, slots=True)
class Readings:
    """How Algorithm 1 is read.

    suffix_after_match (a): after a match the rest of the prompt gets rows; the listing maps none.
    prefill_extends (b): rows mapped beyond the prompt. 0: the next one is mapped when it is near. 1: always one ahead.
        2: the listing, whose Create maps the prompt and is followed by two Extends.
    decode_extends (c): a row when fewer than ``margin_tokens`` slots are left, or, as listed, with every token.
    preempt (d): the lowest priority again and again until the row fits, or, as listed, one and no more.
    record (e): a finished request is recorded if its session goes on, or, as listed, always.

    Correction (f), to share full chunks alone, has no alternative: two writers of one chunk would be wrong. Correction (d)'s
    other half, that records go before running requests, is the memory's rule (``VTensorManager.alloc``).
    """

    suffix_after_match: bool = True
    prefill_extends: int = 0
    decode_extends: Literal["when_short", "every_token"] = "when_short"
    margin_tokens: int = 1
    preempt: Literal["until_it_fits", "once"] = "until_it_fits"
    record: Literal["if_continued", "always"] = "if_continued"


@dataclass(slots=True)
class VTensor:
    """The KV of one request: its virtual range, the rows mapped in it, in order, and how many tokens they hold."""

    range_id: int
    keys: Sequence[int]
    rows: list[int] = field(default_factory=list)
    tokens: int = 0


class VirtualRanges:
    """The vSet: virtual ranges of one length. A free one is used again before another is reserved."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.reserved = 0

    def take(self) -> int:
        if self._free:
            return heappop(self._free)
        self.reserved += 1
        return self.reserved - 1

    def give_back(self, range_id: int) -> None:
        heappush(self._free, range_id)


class FlexInfer:
    """The vTensors of one engine. Requests are in order of priority: the first to come is the last to go.

    Args:
        memory, owner: where rows come from, and under which id.
        chunk_tokens: tokens that a row holds.
        max_tokens: length of a virtual range, the longest sequence.
    """

    def __init__(
        self, memory: VTensorManager, owner: int, chunk_tokens: int, max_tokens: int, readings: Readings | None = None
    ) -> None:
        self._memory = memory
        self._owner = owner
        self._chunk_tokens = chunk_tokens
        self._max_tokens = max_tokens
        self._readings = readings or Readings()
        self.requests: dict[int, VTensor] = {}
        self.ranges = VirtualRanges()

    def prefill(self, request: int, prompt_tokens: int, keys: Sequence[int] = ()) -> int | None:
        """Memory for a prompt; ``keys`` identify its full chunks. Returns how many of its tokens are cached already, or
        None, and nothing taken, when the rest does not fit.

        Raises ValueError for a request that is here, or a prompt longer than a range.
        """
        if request in self.requests or not 0 < prompt_tokens <= self._max_tokens:
            raise ValueError(
                f"FlexInfer: request {request} with {prompt_tokens} tokens; at most {self._max_tokens}, once"
            )
        matched = self._memory.match(self._owner, keys)
        cached_tokens = min(len(matched) * self._chunk_tokens, prompt_tokens)
        tensor = VTensor(self.ranges.take(), keys, matched, prompt_tokens)
        missing = -(-prompt_tokens // self._chunk_tokens) - len(matched)
        if matched and not self._readings.suffix_after_match:
            missing = 0
        elif not matched or self._readings.prefill_extends < 2:
            missing += self._readings.prefill_extends
        if not self._map(tensor, missing):
            self._drop(tensor)
            return None
        self.requests[request] = tensor
        return cached_tokens

    def decode(self, request: int) -> list[int]:
        """One token more for ``request``. Returns the requests that were preempted for it; itself, if it is the last in
        priority and still does not fit.

        Raises ValueError for an unknown request or a full range.
        """
        tensor = self._find(request)
        if tensor.tokens == self._max_tokens:
            raise ValueError(f"FlexInfer: request {request} is at its maximum of {self._max_tokens} tokens")
        preempted: list[int] = []
        while not self._extend(tensor):
            victim = next(reversed(self.requests))
            self.release(victim)
            preempted.append(victim)
            if victim == request:
                return preempted
            if self._readings.preempt == "once":
                if not self._extend(tensor):
                    raise MemoryError(f"FlexInfer: no row for request {request} after one preemption")
                break
        tensor.tokens += 1
        return preempted

    def finish(self, request: int, *, continued: bool) -> None:
        """The last token is there. ``continued``: the session goes on, so its prefix will be asked for."""
        tensor = self._find(request)
        if continued or self._readings.record == "always":
            full = min(len(tensor.keys), tensor.tokens // self._chunk_tokens)
            self._memory.record(self._owner, tensor.keys[:full], tensor.rows)
        self.release(request)

    def release(self, request: int) -> None:
        """The request ends or is preempted: its rows are unmapped, and free unless shared."""
        self._drop(self._find(request))
        del self.requests[request]

    def reserved_tokens(self) -> int:
        """Token slots that are mapped and not used, over all requests."""
        return sum(len(tensor.rows) * self._chunk_tokens - tensor.tokens for tensor in self.requests.values())

    def _find(self, request: int) -> VTensor:
        if request not in self.requests:
            raise ValueError(f"FlexInfer: request {request} is not here")
        return self.requests[request]

    def _extend(self, tensor: VTensor) -> bool:
        """The rows that the next token needs, and that are due ahead of it. False when they do not fit."""
        if self._readings.decode_extends == "every_token":
            due = 1
        else:
            slots = len(tensor.rows) * self._chunk_tokens - tensor.tokens
            due = int(slots < self._readings.margin_tokens)
        room = -(-self._max_tokens // self._chunk_tokens) - len(tensor.rows)
        return self._map(tensor, min(due, room))

    def _map(self, tensor: VTensor, rows: int) -> bool:
        ids = self._memory.alloc(self._owner, max(0, rows))
        if ids is None:
            return False
        tensor.rows += ids
        return True

    def _drop(self, tensor: VTensor) -> None:
        self._memory.free(self._owner, tensor.rows)
        self.ranges.give_back(tensor.range_id)

    def check(self) -> None:
        """Raise AssertionError if a request lacks rows for its tokens, or two use one range."""
        ranges = [tensor.range_id for tensor in self.requests.values()]
        assert len(set(ranges)) == len(ranges), "two requests use one virtual range"
        if self._readings.suffix_after_match:
            for request, tensor in self.requests.items():
                assert len(tensor.rows) * self._chunk_tokens >= tensor.tokens, f"request {request} lacks rows"
        self._memory.check()
