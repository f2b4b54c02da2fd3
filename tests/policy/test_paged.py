"""Private paged pools: worked example, refusals, and a state machine against sets of ids."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fineserve_sim.policy.interfaces import KVManager
from fineserve_sim.policy.paged import PagedPool, PrivatePools


def test_worked_example() -> None:
    pool = PagedPool(block_bytes=10, share_bytes=47)
    assert pool.capacity_blocks == pool.free_blocks == 4
    assert pool.alloc(3) == [0, 1, 2]
    assert pool.alloc(2) is None and pool.free_blocks == 1
    pool.free([1, 0])
    assert pool.used_bytes == 10
    assert pool.alloc(3) == [1, 0, 3]  # last in, first out: the ids just freed, in the order in which they were named
    assert pool.alloc(0) == [] and pool.alloc(1) is None
    pool.check()


def test_shares_are_private() -> None:
    pools: KVManager = PrivatePools({1: (10, 45), 2: (7, 21)})
    assert pools.alloc(1, 4) == [0, 1, 2, 3]
    assert pools.alloc(1, 1) is None  # although owner 2 is idle
    assert (pools.free_blocks(2), pools.capacity_blocks(1), pools.used_bytes(1)) == (3, 4, 40)
    assert pools.ledger() == (66, 40, 0, 21, 5)


@pytest.mark.parametrize(
    ("ids", "message"), [([3], "block 3 is not held"), ([-1], "-1"), ([0, 0], "twice"), ([0, 9], "9")]
)
def test_bad_free_changes_nothing(ids: list[int], message: str) -> None:
    pool = PagedPool(10, 100)
    pool.alloc(2)
    with pytest.raises(ValueError, match=message):
        pool.free(ids)
    assert pool.free_blocks == 8
    pool.check()


def test_bad_arguments_are_refused() -> None:
    pools = PrivatePools({1: (10, 100)})
    with pytest.raises(ValueError, match="owner 5 is not registered"):
        pools.alloc(5, 1)
    with pytest.raises(ValueError, match="-1 blocks"):
        pools.alloc(1, -1)
    for block_bytes, share_bytes in [(0, 10), (10, -1)]:
        with pytest.raises(ValueError, match="paged pool"):
            PagedPool(block_bytes, share_bytes)


def test_a_share_below_one_block_has_no_capacity() -> None:
    pools = PrivatePools({1: (10, 9)})
    assert pools.capacity_blocks(1) == 0 and pools.alloc(1, 1) is None
    assert pools.ledger().lost_bytes == 9


class PrivatePoolsMachine(RuleBasedStateMachine):
    """The naive model: per owner, a list of the ids it holds."""

    @initialize(shares=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 120)), min_size=1, max_size=3))
    def start(self, shares: list[tuple[int, int]]) -> None:
        self.shares = dict(enumerate(shares))
        self.pools = PrivatePools(self.shares)
        self.held: dict[int, list[int]] = {owner: [] for owner in self.shares}

    def capacity(self, owner: int) -> int:
        block, share = self.shares[owner]
        return share // block

    @rule(data=st.data(), blocks=st.integers(0, 30))
    def alloc(self, data: st.DataObject, blocks: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.shares)))
        held = self.held[owner]
        ids = self.pools.alloc(owner, blocks)
        assert (ids is not None) == (len(held) + blocks <= self.capacity(owner))
        if ids is not None:
            assert len(ids) == blocks == len(set(ids)) and not set(ids) & set(held)
            assert all(0 <= block < self.capacity(owner) for block in ids)
            held += ids

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from([o for o, held in self.held.items() if held]))
        ids = data.draw(st.lists(st.sampled_from(self.held[owner]), unique=True))
        self.pools.free(owner, ids)
        self.held[owner] = [block for block in self.held[owner] if block not in ids]

    @rule(data=st.data(), block=st.integers(-3, 130))
    def free_what_is_not_held(self, data: st.DataObject, block: int) -> None:
        owner = data.draw(st.sampled_from(sorted(self.shares)))
        held = self.held[owner]
        with pytest.raises(ValueError, match=r"paged pool"):
            self.pools.free(owner, [*held, block])  # not held, or held and so named twice

    @invariant()
    def model_agrees(self) -> None:
        self.pools.check()
        for owner, held in self.held.items():
            assert self.pools.free_blocks(owner) == self.capacity(owner) - len(held)
            assert self.pools.capacity_blocks(owner) == self.capacity(owner)
            assert self.pools.used_bytes(owner) == len(held) * self.shares[owner][0]
        ledger = self.pools.ledger()
        assert ledger.used_bytes == sum(len(held) * self.shares[owner][0] for owner, held in self.held.items())
        assert ledger.lost_bytes == sum(share % block for block, share in self.shares.values())
        assert ledger.total_bytes == sum(ledger[1:]) == sum(share for _, share in self.shares.values())


TestPrivatePoolsMachine = PrivatePoolsMachine.TestCase
