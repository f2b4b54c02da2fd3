"""Random streams by name.

Every consumer has a stream of its own, derived from the seed and its name, so that a new one changes no other
(``arrivals/A``, ``lengths/A`` for model A). A name counts by its 32-bit hash, on which published results depend. Among 20,000
names two share a hash with 5 %, so models get names by ``stream_names``, which share none.
"""

from __future__ import annotations

from collections.abc import Iterable
from zlib import crc32

import numpy as np

OF_A_MODEL = ("arrivals", "lengths")
"""The streams that each model has."""


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of one named consumer. The same seed and name give the same draws, always."""
    return np.random.default_rng(np.random.SeedSequence([seed, crc32(name.encode())]))


def stream_names(models: Iterable[str]) -> dict[str, str]:
    """The name of each model in its random streams: its id, with primes where an earlier model has the same hash."""
    taken: set[int] = set()
    names = {}
    for model in models:
        name = model
        while not taken.isdisjoint(hashes := [crc32(f"{kind}/{name}".encode()) for kind in OF_A_MODEL]):
            name += "'"
        taken.update(hashes)
        names[model] = name
    return names
