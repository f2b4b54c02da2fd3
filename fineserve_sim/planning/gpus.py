"""The GPUs that a plan may take: so many of one kind, or so many of each of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fineserve_sim import catalog

Numbers = int | Mapping[str, int]
"""How many there are; of several kinds, by kind."""
Kind = str | Mapping[str, Any]
"""A GPU of the catalog, or one described as in a file."""


def numbers_of(text: str) -> Numbers:
    """``8``, or ``h100-sxm:4,l40s:8``. Raises ValueError for another text."""
    if text.isdecimal() and int(text):
        return int(text)
    found: dict[str, int] = {}
    for part in text.split(","):
        gpu, _, count = part.rpartition(":")
        if not gpu or not count.isdecimal() or not int(count):
            raise ValueError(f"--gpus {text}: expected a number above 0, or one of each kind, as in h100-sxm:4,l40s:8")
        if gpu in found:
            raise ValueError(f"--gpus {text}: {gpu} is there twice")
        found[gpu] = int(count)
    return found


def check(numbers: Numbers) -> None:
    """Raises ValueError for numbers of GPUs that are none, KeyError for an unknown kind."""
    counts = list(numbers.values()) if isinstance(numbers, Mapping) else [numbers]
    if not counts or min(counts) < 1:
        raise ValueError(f"gpus: must be a number above 0, or one of each kind, not {numbers}")
    for gpu in numbers if isinstance(numbers, Mapping) else ():
        catalog.gpu(gpu)


def kinds_of(numbers: Numbers, gpu: Kind) -> list[tuple[Kind, int]]:
    """Each kind and how many there are; ``gpu`` is the kind of a number alone."""
    return list(numbers.items()) if isinstance(numbers, Mapping) else [(gpu, numbers)]


def cluster_of(numbers: Numbers, gpu: Kind) -> dict[str, Any]:
    """The same as a file has it."""
    kinds = [{"gpu": kind, "count": count} for kind, count in kinds_of(numbers, gpu)]
    return kinds[0] if len(kinds) == 1 else {"nodes": kinds}


def name_of(kind: Kind) -> str:
    return kind if isinstance(kind, str) else str(kind.get("name", "GPUs"))


def named(numbers: Numbers, gpu: Kind) -> str:
    """``4 h100-sxm + 8 l40s``."""
    kinds = kinds_of(numbers, gpu)
    return " + ".join(f"{count} {name_of(kind)}" for kind, count in kinds)


def price_of(numbers: Numbers, gpu: Kind, prices: Mapping[str, float]) -> float | None:
    """Dollars an hour of all of them; None where the price of one is not known."""
    kinds = [(name_of(kind), count) for kind, count in kinds_of(numbers, gpu)]
    if any(kind not in prices for kind, _ in kinds):
        return None
    return sum(prices[kind] * count for kind, count in kinds)
