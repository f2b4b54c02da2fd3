"""Engines whose KV memory is one: what one takes, the others no longer have.

Inside a span an engine takes blocks at its iteration boundaries without an event. Two facts keep that exact. Boundaries
are settled in the order of their times over all engines of the domain, before anyone looks at the memory. And a span is
only as long as its blocks are sure: those of all spans together fit, whatever the order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain

from fineserve_sim.cluster.engine import Engine, Growth
from fineserve_sim.cluster.sequence import DecodeSet
from fineserve_sim.policy.interfaces import KVManager


class MemoryDomain:
    """A connected set of engines over shared KV managers; or one engine with pools of its own."""

    def __init__(self, engines: Sequence[Engine], managers: Sequence[KVManager]) -> None:
        self.engines = tuple(engines)
        self._kv = {engine.index: engine.kv for engine in self.engines}
        self._managers = tuple(managers)
        self._alone = self.engines[0] if len(self.engines) == 1 else None

    def settle(self, now: float, order: int) -> None:
        """Pass every boundary before (``now``, ``order``) and take its blocks, in the order of time, then engine."""
        growths: list[Growth] = []
        for engine in self.engines:
            if engine.next_boundary_s <= now:
                growths += engine.pass_boundaries(now, order)
        if not growths:
            return
        if self._alone is not None:  # in order as they are: all at once
            growths = [(now, self._alone.index, list(chain.from_iterable(growth[2] for growth in growths)))]
        elif len(growths) > 1:
            growths.sort(key=_moment)
        for _, index, sequences in growths:
            if not self._kv[index].grow_each(sequences):
                raise AssertionError(f"engine {index}: no memory inside a span")

    def steps_that_fit(self, engine: Engine, decodes: DecodeSet, most: int) -> int:
        """The longest span, 1 to ``most`` iterations, whose blocks are sure beside the spans of the others. The engine is
        promised them."""
        engine.promised_blocks = decodes.blocks_ahead(most - 1)
        if self._promises_fit():
            return most

        def too_long(steps: int) -> bool:
            engine.promised_blocks = decodes.blocks_ahead(steps - 1)
            return not self._promises_fit()

        self._recount(engine)
        steps = max(1, bisect_left(range(1, most + 1), True, key=too_long))
        engine.promised_blocks = decodes.blocks_ahead(steps - 1)
        return steps

    def promises_hold(self, taker: Engine) -> bool:
        """What the other engines' spans will take still fits after ``taker`` took blocks outside a span."""
        if self._alone is not None or self._promises_fit():
            return True
        self._recount(taker)
        return self._promises_fit()

    def check(self) -> None:
        for manager in self._managers:
            manager.check()

    def _recount(self, engine: Engine) -> None:
        for other in self.engines:
            if other is not engine:
                other.recount_promise()

    def _promises_fit(self) -> bool:
        demands = {engine.index: engine.promised_blocks for engine in self.engines}
        return all(manager.fits(demands) for manager in self._managers)


def _moment(growth: Growth) -> tuple[float, int]:
    return growth[0], growth[1]
