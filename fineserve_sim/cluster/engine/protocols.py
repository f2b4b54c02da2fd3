"""What an engine needs of others: the cluster around it, and somebody to turn to when a decode finds no KV block.

``E_contra`` is the engine.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, TypeVar

from fineserve_sim.cluster.engine.queue import Lane
from fineserve_sim.cluster.engine.sequence import Decodes, SequenceState
from fineserve_sim.latency.sharing import Demand

E_contra = TypeVar("E_contra", contravariant=True)


class EngineHost(Protocol[E_contra]):
    """The cluster around an engine: what it hears, and what it is asked."""

    merging: bool
    logs: bool
    """Whether what is computed is written down."""

    def consult(self, engine: E_contra, now: float) -> None:
        """The engine stands between two iterations: its scheduler may start requests."""
        ...

    def must_ask(self, engine: E_contra) -> bool: ...
    def ask_again_s(self, engine: E_contra) -> float: ...
    def settle(self, engine: E_contra, now: float, order: int) -> None:
        """An event of the engine begins: bring the memory that it sees up to it."""
        ...

    def settle_now(self, engine: E_contra, now: float) -> None:
        """As ``settle``, within the event under way."""
        ...

    def set_demand(self, engine: E_contra, now: float, need: Demand) -> None: ...
    def steps_that_fit(self, engine: E_contra, decodes: Decodes, most: int) -> int: ...
    def launched(self, engine: E_contra, lane: Lane, now: float, *, sure: bool) -> None: ...
    def computed(self, engine: E_contra, lane: Lane, since_s: float, now: float, stage: int = 0) -> None:
        """A batch, or a span of alike ones, was computed since then."""
        ...

    def touch(self, engine: E_contra) -> None:
        """Its load changed, outside of a batch."""
        ...

    def progressed(self, engine: E_contra) -> None: ...
    def emitted(self, sequence: SequenceState, now: float) -> None: ...
    def finished(self, engine: E_contra, sequence: SequenceState, now: float) -> None: ...
    def preempted(self, engine: E_contra, sequence: SequenceState, now: float | None = None) -> None: ...
    def returned(self, engine: E_contra, sequences: Collection[SequenceState], now: float) -> None:
        """The engine gives these back: they wait for another one."""
        ...

    def memory_freed(self, engine: E_contra, now: float) -> None: ...
    def stalled(self, engine: E_contra, now: float) -> None: ...
    def rested(self, engine: E_contra, now: float) -> None: ...
    def stopped(self, engine: E_contra, now: float) -> None: ...
    def leaves(self, engine: E_contra, lane: Lane, sequence: SequenceState, now: float) -> None: ...


class Relief(Protocol[E_contra]):
    """What an engine does when a decode finds no KV block, instead of recomputing the latest.

    ``admits``: new sequences may start; ``held`` sequences are away from the lanes; ``boundaries_ahead``: so many iterations
    ahead it looks for blocks.
    """

    boundaries_ahead: int

    @property
    def admits(self) -> bool: ...
    @property
    def held(self) -> int: ...
    def members(self) -> list[SequenceState]:
        """The sequences that are away from the lanes."""
        ...

    def used_blocks(self) -> int:
        """Blocks that they hold."""
        ...

    def abandon(self) -> list[SequenceState]:
        """The engine is lost: those away are, too, and hold nothing any more."""
        ...

    def before(self, engine: E_contra, lane: Lane, now: float) -> None:
        """A batch is about to be formed."""
        ...

    def make_room(self, engine: E_contra, lane: Lane, growing: Collection[SequenceState], now: float) -> None:
        """There are no blocks for all of ``growing``: afterwards those that still decode in ``lane`` have theirs."""
        ...
