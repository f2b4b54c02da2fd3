"""Private paged pools with prefix caching, as vLLM's: computed blocks are shared, and stay until somebody needs them.

A paged pool of one engine is vTensor memory of a single tensor whose chunk is a block: blocks have names, references and a
radix tree, and records go, least recently used first, when the pool runs out. Only the driver has no part in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fineserve_sim.policy.interfaces import KVLedger
from fineserve_sim.policy.memory.vtensor import VTensorManager


class _Pools(dict[int, VTensorManager]):
    def __missing__(self, owner: int) -> VTensorManager:
        raise ValueError(f"prefix pools: owner {owner} is not registered; the owners are {sorted(self)}")


class PrefixPools:
    """The KV memory of one GPU as one pool an engine; a `PrefixKVManager` (see interfaces.py).

    Args:
        shares: (block bytes, share bytes) by owner (engine id). The memory managed is the sum of the shares.
    """

    shares_running = True

    def __init__(self, shares: Mapping[int, tuple[int, int]]) -> None:
        self._pools = _Pools(
            {
                owner: VTensorManager(share, {owner: 1}, chunk_bytes=block, trim_s=float("inf"))
                for owner, (block, share) in shares.items()
            }
        )

    def alloc(self, owner: int, blocks: int) -> list[int] | None:
        """As ``VTensorManager.alloc``, from the owner's pool."""
        return self._pools[owner].alloc(owner, blocks)

    def free(self, owner: int, block_ids: Sequence[int]) -> None:
        """As ``VTensorManager.free``."""
        self._pools[owner].free(owner, block_ids)

    def match(self, owner: int, keys: Sequence[int]) -> list[int]:
        """The blocks of the longest recorded prefix, held by one sequence more; free them like others."""
        return self._pools[owner].match(owner, keys)

    def record(self, owner: int, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        """Keep the first ``len(keys)`` blocks of a sequence, all full, for requests to come."""
        self._pools[owner].record(owner, keys, block_ids)

    def free_blocks(self, owner: int) -> int:
        """How many blocks ``owner`` could get now, all its records given up."""
        return self._pools[owner].free_blocks(owner)

    def capacity_blocks(self, owner: int) -> int:
        """Whole blocks in the owner's share; what the others hold does not matter."""
        return self._pools[owner].capacity_blocks(owner)

    def used_bytes(self, owner: int) -> int:
        """Bytes of the blocks that sequences and records of ``owner`` hold, each counted once."""
        return self._pools[owner].used_bytes(owner)

    def fits(self, demands: Mapping[int, int]) -> bool:
        """Whether each owner's pool has the blocks asked of it; owners without a pool here are ignored."""
        return all(owner not in self._pools or self._pools[owner].fits({owner: n}) for owner, n in demands.items())

    def ledger(self) -> KVLedger:
        """Bytes of all shares."""
        ledgers = [pool.ledger() for pool in self._pools.values()]
        return KVLedger(*(sum(column) for column in zip(*ledgers, strict=True)))

    def check(self) -> None:
        """Raise AssertionError if a pool contradicts itself."""
        for pool in self._pools.values():
            pool.check()
