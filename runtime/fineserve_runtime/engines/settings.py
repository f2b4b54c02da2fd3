"""What an engine's scheduler and worker must know of the slab region, as plain data.

It travels in vLLM's ``additional_config`` under the key ``fineserve``, so both find it wherever vLLM builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fineserve_runtime.engines.api import Device
from fineserve_runtime.engines.lease import SlabLease
from fineserve_runtime.engines.region import Region
from fineserve_runtime.engines.table import SlabTable

KEY = "fineserve"


@dataclass(frozen=True, slots=True)
class SlabSettings:
    """Paths of the region and its table, and the engine's place in them. ``limit_slabs`` None: no limit."""

    table: str
    region: str
    device: Device
    engine: int
    block_bytes: int
    limit_slabs: int | None = None
    poison_freed: bool = False
    weights_in_region: bool = False

    def as_additional_config(self) -> dict[str, Any]:
        return {KEY: asdict(self)}

    @classmethod
    def of(cls, additional_config: Mapping[str, Any]) -> SlabSettings:
        return cls(**additional_config[KEY])

    @property
    def region_path(self) -> Path:
        return Path(self.region)

    def open_table(self) -> SlabTable:
        return SlabTable(Path(self.table))

    def open_lease(self, region: Region) -> SlabLease:
        return SlabLease(
            self.open_table(),
            region,
            self.engine,
            self.block_bytes,
            limit_slabs=self.limit_slabs,
            poison_freed=self.poison_freed,
        )
