"""The memory of an engine on its devices at this moment, read from the owner tables."""

from __future__ import annotations

from collections.abc import Mapping

from fineserve_runtime.engines.api import EngineConfig, EngineStats
from fineserve_runtime.engines.ranks import free_in_all
from fineserve_runtime.engines.table import SlabTable


class TableFigures:
    """``tables``: of its ranks' devices, the first rank's first. Other engines take and free slabs between two reports of this
    one, so nothing is kept. It leases ``unit_slabs`` at a time: one slab, or the slabs of a page."""

    def __init__(
        self, tables: Mapping[int, SlabTable], engine: int, config: EngineConfig, block_bytes: int, unit_slabs: int = 1
    ) -> None:
        self._tables = dict(tables)
        self._first = next(iter(self._tables.values()))
        self._engine = engine
        self._config = config
        self._block_bytes = block_bytes
        self._unit_slabs = unit_slabs

    def stats(self, gpu: int | None = None) -> EngineStats:
        table = self._first if gpu is None else self._tables[gpu]
        row = table.counters[self._engine]
        slab_bytes = table.header.slab_bytes
        weight_bytes = -(-row.get("weight_bytes") // slab_bytes) * slab_bytes
        spare_bytes = row.get("spare_bytes")
        leased_bytes = max(0, table.owned_slabs(self._engine) * slab_bytes - weight_bytes - spare_bytes)
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
            spare_bytes=spare_bytes,
            pages_mapped=row.get("pages_mapped"),
            map_s=row.get("map_ns") / 1e9,
            pages_unmapped=row.get("pages_unmapped"),
            unmap_s=row.get("unmap_ns") / 1e9,
        )

    def kv_capacity_tokens(self) -> int:
        """Tokens that fit when no other engine holds KV; weights in the region stay where they are."""
        slabs = min(map(_slabs_for_kv, self._tables.values()))
        return self._blocks_in(min(slabs, self._limit_slabs())) * self._config.block_tokens

    def free_kv_tokens(self) -> int:
        """Tokens that the engine could take now, idle cached prefixes counted as free."""
        stats = self.stats()
        slab_bytes = self._first.header.slab_bytes
        free_slabs = free_in_all(tuple(self._tables.values()))
        leasable = min(free_slabs, self._limit_slabs() - stats.leased_bytes // slab_bytes)
        own_blocks = (stats.stranded_bytes + stats.cached_bytes) // self._block_bytes
        blocks = own_blocks + self._blocks_in(max(0, leasable)) + self._blocks_in(stats.spare_bytes // slab_bytes)
        return blocks * self._config.block_tokens

    def _limit_slabs(self) -> int:
        limit = self._config.kv_limit_bytes
        return self._first.header.slab_count if limit is None else limit // self._first.header.slab_bytes

    def _blocks_in(self, slabs: int) -> int:
        unit_bytes = self._unit_slabs * self._first.header.slab_bytes
        per_unit = unit_bytes // self._block_bytes - (unit_bytes % self._block_bytes != 0)
        return slabs // self._unit_slabs * per_unit


def _slabs_for_kv(table: SlabTable) -> int:
    header = table.header
    weights = sum(-(-row.get("weight_bytes") // header.slab_bytes) for row in table.counters)
    return header.slab_count - header.reserved_slabs - weights
