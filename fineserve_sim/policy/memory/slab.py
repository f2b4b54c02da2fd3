"""KV slab manager: one pre-allocated KV tensor of a GPU, shared by engines with different KV block sizes.

The tensor is cut into slabs of equal size (FineServe, section 5.2). A free slab can be formatted to any block size
(its *key*), stores only blocks of that size, and returns to the free slabs when its last block is freed. Which ids a slab
owns is arithmetic (see geometry.py), so no id is translated and no driver is called at run time.

Choice of a slab: the most used PARTIAL one, then the lowest id, so that little used slabs can drain; then the free slab
with the lowest id. Each key keeps its PARTIAL slabs in a heap whose ranks are refreshed lazily. Freeing a block leaves
the entry of its slab too optimistic, which shows when it reaches the top. Each free causes at most one refresh, so
alloc and free cost O(log slabs), amortised, for each slab touched, and a few bit operations for each block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import TypeVar

from fineserve_sim.policy.interfaces import KVLedger
from fineserve_sim.policy.memory.geometry import SlabPlan, plan_slabs


class _Pool:
    """The slabs formatted to one key: they hold ``used_blocks``, and ``spare_blocks`` that nobody has.

    ``free_bits`` has the PARTIAL slabs; bit i is set when the i-th block of the slab is free. ``partial`` is a min-heap of
    (-used, slab id): each PARTIAL slab has exactly one entry, whose ``used`` may be out of date, upwards only; entries of
    slabs that left the pool are dropped at the top. Slabs of grid keys differ: for these ``blocks_per_slab`` is 0,
    ``grid_blocks`` has the blocks of each slab, and ``unformatted_blocks`` counts those that the free slabs would hold.
    """

    def __init__(self, block_bytes: int, plan: SlabPlan, slabs: range) -> None:
        self.block_bytes = block_bytes
        self.blocks_per_slab = 0 if plan.is_grid(block_bytes) else plan.slab_bytes // block_bytes
        spans = [] if self.blocks_per_slab else [plan.span(block_bytes, slab_id) for slab_id in range(slabs.stop)]
        self.grid_blocks = [end - first for first, end in spans]
        self.capacity_blocks = self.unformatted_blocks = self.blocks_in(slabs)
        self.free_bits: dict[int, int] = {}
        self.partial: list[tuple[int, int]] = []
        self.spare_blocks = self.used_blocks = 0

    def blocks_in(self, slab_ids: Sequence[int]) -> int:
        """Blocks that these slabs hold when they are formatted to the key."""
        return self.blocks_per_slab * len(slab_ids) or sum(self.grid_blocks[slab_id] for slab_id in slab_ids)


@dataclass
class _Holder:
    """One owner, and the blocks that it holds, by id."""

    pool: _Pool
    held: set[int] = field(default_factory=set)


Owner = TypeVar("Owner")


class Owners(dict[int, Owner]):
    """What a KV memory keeps of each engine that draws on it; ValueError for an engine that does not."""

    def __init__(self, memory: str, owners: Mapping[int, Owner]) -> None:
        super().__init__(owners)
        self._memory = memory

    def __missing__(self, owner: int) -> Owner:
        raise ValueError(f"{self._memory}: owner {owner} is not registered; the owners are {sorted(self)}")


class KVSlabManager:
    """The KV tensor of one GPU, cut into slabs; a `KVManager` (see interfaces.py).

    ``total_bytes`` is the size of the tensor: what is left after whole slabs is lost; without a slab, capacities are 0.
    ``owners`` are block sizes in bytes by owner (engine id); owners with the same block size share a key and its slabs. The
    ``plan`` is made for them by default. ``reserved_slabs``, the lowest, are held back from every owner and count as lost. With
    at least one, block id 0 of every engine stays unowned: the runtime's engines use it as their null block.

    Raises ValueError for a plan that lacks a block size, negative ``total_bytes``, or more reserved slabs than slabs.
    """

    def __init__(
        self, total_bytes: int, owners: Mapping[int, int], *, plan: SlabPlan | None = None, reserved_slabs: int = 0
    ) -> None:
        self.plan = plan or plan_slabs(owners.values())
        self.slab_count = total_bytes // self.plan.slab_bytes
        if missing := set(owners.values()) - set(self.plan.block_bytes):
            raise ValueError(
                f"KV slab manager: the plan has no block size {sorted(missing)}; it has {self.plan.block_bytes}"
            )
        if total_bytes < 0 or not 0 <= reserved_slabs <= self.slab_count:
            raise ValueError(
                f"KV slab manager: {reserved_slabs} reserved slabs of {self.plan.slab_bytes} bytes; "
                f"{total_bytes} bytes hold {max(0, self.slab_count)}"
            )
        self._total_bytes = total_bytes
        self._slabs = range(reserved_slabs, self.slab_count)
        self._untouched = reserved_slabs  # slabs from here on were never formatted
        self._holes: list[int] = []  # free slabs before it, a min-heap
        self.free_slabs = len(self._slabs)  # formatted for nobody
        self._pools = {key: _Pool(key, self.plan, self._slabs) for key in sorted(set(owners.values()))}
        self._grid_pools = [pool for pool in self._pools.values() if not pool.blocks_per_slab]
        self._owners = Owners("KV slab manager", {owner: _Holder(self._pools[key]) for owner, key in owners.items()})

    def alloc(self, owner: int, blocks: int) -> list[int] | None:
        """``blocks`` block ids, or None when they do not all fit; then nothing is taken. Raises ValueError for an unknown owner
        or a negative number."""
        holder = self._owners[owner]
        pool = holder.pool
        per_slab = pool.blocks_per_slab
        if blocks < 0:
            raise ValueError(f"KV slab manager: owner {owner} asks for {blocks} blocks; it must be 0 or more")
        if blocks > pool.spare_blocks and blocks > self._available_blocks(pool):
            return None
        ids: list[int] = []
        left, heap, free_bits = blocks, pool.partial, pool.free_bits
        while left and heap:  # the most used PARTIAL slab, lowest id first, is at the top when its rank is up to date
            noted, slab_id = heap[0]
            free = free_bits.get(slab_id, 0)
            if not free:
                heappop(heap)
                continue
            rank = free.bit_count() - (per_slab or pool.grid_blocks[slab_id])
            if rank != noted:
                heapreplace(heap, (rank, slab_id))
                continue
            first = slab_id * per_slab or self.plan.span(pool.block_bytes, slab_id)[0]
            rest = free
            while rest and left:
                lowest = rest & -rest
                ids.append(first + lowest.bit_length() - 1)
                rest ^= lowest
                left -= 1
            if rest:
                free_bits[slab_id] = rest
                heap[0] = (rank - (free ^ rest).bit_count(), slab_id)  # lower than before, so it stays the top
            else:
                del free_bits[slab_id]
                heappop(heap)
        if left:
            self._take_fresh(pool, left, ids)
        pool.spare_blocks -= blocks
        pool.used_blocks += blocks
        holder.held.update(ids)
        return ids

    def free(self, owner: int, block_ids: Sequence[int]) -> None:
        """Give back blocks. Raises ValueError for an unknown owner, or an id that it does not hold or that is given
        twice; then nothing is given back."""
        holder = self._owners[owner]
        held, pool = holder.held, holder.pool
        if not held.issuperset(block_ids):
            stray = next(block for block in block_ids if block not in held)
            raise ValueError(f"KV slab manager: owner {owner} does not hold block {stray} and cannot free it")
        if len({*block_ids}) != len(block_ids):
            twice = next(block for block in block_ids if block_ids.count(block) > 1)
            raise ValueError(f"KV slab manager: owner {owner} frees block {twice} twice in one call")
        held.difference_update(block_ids)
        drained = block_ids if pool.blocks_per_slab == 1 else self._unset(pool, self._masks(pool, block_ids))
        if drained:
            self._give_back(pool, drained)
        pool.spare_blocks += len(block_ids)
        pool.used_blocks -= len(block_ids)

    def _masks(self, pool: _Pool, block_ids: Sequence[int]) -> dict[int, int]:
        """The blocks as bitmaps by slab id."""
        masks = dict[int, int]()
        if per_slab := pool.blocks_per_slab:
            for block in block_ids:
                slab_id = block // per_slab
                masks[slab_id] = masks.get(slab_id, 0) | 1 << block % per_slab
            return masks
        for block in block_ids:
            slab_id = block * pool.block_bytes // self.plan.slab_bytes
            first, _ = self.plan.span(pool.block_bytes, slab_id)
            masks[slab_id] = masks.get(slab_id, 0) | 1 << block - first
        return masks

    @staticmethod
    def _unset(pool: _Pool, masks: Mapping[int, int]) -> list[int]:
        """These blocks are free. Returns the slabs in which nobody holds one any more."""
        free_bits, per_slab = pool.free_bits, pool.blocks_per_slab
        drained: list[int] = []
        for slab_id, mask in masks.items():
            before = free_bits.get(slab_id, 0)
            free = before | mask
            rank = free.bit_count() - (per_slab or pool.grid_blocks[slab_id])
            if rank:
                free_bits[slab_id] = free
                if not before:
                    heappush(pool.partial, (rank, slab_id))
            else:
                drained.append(slab_id)
                if before:
                    del free_bits[slab_id]
        return drained

    def _take_fresh(self, pool: _Pool, left: int, ids: list[int]) -> None:
        """Give so many blocks of free slabs, whole ones first. There must be as many, and no PARTIAL slab."""
        per_slab = pool.blocks_per_slab
        if per_slab and left >= per_slab:
            slab_ids = self._format(pool, left // per_slab)
            if per_slab == 1:
                ids += slab_ids
            else:
                for id in slab_ids:
                    ids += range(id * per_slab, (id + 1) * per_slab)
            left %= per_slab
        while left:  # a part of one, or of grid keys one after the other
            (slab_id,) = slab_ids = self._format(pool, 1)
            first, blocks = self.plan.span(pool.block_bytes, slab_id)[0], pool.blocks_in(slab_ids)
            taken = min(left, blocks)
            ids += range(first, first + taken)
            if taken < blocks:
                pool.free_bits[slab_id] = (1 << blocks) - (1 << taken)
                pool.partial.append((-taken, slab_id))
            left -= taken

    def _format(self, pool: _Pool, count: int) -> list[int]:
        """Format the ``count`` lowest free slabs to the key of the pool. There must be as many. Only called when the heap of
        the pool is empty; this is why no slab ever has two entries in a heap."""
        holes = self._holes
        slab_ids: list[int] = []
        while holes and len(slab_ids) < count:
            slab_ids.append(heappop(holes))
        if new := count - len(slab_ids):
            slab_ids += range(self._untouched, self._untouched + new)
            self._untouched += new
        self.free_slabs -= count
        pool.spare_blocks += pool.blocks_in(slab_ids)
        for grid_pool in self._grid_pools:
            grid_pool.unformatted_blocks -= grid_pool.blocks_in(slab_ids)
        return slab_ids

    def _give_back(self, pool: _Pool, slab_ids: Sequence[int]) -> None:
        """These slabs of the pool are empty: they are free again."""
        holes = self._holes
        for slab_id in slab_ids:
            heappush(holes, slab_id)
        self.free_slabs += len(slab_ids)
        pool.spare_blocks -= pool.blocks_in(slab_ids)
        for grid_pool in self._grid_pools:
            grid_pool.unformatted_blocks += grid_pool.blocks_in(slab_ids)

    def _available_blocks(self, pool: _Pool) -> int:
        per_slab = pool.blocks_per_slab
        return pool.spare_blocks + (self.free_slabs * per_slab if per_slab else pool.unformatted_blocks)

    def free_blocks(self, owner: int) -> int:
        """How many blocks ``owner`` could get now. Exact: ``alloc`` succeeds up to it and fails above. O(1)."""
        return self._available_blocks(self._owners[owner].pool)

    def capacity_blocks(self, owner: int) -> int:
        return self._owners[owner].pool.capacity_blocks

    def used_bytes(self, owner: int) -> int:
        holder = self._owners[owner]
        return len(holder.held) * holder.pool.block_bytes

    def fits(self, demands: Mapping[int, int]) -> bool:
        """Whether all these blocks (owner to number) would be granted in whatever order; owners not registered here are
        ignored. Exact for aligned keys; for grid keys, whose slabs differ by a block, on the safe side."""
        if sum(demands.values()) <= self.free_slabs:
            return True  # even if every block takes a slab of its own
        needed: dict[int, int] = {}
        for owner, blocks in demands.items():
            if owner in self._owners:
                key = self._owners[owner].pool.block_bytes
                needed[key] = needed.get(key, 0) + blocks
        slabs = 0
        for key, blocks in needed.items():
            if (beyond := blocks - self._pools[key].spare_blocks) > 0:
                slabs += -(-beyond // self.plan.least_blocks(key))
        return slabs <= self.free_slabs

    def spare_blocks(self, owner: int) -> int:
        """Blocks that nobody holds in the slabs of ``owner``'s block size: only owners of that size can take them."""
        return self._owners[owner].pool.spare_blocks

    def ledger(self) -> KVLedger:
        """All bytes of the tensor. The reserved slabs and the tail behind the last slab are lost. So are the remainders
        of slabs while they are formatted to a grid key; they come back when the slab drains."""
        used = sum(pool.used_blocks * key for key, pool in self._pools.items())
        stranded = sum(pool.spare_blocks * key for key, pool in self._pools.items())
        free = self.free_slabs * self.plan.slab_bytes
        return KVLedger(self._total_bytes, used, stranded, free, self._total_bytes - used - stranded - free)

    def locate(self, owner: int, block_id: int) -> tuple[int, int]:
        """(slab id, local block id) of a block in the view of ``owner``, whether held or not. Raises ValueError for an
        id outside the tensor or, for a grid key, across a slab boundary."""
        key = self._owners[owner].pool.block_bytes
        slab_id = block_id * key // self.plan.slab_bytes
        first, end = self.plan.span(key, slab_id)
        if not (0 <= slab_id < self.slab_count and first <= block_id < end):
            raise ValueError(
                f"KV slab manager: block {block_id} of owner {owner} lies in none of {self.slab_count} slabs"
            )
        return slab_id, block_id - first

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself: recomputes every counter from what owners hold. O(slabs)."""
        free = [*self._holes, *range(self._untouched, self.slab_count)]
        assert self.free_slabs == len(free), "the free slabs are miscounted"
        formatted: list[int] = []
        for key, pool in self._pools.items():
            formatted += self._check_pool(key, pool)
            blocks = sum(end - first for first, end in (self.plan.span(key, slab_id) for slab_id in free))
            assert self._available_blocks(pool) == blocks + pool.spare_blocks, f"free blocks of key {key}"
        assert sorted(free + formatted) == list(self._slabs), "a slab is lost, in two places, or reserved"
        assert min(self.ledger()) >= 0, f"the ledger does not add up: {self.ledger()}"

    def _check_pool(self, key: int, pool: _Pool) -> Iterable[int]:
        """Every block in the slabs of the pool, which are returned, is held by one owner, or free and counted."""
        held: dict[int, int] = {}
        for holder in self._owners.values():
            if holder.pool is pool:
                for slab_id, bits in self._masks(pool, [*holder.held]).items():
                    assert not bits & held.get(slab_id, 0), f"two owners hold one block of slab {slab_id}"
                    held[slab_id] = held.get(slab_id, 0) | bits
        ranks = {slab_id: -rank for rank, slab_id in pool.partial}
        assert len(ranks) == len(pool.partial), f"a slab is twice in the heap of key {key}"
        for slab_id, bits in held.items():
            first, end = self.plan.span(key, slab_id)
            free = pool.free_bits.get(slab_id, 0)
            assert bits ^ free == (1 << (end - first)) - 1, (
                f"a block of slab {slab_id} is neither held nor free, or both"
            )
            assert ranks.get(slab_id, -1) >= bits.bit_count() if free else slab_id not in ranks, (
                f"slab {slab_id} in the heap"
            )
        assert pool.free_bits.keys() <= held.keys() and all(pool.free_bits.values()), f"an empty slab of key {key}"
        counters = [sum(map(int.bit_count, bits.values())) for bits in (held, pool.free_bits)]
        assert [pool.used_blocks, pool.spare_blocks] == counters, f"counters of key {key}"
        return held
