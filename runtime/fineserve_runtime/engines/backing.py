"""Where the blocks of an engine lie: units of KV memory that it takes from the region, uses up and gives back.

A unit is a slab where it lies in the region (`SlabBacking`), or a page of the engine's own address space with memory of the
region behind it (pages.py). What happens inside a unit is the lease's business (lease.py).
"""

from __future__ import annotations

from typing import Protocol

from fineserve_runtime.engines.ranks import RankTables
from fineserve_runtime.engines.region import Region
from fineserve_runtime.engines.table import SlabTable


class Backing(Protocol):
    """Units below ``units``, of which the lowest ``reserved`` hold the engine's null block; an engine has ``limit`` at most.
    ``spare_bytes`` belong to the engine and hold nothing yet. They count as free, since it gives them up on demand.

    Not for several threads. Counts come from the last ``look``, corrected by this engine's own changes since."""

    unit_bytes: int
    units: int
    reserved: int
    limit: int

    @property
    def table(self) -> SlabTable | RankTables: ...

    @property
    def spare_bytes(self) -> int: ...

    def look(self) -> None:
        """See what others took and gave meanwhile."""
        ...

    def obtainable(self) -> int:
        """How many units ``take`` would grant under the table's lock."""
        ...

    def take(self, count: int) -> list[int]:
        """So many units, which must be obtainable. Hold the table's lock."""
        ...

    def give_back(self, unit: int, *, meaningful: bool) -> None:
        """``meaningful``: its bytes are this engine's KV."""
        ...

    def fill(self, unit: int, byte: int) -> None: ...

    def foreign(self, unit: int) -> bool:
        """Whether the bytes of a unit just taken mean nothing to this engine."""
        ...

    def holds(self, unit: int) -> bool: ...

    def crowded(self) -> bool:
        """Whether hardly a unit is free for others."""
        ...

    def settle(self, *, may_take: bool) -> None:
        """Give up spare memory when others lack it; else make some, if ``may_take``. The caller holds the table's lock."""
        ...

    def give_up_spares(self) -> None:
        """Nothing is spare any more."""
        ...

    def check(self, leased: int) -> None:
        """Raise AssertionError if the table disagrees that so many units are leased."""
        ...

    def close(self) -> None: ...


class SlabBacking:
    """Slabs of the region. ``limit_slabs`` None: as many as there are."""

    spare_bytes = 0

    def __init__(
        self, table: SlabTable | RankTables, region: Region, engine: int, *, limit_slabs: int | None = None
    ) -> None:
        header = table.header
        self.table: SlabTable | RankTables = table
        self.unit_bytes = header.slab_bytes
        self.units = header.slab_count
        self.reserved = header.reserved_slabs
        rentable = header.slab_count - header.reserved_slabs
        self.limit = rentable if limit_slabs is None else min(rentable, limit_slabs)
        self._region = region
        self._engine = engine
        self._held = 0
        self._scarce = max(1, rentable // 16)
        self._below = self.units
        self._free = table.free_slabs()

    def look(self) -> None:
        self._free = self.table.free_slabs(self._below)

    def obtainable(self) -> int:
        return min(self._free, self.limit - self._held)

    def take(self, count: int) -> list[int]:
        slabs = self.table.take(self._engine, count)
        assert slabs is not None, "the table grants fewer slabs than it counted"
        self._free -= count
        self._held += count
        return slabs

    def give_back(self, unit: int, *, meaningful: bool) -> None:
        self.table.give_back(self._engine, [unit], meaningful=meaningful)
        self._free += 1
        self._held -= 1

    def fill(self, unit: int, byte: int) -> None:
        self._region.fill(unit * self.unit_bytes, self.unit_bytes, byte)

    def read(self, offset: int, length: int) -> bytes:
        """Bytes of slabs that the engine holds; offsets count from slab 0."""
        return self._region.read(offset, length)

    def write(self, offset: int, data: bytes) -> None:
        self._region.write(offset, data)

    def stay_below(self, slab: int) -> None:
        """Take no slab from this one on. Slabs held there stay."""
        self._below = slab

    def foreign(self, unit: int) -> bool:
        return self.table.changed_hands(self._engine, unit)

    def holds(self, unit: int) -> bool:
        return self.table.owner_of(unit) == self._engine

    def crowded(self) -> bool:
        return self._free < self._scarce

    def settle(self, *, may_take: bool) -> None:
        """A slab needs nothing before it is used."""

    def give_up_spares(self) -> None:
        """It has none."""

    def check(self, leased: int) -> None:
        assert leased == self._held <= self.table.owned_slabs(self._engine), "slabs leased"

    def close(self) -> None:
        self.table.close()
