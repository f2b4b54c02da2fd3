"""The ledger of GPU memory: what is usable is claimed, set aside for KV, or free, and no byte is sold twice."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from fineserve_sim.policy.interfaces import GpuSlot
from fineserve_sim.policy.memory.ledger import MemoryLedger

GPUS = (0, 1, 2)
USABLE = 100


def test_a_claim_that_does_not_fit_takes_nothing() -> None:
    ledger = MemoryLedger.of([GpuSlot(0, 0, 100), GpuSlot(1, 0, 50)])
    with pytest.raises(ValueError, match="GPU 1 has"):
        ledger.claim("a", (0, 1), 60)
    assert [ledger.free_bytes(gpu) for gpu in (0, 1)] == [100, 50]


def test_an_engine_that_leaves_no_memory_for_kv_has_no_room() -> None:
    ledger = MemoryLedger({0: 100})
    assert ledger.has_room((0,), 99) and not ledger.has_room((0,), 100)


def test_a_pool_is_no_larger_than_what_claims_leave() -> None:
    ledger = MemoryLedger({0: 100})
    ledger.claim(0, (0,), 70)
    ledger.set_pool(0, 30)
    with pytest.raises(ValueError, match="aside"):
        ledger.set_pool(0, 31)
    with pytest.raises(ValueError, match="does not fit"):
        ledger.claim(1, (0,), 1)


class Ledgers(RuleBasedStateMachine):
    """Against books that are kept apart for claims and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = MemoryLedger(dict.fromkeys(GPUS, USABLE))
        self.claims: dict[int, tuple[tuple[int, ...], int]] = {}
        self.pools = dict.fromkeys(GPUS, 0)

    def _free(self, gpu: int) -> int:
        claimed = sum(claim for gpus, claim in self.claims.values() if gpu in gpus)
        return USABLE - claimed - self.pools[gpu]

    @rule(engine=st.integers(0, 4), gpus=st.sets(st.sampled_from(GPUS), min_size=1), claim=st.integers(0, 70))
    def claim(self, engine: int, gpus: set[int], claim: int) -> None:
        if engine in self.claims or any(self._free(gpu) < claim for gpu in gpus):
            with pytest.raises(ValueError, match=r"twice|fit"):
                self.ledger.claim(engine, sorted(gpus), claim)
            return
        self.ledger.claim(engine, sorted(gpus), claim)
        self.claims[engine] = (tuple(sorted(gpus)), claim)

    @rule(engine=st.integers(0, 4))
    def release(self, engine: int) -> None:
        if engine in self.claims:
            assert self.ledger.release(engine) == self.claims.pop(engine)[0]

    @rule(gpu=st.sampled_from(GPUS), pool=st.integers(0, 60))
    def set_pool(self, gpu: int, pool: int) -> None:
        if pool > self._free(gpu) + self.pools[gpu]:
            with pytest.raises(ValueError, match="aside"):
                self.ledger.set_pool(gpu, pool)
            return
        self.ledger.set_pool(gpu, pool)
        self.pools[gpu] = pool

    @invariant()
    def books_agree(self) -> None:
        for gpu in GPUS:
            assert self.ledger.free_bytes(gpu) == self._free(gpu) >= 0
            assert self.ledger.left_bytes(gpu) == self._free(gpu) + self.pools[gpu]


TestLedgers = Ledgers.TestCase
TestLedgers.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
