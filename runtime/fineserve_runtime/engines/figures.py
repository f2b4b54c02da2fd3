"""What one engine has of its device's memory, read from the owner table as it is now."""

from __future__ import annotations

from fineserve_runtime.engines.api import EngineConfig, EngineStats
from fineserve_runtime.engines.table import SlabTable


class TableFigures:
    """Other engines take and free slabs between two reports of this one, so nothing is kept."""

    def __init__(self, table: SlabTable, engine: int, config: EngineConfig, block_bytes: int) -> None:
        self._table = table
        self._engine = engine
        self._config = config
        self._block_bytes = block_bytes

    def stats(self) -> EngineStats:
        row = self._table.counters[self._engine]
        slab_bytes = self._table.header.slab_bytes
        weight_bytes = -(-row.get("weight_bytes") // slab_bytes) * slab_bytes
        leased_bytes = self._table.owned_slabs(self._engine) * slab_bytes - weight_bytes
        used_bytes, cached_bytes = row.get("used_bytes"), row.get("cached_bytes")
        return EngineStats(
            leased_bytes=leased_bytes,
            used_bytes=used_bytes - cached_bytes,
            stranded_bytes=max(0, leased_bytes - used_bytes),
            cached_bytes=cached_bytes,
            weight_bytes=weight_bytes,
            steps=row.get("steps"),
            preemptions=row.get("preemptions"),
            slabs_leased=row.get("slabs_leased"),
            slabs_returned=row.get("slabs_returned"),
            blocks_zeroed=row.get("blocks_zeroed"),
            prefix_queries=row.get("prefix_queries"),
            prefix_hits=row.get("prefix_hits"),
        )

    def kv_capacity_tokens(self) -> int:
        """Tokens that fit when no other engine holds KV; weights in the region stay where they are."""
        header = self._table.header
        slabs = header.slab_count - header.reserved_slabs
        slabs -= sum(-(-row.get("weight_bytes") // header.slab_bytes) for row in self._table.counters)
        return self._blocks_in(min(slabs, self._limit_slabs())) * self._config.block_tokens

    def free_kv_tokens(self) -> int:
        """Tokens that the engine could take now, idle cached prefixes counted as free."""
        stats = self.stats()
        slab_bytes = self._table.header.slab_bytes
        leasable = min(self._table.free_slabs(), self._limit_slabs() - stats.leased_bytes // slab_bytes)
        own_blocks = (stats.stranded_bytes + stats.cached_bytes) // self._block_bytes
        return (own_blocks + self._blocks_in(max(0, leasable))) * self._config.block_tokens

    def _limit_slabs(self) -> int:
        limit = self._config.kv_limit_bytes
        return self._table.header.slab_count if limit is None else limit // self._table.header.slab_bytes

    def _blocks_in(self, slabs: int) -> int:
        slab_bytes = self._table.header.slab_bytes
        per_slab = slab_bytes // self._block_bytes - (slab_bytes % self._block_bytes != 0)
        return slabs * per_slab
