"""Private paged pools: every engine has memory of its own and pages it alone.

This is plain PagedAttention memory management as in vLLM: a share is cut into blocks of the engine's own size, and any free
block serves any sequence. Nothing fragments, and nothing can be lent: an idle engine's free blocks stay its own. So blocks
are counted, not named: which of them a sequence holds changes no decision.

``PagedPool`` is a fixed share of a GPU. ``PoolShare`` counts the blocks of one engine in a ``BytePool`` whose size changes,
where dropped layers become KV memory, and from which an engine that drains may still draw beside the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fineserve_sim.policy.interfaces import KVLedger, KVManager


class BlockPool(Protocol):
    """Blocks of one engine in one memory, counted. ``take`` and ``give`` raise ValueError for what cannot be."""

    @property
    def free_blocks(self) -> int: ...
    @property
    def capacity_blocks(self) -> int: ...
    @property
    def used_bytes(self) -> int: ...
    def take(self, blocks: int) -> bool: ...
    def give(self, blocks: int) -> None: ...


class PagedPool:
    """``share_bytes`` cut into blocks of ``block_bytes``, ``free_blocks`` of which nobody holds.

    Raises:
        ValueError: a block below 1 byte or a negative share.
    """

    __slots__ = ("block_bytes", "capacity_blocks", "free_blocks", "share_bytes")

    def __init__(self, block_bytes: int, share_bytes: int) -> None:
        if block_bytes < 1 or share_bytes < 0:
            raise ValueError(
                f"paged pool: {share_bytes} bytes in blocks of {block_bytes}; need bytes >= 0 and blocks >= 1"
            )
        self.block_bytes = block_bytes
        self.share_bytes = share_bytes
        self.capacity_blocks = share_bytes // block_bytes
        self.free_blocks = self.capacity_blocks

    @property
    def used_bytes(self) -> int:
        return (self.capacity_blocks - self.free_blocks) * self.block_bytes

    def take(self, blocks: int) -> bool:
        """Take ``blocks`` blocks. False when there are not as many; then nothing is taken. ValueError if negative."""
        if blocks < 0:
            raise ValueError(f"paged pool: {blocks} blocks asked for; it must be 0 or more")
        if blocks > self.free_blocks:
            return False
        self.free_blocks -= blocks
        return True

    def give(self, blocks: int) -> None:
        """Give back blocks. ValueError for a negative number or more than are held; then nothing is given back."""
        held = self.capacity_blocks - self.free_blocks
        if not 0 <= blocks <= held:
            raise ValueError(
                f"paged pool: {blocks} blocks given back; it must be 0 to {held}, the blocks that are held"
            )
        self.free_blocks += blocks


class BytePool:
    """KV memory of ``limit_bytes``, which may change, with ``used_bytes`` of it taken."""

    __slots__ = ("limit_bytes", "used_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.limit_bytes - self.used_bytes


class PoolShare:
    """Blocks of ``block_bytes`` that one engine holds in a ``BytePool``, perhaps beside others."""

    __slots__ = ("block_bytes", "held_blocks", "pool")

    def __init__(self, pool: BytePool, block_bytes: int) -> None:
        self.pool = pool
        self.block_bytes = block_bytes
        self.held_blocks = 0

    @property
    def free_blocks(self) -> int:
        pool = self.pool
        return (pool.limit_bytes - pool.used_bytes) // self.block_bytes

    @property
    def capacity_blocks(self) -> int:
        """Blocks if nobody else held any."""
        return self.pool.limit_bytes // self.block_bytes

    @property
    def used_bytes(self) -> int:
        return self.held_blocks * self.block_bytes

    def take(self, blocks: int) -> bool:
        pool, bytes = self.pool, blocks * self.block_bytes
        if pool.used_bytes + bytes > pool.limit_bytes:
            return False
        self.held_blocks += blocks
        pool.used_bytes += bytes
        return True

    def give(self, blocks: int) -> None:
        """ValueError for more than are held; then nothing is given back."""
        if blocks > self.held_blocks:
            raise ValueError(f"paged pool: {blocks} blocks given back; {self.held_blocks} are held")
        self.held_blocks -= blocks
        self.pool.used_bytes -= blocks * self.block_bytes


class _Pools(dict[int, PagedPool]):
    def __missing__(self, owner: int) -> PagedPool:
        raise ValueError(f"private pools: owner {owner} is not registered; the owners are {sorted(self)}")


class PrivatePools:
    """The KV memory of one GPU as one `PagedPool` per owner; a `KVMemory` (see interfaces.py).

    Args:
        shares: (block bytes, share bytes) by owner (engine id). The memory managed is the sum of the shares.
    """

    def __init__(self, shares: Mapping[int, tuple[int, int]]) -> None:
        self._pools = _Pools({owner: PagedPool(block, share) for owner, (block, share) in shares.items()})

    def join(self, owner: int, block_bytes: int, share_bytes: int) -> None:
        """A new owner with a share of its own. ValueError for one that has a pool."""
        if owner in self._pools:
            raise ValueError(f"private pools: owner {owner} joins twice")
        self._pools[owner] = PagedPool(block_bytes, share_bytes)

    def leave(self, owner: int) -> None:
        """The owner goes, and its share with it. ValueError while it holds blocks."""
        if self._pools[owner].used_bytes:
            raise ValueError(f"private pools: owner {owner} leaves with {self._pools[owner].used_bytes} bytes in use")
        del self._pools[owner]

    def pool(self, owner: int) -> PagedPool:
        """The pool of ``owner``, to take from and give back to; ValueError for an unknown owner."""
        return self._pools[owner]

    def ledger(self) -> KVLedger:
        """Bytes of all shares. Nothing is stranded, for there are no slabs; a share's last part of a block is lost."""
        pools = self._pools.values()
        return KVLedger(
            total_bytes=sum(pool.share_bytes for pool in pools),
            used_bytes=sum(pool.used_bytes for pool in pools),
            stranded_bytes=0,
            free_bytes=sum(pool.free_blocks * pool.block_bytes for pool in pools),
            lost_bytes=sum(pool.share_bytes % pool.block_bytes for pool in pools),
        )

    def check(self) -> None:
        """Raise AssertionError if a pool contradicts itself."""
        for owner, pool in self._pools.items():
            assert 0 <= pool.free_blocks <= pool.capacity_blocks, f"owner {owner}: {pool.free_blocks} free blocks"
        total, *parts = self.ledger()
        assert sum(parts) == total, f"the ledger does not add up: {self.ledger()}"


GpuMemory = KVManager | PrivatePools
"""The KV memory of one GPU: blocks with names that engines share, or pools of their own."""
