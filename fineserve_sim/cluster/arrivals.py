"""Where a run's requests come from: a trace, or clients that wait for their answers.

A trace is read from chunk to chunk, and within it a slice of rows at a time as Python's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, repeat

import numpy as np
from fineserve_traces import Requests, Trace
from numpy.typing import NDArray

from fineserve_sim.cluster.engine.sequence import Prefix
from fineserve_sim.cluster.scenario import Clients, Ended, EndedRequests
from fineserve_sim.policy.interfaces import Request

ROWS = 8192
"""Requests that are converted to Python's numbers at a time."""

MOST_TOKENS = 2**40
"""More than any request has."""

_WHAT = ("model", "arrival_s", "prompt_tokens", "output_tokens")
_ROW = np.dtype([("number", "i8"), ("open", "?"), *zip(_WHAT, ("i4", "f8", "i8", "i8"), strict=True)])
"""The fields of a request in its trace, with its number and whether it is open."""


class Arrivals:
    """The requests one by one. With ``caches`` (KV memory keeps prefixes) each also has the ids of its prefixes, where the
    trace knows them. With ``own`` a request without such ids gets a prefix of its own, which no other request shares.
    ``next_s`` is when the next one arrives, infinite when there is none."""

    def __init__(self, requests: Requests, *, caches: bool = False, own: bool = False) -> None:
        self._coming = _coming(requests, caches, own)
        self._next = next(self._coming, None)
        self.next_s = math.inf if self._next is None else self._next[0].arrival_s

    def take(self) -> tuple[Request, int, Prefix | None]:
        """The next request, how many tokens it would generate if nothing cut it off (the oracle), and its prefixes."""
        taken = self._next
        assert taken is not None
        self._next = next(self._coming, None)
        self.next_s = math.inf if self._next is None else self._next[0].arrival_s
        return taken


def _coming(requests: Requests, caches: bool, own: bool) -> Iterator[tuple[Request, int, Prefix | None]]:
    numbers, names = count(), requests.models
    for chunk in requests.chunks():
        for first in range(0, len(chunk), ROWS):
            rows = slice(first, first + ROWS)
            prefixes = _prefixes(chunk, rows) if caches else repeat(None)
            columns = (getattr(chunk, name)[rows].tolist() for name in _WHAT)
            for model, arrival_s, prompt, output, prefix in zip(*columns, prefixes, strict=False):
                number = next(numbers)
                known = _like_itself(number) if own and prefix is None else prefix
                yield Request(number, names[model], arrival_s, prompt), output, known


def _like_itself(number: int) -> Prefix:
    """All tokens of this request are known, and no other request begins alike."""
    return Prefix((-1 - number,), MOST_TOKENS, MOST_TOKENS)


def _prefixes(chunk: Trace, rows: slice) -> Iterable[Prefix | None]:
    ids, id_tokens, covered = chunk.prefix_hashes, chunk.prefix_block_tokens, chunk.prefix_tokens
    if ids is None or id_tokens is None or covered is None:
        return repeat(None)
    return map(Prefix, ids[rows], repeat(id_tokens), covered[rows].tolist())


class ClosedLoops:
    """The requests of ``clients``, numbered as they are sent. All clients send their first request at 0; the first one of each
    model comes before the second one of any. A client without a next row of its model stops. ``next_s`` as in ``Arrivals``."""

    def __init__(self, trace: Trace, clients: Clients, *, caches: bool = False, own: bool = False) -> None:
        self._trace = replace(trace, arrival_s=np.zeros(len(trace)))
        self._clients, self._caches, self._own = clients, caches, own
        self._left = [iter(np.flatnonzero(trace.model == model).tolist()) for model in range(len(trace.models))]
        self._due: list[tuple[float, int, int, int]] = []  # when, in which turn, the model, the row
        self._turns = count()
        self._rows: list[int] = []
        self._sent_s: list[float] = []
        for number in range(max(clients.of)):
            for model, clients_of in enumerate(clients.of):
                if number < clients_of:
                    self._send_at(0.0, model)

    def _send_at(self, time_s: float, model: int) -> None:
        row = next(self._left[model], None)
        if row is not None:
            heappush(self._due, (time_s, next(self._turns), model, row))

    @property
    def all_sent(self) -> bool:
        return len(self._rows) >= self._clients.requests

    @property
    def next_s(self) -> float:
        return math.inf if self.all_sent or not self._due else self._due[0][0]

    def take(self) -> tuple[Request, int, Prefix | None]:
        """As ``Arrivals.take``."""
        now, _, model, row = heappop(self._due)
        number, trace = len(self._rows), self._trace
        self._rows.append(row)
        self._sent_s.append(now)
        prefix = next(iter(_prefixes(trace, slice(row, row + 1)))) if self._caches else None
        if self._own and prefix is None:
            prefix = _like_itself(number)
        prompt, output = int(trace.prompt_tokens[row]), int(trace.output_tokens[row])
        return Request(number, trace.models[model], now, prompt), output, prefix

    def answered(self, number: int, now: float) -> None:
        """The request with this number has ended: its client goes on."""
        model = int(self._trace.model[self._rows[number]])
        self._send_at(now + self._clients.think_s[model], model)

    def sent(self) -> Trace:
        """All requests that were sent, in the order of their arrivals."""
        return replace(self._trace.take(np.array(self._rows)), arrival_s=np.array(self._sent_s))


class Joined:
    """Joins requests that stream through with their outcomes: ``told`` gets columns of the trace and outcomes when requests
    end."""

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
