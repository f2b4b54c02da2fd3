"""What an engine's scheduler and worker must know of the slab region, as plain data.

It travels in vLLM's ``additional_config`` under the key ``fineserve``, so both find it wherever vLLM builds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fineserve_runtime.engines.api import Device, Paging
from fineserve_runtime.engines.backing import Backing, SlabBacking
from fineserve_runtime.engines.lease import SlabLease
from fineserve_runtime.engines.pages import AddressSpace, PageBacking, address_space
from fineserve_runtime.engines.ranks import RankTables
from fineserve_runtime.engines.region import Region
from fineserve_runtime.engines.table import SlabTable
from fineserve_sim.policy.groups.microbatch import LookaheadMode

KEY = "fineserve"


@dataclass(frozen=True, slots=True)
class SlabSettings:
    """Paths of the region and its table, and the engine's place in them. ``limit_slabs`` None: no limit. An engine of several
    ranks has ``peers``: table and region of each but the first. ``swaps``: what is preempted keeps its KV in host memory.
    ``keeps``, ``borrows`` and ``lookahead`` as `api.EngineConfig` has them. With ``paging``, its pages have ``tensors`` slabs
    each; ``contiguous``: each of its sequences gets blocks for the longest one."""

    table: str
    region: str
    device: Device
    engine: int
    block_bytes: int
    limit_slabs: int | None = None
    poison_freed: bool = False
    weights_in_region: bool = False
    peers: tuple[tuple[str, str], ...] = ()
    swaps: bool = False
    keeps: tuple[int, int] | None = None
    borrows: bool = False
    lookahead: LookaheadMode | None = None
    paging: Paging | None = None
    tensors: int = 1
    contiguous: bool = False

    def as_additional_config(self) -> dict[str, Any]:
        return {KEY: asdict(self)}

    @classmethod
    def of(cls, additional_config: Mapping[str, Any]) -> SlabSettings:
        fields = dict(additional_config[KEY])
        paging, keeps = fields.pop("paging"), fields.pop("keeps")
        return cls(**fields, paging=paging and Paging(**paging), keeps=keeps and tuple(keeps))

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

    def address_space(self, *, anew: bool = False) -> AddressSpace:
        """That of the engine, where it has one of its own."""
        with closing(self.open_table()) as table:
            return address_space(self.region_path, self.engine, table.header, self.tensors, anew=anew)

    def open_lease(self, region: Region) -> SlabLease:
        return SlabLease(self._backing(region), self.engine, self.block_bytes, poison_freed=self.poison_freed)

    def _backing(self, region: Region) -> Backing:
        ranks = self.ranks
        tables = [rank.open_table() for rank in ranks]
        if self.paging is not None:
            return PageBacking(tables[0], self.address_space(), self.engine, self.paging)
        order = sorted(range(len(ranks)), key=lambda rank: ranks[rank].table)
        table = tables[0] if len(tables) == 1 else RankTables(tables, order)
        return SlabBacking(table, region, self.engine, limit_slabs=self.limit_slabs)
