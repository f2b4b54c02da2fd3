"""Which request gives its KV memory back when there is none left (vLLM: recompute, the latest arrival first).

One rule serves all cases. A decode without a block takes it from the request of its engine that arrived last, possibly
itself. Partial prefills that block one another, in however many engines of one memory, are told apart the same way: the
one that arrived last starts again later. The oldest request is never a victim while another runs, so one request always goes
on, and no two requests can evict each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Preemptible(Protocol):
    """A request that holds KV memory; ``index`` tells requests of one moment apart."""

    arrival_s: float
    index: int


Victim = TypeVar("Victim", bound=Preemptible)


def preemption_victim(holders: Iterable[Victim]) -> Victim:
    """The holder that arrived last; among equals, the higher index. Raises ValueError when there is none."""
    try:
        return max(holders, key=arrival_order)
    except ValueError:
        raise ValueError("no request holds memory that could be taken") from None


def arrival_order(holder: Preemptible) -> tuple[float, int]:
    """Sorts by age, oldest first: the order in which decodes get their blocks."""
    return holder.arrival_s, holder.index
