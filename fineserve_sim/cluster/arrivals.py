"""Where a run's requests come from: from chunk to chunk, and within it a slice of rows at a time as Python's numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from fineserve_traces import Requests, Trace
from numpy.typing import NDArray

from fineserve_sim.cluster.engine.sequence import Prefix
from fineserve_sim.cluster.scenario import Ended, EndedRequests, outputs
from fineserve_sim.policy.interfaces import Request

ROWS = 8192
"""Requests that are Python's numbers at a time."""


class Arrivals:
    """The requests one by one; with ``caches`` also what is known of their tokens, where KV memory keeps prefixes. ``next_s``
    is when the next one arrives, infinite when there is none."""

    def __init__(self, requests: Requests, *, caches: bool = False) -> None:
        self._names = requests.models
        self._caches = caches
        self._slices = _slices(requests)
        self._number = self._at = 0
        self.next_s = math.inf
        self._load()

    def take(self) -> tuple[Request, int, Prefix | None]:
        """The next request, how many tokens it would generate if nothing cut it off (the oracle), and its prefixes."""
        at = self._at
        request = Request(self._number, self._names[self._model[at]], self.next_s, self._prompt[at])
        output, prefix = self._output[at], self._prefixes[at] if self._prefixes else None
        self._number += 1
        self._at = at = at + 1
        if at < len(self._arrival_s):
            self.next_s = self._arrival_s[at]
        else:
            self._load()
        return request, output, prefix

    def _load(self) -> None:
        rows = next(self._slices, None)
        if rows is None:
            self.next_s = math.inf
            return
        trace, here = rows
        self._arrival_s: list[float] = trace.arrival_s[here].tolist()
        self._model: list[int] = trace.model[here].tolist()
        self._prompt: list[int] = trace.prompt_tokens[here].tolist()
        self._output: list[int] = trace.output_tokens[here].tolist()
        self._prefixes = prefixes_of(trace, here) if self._caches else []
        self._at, self.next_s = 0, self._arrival_s[0]


def _slices(requests: Requests) -> Iterator[tuple[Trace, slice]]:
    for chunk in requests.chunks():
        for first in range(0, len(chunk), ROWS):
            yield chunk, slice(first, first + ROWS)


def prefixes_of(trace: Trace, rows: slice = slice(None)) -> list[Prefix]:
    """What the trace knows of the tokens of each of these requests; empty when it knows nothing. A block that its prompt fills
    in part says nothing of what comes behind the prompt."""
    ids, id_tokens = trace.prefix_hashes, trace.prefix_block_tokens
    if ids is None or id_tokens is None:
        return []
    lengths = zip(trace.prompt_tokens[rows].tolist(), trace.output_tokens[rows].tolist(), strict=True)
    prefixes = []
    for own, (prompt, output) in zip(ids[rows], lengths, strict=True):
        covered = len(own) * id_tokens
        partial = prompt < covered < prompt + output
        prefixes.append(Prefix(own, id_tokens, prompt if partial else covered))
    return prefixes


class Joined:
    """Requests that stream through, and what became of them with what they were: ``told`` gets both when they end."""

    def __init__(self, requests: Requests, told: Callable[[EndedRequests], None]) -> None:
        self._requests, self._told = requests, told
        self._chunks: dict[int, _Open] = {}  # by the number of its first request

    @property
    def models(self) -> tuple[str, ...]:
        return self._requests.models

    @property
    def source(self) -> str:
        return self._requests.source

    @property
    def kept(self) -> int:
        """Requests of which it is still known what they were: those that are open and, while they are fewer than these, others
        of their chunks."""
        return sum(len(chunk) for chunk in self._chunks.values())

    def chunks(self) -> Iterator[Trace]:
        first = 0
        for chunk in self._requests.chunks():
            self._chunks[first] = _Open(first, chunk)
            yield chunk
            first += len(chunk)

    def __call__(self, ended: Ended) -> None:
        firsts = np.array([*self._chunks])
        chunk_of = np.searchsorted(firsts, ended.request, side="right") - 1
        number = len(ended.request)
        tokens = np.empty((2, number), dtype=np.int64)
        came = EndedRequests(ended, np.empty(number, dtype=np.int32), np.empty(number), tokens[0], tokens[1])
        for place in np.unique(chunk_of).tolist():
            chunk, here = self._chunks[firsts[place]], np.flatnonzero(chunk_of == place)
            chunk.fill(came, here)
            if not len(chunk):
                del self._chunks[firsts[place]]
        self._told(came)


class _Open:
    """The requests of a chunk that are open, and fewer others: columns of what they were, by their rising numbers."""

    def __init__(self, first: int, chunk: Trace) -> None:
        self._number = np.arange(first, first + len(chunk))
        self._columns = (chunk.model, chunk.arrival_s, chunk.prompt_tokens, chunk.output_tokens)
        self._open = np.ones(len(chunk), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self._number)

    def fill(self, came: EndedRequests, here: NDArray[np.intp]) -> None:
        """Say what those ``here`` were, which are of this chunk and have ended."""
        rows = np.searchsorted(self._number, came.ended.request[here])
        model, arrival_s, prompt_tokens, output_tokens = self._columns
        came.model[here], came.arrival_s[here] = model[rows], arrival_s[rows]
        came.prompt_tokens[here] = prompt_tokens[rows]
        came.output_tokens[here] = outputs(output_tokens[rows], came.ended.take(here))
        self._open[rows] = False
        if 2 * np.count_nonzero(self._open) <= len(self):
            self._forget()

    def _forget(self) -> None:
        """Those that have ended."""
        left = np.flatnonzero(self._open)
        model, arrival_s, prompt_tokens, output_tokens = self._columns
        self._number, self._open = self._number[left], self._open[left]
        self._columns = (model[left], arrival_s[left], prompt_tokens[left], output_tokens[left])
