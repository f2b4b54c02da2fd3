"""KV slab manager: one pre-allocated KV tensor of a GPU, shared by engines with different KV block sizes.

The tensor is cut into slabs of equal size (FineServe, section 5.2). A free slab can be formatted to any block size
(its *key*), stores only blocks of that size, and returns to the free slabs when its last block is freed. An engine sees
the whole tensor as an array of its own blocks: block ``id`` lies at byte ``id * block_bytes``, so no id is translated
and no driver is called at run time. Which ids a slab owns is arithmetic: see geometry.py.

Choice of a slab: the most used PARTIAL one, then the lowest id, so that little used slabs can drain; then the free slab
with the lowest id. Each key keeps its PARTIAL slabs in a heap whose ranks are refreshed lazily: freeing a block leaves
the entry of its slab too optimistic, which shows when it reaches the top. Each free causes at most one refresh, so
alloc and free cost O(log slabs), amortised, for each slab touched, and a few bit operations for each block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush, heapreplace

from fineserve_sim.policy.interfaces import KVLedger
from fineserve_sim.policy.memory.geometry import SlabPlan, plan_slabs
from fineserve_sim.policy.memory.slab_table import (
    Holder,
    Holders,
    Pool,
    Slab,
    SlabEntry,
    SlabState,
    check_pool,
    check_slab,
    take_lowest,
)

__all__ = ["KVSlabManager", "SlabEntry", "SlabPlan", "SlabState", "plan_slabs"]


class KVSlabManager:
    """The KV tensor of one GPU, cut into slabs; a `KVManager` (see interfaces.py).

    Args:
        total_bytes: size of the KV tensor. What is left after whole slabs is lost; without a slab, capacities are 0.
        owners: block size in bytes by owner (engine id). Owners with the same block size share a key and its slabs.
        plan: slab size and keys; by default planned for the block sizes of ``owners``.
        reserved_slabs: so many slabs, the lowest, are held back from every owner and count as lost. With at least one,
            block id 0 of every engine stays unowned: the runtime's engines use it as their null block.

    Raises:
        ValueError: a plan that lacks a block size, a negative ``total_bytes``, or more reserved slabs than slabs.
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
        self._reserved = reserved_slabs
        self._slabs = [Slab(slab_id) for slab_id in range(reserved_slabs)]  # those ever touched; the rest is free
        self._holes: list[int] = []  # free slabs among them, a min-heap
        self._free_slabs = self.slab_count - reserved_slabs
        self._pools = {key: Pool(key, self.plan, self._capacity(key)) for key in sorted(set(owners.values()))}
        self._grid_pools = [pool for pool in self._pools.values() if not pool.blocks_per_slab]
        self._owners = Holders({owner: Holder(self._pools[key]) for owner, key in owners.items()})

    def _capacity(self, key: int) -> int:
        return self.plan.blocks_in_slabs(key, self.slab_count) - self.plan.blocks_in_slabs(key, self._reserved)

    def alloc(self, owner: int, blocks: int) -> list[int] | None:
        """``blocks`` block ids, or None when they do not all fit; then nothing is taken.

        Raises ValueError for an unknown owner or a negative number.
        """
        holder = self._owners[owner]
        pool = holder.pool
        per_slab = pool.blocks_per_slab
        if blocks < 0:
            raise ValueError(f"KV slab manager: owner {owner} asks for {blocks} blocks; it must be 0 or more")
        if per_slab == 1:
            return self._take_lowest_slabs(holder, blocks) if blocks <= self._free_slabs else None
        if blocks > self._available_blocks(pool):
            return None
        ids: list[int] = []
        held = holder.held
        left = blocks
        while left:
            slab = self._fullest_partial(pool) if pool.partial else None
            if slab is None:
                if left >= per_slab > 0:
                    left -= self._take_whole_slabs(pool, left, held, ids)
                    continue
                slab = self._format(pool)
            slab_id, free = slab.id, slab.free_bits
            first = slab_id * per_slab or self.plan.span(pool.block_bytes, slab_id)[0]
            mask, taken = free & -free, 1
            if left == 1 or mask == free:  # the common cases: one block is wanted, or left
                ids.append(first + mask.bit_length() - 1)
            else:
                mask = take_lowest(free, left, first, ids)
                taken = mask.bit_count()
            left -= taken
            slab.used += taken
            slab.free_bits = free = free ^ mask
            held[slab_id] = held.get(slab_id, 0) | mask
            if free:
                pool.partial[0] = (-slab.used, slab_id)  # lower than before, so it stays the top
            else:
                heappop(pool.partial)
        pool.used_blocks += blocks
        holder.used_blocks += blocks
        return ids

    def free(self, owner: int, block_ids: Sequence[int]) -> None:
        """Give back blocks. Raises ValueError for an unknown owner, or an id that it does not hold or that is given
        twice; then nothing is given back."""
        holder = self._owners[owner]
        if holder.pool.blocks_per_slab == 1 and self._free_whole_slabs(holder, block_ids):
            return
        masks = self._masks(owner, holder, block_ids)
        held, pool, slabs = holder.held, holder.pool, self._slabs
        drained: list[Slab] = []
        for slab_id, mask in masks.items():
            if left := held[slab_id] ^ mask:
                held[slab_id] = left
            else:
                del held[slab_id]
            slab = slabs[slab_id]
            was_full = not slab.free_bits
            slab.free_bits |= mask
            slab.used -= mask.bit_count()
            if not slab.used:
                drained.append(slab)
            elif was_full:
                heappush(pool.partial, (-slab.used, slab_id))
        if drained:
            self._unformat(pool, drained)
        holder.used_blocks -= len(block_ids)
        pool.used_blocks -= len(block_ids)

    def _masks(self, owner: int, holder: Holder, block_ids: Sequence[int]) -> dict[int, int]:
        """The blocks as bitmaps by slab id, all of them verified to be held by the owner."""
        held, per_slab = holder.held, holder.pool.blocks_per_slab
        masks: dict[int, int] = {}
        if per_slab:
            for block in block_ids:
                slab_id = block // per_slab
                masks[slab_id] = masks.get(slab_id, 0) | 1 << block % per_slab
        else:
            self._grid_masks(holder.pool.block_bytes, block_ids, masks)
        for slab_id, mask in masks.items():
            if stray := mask & ~held.get(slab_id, 0):
                lowest = (stray & -stray).bit_length() - 1
                raise self._not_held(owner, self.plan.span(holder.pool.block_bytes, slab_id)[0] + lowest)
        if sum(map(int.bit_count, masks.values())) != len(block_ids):
            twice = next(block for block in block_ids if block_ids.count(block) > 1)
            raise ValueError(f"KV slab manager: owner {owner} frees block {twice} twice in one call")
        return masks

    def _grid_masks(self, block_bytes: int, block_ids: Sequence[int], masks: dict[int, int]) -> None:
        """Fill ``masks`` for blocks whose slabs own unequal spans of the grid."""
        slab_id = first = end = 0
        for block in block_ids:
            if not first <= block < end:
                slab_id = block * block_bytes // self.plan.slab_bytes
                first, end = self.plan.span(block_bytes, slab_id)  # a straddling block is at ``end``: nobody's bit
            masks[slab_id] = masks.get(slab_id, 0) | 1 << (block - first)

    @staticmethod
    def _not_held(owner: int, block: int) -> ValueError:
        return ValueError(f"KV slab manager: owner {owner} does not hold block {block} and cannot free it")

    def _fullest_partial(self, pool: Pool) -> Slab | None:
        """The most used PARTIAL slab of the pool, lowest id first, at the top of its heap; None when it has none."""
        heap = pool.partial
        while heap:
            rank, slab_id = heap[0]
            slab = self._slabs[slab_id]
            if slab.pool is not pool:
                heappop(heap)
            elif -rank != slab.used:
                heapreplace(heap, (-slab.used, slab_id))
            else:
                return slab
        return None

    def _format(self, pool: Pool) -> Slab:
        """Format the lowest free slab to the key of the pool. Only called when the heap of the pool is empty; this is
        why no slab ever has two entries in a heap."""
        slab = self._slabs[self._lowest_free(1)[0]]
        first, end = self.plan.span(pool.block_bytes, slab.id)
        slab.pool, slab.free_bits, slab.used = pool, (1 << (end - first)) - 1, 0
        pool.slabs += 1
        pool.slab_blocks += end - first
        pool.partial.append((0, slab.id))
        if self._grid_pools:
            self._shift_unformatted(slab.id, -1)
        return slab

    def _unformat(self, pool: Pool, slabs: Sequence[Slab]) -> None:
        """These slabs are empty: they go back to the free list."""
        holes = self._holes
        for slab in slabs:
            pool.slab_blocks -= slab.free_bits.bit_length()
            slab.pool = None
            slab.free_bits = 0
            heappush(holes, slab.id)
            if self._grid_pools:
                self._shift_unformatted(slab.id, 1)
        pool.slabs -= len(slabs)
        self._free_slabs += len(slabs)

    def _lowest_free(self, count: int) -> list[int]:
        """The lowest ``count`` free slabs, which are then taken. There must be as many."""
        holes = self._holes
        slab_ids = [heappop(holes) for _ in range(min(count, len(holes)))]
        while len(slab_ids) < count:
            slab_ids.append(len(self._slabs))
            self._slabs.append(Slab(len(self._slabs)))
        self._free_slabs -= count
        return slab_ids

    @property
    def free_slabs(self) -> int:
        """Slabs that are formatted for nobody."""
        return self._free_slabs

    def _take_lowest_slabs(self, holder: Holder, blocks: int) -> list[int]:
        """The lowest free slabs, where each is a block. What they are formatted to is noted down when somebody looks."""
        ids = self._lowest_free(blocks)
        holder.held.update(dict.fromkeys(ids, 1))
        self._count_slabs(holder, ids, 1)
        return ids

    def _free_whole_slabs(self, holder: Holder, block_ids: Sequence[int]) -> bool:
        """Give back blocks that are a slab each. False, and nothing done, unless all are held and named once."""
        held, holes = holder.held, self._holes
        distinct = set(block_ids)
        if len(distinct) != len(block_ids) or not distinct <= held.keys():
            return False
        for slab_id in block_ids:
            del held[slab_id]
            heappush(holes, slab_id)
        self._free_slabs += len(block_ids)
        self._count_slabs(holder, block_ids, -1)
        return True

    def _count_slabs(self, holder: Holder, slab_ids: Sequence[int], sign: int) -> None:
        """Slabs that are a block each were taken (1) or given back (-1)."""
        blocks, pool = sign * len(slab_ids), holder.pool
        pool.slabs += blocks
        pool.slab_blocks += blocks
        pool.used_blocks += blocks
        holder.used_blocks += blocks
        if self._grid_pools:
            for slab_id in slab_ids:
                self._shift_unformatted(slab_id, -sign)

    def _note_single_blocks(self) -> None:
        """Write down which slabs are formatted to keys whose blocks are whole slabs."""
        for slab in self._slabs:
            if slab.pool is not None and slab.pool.blocks_per_slab == 1:
                slab.pool, slab.used = None, 0
        for holder in self._owners.values():
            if holder.pool.blocks_per_slab == 1:
                for slab_id in holder.held:
                    self._slabs[slab_id].pool, self._slabs[slab_id].used = holder.pool, 1

    def _take_whole_slabs(self, pool: Pool, blocks: int, held: dict[int, int], ids: list[int]) -> int:
        """Format as many of the lowest free slabs as ``blocks`` fill, and take all their blocks at once: what taking
        them one by one comes to. Only for aligned keys without PARTIAL slabs. Returns the number of blocks taken."""
        per_slab = pool.blocks_per_slab
        full = (1 << per_slab) - 1
        count = blocks // per_slab
        for slab_id in self._lowest_free(count):
            slab = self._slabs[slab_id]
            slab.pool, slab.used = pool, per_slab
            held[slab_id] = full
            ids += range(slab_id * per_slab, (slab_id + 1) * per_slab)
            if self._grid_pools:
                self._shift_unformatted(slab_id, -1)
        pool.slabs += count
        pool.slab_blocks += count * per_slab
        return count * per_slab

    def _shift_unformatted(self, slab_id: int, sign: int) -> None:
        for pool in self._grid_pools:
            first, end = self.plan.span(pool.block_bytes, slab_id)
            pool.unformatted_blocks += sign * (end - first)

    def _available_blocks(self, pool: Pool) -> int:
        per_slab = pool.blocks_per_slab
        unformatted = self._free_slabs * per_slab if per_slab else pool.unformatted_blocks
        return pool.slab_blocks - pool.used_blocks + unformatted

    def free_blocks(self, owner: int) -> int:
        """How many blocks ``owner`` could get now. Exact: ``alloc`` succeeds up to it and fails above. O(1)."""
        return self._available_blocks(self._owners[owner].pool)

    def capacity_blocks(self, owner: int) -> int:
        return self._capacity(self._owners[owner].pool.block_bytes)

    def used_bytes(self, owner: int) -> int:
        holder = self._owners[owner]
        return holder.used_blocks * holder.pool.block_bytes

    def fits(self, demands: Mapping[int, int]) -> bool:
        """Whether all these blocks (owner to number) would be granted in whatever order; owners not registered here are
        ignored. Exact for aligned keys; for grid keys, whose slabs differ by a block, on the safe side."""
        if sum(demands.values()) <= self._free_slabs:
            return True  # even if every block takes a slab of its own
        needed: dict[int, int] = {}
        for owner, blocks in demands.items():
            if owner in self._owners:
                key = self._owners[owner].pool.block_bytes
                needed[key] = needed.get(key, 0) + blocks
        slabs = 0
        for key, blocks in needed.items():
            pool = self._pools[key]
            beyond = blocks - (pool.slab_blocks - pool.used_blocks)
            if beyond > 0:
                slabs += -(-beyond // (pool.blocks_per_slab or self.plan.slab_bytes // key - 1))
        return slabs <= self._free_slabs

    def formatted_blocks(self, owner: int) -> tuple[int, int]:
        """Blocks in the slabs of ``owner``'s block size: all, and those that nobody holds, which only owners of that size can
        take."""
        pool = self._owners[owner].pool
        return pool.slab_blocks, pool.slab_blocks - pool.used_blocks

    def ledger(self) -> KVLedger:
        """All bytes of the tensor. Lost are the reserved slabs, the tail behind the last slab, and the remainders of
        slabs while they are formatted to a grid key (they come back when the slab drains)."""
        pools, slab_bytes = self._pools, self.plan.slab_bytes
        used = sum(pool.used_blocks * key for key, pool in pools.items())
        remainders = sum(pool.slabs * slab_bytes - pool.slab_blocks * key for key, pool in pools.items())
        return KVLedger(
            total_bytes=self._total_bytes,
            used_bytes=used,
            stranded_bytes=sum((pool.slab_blocks - pool.used_blocks) * key for key, pool in pools.items()),
            free_bytes=self._free_slabs * slab_bytes,
            lost_bytes=self._total_bytes % slab_bytes + self._reserved * slab_bytes + remainders,
        )

    def slab_table(self) -> list[SlabEntry]:
        """One row per slab, by slab id."""
        self._note_single_blocks()
        untouched = [SlabEntry(SlabState.FREE, None, 0)] * (self.slab_count - len(self._slabs))
        return [self._entry(slab) for slab in self._slabs] + untouched

    def _entry(self, slab: Slab) -> SlabEntry:
        if slab.pool is None:
            return SlabEntry(SlabState.RESERVED if slab.id < self._reserved else SlabState.FREE, None, 0)
        return SlabEntry(SlabState.PARTIAL if slab.free_bits else SlabState.FULL, slab.pool.block_bytes, slab.used)

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

    def byte_offset(self, owner: int, block_id: int) -> int:
        """Where the block starts in the shared tensor, in bytes. Raises ValueError as `locate` does."""
        self.locate(owner, block_id)
        return block_id * self._owners[owner].pool.block_bytes

    def check(self) -> None:
        """Raise AssertionError if the state contradicts itself: recomputes every counter from the slabs. O(slabs)."""
        self._note_single_blocks()
        free = [slab.id for slab in self._slabs if slab.pool is None and slab.id >= self._reserved]
        assert sorted(self._holes) == free, "the free list is not the unformatted slabs"
        free += range(len(self._slabs), self.slab_count)
        assert self._free_slabs == len(free), "the free slabs are miscounted"
        assert all(slab.pool is None for slab in self._slabs[: self._reserved]), "a reserved slab is formatted"
        for slab in self._slabs:
            check_slab(slab, self._owners, self.plan)
        for pool in self._pools.values():
            slabs = [slab for slab in self._slabs if slab.pool is pool]
            check_pool(pool, slabs, free, self._available_blocks(pool), self.plan)
        for owner, holder in self._owners.items():
            held_blocks = sum(bits.bit_count() for bits in holder.held.values())
            assert holder.used_blocks == held_blocks, f"blocks of owner {owner}"
        total, *parts = self.ledger()
        assert sum(parts) == total and min(parts) >= 0, f"the ledger does not add up: {self.ledger()}"
