"""KV slab manager: one pre-allocated KV tensor of a GPU, shared by engines with different KV block sizes.

The tensor is cut into slabs of equal size (FineServe, section 5.2). A free slab can be formatted to any block size
(its *key*), stores only blocks of that size, and returns to the free slabs when its last block is freed. Which ids a slab
owns is arithmetic (see geometry.py), so no id is translated and no driver is called at run time.

Choice of a slab: the most used PARTIAL one, then the lowest id, so that little used slabs can drain; then the free slab
with the lowest id. Free slabs, and the PARTIAL slabs of a key with so many blocks in use, are bits of a set (``SlabSet``).
So alloc and free cost a few bit operations for each slab and each block touched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from fineserve_sim.policy.interfaces import KVLedger
from fineserve_sim.policy.memory.geometry import SlabPlan, plan_slabs
from fineserve_sim.policy.memory.slab_set import SlabSet, lowest_bit


class _Pool:
    """The slabs formatted to one key: they hold ``used_blocks``, and ``spare_blocks`` that no owner holds.

    By slab id, ``used`` counts the blocks in use, and bit i of ``free_bits`` is set when the i-th block is free. Both are 0
    for slabs that are not here. ``partial`` has the PARTIAL slabs by how many blocks are in use; none has more than ``top``.
    Slabs of grid keys differ: for these ``blocks_per_slab`` is 0, ``grid_blocks`` has the blocks of each slab, and
    ``unformatted_blocks`` counts the blocks that the free slabs would hold. Slabs of one block are full or gone: ``used``
    stays 0.
    """

    def __init__(self, block_bytes: int, plan: SlabPlan, slabs: range) -> None:
        self.block_bytes = block_bytes
        self.blocks_per_slab = 0 if plan.is_grid(block_bytes) else plan.slab_bytes // block_bytes
        spans = [] if self.blocks_per_slab else [plan.span(block_bytes, slab_id) for slab_id in range(slabs.stop)]
        self.grid_blocks = [end - first for first, end in spans]
        self.capacity_blocks = self.unformatted_blocks = self.blocks_in(slabs)
        self.used, self.free_bits = [0] * slabs.stop, [0] * slabs.stop
        most = self.blocks_per_slab or max(self.grid_blocks, default=0)
        self.partial = [SlabSet(slabs.stop) for _ in range(most)]
        self.top = 0
        self.spare_blocks = self.used_blocks = 0

    def blocks_in(self, slab_ids: Sequence[int]) -> int:
        """Blocks that these slabs hold when they are formatted to the key."""
        return self.blocks_per_slab * len(slab_ids) or sum(self.grid_blocks[slab_id] for slab_id in slab_ids)

    def most_used(self) -> int:
        """How many blocks are in use in the fullest PARTIAL slabs; 0 where there is none."""
        partial, top = self.partial, self.top
        while top and not partial[top].size:
            top -= 1
        self.top = top
        return top

    def sort(self, slab_id: int, used: int) -> None:
        """Add a slab with ``used`` blocks in use, not all of them, to the PARTIAL slabs."""
        self.partial[used].add(slab_id)
        self.top = max(self.top, used)

    def give_back(self, slab_id: int, bits: int, blocks: int) -> bool:
        """So many blocks of a slab, at these places, are free. Returns whether all of them are."""
        before = self.used[slab_id]
        self.used[slab_id] = used = before - blocks
        self.free_bits[slab_id] = (self.free_bits[slab_id] | bits) if used else 0  # in place, it is slow compiled
        if before < (self.blocks_per_slab or self.grid_blocks[slab_id]):
            self.partial[before].remove(slab_id)
        if used:
            self.sort(slab_id, used)
        return not used


@dataclass
class _Holder:
    """One owner, and the blocks that it holds, by id."""

    pool: _Pool
    held: set[int] = field(default_factory=set)


Owner = TypeVar("Owner")


class Owners(dict[int, Owner]):
    """Entries of a KV memory for each engine that draws on it; ValueError for any other engine."""

    def __init__(self, memory: str, owners: Mapping[int, Owner]) -> None:
        super().__init__(owners)
        self._memory = memory

    def __missing__(self, owner: int) -> Owner:
        raise ValueError(f"{self._memory}: owner {owner} is not registered; the owners are {sorted(self)}")


class KVSlabManager:
    """The KV tensor of one GPU, cut into slabs; a `KVManager` (see interfaces.py).

    ``total_bytes`` is the size of the tensor. The rest after whole slabs is lost; without a slab, capacities are 0. ``owners``
    are block sizes in bytes by owner (engine id); owners with the same block size share a key and its slabs. The ``plan`` is
    made for them by default. ``reserved_slabs``, the lowest, are held back from every owner and count as lost. With at least
    one, block id 0 of every engine stays unowned: the runtime's engines use it as their null block.

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
        self._free = SlabSet(self.slab_count, self._slabs)  # without a format
        self._pools = {key: _Pool(key, self.plan, self._slabs) for key in sorted(set(owners.values()))}
        self._grid_pools = [pool for pool in self._pools.values() if not pool.blocks_per_slab]
        self._owners = Owners("KV slab manager", {owner: _Holder(self._pools[key]) for owner, key in owners.items()})

    @property
    def free_slabs(self) -> int:
        """Slabs without a format."""
        return self._free.size

    def alloc(self, owner: int, blocks: int) -> list[int] | None:
        """``blocks`` block ids, or None when they do not all fit; then nothing is taken. Raises ValueError for an unknown owner
        or a negative number."""
        holder = self._owners[owner]
        pool = holder.pool
        if blocks < 0:
            raise ValueError(f"KV slab manager: owner {owner} asks for {blocks} blocks; it must be 0 or more")
        if blocks > pool.spare_blocks and blocks > self._available_blocks(pool):
            return None
        ids: list[int] = []
        left, free_bits = blocks, pool.free_bits
        while left and (used := pool.most_used()):
            slab_id = pool.partial[used].pop()
            first = slab_id * pool.blocks_per_slab or self.plan.span(pool.block_bytes, slab_id)[0]
            rest, taken = free_bits[slab_id], 0
            while rest and taken < left:
                ids.append(first + lowest_bit(rest))
                rest &= rest - 1
                taken += 1
            free_bits[slab_id] = rest
            pool.used[slab_id] = used + taken
            if rest:
                pool.sort(slab_id, used + taken)
            left -= taken
        if left and pool.blocks_per_slab:
            self._take_fresh(pool, left, ids)
        elif left:
            self._take_fresh_of_grid(pool, left, ids)
        pool.spare_blocks -= blocks
        pool.used_blocks += blocks
        holder.held.update(ids)
        return ids

    def free(self, owner: int, block_ids: Sequence[int]) -> None:
        """Give back blocks. Raises ValueError for an unknown owner, or an id that it does not hold or that is given
        twice; then nothing is given back."""
        holder = self._owners[owner]
        held, pool = holder.held, holder.pool
        before = len(held)
        if held.issuperset(block_ids):
            held.difference_update(block_ids)
            if before - len(held) < len(block_ids):  # one is given twice
                held.update(block_ids)
        if before - len(held) != len(block_ids):
            raise ValueError(f"KV slab manager: owner {owner} {_wrong(block_ids, held)}")
        drained = block_ids if pool.blocks_per_slab == 1 else self._unset(pool, block_ids)
        if drained:
            self._give_back(pool, drained)
        pool.spare_blocks += len(block_ids)
        pool.used_blocks -= len(block_ids)

    def _slab_of(self, pool: _Pool, block: int) -> tuple[int, int]:
        """The slab of a block, and its place there."""
        if per_slab := pool.blocks_per_slab:
            return block // per_slab, block % per_slab
        slab_id = block * pool.block_bytes // self.plan.slab_bytes
        return slab_id, block - self.plan.span(pool.block_bytes, slab_id)[0]

    def _unset(self, pool: _Pool, block_ids: Sequence[int]) -> list[int]:
        """These blocks are free. Returns the slabs without a used block. Consecutive ids of a slab go together."""
        drained: list[int] = []
        last, bits, blocks = -1, 0, 0
        for block in block_ids:
            slab_id, place = self._slab_of(pool, block)
            if slab_id != last:
                if blocks and pool.give_back(last, bits, blocks):
                    drained.append(last)
                last, bits, blocks = slab_id, 0, 0
            bits |= 1 << place
            blocks += 1
        if blocks and pool.give_back(last, bits, blocks):
            drained.append(last)
        return drained

    def _take_fresh(self, pool: _Pool, left: int, ids: list[int]) -> None:
        """Give so many blocks of free slabs, and of the last one perhaps a part. There must be as many, and no PARTIAL slab."""
        per_slab = pool.blocks_per_slab
        whole, rest = left // per_slab, left % per_slab
        slab_ids = self._format(pool, whole + (1 if rest else 0))
        if per_slab == 1:
            ids += slab_ids
            return
        if rest:
            opened = slab_ids.pop()
        first = end = 0  # of slabs in a row
        for slab_id in slab_ids:
            pool.used[slab_id] = per_slab
            if slab_id != end:
                ids += range(first * per_slab, end * per_slab)
                first = slab_id
            end = slab_id + 1
        ids += range(first * per_slab, end * per_slab)
        if rest:
            self._open(pool, opened, opened * per_slab, per_slab, rest, ids)

    def _take_fresh_of_grid(self, pool: _Pool, left: int, ids: list[int]) -> None:
        """As ``_take_fresh``, for a grid key, whose slabs differ: one after the other."""
        while left:
            (slab_id,) = self._format(pool, 1)
            first, end = self.plan.span(pool.block_bytes, slab_id)
            taken = min(left, end - first)
            self._open(pool, slab_id, first, end - first, taken, ids)
            left -= taken

    def _open(self, pool: _Pool, slab_id: int, first: int, blocks: int, taken: int, ids: list[int]) -> None:
        """Give the first ``taken`` of the blocks of a slab that was just formatted."""
        ids += range(first, first + taken)
        pool.free_bits[slab_id] = (1 << blocks) - (1 << taken)
        pool.used[slab_id] = taken
        if taken < blocks:
            pool.sort(slab_id, taken)

    def _format(self, pool: _Pool, count: int) -> list[int]:
        """Format the ``count`` lowest free slabs to the key of the pool. There must be as many."""
        slab_ids = self._free.take(count)
        pool.spare_blocks += pool.blocks_in(slab_ids)
        for grid_pool in self._grid_pools:
            grid_pool.unformatted_blocks -= grid_pool.blocks_in(slab_ids)
        return slab_ids

    def _give_back(self, pool: _Pool, slab_ids: Sequence[int]) -> None:
        """These slabs of the pool are empty: they are free again."""
        self._free.add_all(slab_ids)
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
        """Whether all these blocks (owner to number) would be granted in any order; owners not registered here are ignored.
        Exact for aligned keys; for grid keys, whose slabs differ by a block, on the safe side."""
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
        """Free blocks in the slabs of ``owner``'s block size: only owners of that size can take them."""
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
        free = self._free.ids()
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
                for block in holder.held:
                    slab_id, place = self._slab_of(pool, block)
                    assert not held.get(slab_id, 0) >> place & 1, f"two owners hold block {block}"
                    held[slab_id] = held.get(slab_id, 0) | 1 << place
        partial = {slab_id: used for used, slabs in enumerate(pool.partial) for slab_id in slabs.ids()}
        for slab_id, bits in held.items():
            first, end = self.plan.span(key, slab_id)
            free, whole = pool.free_bits[slab_id], (1 << (end - first)) - 1
            assert bits ^ free == whole, f"a block of slab {slab_id} is neither held nor free, or both"
            if pool.blocks_per_slab != 1:
                assert pool.used[slab_id] == bits.bit_count(), f"slab {slab_id} is miscounted"
            assert partial.pop(slab_id, 0) == (bits.bit_count() if free else 0), f"slab {slab_id} among its likes"
        assert not partial, f"empty slabs of key {key} among partial ones: {partial}"
        assert sum(map(bool, pool.free_bits)) <= len(held), f"an empty slab of key {key} has bits"
        counters = [sum(map(int.bit_count, bits)) for bits in (held.values(), pool.free_bits)]
        assert [pool.used_blocks, pool.spare_blocks] == counters, f"counters of key {key}"
        return held


def _wrong(block_ids: Sequence[int], held: Collection[int]) -> str:
    """Why these blocks cannot be freed."""
    for number, block in enumerate(block_ids):
        if block not in held:
            return f"does not hold block {block} and cannot free it"
        if block in block_ids[:number]:
            return f"frees block {block} twice in one call"
    return ""
