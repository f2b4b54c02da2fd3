"""Static partition of a GPU's KV memory (the S-Partition baseline of Prism; also MIG slices and fractional GPUs).

Models are placed once, by KVPR on their mean rates (``kvpr.py``), and each gets a fixed part of what weights and
activations leave: in proportion to the KV bytes that arrive for it, request rate times bytes per token, or an equal part.
Nobody gets less than one request of full length needs, for a smaller pool could never serve it. The paper states
neither rule; both are readings (systems.md 6.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple


class Share(NamedTuple):
    """What speaks for an engine's part: its weight in the division, and the least that it can work with."""

    weight: float
    least_bytes: int


def split_bytes(pool_bytes: int, shares: Mapping[int, Share]) -> dict[int, int]:
    """The pool divided in proportion to the weights, everybody getting at least ``least_bytes``.

    Who would get less than that gets just that, and the others divide the rest. When the pool does not even hold all
    minima, it is divided in proportion to them. Weights of 0 throughout count as equal.
    Parts are rounded down. Raises ValueError for a negative pool, weight or minimum.
    """
    if pool_bytes < 0 or any(share.weight < 0 or share.least_bytes < 0 for share in shares.values()):
        raise ValueError(f"a pool of {pool_bytes} bytes cannot be divided by {dict(shares)}: all must be at least 0")
    least = sum(share.least_bytes for share in shares.values())
    if least > pool_bytes:
        return {owner: pool_bytes * share.least_bytes // least for owner, share in shares.items()}
    parts: dict[int, int] = {}
    weights = {owner: Fraction(share.weight) for owner, share in shares.items()}  # exact, so that nothing is sold twice
    if not any(weights.values()):
        weights = dict.fromkeys(shares, Fraction(1))
    while weights:
        left_bytes, total = pool_bytes - sum(parts.values()), sum(weights.values())
        part = {owner: int(left_bytes * weight / total) for owner, weight in weights.items()}
        short = [owner for owner in weights if part[owner] < shares[owner].least_bytes]
        if not short:
            return parts | part
        for owner in short:
            parts[owner] = shares[owner].least_bytes
            del weights[owner]
    return parts
