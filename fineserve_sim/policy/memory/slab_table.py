"""What the KV slab manager writes down: slabs, pools of slabs of one block size, owners; and the laws that tie them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from fineserve_sim.policy.memory.geometry import SlabPlan


class SlabState(Enum):
    """State of a slab table entry; RESERVED slabs are held back from every owner."""

    FREE = "free"
    PARTIAL = "partial"
    FULL = "full"
    RESERVED = "reserved"


class SlabEntry(NamedTuple):
    """One row of the slab table: ``key`` is the block size in bytes, None while unformatted; ``used`` counts blocks."""

    state: SlabState
    key: int | None
    used: int


class Pool:
    """The slabs formatted to one key. ``partial`` is a min-heap of (-used, slab id): each PARTIAL slab has exactly one
    entry, whose ``used`` may be out of date, upwards only; entries of slabs that left the pool are dropped at the top.
    """

    __slots__ = (
        "block_bytes",
        "blocks_per_slab",
        "partial",
        "slab_blocks",
        "slabs",
        "unformatted_blocks",
        "used_blocks",
    )

    def __init__(self, block_bytes: int, plan: SlabPlan, unformatted_blocks: int) -> None:
        self.block_bytes = block_bytes
        self.blocks_per_slab = 0 if plan.is_grid(block_bytes) else plan.slab_bytes // block_bytes  # 0: differs by slab
        self.unformatted_blocks = unformatted_blocks  # blocks that the free slabs would hold; kept for grid keys only
        self.partial: list[tuple[int, int]] = []
        self.slabs = 0
        self.slab_blocks = 0
        self.used_blocks = 0


class Slab:
    """One slab; ``pool`` is None while it is unformatted. Bit i of ``free_bits`` is set when its i-th block is free."""

    __slots__ = ("free_bits", "id", "pool", "used")

    def __init__(self, slab_id: int) -> None:
        self.id = slab_id
        self.pool: Pool | None = None
        self.free_bits = self.used = 0

    def blocks(self, plan: SlabPlan) -> int:
        """How many blocks the slab holds as it is formatted."""
        if self.pool is None:
            return 0
        first, end = plan.span(self.pool.block_bytes, self.id)
        return end - first


class Holder:
    """One owner. ``held`` maps slab ids to bitmaps of the blocks in them that this owner holds (never 0)."""

    __slots__ = ("held", "pool", "used_blocks")

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.held: dict[int, int] = {}
        self.used_blocks = 0


class Holders(dict[int, Holder]):
    def __missing__(self, owner: int) -> Holder:
        raise ValueError(f"KV slab manager: owner {owner} is not registered; the owners are {sorted(self)}")


def take_lowest(bits: int, limit: int, first: int, ids: list[int]) -> int:
    """Append ``first + i`` for the lowest set bits i of ``bits``, ``limit`` at most; returns these bits."""
    taken = 0
    while limit and bits:
        start = (bits & -bits).bit_length() - 1
        rest = bits >> start
        run = min((rest & ~(rest + 1)).bit_count(), limit)  # consecutive ones from the lowest on
        ids.extend(range(first + start, first + start + run))
        mask = ((1 << run) - 1) << start
        taken |= mask
        bits ^= mask
        limit -= run
    return taken


def check_slab(slab: Slab, owners: Mapping[int, Holder], plan: SlabPlan) -> None:
    """Raise AssertionError unless every block of the slab is free or held by one owner of its key, and counted."""
    held = 0
    for owner, holder in owners.items():
        bits = holder.held.get(slab.id)
        assert bits is None or (bits and holder.pool is slab.pool), f"slab {slab.id} is not formatted for owner {owner}"
        assert not held & (bits or 0), f"two owners hold one block of slab {slab.id}"
        held |= bits or 0
    assert held & slab.free_bits == 0, f"a held block of slab {slab.id} is free"
    assert held | slab.free_bits == (1 << slab.blocks(plan)) - 1, f"a block of slab {slab.id} is neither held nor free"
    assert slab.used == held.bit_count(), f"slab {slab.id} miscounts its blocks"
    assert slab.pool is None or slab.used, f"slab {slab.id} should not be formatted"


def check_pool(pool: Pool, slabs: Sequence[Slab], free: Collection[int], available_blocks: int, plan: SlabPlan) -> None:
    """Raise AssertionError unless the pool counts its ``slabs`` and the blocks that it could give, ``free`` slabs
    included, and its heap has the PARTIAL ones."""
    key = pool.block_bytes
    counters = (len(slabs), sum(slab.blocks(plan) for slab in slabs), sum(slab.used for slab in slabs))
    assert (pool.slabs, pool.slab_blocks, pool.used_blocks) == counters, f"counters of key {key}"
    spans = [plan.span(key, slab_id) for slab_id in free]
    available = sum(end - first for first, end in spans) + pool.slab_blocks - pool.used_blocks
    assert available_blocks == available, f"free blocks of key {key}"
    ranks = {slab_id: -rank for rank, slab_id in pool.partial}
    assert len(ranks) == len(pool.partial), f"a slab is twice in the heap of key {key}"
    for slab in slabs:
        if slab.free_bits:
            assert ranks.get(slab.id, -1) >= slab.used, f"PARTIAL slab {slab.id} is missing in the heap of key {key}"
        else:
            assert slab.id not in ranks, f"FULL slab {slab.id} is in the heap of key {key}"
