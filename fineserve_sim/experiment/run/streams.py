"""Random streams by name.

Every consumer has a stream of its own, derived from the seed and its name, so that a new one changes no other
(``arrivals/A``, ``lengths/A`` for model A).
"""

from __future__ import annotations

from zlib import crc32

import numpy as np


def stream(seed: int, name: str) -> np.random.Generator:
    """The random stream of one named consumer. The same seed and name give the same draws, always."""
    return np.random.default_rng(np.random.SeedSequence([seed, crc32(name.encode())]))
