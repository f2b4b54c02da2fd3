"""The owner tables of several devices as one, for an engine whose ranks hold a part of each KV block on each of them.

vLLM has one block id for all ranks, so a slab of such an engine is the slab of the same number on every device. It is free
when all of them have it free, and it is taken and given back on all of them. Locks are taken in the order of the devices'
numbers, so two engines cannot wait for each other. Tickets are drawn on all devices at once, so they stand in one order
everywhere.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from fineserve_runtime.engines.region import Region
from fineserve_runtime.engines.table import Counters, SlabTable, TableHeader


class SharedCounters:
    """The engine's row in each table: what it writes stands in all of them."""

    def __init__(self, rows: Sequence[Counters]) -> None:
        self._rows = rows

    def get(self, field: str) -> int:
        return self._rows[0].get(field)

    def set(self, field: str, value: int) -> None:
        for row in self._rows:
            row.set(field, value)

    def add(self, field: str, by: int) -> None:
        for row in self._rows:
            row.add(field, by)


class RankTables:
    """What a `SlabLease` wants of a table, over ``tables`` in the order of the ranks. ``locking_order``: their indices in the
    order in which everybody locks them. Raises ValueError for tables of different shapes."""

    def __init__(self, tables: Sequence[SlabTable], locking_order: Sequence[int]) -> None:
        shapes = {(table.header.slab_count, table.header.slab_bytes, table.header.engines) for table in tables}
        if len(shapes) != 1:
            raise ValueError(f"ranks need regions of one shape; these differ: {sorted(shapes)}")
        self._tables = tuple(tables)
        self._ordered = [tables[index] for index in locking_order]
        self.header: TableHeader = tables[0].header
        self.counters = [
            SharedCounters([table.counters[engine] for table in tables]) for engine in range(self.header.engines)
        ]

    @contextmanager
    def lock(self) -> Iterator[None]:
        with ExitStack() as stack:
            for table in self._ordered:
                stack.enter_context(table.lock())
            yield

    def free_slabs(self, below: int | None = None) -> int:
        return free_in_all(self._tables, below)

    def take(self, engine: int, count: int) -> list[int] | None:
        """The lowest ``count`` slabs that are free everywhere, or None when there are fewer. Hold the lock."""
        free = np.flatnonzero(np.logical_and.reduce([table.free_marks() for table in self._tables]))
        if len(free) < count:
            return None
        slabs: list[int] = free[:count].tolist()
        for table in self._tables:
            table.take_these(engine, slabs)
        return slabs

    def give_back(self, engine: int, slabs: Sequence[int], *, meaningful: bool = True) -> None:
        for table in self._tables:
            table.give_back(engine, slabs, meaningful=meaningful)

    def owner_of(self, slab: int) -> int | None:
        return self._tables[0].owner_of(slab)

    def owned_slabs(self, engine: int) -> int:
        """On the device that has most of them: weights lie where each has room."""
        return max(table.owned_slabs(engine) for table in self._tables)

    def changed_hands(self, engine: int, slab: int) -> bool:
        return any(table.changed_hands(engine, slab) for table in self._tables)

    def draw_ticket(self, engine: int) -> None:
        for table in self._tables:
            table.draw_ticket(engine)

    def drop_ticket(self, engine: int) -> None:
        for table in self._tables:
            table.drop_ticket(engine)

    def others_starve(self, engine: int) -> bool:
        return any(table.others_starve(engine) for table in self._tables)

    def close(self) -> None:
        for table in self._tables:
            table.close()


class RankRegions:
    """The same bytes of several regions."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = tuple(regions)

    @property
    def size_bytes(self) -> int:
        return min(region.size_bytes for region in self._regions)

    def fill(self, offset: int, length: int, byte: int) -> None:
        for region in self._regions:
            region.fill(offset, length, byte)

    def read(self, offset: int, length: int) -> bytes:
        """The bytes of each region, one after another."""
        return b"".join(region.read(offset, length) for region in self._regions)

    def write(self, offset: int, data: bytes) -> None:
        """``data`` as ``read`` gives it."""
        length = len(data) // len(self._regions)
        for number, region in enumerate(self._regions):
            region.write(offset, data[number * length : (number + 1) * length])

    def close(self) -> None:
        for region in self._regions:
            region.close()


def free_in_all(tables: Sequence[SlabTable], below: int | None = None) -> int:
    """How many slabs (of those below one) are free in every one of the tables."""
    if len(tables) == 1:
        return tables[0].free_slabs(below)
    return int(np.count_nonzero(np.logical_and.reduce([table.free_marks()[:below] for table in tables])))


GONE_S = 10.0
"""How long a killed rank is waited for. One that a driver holds in the kernel may never go."""


def end_rank(pid: int, engine_pid: int) -> bool:
    """Kill a rank that outlived its engine, and wait until it is gone: it could still write into slabs that others get. False
    when it is not gone after ``GONE_S``. Another process may have its number by now; a rank is in the session that its
    engine's process leads."""
    try:
        file = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if os.getsid(pid) != engine_pid:
            return True
        signal.pidfd_send_signal(file, signal.SIGKILL)
        gone = select.poll()
        gone.register(file, select.POLLIN)
        return bool(gone.poll(1000 * GONE_S))
    except ProcessLookupError:
        return True
    finally:
        os.close(file)
