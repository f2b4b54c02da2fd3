"""A prefix cache in host memory, below the cache of the engine's GPUs, as in vLLM's offloading connector.

Each block that the GPUs' cache records is copied to the host as well, over the host link, while the engine computes. So the
host still has blocks that the GPUs give up. A request that starts is first looked up on the GPUs, then on the host. If the
host has more, it gets all its blocks and is stalled until the copy has arrived; others start meanwhile. Then it prefills the
rest. A preempted request finds its own KV in the same way.

Left out: blocks that the GPUs give up before their copy has left stay there in vLLM, for the milliseconds that it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from fineserve_sim.cluster.clock import Clock, Kind, order_of
from fineserve_sim.cluster.engine.kv import PrefixBlocks
from fineserve_sim.cluster.engine.links import KV, GpuLinks
from fineserve_sim.cluster.engine.loop import Engine
from fineserve_sim.cluster.engine.sequence import Queue, SequenceState
from fineserve_sim.cluster.engine.state import PrefixTier
from fineserve_sim.cluster.log import DecisionLog
from fineserve_sim.policy.memory.host_cache import HostCache, Place
from fineserve_sim.policy.memory.paged import PagedPool

TIMER: Final = order_of(Kind.TIMER, 0)


class OffloadedBlocks(PrefixBlocks):
    """Named blocks, with a copy of each recorded one in ``host``. ``block_bytes``: of one block, over all GPUs of the
    engine."""

    def __init__(
        self, pools: Sequence[PagedPool], block_tokens: int, host: HostCache, links: GpuLinks, block_bytes: int
    ) -> None:
        super().__init__(pools, block_tokens)
        self.host, self.block_bytes = host, block_bytes
        self.to_host, self.from_host = links.to_host, links.from_host
        self.on_written: Callable[[float], None] | None = None

    def to_prefill(self, sequence: SequenceState) -> tuple[int, ...]:
        """The keys of the full blocks that the sequence must prefill, without its last token, which must be computed to yield
        the next."""
        return self._keys(sequence, sequence.target_tokens - 1)

    def lookup(self, sequence: SequenceState) -> tuple[int, int]:
        """How many leading blocks of the sequence's prefill the GPUs have, and how many the host has behind them."""
        keys = self.to_prefill(sequence)
        here = self._blocks.found(keys)
        return here, self.host.match(keys, here)

    def keep(self, sequence: SequenceState) -> None:
        super().keep(sequence)
        if self._keeps and (new := self.host.write(self._keys(sequence, sequence.cached_tokens))):
            self.to_host.send(len(new) * self.block_bytes, KV, None, partial(self._written, new))

    def _written(self, new: list[Place], now: float) -> None:
        self.host.written(new)
        if self.on_written is not None:
            self.on_written(now)


class Offloading(PrefixTier):
    """Brings prefixes back from the host of an engine with ``OffloadedBlocks``, where it takes its place as ``prefixes``.
    ``fetched_tokens`` counts what has come."""

    def __init__(self, engine: Engine, clock: Clock, log: DecisionLog | None) -> None:
        assert isinstance(engine.kv, OffloadedBlocks)
        self._engine, self._kv, self._clock, self._log = engine, engine.kv, clock, log
        engine.prefixes = self
        engine.kv.on_written = self._written
        self.fetched_tokens = 0

    def has_more(self, sequence: SequenceState) -> bool:
        return self._kv.lookup(sequence)[1] > 0

    def fetch(self, queue: Queue) -> bool:
        engine, kv, sequence = self._engine, self._kv, queue.waiting[0]
        here, there = kv.lookup(sequence)
        sequence.cached_tokens = kv.reuse(sequence)
        if not kv.grow(sequence, (here + there) * kv.block_tokens):
            kv.release(sequence)
            sequence.cached_tokens = 0
            return False
        sequence.cached_tokens = (here + there) * kv.block_tokens
        engine.stalled[queue.take_first()] = None
        engine.backlog_tokens -= sequence.target_tokens
        engine.composition_changed = True
        keys = kv.to_prefill(sequence)[: here + there]
        kv.host.read(keys, here)
        began_s = self._clock.now
        kv.from_host.send(there * kv.block_bytes, KV, None, partial(self._arrived, sequence, keys, here, began_s))
        engine.host.ask_again(engine, began_s)  # its backlog is shorter
        return True

    def _arrived(self, sequence: SequenceState, keys: tuple[int, ...], here: int, began_s: float, now: float) -> None:
        engine = self._engine
        self._kv.host.let_go(keys, here)
        if sequence not in engine.stalled:
            return  # the engine was lost
        tokens = (len(keys) - here) * self._kv.block_tokens
        self.fetched_tokens += tokens
        if self._log is not None:
            self._log.fetched(engine, sequence.index, tokens, began_s, now)
        engine.host.order = TIMER
        engine.host.settle_now(engine, now)
        engine.adopt(sequence, now)
        engine.host.ask_again(engine, now)

    def _written(self, now: float) -> None:
        """The host has more blocks: the first waiting request may need less memory than before."""
        engine = self._engine
        if engine.waiting and not engine.gone:
            engine.host.order = TIMER
            engine.executor.replan(now)


def offload(engine: Engine, clock: Clock, log: DecisionLog | None) -> None:
    """An engine whose blocks have copies on the host fetches them from there, and writes it down in ``log``."""
    if isinstance(engine.kv, OffloadedBlocks):
        Offloading(engine, clock, log)
