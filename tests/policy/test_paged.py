"""Private paged pools: worked example, refusals, and a state machine against plain numbers."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fineserve_sim.policy.memory.paged import BytePool, PagedPool, PrivatePools


def test_worked_example() -> None:
    pool = PagedPool(10, BytePool(47))
    assert pool.capacity_blocks == pool.free_blocks == 4
    assert pool.take(3) and pool.used_bytes == 30
    assert not pool.take(2) and pool.free_blocks == 1
    pool.give(2)
    assert pool.used_bytes == 10
    assert pool.take(3) and pool.take(0) and not pool.take(1)


def test_shares_are_private() -> None:
    pools = PrivatePools({1: (10, 45), 2: (7, 21)})
    assert pools.pool(1).take(4)
    assert not pools.pool(1).take(1)  # although owner 2 is idle
    assert (pools.pool(2).free_blocks, pools.pool(1).capacity_blocks, pools.pool(1).used_bytes) == (3, 4, 40)
    assert pools.ledger() == (66, 40, 0, 21, 5)


def test_bad_arguments_are_refused_and_change_nothing() -> None:
    pools = PrivatePools({1: (10, 100)})
    with pytest.raises(ValueError, match="owner 5 is not registered"):
        pools.pool(5)
    pool = pools.pool(1)
    pool.take(2)
    with pytest.raises(ValueError, match="-1 blocks"):
        pool.take(-1)
    for blocks in (3, -1):
        with pytest.raises(ValueError, match=f"{blocks} blocks given back; it must be 0 to 2"):
            pool.give(blocks)
    assert pool.free_blocks == 8
    for block_bytes, share_bytes in [(0, 10), (10, -1)]:
        with pytest.raises(ValueError, match="paged pool"):
            PagedPool(block_bytes, BytePool(share_bytes))


def test_a_share_below_one_block_has_no_capacity() -> None:
    pools = PrivatePools({1: (10, 9)})
    assert pools.pool(1).capacity_blocks == 0 and not pools.pool(1).take(1)
    assert pools.ledger().lost_bytes == 9


class PrivatePoolsMachine(RuleBasedStateMachine):
    """The naive model: how many blocks each owner holds."""

    @initialize(shares=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 120)), min_size=1, max_size=3))
    def start(self, shares: list[tuple[int, int]]) -> None:
        self.shares = dict(enumerate(shares))
        self.pools = PrivatePools(self.shares)
        self.held = dict.fromkeys(self.shares, 0)

    def capacity(self, owner: int) -> int:
        block, share = self.shares[owner]
        return share // block

    @rule(data=st.data(), blocks=st.integers(0, 30))
    def take(self, data: st.DataObject, blocks: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.shares)))
        fits = self.held[owner] + blocks <= self.capacity(owner)
        assert self.pools.pool(owner).take(blocks) == fits
        self.held[owner] += blocks if fits else 0

    @rule(data=st.data(), blocks=st.integers(0, 30))
    def give(self, data: st.DataObject, blocks: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.shares)))
        if blocks > self.held[owner]:
            with pytest.raises(ValueError, match="given back"):
                self.pools.pool(owner).give(blocks)
        else:
            self.pools.pool(owner).give(blocks)
            self.held[owner] -= blocks

    @invariant()
    def model_agrees(self) -> None:
        self.pools.check()
        for owner, held in self.held.items():
            pool = self.pools.pool(owner)
            assert (pool.capacity_blocks, pool.free_blocks) == (self.capacity(owner), self.capacity(owner) - held)
            assert pool.used_bytes == held * self.shares[owner][0]
        ledger = self.pools.ledger()
        assert ledger.used_bytes == sum(held * self.shares[owner][0] for owner, held in self.held.items())
        assert ledger.lost_bytes == sum(share % block for block, share in self.shares.values())
        assert ledger.total_bytes == sum(ledger[1:]) == sum(share for _, share in self.shares.values())


TestPrivatePoolsMachine = PrivatePoolsMachine.TestCase
