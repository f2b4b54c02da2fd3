"""What a cluster tells of its engines to whoever lets them come and go. As it stands: nobody does, as in a static cluster."""

from __future__ import annotations

from fineserve_sim.cluster.engine.base import Engine
from fineserve_sim.cluster.engine.queue import Lane
from fineserve_sim.cluster.engine.sequence import SequenceState


class Fleet:
    """``lends``: memory may be with somebody else for a while, weights that load or a request on its way."""

    lends = False

    def rested(self, engine: Engine, now: float) -> None:
        """It has nothing more to do."""

    def stopped(self, engine: Engine, now: float) -> None:
        """It was to stop, and its last batch has left."""
        raise AssertionError(f"engine {engine.index} was told to stop; only pipelines are")

    def leaves(self, engine: Engine, lane: Lane, sequence: SequenceState, now: float) -> None:
        """A sequence that is to go elsewhere stands between two iterations."""
        raise AssertionError(f"request {sequence.index} was to move; it stays with its engine")

    def reform(self, now: float) -> None:
        """All commands are carried out, and engines came or went."""

    def check(self) -> None:
        """Raise AssertionError if bytes do not add up."""

    def fail(self, number: int) -> None:
        """A GPU, or an instance by its number in the placement, is lost, with all that its engines hold; their requests start
        again elsewhere."""
        raise AssertionError("the engines of a static cluster stay")

    def repair(self, number: int) -> None:
        """What was lost is back, with nothing in its memory."""
        raise AssertionError("the engines of a static cluster stay")
