"""Private paged pools: every engine has a fixed share of the GPU's KV memory and pages it alone.

This is plain PagedAttention memory management as in vLLM: a share is cut once into blocks of the engine's own size, and
any free block serves any sequence. Nothing fragments, and nothing can be lent: an idle engine's free blocks stay its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from fineserve_sim.policy.interfaces import KVLedger


class PagedPool:
    """``share_bytes`` cut into blocks of ``block_bytes``, ids 0 to capacity - 1; the last freed block is reused first.

    Raises:
        ValueError: a block below 1 byte or a negative share.
    """

    __slots__ = ("_free", "_held", "block_bytes", "capacity_blocks", "share_bytes")

    def __init__(self, block_bytes: int, share_bytes: int) -> None:
        if block_bytes < 1 or share_bytes < 0:
            raise ValueError(
                f"paged pool: {share_bytes} bytes in blocks of {block_bytes}; need bytes >= 0 and blocks >= 1"
            )
        self.block_bytes = block_bytes
        self.share_bytes = share_bytes
        self.capacity_blocks = share_bytes // block_bytes
        self._free = list(range(self.capacity_blocks - 1, -1, -1))  # a stack: its end is handed out first
        self._held: set[int] = set()

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        return len(self._held) * self.block_bytes

    def alloc(self, blocks: int) -> list[int] | None:
        """``blocks`` block ids, or None when there are not as many; then nothing is taken. ValueError if negative."""
        if blocks < 0:
            raise ValueError(f"paged pool: {blocks} blocks asked for; it must be 0 or more")
        left = len(self._free) - blocks
        if left < 0:
            return None
        ids = self._free[left:]
        del self._free[left:]
        ids.reverse()
        self._held.update(ids)
        return ids

    def free(self, block_ids: Sequence[int]) -> None:
        """Give back blocks. Raises ValueError for an id not held or given twice; then nothing is given back."""
        held = self._held
        before = len(held)
        held.difference_update(block_ids)
        if len(held) + len(block_ids) != before:
            self._refuse(block_ids)
        self._free.extend(reversed(block_ids))

    def _refuse(self, block_ids: Sequence[int]) -> NoReturn:
        """Take back a release that named blocks not held, or one twice, and say which."""
        freed = set(block_ids)
        stray = freed.intersection(self._free).union(id for id in freed if not 0 <= id < self.capacity_blocks)
        self._held.update(freed - stray)
        if stray:
            raise ValueError(f"paged pool: block {min(stray)} is not held and cannot be freed")
        raise ValueError(f"paged pool: {len(block_ids) - len(freed)} of the blocks to free are named twice in one call")

    def check(self) -> None:
        """Raise AssertionError unless every block is either free or held, once."""
        assert len(self._free) + len(self._held) == self.capacity_blocks, "a block is lost or doubled"
        assert self._held.union(self._free) == set(range(self.capacity_blocks)), (
            "a block is both free and held, or unknown"
        )


class _Pools(dict[int, PagedPool]):
    def __missing__(self, owner: int) -> PagedPool:
        raise ValueError(f"private pools: owner {owner} is not registered; the owners are {sorted(self)}")


class PrivatePools:
    """The KV memory of one GPU as one `PagedPool` per owner; a `KVManager` (see interfaces.py).

    Args:
        shares: (block bytes, share bytes) by owner (engine id). The memory managed is the sum of the shares.
    """

    def __init__(self, shares: Mapping[int, tuple[int, int]]) -> None:
        self._pools = _Pools({owner: PagedPool(block, share) for owner, (block, share) in shares.items()})

    def alloc(self, owner: int, blocks: int) -> list[int] | None:
        """``blocks`` ids from the owner's pool, or None; ValueError for an unknown owner or a negative number."""
        return self._pools[owner].alloc(blocks)

    def free(self, owner: int, block_ids: Sequence[int]) -> None:
        """Give back blocks; raises ValueError for an unknown owner or as `PagedPool.free` does."""
        self._pools[owner].free(block_ids)

    def free_blocks(self, owner: int) -> int:
        """How many blocks ``owner`` could get now."""
        return self._pools[owner].free_blocks

    def capacity_blocks(self, owner: int) -> int:
        """Whole blocks in the owner's share; what the others hold does not matter."""
        return self._pools[owner].capacity_blocks

    def used_bytes(self, owner: int) -> int:
        """Bytes of the blocks that ``owner`` holds."""
        return self._pools[owner].used_bytes

    def fits(self, demands: Mapping[int, int]) -> bool:
        """Whether each owner's pool has the blocks asked of it; owners without a pool here are ignored."""
        pools = self._pools
        return all(owner not in pools or blocks <= pools[owner].free_blocks for owner, blocks in demands.items())

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
        for pool in self._pools.values():
            pool.check()
        total, *parts = self.ledger()
        assert sum(parts) == total, f"the ledger does not add up: {self.ledger()}"
