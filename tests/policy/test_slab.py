"""The KV slab manager: worked examples, the paper's claims, refusals, and a state machine against a naive allocator."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fineserve_sim.policy.interfaces import KVManager
from fineserve_sim.policy.memory.geometry import SlabPlan, plan_slabs
from fineserve_sim.policy.memory.slab import KVSlabManager

FREE: tuple[int | None, int] = (None, 0)
FP16_OWNER, FP8_OWNER = 1, 2


def take(manager: KVManager, owner: int, blocks: int) -> list[int]:
    ids = manager.alloc(owner, blocks)
    assert ids is not None, f"owner {owner} could not get {blocks} blocks"
    return ids


def slab_table(manager: KVSlabManager) -> list[tuple[int | None, int]]:
    """By slab id, its key (None while it is unformatted) and how many blocks of it are held."""
    table = [FREE] * manager.slab_count
    for key, pool in manager._pools.items():
        for owner, holder in manager._owners.items():
            if holder.pool is pool:
                for slab, _ in (manager.locate(owner, block) for block in holder.held):
                    table[slab] = (key, table[slab][1] + 1)
    return table


# -- worked examples


def test_figure_8() -> None:
    """Claim FS-8-blkid. A slab is two FP16 or four FP8 blocks: (slab 1, local 0) is FP16 block 2, and
    (slab 0, local 3) is FP8 block 3."""
    manager = KVSlabManager(4 * 4, {FP16_OWNER: 2, FP8_OWNER: 1}, plan=plan_slabs([2, 1], multiple=2))
    assert take(manager, FP8_OWNER, 4) == [0, 1, 2, 3]
    assert take(manager, FP16_OWNER, 1) == [2]
    assert manager.locate(FP16_OWNER, 2) == (1, 0)
    assert manager.locate(FP8_OWNER, 3) == (0, 3)
    assert slab_table(manager) == [(1, 4), (2, 1), FREE, FREE]


def test_life_of_a_slab() -> None:
    """Slabs of 4 bytes. The ledger is (total, used, stranded, free, lost); 2 bytes behind the last slab are lost."""
    manager = KVSlabManager(14, {FP16_OWNER: 4, FP8_OWNER: 1})
    assert manager.ledger() == (14, 0, 0, 12, 2)
    first = take(manager, FP8_OWNER, 3)
    assert manager.ledger() == (14, 3, 1, 8, 2)  # one byte is stranded: only FP8 blocks can take it
    assert (manager.spare_blocks(FP8_OWNER), manager.spare_blocks(FP16_OWNER)) == (1, 0)
    assert (manager.free_blocks(FP16_OWNER), manager.capacity_blocks(FP16_OWNER)) == (2, 3)
    second = take(manager, FP8_OWNER, 2)  # fills the PARTIAL slab first
    assert second == [3, 4]
    assert slab_table(manager) == [(1, 4), (1, 1), FREE]
    manager.free(FP8_OWNER, first)
    assert slab_table(manager) == [(1, 1), (1, 1), FREE]
    manager.free(FP8_OWNER, second)
    assert slab_table(manager) == [FREE] * 3
    assert take(manager, FP16_OWNER, 3) == [0, 1, 2]
    assert manager.alloc(FP16_OWNER, 1) is None and manager.alloc(FP8_OWNER, 1) is None  # exhaustion
    assert manager.used_bytes(FP16_OWNER) == 12
    manager.check()


def test_most_used_partial_slab_first_then_lowest_id() -> None:
    manager = KVSlabManager(16, {1: 1}, plan=SlabPlan(4, (1,)))
    take(manager, 1, 16)
    manager.free(1, [0, 1, 2, 5, 6, 9, 10, 12])  # used: 1, 2, 2, 3
    assert [take(manager, 1, 1)[0] for _ in range(8)] == [12, 5, 6, 9, 10, 0, 1, 2]


def test_little_used_slabs_drain() -> None:
    """With the most used slab preferred, steady traffic of half the load leaves whole slabs free for other keys."""
    manager = KVSlabManager(64 * 8, {1: 1, 2: 8})
    live = take(manager, 1, 512)
    rng = random.Random(7)
    rng.shuffle(live)
    manager.free(1, live[256:])
    del live[256:]
    assert manager.free_blocks(2) < 8
    for _ in range(4000):
        index = rng.randrange(256)
        manager.free(1, [live[index]])
        live[index] = take(manager, 1, 1)[0]
    assert manager.free_blocks(2) >= 24  # 32 slabs would hold the 256 live blocks if packed
    manager.check()


def test_one_block_pins_a_slab() -> None:
    manager = KVSlabManager(20, {1: 1, 2: 20})
    ids = take(manager, 1, 20)
    manager.free(1, ids[1:])
    assert manager.ledger().stranded_bytes == 19 and manager.alloc(2, 1) is None
    manager.free(1, ids[:1])
    assert take(manager, 2, 1) == [0]


def test_owners_of_one_block_size_share_slabs() -> None:
    manager = KVSlabManager(8, {1: 2, 2: 2}, plan=SlabPlan(8, (2,)))
    mine, theirs = take(manager, 1, 2), take(manager, 2, 1)
    assert (mine, theirs) == ([0, 1], [2])
    with pytest.raises(ValueError, match="owner 1 does not hold block 2"):
        manager.free(1, [0, 2])
    assert (manager.used_bytes(1), manager.used_bytes(2)) == (4, 2)
    manager.check()


def test_grid_key_by_hand() -> None:
    """Slabs of 10 bytes hold blocks 0-1, 3-4, 5-6 and 8-9 of 4 bytes; blocks 2 and 7 straddle a boundary."""
    manager = KVSlabManager(40, {1: 4, 2: 10}, plan=SlabPlan(10, (4, 10)))
    assert manager.capacity_blocks(1) == manager.free_blocks(1) == 8
    assert take(manager, 1, 3) == [0, 1, 3]
    assert manager.ledger() == (40, 12, 4, 20, 4)  # two formatted slabs lose 2 bytes each
    assert take(manager, 2, 2) == [2, 3]
    assert manager.locate(1, 3) == (1, 0)
    with pytest.raises(ValueError, match="block 2 of owner 1"):
        manager.locate(1, 2)
    with pytest.raises(ValueError, match="does not hold block 2"):
        manager.free(1, [1, 2])
    manager.free(1, [0, 1, 3])
    assert manager.ledger() == (40, 20, 0, 20, 0)
    manager.check()


def test_reserved_slabs_are_held_back() -> None:
    manager = KVSlabManager(20, {1: 1, 2: 2}, plan=SlabPlan(4, (1, 2)), reserved_slabs=2)
    assert manager.capacity_blocks(1) == 12
    assert take(manager, 1, 1) == [8] and take(manager, 2, 4) == [6, 7, 8, 9]  # id 0 is nobody's: the null block
    assert slab_table(manager)[:3] == [FREE, FREE, (1, 1)]
    assert manager.ledger() == (20, 9, 3, 0, 8)
    manager.check()


# -- claims of the paper


class FirstFitArena:
    """The strawman of Fig. 5(a): contiguous first fit with blocks of any size in one arena."""

    def __init__(self, total: int) -> None:
        self.cells: list[int | None] = [None] * total
        self.next_id = 0

    def alloc(self, size: int) -> int | None:
        for start in range(len(self.cells) - size + 1):
            if all(cell is None for cell in self.cells[start : start + size]):
                self.next_id += 1
                self.cells[start : start + size] = [self.next_id] * size
                return self.next_id
        return None

    def free(self, block: int) -> None:
        self.cells = [None if cell == block else cell for cell in self.cells]

    @property
    def free_bytes(self) -> int:
        return self.cells.count(None)


def test_slabs_remove_the_external_fragmentation_of_a_mixed_arena() -> None:
    """Claim FS-5a: FP8 (1 byte) and FP16 (2 bytes) blocks alternate up to 12 bytes, then all FP8 blocks leave."""
    arena = FirstFitArena(12)
    small = [block for block in (arena.alloc(size) for size in [1, 2] * 4) if block is not None][::2]
    for block in small:
        arena.free(block)
    assert arena.free_bytes == 4 and arena.alloc(2) is None  # two FP16 blocks' worth of bytes that serve none

    manager = KVSlabManager(12, {FP8_OWNER: 1, FP16_OWNER: 2})
    fp8 = [(take(manager, FP8_OWNER, 1), take(manager, FP16_OWNER, 1))[0][0] for _ in range(4)]
    assert manager.ledger() == (12, 12, 0, 0, 0)
    manager.free(FP8_OWNER, fp8)
    assert manager.ledger().free_bytes == 4 and len(take(manager, FP16_OWNER, 2)) == 2


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 3))
def test_ids_are_affine_and_no_byte_is_lost_under_the_lcm_rule(sizes: list[int], slabs: int) -> None:
    """Claim FS-eq-slab: offset = slab * slab_bytes + local * block = id * block, and full slabs leave nothing over."""
    plan = plan_slabs(sizes, cap_bytes=2**40)
    for owner, size in enumerate(sizes):
        manager = KVSlabManager(plan.slab_bytes * slabs, dict(enumerate(sizes)), plan=plan)
        ids = take(manager, owner, manager.free_blocks(owner))
        assert manager.ledger().used_bytes == plan.slab_bytes * slabs
        for block in ids[:: max(1, len(ids) // 50)]:
            slab, local = manager.locate(owner, block)
            assert block == slab * (plan.slab_bytes // size) + local
            assert block * size == slab * plan.slab_bytes + local * size


def test_grid_loss_of_the_five_models_is_below_one_block_per_slab() -> None:
    """8B FP16 and FP8, 70B, Qwen3-32B and 8B QoQ in KiB: the cap leaves slabs of 20 MiB and QoQ off the LCM."""
    sizes = {0: 2048, 1: 1024, 2: 5120, 3: 4096, 4: 544}
    manager = KVSlabManager(40 * 2**20, sizes, plan=plan_slabs(sizes.values(), cap_bytes=64 * 1024))
    slabs = manager.slab_count
    assert slabs == 2048
    take(manager, 4, manager.capacity_blocks(4))
    lost = manager.ledger().lost_bytes
    assert 0 < lost <= slabs * 544
    assert lost / slabs == pytest.approx(512, rel=0.01)  # of 17 slabs, 16 lose a block
    assert manager.alloc(4, 1) is None


# -- refusals


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([4], "does not hold block 4"),  # free block of a slab it uses
        ([-1], "does not hold block -1"),
        ([10**6], "does not hold block 1000000"),
        ([0, 1, 0], "block 0 twice"),
        ([0, 1, 40], "does not hold block 40"),
    ],
)
def test_bad_free_changes_nothing(ids: list[int], message: str) -> None:
    manager = KVSlabManager(80, {1: 1, 2: 8})
    take(manager, 1, 4)
    before = manager.ledger(), slab_table(manager)
    with pytest.raises(ValueError, match=message):
        manager.free(1, ids)
    assert (manager.ledger(), slab_table(manager)) == before
    manager.check()


def test_double_free_is_refused() -> None:
    manager = KVSlabManager(80, {1: 1, 2: 8})
    ids = take(manager, 1, 4)
    manager.free(1, ids)
    with pytest.raises(ValueError, match="does not hold block 0"):
        manager.free(1, ids)


def test_alloc_is_all_or_nothing() -> None:
    manager = KVSlabManager(80, {1: 1, 2: 8})
    take(manager, 1, 77)
    assert manager.alloc(1, 4) is None and manager.used_bytes(1) == 77
    assert take(manager, 1, 0) == [] and len(take(manager, 1, 3)) == 3


def test_bad_arguments_are_refused() -> None:
    manager = KVSlabManager(80, {1: 1, 2: 8})
    with pytest.raises(ValueError, match=r"owner 9 is not registered; the owners are \[1, 2\]"):
        manager.alloc(9, 1)
    with pytest.raises(ValueError, match="asks for -1 blocks"):
        manager.alloc(1, -1)
    with pytest.raises(ValueError, match="block 10 of owner 2"):
        manager.locate(2, 10)
    with pytest.raises(ValueError, match="no block size"):
        KVSlabManager(80, {1: 3}, plan=plan_slabs([4]))
    for total, reserved in [(80, 11), (80, -1), (-8, 0)]:
        with pytest.raises(ValueError, match="reserved slabs"):
            KVSlabManager(total, {1: 8}, reserved_slabs=reserved)


def test_memory_below_one_slab_has_no_capacity() -> None:
    manager = KVSlabManager(7, {1: 8})
    assert manager.capacity_blocks(1) == manager.free_blocks(1) == 0
    assert manager.alloc(1, 1) is None and manager.ledger() == (7, 0, 0, 0, 7)
    manager.check()


# -- state machine


class NaiveSlabs:
    """The specification with sets: slab -> (key, {block id: owner}); every choice by scanning."""

    def __init__(self, plan: SlabPlan, slabs: Sequence[int]) -> None:
        self.plan = plan
        self.key: dict[int, int | None] = dict.fromkeys(slabs)
        self.owner_of: dict[int, dict[int, int]] = {slab: {} for slab in slabs}

    def entries(self, slab: int, key: int) -> list[int]:
        low, high = slab * self.plan.slab_bytes, (slab + 1) * self.plan.slab_bytes
        return [block for block in range(low // key, high // key + 1) if low <= block * key <= high - key]

    def room(self, key: int) -> int:
        slabs = [slab for slab in self.key if self.key[slab] in (None, key)]
        return sum(len(self.entries(slab, key)) - len(self.owner_of[slab]) for slab in slabs)

    def alloc(self, owner: int, key: int) -> int:
        partial = [
            (-len(self.owner_of[slab]), slab)
            for slab in self.key
            if self.key[slab] == key and len(self.owner_of[slab]) < len(self.entries(slab, key))
        ]
        slab = min(partial)[1] if partial else min(slab for slab in self.key if self.key[slab] is None)
        self.key[slab] = key
        block = min(set(self.entries(slab, key)) - set(self.owner_of[slab]))
        self.owner_of[slab][block] = owner
        return block

    def free(self, key: int, block: int) -> None:
        slab = block * key // self.plan.slab_bytes
        del self.owner_of[slab][block]
        if not self.owner_of[slab]:
            self.key[slab] = None


KEYS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12])


class KVSlabManagerMachine(RuleBasedStateMachine):
    """Small caps force grid keys; small sizes make owners share keys and slabs turn over."""

    @initialize(
        sizes=st.lists(KEYS, min_size=1, max_size=4),
        cap=st.sampled_from([6, 12, 24, 1000]),
        multiple=st.integers(1, 2),
        slabs=st.integers(1, 9),
        reserved=st.integers(0, 1),
        tail=st.integers(0, 3),
    )
    def start(self, *, sizes: list[int], cap: int, multiple: int, slabs: int, reserved: int, tail: int) -> None:
        plan = plan_slabs(sizes, cap_bytes=cap, multiple=multiple)
        self.sizes = dict(enumerate(sizes))
        self.total = plan.slab_bytes * slabs + min(tail, plan.slab_bytes - 1)
        self.reserved_bytes = reserved * plan.slab_bytes
        self.slab_end = plan.slab_bytes * slabs
        self.manager = KVSlabManager(self.total, self.sizes, plan=plan, reserved_slabs=reserved)
        self.naive = NaiveSlabs(plan, range(reserved, slabs))
        self.held: dict[int, list[int]] = {owner: [] for owner in self.sizes}
        self.capacity = {owner: self.naive.room(key) for owner, key in self.sizes.items()}

    def owner(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.sizes)))

    @rule(data=st.data(), blocks=st.integers(0, 40))
    def alloc(self, data: st.DataObject, blocks: int) -> None:
        owner = self.owner(data)
        key = self.sizes[owner]
        ids = self.manager.alloc(owner, blocks)
        if blocks > self.naive.room(key):
            assert ids is None
        else:
            assert ids == [self.naive.alloc(owner, key) for _ in range(blocks)]
            self.held[owner] += ids

    @rule(data=st.data())
    def alloc_all_that_is_free(self, data: st.DataObject) -> None:
        owner = self.owner(data)
        blocks = self.manager.free_blocks(owner)
        assert self.manager.alloc(owner, blocks + 1) is None
        ids = take(self.manager, owner, blocks)
        assert ids == [self.naive.alloc(owner, self.sizes[owner]) for _ in range(blocks)]
        self.held[owner] += ids

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), seed=st.integers(0, 2**16), share=st.sampled_from([0.1, 0.5, 0.9, 1.0]))
    def free_some(self, data: st.DataObject, seed: int, share: float) -> None:
        owner = data.draw(st.sampled_from([o for o, held in self.held.items() if held]))
        held = self.held[owner]
        random.Random(seed).shuffle(held)
        cut = len(held) - max(1, int(share * len(held)))
        gone, self.held[owner] = held[cut:], held[:cut]
        self.manager.free(owner, gone)
        for block in gone:
            self.naive.free(self.sizes[owner], block)

    @rule(data=st.data(), block=st.integers(-2, 400))
    def free_what_cannot_be_freed(self, data: st.DataObject, block: int) -> None:
        owner = self.owner(data)
        with pytest.raises(ValueError, match=r"does not hold|twice"):
            self.manager.free(owner, [*self.held[owner], block])  # not held, or held and so named twice

    @invariant()
    def internally_consistent(self) -> None:
        self.manager.check()

    @invariant()
    def no_byte_is_owned_twice(self) -> None:
        ranges = sorted(
            (block * self.sizes[owner], (block + 1) * self.sizes[owner])
            for owner, held in self.held.items()
            for block in held
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        assert not ranges or (ranges[0][0] >= self.reserved_bytes and ranges[-1][1] <= self.slab_end)

    @invariant()
    def counts_agree(self) -> None:
        for owner, key in self.sizes.items():
            assert self.manager.free_blocks(owner) == self.naive.room(key)
            assert self.manager.capacity_blocks(owner) == self.capacity[owner]
            assert self.manager.used_bytes(owner) == len(self.held[owner]) * key

    @invariant()
    def ledger_and_table_agree(self) -> None:
        naive, plan = self.naive, self.manager.plan
        stranded = dict.fromkeys(self.sizes.values(), 0)
        for slab, key in naive.key.items():
            if key is not None:
                stranded[key] += (len(naive.entries(slab, key)) - len(naive.owner_of[slab])) * key
        used = sum(len(held) * self.sizes[owner] for owner, held in self.held.items())
        free = sum(key is None for key in naive.key.values()) * plan.slab_bytes
        ledger = self.manager.ledger()
        assert ledger[:4] == (self.total, used, sum(stranded.values()), free)
        assert ledger.lost_bytes == self.total - used - sum(stranded.values()) - free
        for owner, key in self.sizes.items():
            assert self.manager.spare_blocks(owner) * key == stranded[key]
        table = slab_table(self.manager)
        assert [table[s] for s in naive.key] == [(k, len(naive.owner_of[s])) for s, k in naive.key.items()]
        reserved = self.reserved_bytes // plan.slab_bytes
        assert table[:reserved] == [FREE] * reserved


TestKVSlabManagerMachine = KVSlabManagerMachine.TestCase
TestKVSlabManagerMachine.settings = settings(max_examples=120, stateful_step_count=40)
