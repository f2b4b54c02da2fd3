"""Private paged pools: every engine has memory of its own and pages it alone.

This is plain PagedAttention memory management as in vLLM: a share is cut into blocks of the engine's own size, and any free
block serves any sequence. Nothing fragments, and nothing can be lent: an idle engine's free blocks stay its own. So blocks
are counted, not named: which of them a sequence holds changes no decision.

The memory under a pool is a fixed share of a GPU, or it changes. It changes where dropped layers become KV memory. An engine
that drains may then still draw from it beside the next one.

Static partition is the S-Partition baseline of Prism, and also MIG slices and fractional GPUs. Models are placed once (KVPR).
Each gets a fixed part of what weights and activations leave. Parts are equal, or in proportion to the KV bytes that arrive for
a model (request rate times bytes per token). A part is no less than one request of full length needs, for a smaller pool could
never serve it. The paper states neither rule; both are readings (systems.md 6.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from fineserve_sim.policy.interfaces import KVLedger, KVManager
from fineserve_sim.policy.memory.slab import Owners


@dataclass(slots=True)
class BytePool:
    """KV memory of ``limit_bytes``, which may change, with ``used_bytes`` of it taken."""

    limit_bytes: int
    used_bytes: int = 0


@dataclass(slots=True)
class PagedPool:
    """Blocks of ``block_bytes`` that one engine holds in a memory, alone or beside others. ValueError for a block
    below 1 byte or a negative share."""

    block_bytes: int
    memory: BytePool
    held_blocks: int = 0

    def __post_init__(self) -> None:
        limit_bytes = self.memory.limit_bytes
        if self.block_bytes < 1 or limit_bytes < 0:
            raise ValueError(
                f"paged pool: {limit_bytes} bytes in blocks of {self.block_bytes}; need bytes >= 0 and blocks >= 1"
            )

    @property
    def free_blocks(self) -> int:
        memory = self.memory
        return (memory.limit_bytes - memory.used_bytes) // self.block_bytes

    @property
    def capacity_blocks(self) -> int:
        """Blocks that the engine could hold if no other engine held any."""
        return self.memory.limit_bytes // self.block_bytes

    @property
    def used_bytes(self) -> int:
        return self.held_blocks * self.block_bytes

    def take(self, blocks: int) -> bool:
        """Take ``blocks`` blocks. False when there are not as many; then nothing is taken. ValueError if negative."""
        if blocks < 0:
            raise ValueError(f"paged pool: {blocks} blocks asked for; it must be 0 or more")
        memory = self.memory
        used_bytes = memory.used_bytes + blocks * self.block_bytes
        if used_bytes > memory.limit_bytes:
            return False
        memory.used_bytes = used_bytes
        self.held_blocks += blocks
        return True

    def give(self, blocks: int) -> None:
        """Give back blocks. ValueError for a negative number or more than are held; then nothing is given back."""
        if not 0 <= blocks <= self.held_blocks:
            raise ValueError(
                f"paged pool: {blocks} blocks given back; it must be 0 to {self.held_blocks}, the blocks that are held"
            )
        self.held_blocks -= blocks
        self.memory.used_bytes -= blocks * self.block_bytes


class PrivatePools:
    """The KV memory of one GPU as one `PagedPool` per owner. ``shares``: (block bytes, share bytes) by owner (engine id)."""

    def __init__(self, shares: Mapping[int, tuple[int, int]]) -> None:
        self._pools = Owners[PagedPool]("private pools", {})
        for owner, (block_bytes, share_bytes) in shares.items():
            self.join(owner, block_bytes, share_bytes)

    def join(self, owner: int, block_bytes: int, share_bytes: int) -> None:
        """A new owner with a share of its own. ValueError for one that has a pool."""
        if owner in self._pools:
            raise ValueError(f"private pools: owner {owner} joins twice")
        self._pools[owner] = PagedPool(block_bytes, BytePool(share_bytes))

    def leave(self, owner: int) -> None:
        """The owner goes, and its share with it. ValueError while it holds blocks."""
        if used_bytes := self.pool(owner).used_bytes:
            raise ValueError(f"private pools: owner {owner} leaves with {used_bytes} bytes in use")
        del self._pools[owner]

    def pool(self, owner: int) -> PagedPool:
        """The pool of ``owner``, to take from and give back to; ValueError for an unknown owner."""
        return self._pools[owner]

    def ledger(self) -> KVLedger:
        """Bytes of all shares. Nothing is stranded, for there are no slabs; a share's last part of a block is lost."""
        pools = self._pools.values()
        return KVLedger(
            total_bytes=sum(pool.memory.limit_bytes for pool in pools),
            used_bytes=sum(pool.used_bytes for pool in pools),
            stranded_bytes=0,
            free_bytes=sum(pool.free_blocks * pool.block_bytes for pool in pools),
            lost_bytes=sum(pool.memory.limit_bytes % pool.block_bytes for pool in pools),
        )

    def check(self) -> None:
        """Raise AssertionError if a pool contradicts itself."""
        for owner, pool in self._pools.items():
            assert 0 <= pool.free_blocks <= pool.capacity_blocks, f"owner {owner}: {pool.free_blocks} free blocks"
        total, *parts = self.ledger()
        assert sum(parts) == total, f"the ledger does not add up: {self.ledger()}"


GpuMemory = KVManager | PrivatePools
"""The KV memory of one GPU: blocks with names that engines share, or pools of their own."""


class Share(NamedTuple):
    """What speaks for an engine's part: its weight in the division, and the least that it can work with."""

    weight: float
    least_bytes: int


def split_bytes(pool_bytes: int, shares: Mapping[int, Share]) -> dict[int, int]:
    """The pool divided in proportion to the weights, or equally if all are 0; parts are rounded down.

    An engine that would get less than ``least_bytes`` gets just that, and the others divide the rest. When the pool does not
    even hold all minima, it is divided in proportion to them. Raises ValueError for a negative pool, weight or minimum.
    """
    if pool_bytes < 0 or any(share.weight < 0 or share.least_bytes < 0 for share in shares.values()):
        raise ValueError(f"a pool of {pool_bytes} bytes cannot be divided by {dict(shares)}: all must be at least 0")
    least = sum(share.least_bytes for share in shares.values())
    if least > pool_bytes:
        return {owner: pool_bytes * share.least_bytes // least for owner, share in shares.items()}
    parts: dict[int, int] = {}
    weighted = any(share.weight for share in shares.values())
    # Exact, so that nothing is sold twice.
    weights = {owner: Fraction(share.weight if weighted else 1) for owner, share in shares.items()}
    while weights:
        left_bytes, total = pool_bytes - sum(parts.values()), sum(weights.values())
        part = {owner: int(left_bytes * weight / total) for owner, weight in weights.items()}
        short = [owner for owner in weights if part[owner] < shares[owner].least_bytes]
        if not short:
            return parts | part
        parts |= {owner: shares[owner].least_bytes for owner in short}
        weights = {owner: weight for owner, weight in weights.items() if owner not in parts}
    return parts
