"""Where requests come from: a trace that is there as a whole, or one that comes chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, Protocol

import numpy as np

from fineserve_traces.schema import IntArray, Trace, TraceError


class Requests(Protocol):
    """Requests in arrival order, of ``models`` that each chunk indexes; what they are and where they come from, for people.

    ``chunks`` begins anew each time and gives the same. A ``Trace`` is one.
    """

    @property
    def models(self) -> tuple[str, ...]: ...

    @property
    def source(self) -> str: ...

    def chunks(self) -> Iterator[Trace]: ...


def whole(requests: Requests) -> Trace:
    """All of them at once. Raises TraceError when there is none."""
    chunks = [*requests.chunks()]
    if not chunks:
        raise TraceError(f"{requests.source}: no request comes; give at least one")
    if len(chunks) == 1:
        return chunks[0]
    covered = [chunk.prefix_tokens for chunk in chunks if chunk.prefix_tokens is not None]
    return replace(
        chunks[0],
        prefix_hashes=_hashes(chunks),
        prefix_tokens=np.concatenate(covered) if covered else None,
        arrival_s=np.concatenate([chunk.arrival_s for chunk in chunks]),
        model=np.concatenate([chunk.model for chunk in chunks]),
        prompt_tokens=np.concatenate([chunk.prompt_tokens for chunk in chunks]),
        output_tokens=np.concatenate([chunk.output_tokens for chunk in chunks]),
    )


def _hashes(chunks: Sequence[Trace]) -> tuple[tuple[int, ...], ...] | None:
    """Ids of a source mean the same in all its chunks."""
    found = [chunk.prefix_hashes for chunk in chunks if chunk.prefix_hashes is not None]
    return tuple(chain.from_iterable(found)) if found else None


class Totals(NamedTuple):
    """What a pass over requests finds: how many of each model, their prompt tokens, and the first and last arrival."""

    requests: IntArray
    prompt_tokens: IntArray
    first_s: float
    last_s: float


def totals(requests: Requests) -> Totals:
    """Raises TraceError when there is no request, and when a chunk begins before the one before it ends."""
    models = len(requests.models)
    counts, tokens = np.zeros(models, dtype=np.int64), np.zeros(models, dtype=np.int64)
    first_s = last_s = -1.0
    for chunk in requests.chunks():
        if chunk.arrival_s[0] < last_s:
            raise TraceError(f"{requests.source}: a chunk begins at {chunk.arrival_s[0]} s, the one before ends later")
        counts += np.bincount(chunk.model, minlength=models)
        tokens += np.bincount(chunk.model, chunk.prompt_tokens, models).astype(np.int64)
        first_s, last_s = first_s if last_s >= 0 else float(chunk.arrival_s[0]), float(chunk.arrival_s[-1])
    if last_s < 0:
        raise TraceError(f"{requests.source}: no request comes; give at least one")
    return Totals(counts, tokens, first_s, last_s)
