"""Weighted round robin by the quota method (Balinski and Young 1975).

Whoever falls behind its share first has its turn, among those that are not ahead of it: after h requests, a member with the
fraction q of all rates has had between floor(h q) and ceil(h q) of them. Ties go to the first member. Members without a
rate have no share beside others; among themselves they have equal turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace


class Turns:
    """Members 0, 1, ... with these rates (any unit). Raises ValueError for a negative one.

    A turn among all costs O(log members), amortised, one among some a step for each of them.
    """

    __slots__ = ("_heap", "_rate", "_rates", "_sent", "_total")

    def __init__(self, rates: Sequence[float]) -> None:
        if min(rates, default=0.0) < 0:
            raise ValueError(f"the rates must not be negative: {list(rates)}")
        self._rates = tuple(rates) if any(rates) else (1.0,) * len(rates)
        self._rate = sum(self._rates)
        self._sent = [0] * len(self._rates)
        self._total = 0
        # (when its next turn is due, member); an entry whose member had a turn since is put right at the top.
        self._heap = [(1 / rate, member) for member, rate in enumerate(self._rates) if rate]
        heapify(self._heap)

    def next(self) -> int:
        """Whose turn it is among all."""
        heap, sent, rates = self._heap, self._sent, self._rates
        due, best = heap[0]
        while due != (now_due := (sent[best] + 1) / rates[best]):
            heapreplace(heap, (now_due, best))
            due, best = heap[0]
        if sent[best] >= (self._total + 1) / self._rate * rates[best]:
            return self.next_among(range(len(rates)))
        sent[best] += 1
        self._total += 1
        return best

    def next_among(self, members: Sequence[int]) -> int:
        """Whose turn it is if only these can take it."""
        sent, rates = self._sent, self._rates
        members = [member for member in members if rates[member]] or members
        if not rates[members[0]]:
            rates = (1.0,) * len(rates)
        rate = sum([rates[member] for member in members])
        quota = (1 + sum(sent[member] for member in members)) / rate
        behind = [member for member in members if sent[member] < quota * rates[member]]
        best = min(behind or members, key=lambda member: (sent[member] + 1) / rates[member])
        sent[best] += 1
        self._total += self._rates[best] > 0  # turns of members without a share are in nobody's quota
        return best
