"""What an engine's scheduler and worker must know of the slab region, as plain data.

It travels in vLLM's ``additional_config`` under the key ``fineserve``, so both find it wherever vLLM builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fineserve_runtime.engines.api import Device
from fineserve_runtime.engines.lease import SlabLease
from fineserve_runtime.engines.ranks import RankTables
from fineserve_runtime.engines.region import Region
from fineserve_runtime.engines.table import SlabTable

KEY = "fineserve"


@dataclass(frozen=True, slots=True)
class SlabSettings:
    """Paths of the region and its table, and the engine's place in them. ``limit_slabs`` None: no limit. An engine of several
    ranks has ``peers``: table and region of each but the first."""

    table: str
    region: str
    device: Device
    engine: int
    block_bytes: int
    limit_slabs: int | None = None
    poison_freed: bool = False
    weights_in_region: bool = False
    peers: tuple[tuple[str, str], ...] = ()

    def as_additional_config(self) -> dict[str, Any]:
        return {KEY: asdict(self)}

    @classmethod
    def of(cls, additional_config: Mapping[str, Any]) -> SlabSettings:
        return cls(**additional_config[KEY])

    @property
    def region_path(self) -> Path:
        return Path(self.region)

    @property
    def ranks(self) -> tuple[SlabSettings, ...]:
        """What each rank must know: its own table and region."""
        places = ((self.table, self.region), *self.peers)
        return tuple(replace(self, table=table, region=region, peers=()) for table, region in places)

    def open_table(self) -> SlabTable:
        return SlabTable(Path(self.table))

    def open_lease(self, region: Region) -> SlabLease:
        ranks = self.ranks
        tables = [rank.open_table() for rank in ranks]
        order = sorted(range(len(ranks)), key=lambda rank: ranks[rank].table)
        return SlabLease(
            tables[0] if len(tables) == 1 else RankTables(tables, order),
            region,
            self.engine,
            self.block_bytes,
            limit_slabs=self.limit_slabs,
            poison_freed=self.poison_freed,
        )
