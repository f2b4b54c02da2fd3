"""Private pools with prefix caching: what is shared, what stays, what goes first, and that no pool lends to another."""

from __future__ import annotations

import pytest

from fineserve_sim.policy.interfaces import PrefixKVManager, TimedKVManager
from fineserve_sim.policy.memory.prefix_pools import PrefixPools


def test_finished_blocks_serve_the_next_request_and_are_given_up_on_demand() -> None:
    pools = PrefixPools({0: (16, 64), 1: (10, 45)})
    assert isinstance(pools, PrefixKVManager) and pools.shares_running and not isinstance(pools, TimedKVManager)
    assert pools.ledger() == (109, 0, 0, 104, 5) and pools.capacity_blocks(1) == 4
    ids = pools.alloc(0, 3)
    assert ids is not None
    pools.record(0, [7, 8], ids)
    pools.free(0, ids)
    assert pools.used_bytes(0) == 32 and pools.free_blocks(0) == 4
    assert pools.match(0, [7, 9]) == ids[:1] and pools.match(1, [7]) == []
    assert pools.free_blocks(0) == 3 and pools.fits({0: 3, 1: 4}) and not pools.fits({0: 4})
    assert len(pools.alloc(0, 3) or []) == 3  # the record of key 8 went
    assert pools.alloc(0, 1) is None and pools.match(0, [7, 8]) == ids[:1]
    pools.check()


def test_refusals() -> None:
    pools = PrefixPools({0: (16, 64)})
    with pytest.raises(ValueError, match="owner 3 is not registered"):
        pools.alloc(3, 1)
    with pytest.raises(ValueError, match="block 0 is held by no sequence"):
        pools.free(0, [0])
