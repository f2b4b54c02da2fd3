"""kvcached: worked examples of pages, packing, limits and driver time, and a state machine against a naive page table."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fineserve_sim.policy.interfaces import KVManager, TimedKVManager, takes_time
from fineserve_sim.policy.memory.kvcached import PAGE_BYTES, KvCachedManager, VirtualKV

MIB = 2**20
LLAMA_8B = VirtualKV(tensors=64, block_bytes=32 * 1024, map_s=0.004, unmap_s=0.004)
"""Llama-3.1-8B FP16: 32 layers, K and V; 16 tokens of 8 heads x 128 elements x 2 bytes in each tensor."""


def take(manager: KVManager, owner: int, blocks: int) -> list[int]:
    ids = manager.alloc(owner, blocks)
    assert ids is not None, f"owner {owner} could not get {blocks} blocks"
    return ids


def buffered_pages(manager: KvCachedManager, owner: int) -> int:
    """Empty pages that are mapped, or being mapped, for ``owner``."""
    return len(manager._engines[owner].mapped_at_s)


def held_pages(manager: KvCachedManager, owner: int) -> int:
    """Pages in which ``owner`` has blocks; each is a physical page in every tensor."""
    return manager._engines[owner].held_pages


# -- worked examples


def test_a_page_of_an_8b_model_holds_1024_tokens_and_takes_64_physical_pages() -> None:
    manager = KvCachedManager(1024 * MIB, {0: LLAMA_8B})
    assert PAGE_BYTES == 2 * MIB and manager.capacity_blocks(0) == 8 * 64  # 64 blocks of 16 tokens
    assert manager.mapped_bytes() == 0  # virtual reservation costs nothing
    take(manager, 0, 1)
    assert manager.mapped_bytes() == 64 * 2 * MIB
    assert manager.ledger() == (1024 * MIB, 2 * MIB, 126 * MIB, 896 * MIB, 0)
    take(manager, 0, 63)
    assert held_pages(manager, 0) == 1
    take(manager, 0, 1)
    assert held_pages(manager, 0) == 2 and manager.free_blocks(0) == 8 * 64 - 65
    manager.check()


def test_blocks_come_from_the_fullest_partial_page() -> None:
    manager = KvCachedManager(64, {0: VirtualKV(2, 1)}, page_bytes=4)  # pages of 4 blocks, 8 of them
    take(manager, 0, 12)
    manager.free(0, [0, 1, 5, 9, 10, 11])  # used: 2, 3, 1
    assert [take(manager, 0, 1)[0] for _ in range(6)] == [5, 0, 1, 9, 10, 11]


def test_pages_are_never_shared_between_engines() -> None:
    """Of one page's room, nothing is lent to a neighbour with blocks of the same size."""
    manager = KvCachedManager(16, {0: VirtualKV(2, 1), 1: VirtualKV(2, 1)}, page_bytes=4)
    take(manager, 0, 1)
    take(manager, 1, 1)
    assert (manager.free_blocks(0), manager.free_blocks(1)) == (3, 3)
    assert manager.alloc(0, 4) is None and manager.ledger() == (16, 4, 12, 0, 0)
    manager.check()


def test_empty_pages_are_for_anybody() -> None:
    manager = KvCachedManager(24, {0: VirtualKV(1, 4), 1: VirtualKV(3, 1)}, page_bytes=4)
    ids = take(manager, 0, 6)
    assert manager.free_blocks(1) == 0
    manager.free(0, ids[:3])
    assert manager.free_blocks(1) == 4 and take(manager, 1, 4) == [0, 1, 2, 3]
    assert manager.free_blocks(0) == 0 and (manager.used_bytes(0), manager.used_bytes(1)) == (12, 12)


def test_sync_growth_delays_the_engine_that_grows() -> None:
    manager = KvCachedManager(1024 * MIB, {0: LLAMA_8B, 1: LLAMA_8B})
    manager.advance(10.0)
    ids = take(manager, 0, 65)
    assert manager.exposed_s(0) == pytest.approx(2 * 0.004) and manager.exposed_s(1) == 0.0
    manager.advance(10.005)
    assert manager.exposed_s(0) == pytest.approx(0.003)
    manager.advance(11.0)
    take(manager, 0, 1)
    assert manager.exposed_s(0) == 0.0  # it lies in a page held already
    manager.free(0, ids[:64])
    assert manager.exposed_s(0) == pytest.approx(0.004)  # an emptied page is unmapped


