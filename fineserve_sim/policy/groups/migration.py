"""Llumnix's live migration: move the shortest running request of the fullest instance to the freest one.

At each look the instances with the lowest and the highest freeness are paired, then the next two, as long as the one is
under ``out_blocks`` and the other above ``in_blocks``. The destination reserves memory when the move starts, the source
gives its own back when it ends: in a spike over the whole cluster there is nothing to gain.
"""

from __future__ import annotations

from collections.abc import Sequence

from fineserve_sim.policy.commands import Migrate
from fineserve_sim.policy.groups.dispatch import freeness
from fineserve_sim.policy.groups.view import GroupView, Phase


class LlumnixMigration:
    """``out_blocks`` and ``in_blocks`` are freeness thresholds in KV blocks a running request; a pair must straddle
    both."""

    def __init__(self, out_blocks: float = 3.0, in_blocks: float = 3.0) -> None:
        if in_blocks < out_blocks:
            raise ValueError(
                f"in_blocks {in_blocks:g} is below out_blocks {out_blocks:g}; requests would move in circles"
            )
        self._out, self._in = out_blocks, in_blocks

    def tick(self, engines: Sequence[GroupView]) -> list[Migrate]:
        """The moves to start now. ``engines`` are those without a move under way."""
        serving = [view for view in engines if view.phase is Phase.SERVING]
        ranked = sorted(serving, key=lambda view: (freeness(view.load), view.engine))
        moves = []
        for source, destination in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if freeness(source.load) >= self._out or freeness(destination.load) <= self._in:
                break
            shortest = source.load.shortest
            if shortest is not None and source.load.shortest_blocks <= destination.load.free_blocks:
                moves.append(Migrate(shortest, source.engine, destination.engine))
        return moves
