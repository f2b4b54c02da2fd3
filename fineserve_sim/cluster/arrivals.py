"""Where a run's requests come from: from chunk to chunk, and within it a slice of rows at a time as Python's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from itertools import count, repeat

import numpy as np
from fineserve_traces import Requests, Trace
from numpy.typing import NDArray

from fineserve_sim.cluster.engine.sequence import Prefix
from fineserve_sim.cluster.scenario import Ended, EndedRequests
from fineserve_sim.policy.interfaces import Request

ROWS = 8192
"""Requests that are Python's numbers at a time."""

_WHAT = ("model", "arrival_s", "prompt_tokens", "output_tokens")
_ROW = np.dtype([("number", "i8"), ("open", "?"), *zip(_WHAT, ("i4", "f8", "i8", "i8"), strict=True)])
"""What a request is, as its trace has it."""


class Arrivals:
    """The requests one by one; with ``caches`` also what is known of their tokens, where KV memory keeps prefixes. ``next_s``
    is when the next one arrives, infinite when there is none."""

    def __init__(self, requests: Requests, *, caches: bool = False) -> None:
        self._coming = _coming(requests, caches)
        self._next = next(self._coming, None)
        self.next_s = math.inf if self._next is None else self._next[0].arrival_s

    def take(self) -> tuple[Request, int, Prefix | None]:
        """The next request, how many tokens it would generate if nothing cut it off (the oracle), and its prefixes."""
        taken = self._next
        assert taken is not None
        self._next = next(self._coming, None)
        self.next_s = math.inf if self._next is None else self._next[0].arrival_s
        return taken


def _coming(requests: Requests, caches: bool) -> Iterator[tuple[Request, int, Prefix | None]]:
    numbers, names = count(), requests.models
    for chunk in requests.chunks():
        for first in range(0, len(chunk), ROWS):
            rows = slice(first, first + ROWS)
            prefixes = _prefixes(chunk, rows) if caches else repeat(None)
            columns = (getattr(chunk, name)[rows].tolist() for name in _WHAT)
            for model, arrival_s, prompt, output, prefix in zip(*columns, prefixes, strict=False):
                yield Request(next(numbers), names[model], arrival_s, prompt), output, prefix


def _prefixes(chunk: Trace, rows: slice) -> Iterable[Prefix | None]:
    ids, id_tokens, covered = chunk.prefix_hashes, chunk.prefix_block_tokens, chunk.prefix_tokens
    if ids is None or id_tokens is None or covered is None:
        return repeat(None)
    return map(Prefix, ids[rows], repeat(id_tokens), covered[rows].tolist())


class Joined:
    """Requests that stream through, and what became of them with what they were: ``told`` gets both when they end."""

    def __init__(self, requests: Requests, told: Callable[[EndedRequests], None]) -> None:
        self._requests, self._told = requests, told
        self.models, self.source = requests.models, requests.source
        # By their first numbers, requests that are open and fewer others.
        self._chunks: dict[int, NDArray[np.void]] = {}

    def chunks(self) -> Iterator[Trace]:
        first = 0
        for chunk in self._requests.chunks():
            rows = self._chunks[first] = np.empty(len(chunk), _ROW)
            rows["number"], rows["open"] = np.arange(first, first + len(chunk)), True
            for name in _WHAT:
                rows[name] = getattr(chunk, name)
            yield chunk
            first += len(chunk)

    def __call__(self, ended: Ended) -> None:
        firsts = np.array([*self._chunks])
        chunk_of = np.searchsorted(firsts, ended.request, side="right") - 1
        came = np.empty(len(ended.request), _ROW)
        for place in np.unique(chunk_of).tolist():
            first, here = firsts[place], np.flatnonzero(chunk_of == place)
            chunk = self._chunks[first]
            rows = np.searchsorted(chunk["number"], ended.request[here])
            came[here] = chunk[rows]
            chunk["open"][rows] = False
            left = np.flatnonzero(chunk["open"])
            if not len(left):
                del self._chunks[first]
            elif 2 * len(left) <= len(chunk):
                self._chunks[first] = chunk[left]
        self._told(EndedRequests(ended, *(came[name].copy() for name in _WHAT)))