def test_the_buffer_hides_growth_until_it_runs_dry() -> None:
    """Two pages mapped ahead. The third of one step comes when the thread has mapped it, which began at this moment."""
    manager = KvCachedManager(4096 * MIB, {0: LLAMA_8B}, min_reserved=2, max_reserved=4)
    assert buffered_pages(manager, 0) == 2 and manager.mapped_bytes() == 256 * MIB
    manager.advance(1.0)
    take(manager, 0, 2 * 64)
    assert manager.exposed_s(0) == 0.0 and buffered_pages(manager, 0) == 2
    take(manager, 0, 64)
    assert manager.exposed_s(0) == pytest.approx(0.004)
    manager.advance(1.5)
    take(manager, 0, 2 * 64)
    assert manager.exposed_s(0) == 0.0


def test_refill_is_paced_by_the_thread() -> None:
    """Five pages at once from a buffer of one: the thread maps one after the other, and the engine waits for the last."""
    manager = KvCachedManager(4096 * MIB, {0: LLAMA_8B}, min_reserved=1, max_reserved=4)
    take(manager, 0, 5 * 64)
    assert manager.exposed_s(0) == pytest.approx(4 * 0.004)


def test_emptied_pages_stay_mapped_up_to_the_maximum() -> None:
    manager = KvCachedManager(4096 * MIB, {0: LLAMA_8B}, min_reserved=1, max_reserved=3)
    ids = take(manager, 0, 6 * 64)
    manager.advance(1.0)
    manager.free(0, ids)
    assert buffered_pages(manager, 0) == 3 and manager.exposed_s(0) == 0.0
    assert manager.mapped_bytes() == 3 * 128 * MIB and manager.ledger().free_bytes == 4096 * MIB


def test_buffers_are_given_up_to_a_neighbour_in_need() -> None:
    kv = VirtualKV(1, 1, map_s=1.0, unmap_s=0.5)
    manager = KvCachedManager(8, {0: kv, 1: kv}, page_bytes=2, min_reserved=2, max_reserved=2)
    assert manager.mapped_bytes() == 8 and manager.free_blocks(0) == 8
    take(manager, 0, 8)
    assert manager.exposed_s(0) == 2 * (1.0 + 0.5)  # own buffer for nothing, then twice: unmap theirs, map
    assert buffered_pages(manager, 1) == 0 and manager.free_blocks(1) == 0
    manager.check()


def test_a_lowered_limit_bounds_new_pages_at_once_and_takes_none_away() -> None:
    """As when a model comes back to the GPU and its weights need the room."""
    manager = KvCachedManager(8, {0: VirtualKV(1, 1), 1: VirtualKV(1, 1)}, page_bytes=2, min_reserved=1, max_reserved=1)
    ids = take(manager, 0, 4)
    manager.set_limit(3)
    assert manager.mapped_bytes() == 4 and buffered_pages(manager, 0) == buffered_pages(manager, 1) == 0
    assert manager.alloc(0, 1) is None and manager.alloc(1, 1) is None
    assert manager.ledger() == (4, 4, 0, 0, 0)
    manager.free(0, ids[:2])
    assert manager.ledger() == (3, 2, 0, 1, 0) and manager.alloc(1, 1) is None  # a page is two bytes
    manager.set_limit(8)
    assert len(take(manager, 1, 4)) == 4
    manager.check()


def test_blocks_that_straddle_pages_are_nobodys() -> None:
    """QoQ's block with its parameters is 8,704 bytes a tensor: 240 of them lie wholly in the first page of 2 MiB."""
    manager = KvCachedManager(4 * 64 * 2 * MIB, {0: VirtualKV(64, 8704)})
    ids = take(manager, 0, 241)
    assert ids[239:] == [239, 241] and held_pages(manager, 0) == 2
    assert manager.ledger().lost_bytes == (2 * 2 * MIB - 8704 * (240 + 240)) * 64
    manager.check()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="limit -1 bytes"):
        KvCachedManager(-1, {})
    with pytest.raises(ValueError, match="buffer of 3 to 2 pages"):
        KvCachedManager(8, {}, min_reserved=3, max_reserved=2)
    with pytest.raises(ValueError, match="may hold no block of 5"):
        KvCachedManager(64, {0: VirtualKV(1, 5)}, page_bytes=8)
    manager = KvCachedManager(8, {0: VirtualKV(1, 1)}, page_bytes=2)
    with pytest.raises(ValueError, match="owner 7 is not registered"):
        manager.alloc(7, 1)
    with pytest.raises(ValueError, match="does not hold block 3"):
        manager.free(0, [3])
    with pytest.raises(ValueError, match="a limit of -5 bytes"):
        manager.set_limit(-5)


# -- any sequence of calls

PAGE = 8
ENGINES = {0: VirtualKV(2, 1, 0.25, 0.125), 1: VirtualKV(1, 4, 0.5, 0.5), 2: VirtualKV(3, 2, 1.0, 0.0)}
LIMIT = 24 * PAGE


class KvCachedMachine(RuleBasedStateMachine):
    """Against a page table kept as a plain set of block ids by engine: pages held follow from it."""

    @initialize(least=st.integers(0, 2), more=st.integers(0, 2))
    def start(self, least: int, more: int) -> None:
        self.manager = KvCachedManager(
            LIMIT, ENGINES, page_bytes=PAGE, min_reserved=least, max_reserved=least + more, virtual_bytes=2 * LIMIT
        )
        timed: TimedKVManager = self.manager
        assert takes_time(timed)
        self.held: dict[int, set[int]] = {owner: set() for owner in ENGINES}
        self.limit, self.now = LIMIT, 0.0

    def pages(self, owner: int) -> Counter[int]:
        per_page = PAGE // ENGINES[owner].block_bytes
        return Counter(block // per_page for block in self.held[owner])

    def held_bytes(self) -> int:
        return sum(len(self.pages(owner)) * ENGINES[owner].tensors * PAGE for owner in ENGINES)

    def expected_free(self, owner: int) -> int:
        per_page = PAGE // ENGINES[owner].block_bytes
        page_bytes = ENGINES[owner].tensors * PAGE
        room = len(self.pages(owner)) * per_page - len(self.held[owner])
        return room + max(0, self.limit - self.held_bytes()) // page_bytes * per_page

    @rule(owner=st.sampled_from(sorted(ENGINES)), blocks=st.integers(0, 30))
    def alloc(self, owner: int, blocks: int) -> None:
        free, before = self.expected_free(owner), self.pages(owner)
        exposed_s = self.manager.exposed_s(owner)
        room = self.manager.fits({owner: blocks})
        ids = self.manager.alloc(owner, blocks)
        if blocks > free:
            assert ids is None and self.manager.exposed_s(owner) == exposed_s
            return
        assert ids is not None and len(set(ids)) == blocks and not self.held[owner] & set(ids)
        self.held[owner] |= set(ids)
        if room:
            assert self.manager.exposed_s(owner) == exposed_s and self.pages(owner).keys() == before.keys()
        per_page = PAGE // ENGINES[owner].block_bytes
        if blocks == 1 and any(used < per_page for used in before.values()):
            assert before[ids[0] // per_page] == max(used for used in before.values() if used < per_page)

    @rule(owner=st.sampled_from(sorted(ENGINES)), data=st.data())
    def free(self, owner: int, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.held[owner]) or [None]), unique=True))
        ids = [block for block in ids if block is not None]
        self.manager.free(owner, ids)
        self.held[owner] -= set(ids)

    @rule(seconds=st.sampled_from([0.1, 1.0, 50.0]))
    def wait(self, seconds: float) -> None:
        before = {owner: self.manager.exposed_s(owner) for owner in ENGINES}
        self.now += seconds
        self.manager.advance(self.now)
        for owner, exposed_s in before.items():
            assert self.manager.exposed_s(owner) == pytest.approx(max(0.0, exposed_s - seconds))

    @rule(pages=st.integers(0, 40))
    def set_limit(self, pages: int) -> None:
        self.limit = pages * PAGE
        self.manager.set_limit(self.limit)

    @invariant()
    def agrees(self) -> None:
        self.manager.check()
        ledger = self.manager.ledger()
        assert ledger.lost_bytes == 0
        for owner, kv in ENGINES.items():
            assert held_pages(self.manager, owner) == len(self.pages(owner))
            assert self.manager.used_bytes(owner) == len(self.held[owner]) * kv.block_bytes * kv.tensors
            assert self.manager.free_blocks(owner) == self.expected_free(owner)
        assert ledger.used_bytes + ledger.stranded_bytes == self.held_bytes()
        assert self.manager.mapped_bytes() <= max(self.limit, self.held_bytes())


TestKvCached = KvCachedMachine.TestCase
