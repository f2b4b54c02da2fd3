"""The owner table: which engine leases which slab of a device's region, in shared memory beside the region.

One byte a slab names its owner, which is all that engines in several processes must agree on. The inside of a slab is its
owner's own business (lease.py). An engine that takes slabs holds the table's lock, so check-then-take is atomic. Giving back
needs no lock: only the owner writes a byte that is not FREE, and a byte is written at once.

A second byte remembers the last writer of the slab, so that the next owner knows whether the bytes mean anything to it.

The kernel drops the lock of a process that dies, and a half-done take leaves nothing but slabs owned by the dead, which
`reclaim` frees. Each engine also has a row of counters for onlookers, and a *ticket* against livelock (lease.py). Engines of
several devices have a row in the table of each (ranks.py).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

FREE = 0
STRANGER = 254
"""Last writer unknown: poisoned, weights, or an engine that died."""
RESERVED = 255
MAX_ENGINES = 253

_MAGIC = 0x4653_534C_4142_0002  # "FSSLAB", layout 2
_HEADER = struct.Struct("8q")
_ROW = 32  # 64-bit words an engine


class TableHeader(NamedTuple):
    """What both sides must agree on. ``reserved_slabs``, the lowest, hold the engines' null blocks."""

    slab_count: int
    slab_bytes: int
    reserved_slabs: int
    engines: int
    host_pid: int


class RegionError(RuntimeError):
    """A region or table that is missing, stale, of another layout or in use by another host."""


def lock_holder(path: Path) -> int | None:
    """The process id of the holder of a table's lock, as far as the kernel tells."""
    found = path.stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    locks = [line.split() for line in lines if "FLOCK" in line and "->" not in line]  # -> waits
    return next((int(lock[4]) for lock in locks if lock[5] == place), None)


@contextmanager
def private_file(path: Path) -> Iterator[BinaryIO]:
    """A new file for its owner alone, in place of any at ``path``; a process that still maps the former one keeps it."""
    fresh = path.with_name(path.name + ".new")
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:  # noqa: PTH123
        yield file
    fresh.replace(path)


class Counters:
    """One engine's row, readable by every process; the engine's own process is its only writer, tickets apart. ``rank_pid``:
    the process of its rank on this device, where that is another one. ``wanted_slabs``: what its weights looked for in vain."""

    FIELDS = (
        "pid",
        "used_bytes",
        "cached_bytes",
        "weight_bytes",
        "steps",
        "preemptions",
        "slabs_leased",
        "slabs_returned",
        "blocks_zeroed",
        "ticket",
        "block_bytes",
        "prefix_queries",
        "prefix_hits",
        "rank_pid",
        "spare_bytes",
        "pages_mapped",
        "map_ns",
        "pages_unmapped",
        "unmap_ns",
        "wanted_slabs",
    )

    _WORD = MappingProxyType({field: word for word, field in enumerate(FIELDS)})

    def __init__(self, words: memoryview) -> None:
        self._words = words

    def get(self, field: str) -> int:
        return int(self._words[self._WORD[field]])

    def set(self, field: str, value: int) -> None:
        self._words[self._WORD[field]] = value

    def add(self, field: str, by: int) -> None:
        self._words[self._WORD[field]] += by

    def clear(self) -> None:
        for index in range(_ROW):
            self._words[index] = 0


class SlabTable:
    """A process's view of the table. Engines are 0, 1, ...; their mark in the table is the number plus one.

    Each instance opens the file anew, and the lock belongs to the open file: threads with an instance each exclude each
    other as processes do.
    """

    def __init__(self, path: Path) -> None:
        """Attach. Raises RegionError when there is no table of this layout."""
        try:
            self._file = os.open(path, os.O_RDWR)
        except OSError as error:
            raise RegionError(f"no slab table at {path}: {error.strerror}") from None
        magic, *rest = _HEADER.unpack(os.pread(self._file, _HEADER.size, 0).ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC:
            os.close(self._file)
            raise RegionError(f"{path} is no slab table of this version; remove it")
        self._map = mmap.mmap(self._file, 0)
        self.header = TableHeader(*rest[:5])
        self._view = memoryview(self._map)
        words = self._view[_HEADER.size : _HEADER.size + self.header.engines * _ROW * 8].cast("q")
        self.counters = [Counters(words[e * _ROW : (e + 1) * _ROW]) for e in range(self.header.engines)]
        self._words = words
        self._tickets = words[Counters.FIELDS.index("ticket") :: _ROW]
        self._wants = words[Counters.FIELDS.index("wanted_slabs") :: _ROW]
        start = _HEADER.size + self.header.engines * _ROW * 8
        count = self.header.slab_count
        self._owners = self._view[start : start + count]
        self._writers = self._view[start + count : start + 2 * count]
        self._marks = np.frombuffer(self._owners, np.uint8)  # the owners, to be counted fast
        self._first_byte = start

    @classmethod
    def create(cls, path: Path, slab_count: int, slab_bytes: int, engines: int, reserved_slabs: int = 1) -> SlabTable:
        """A new table with every slab free but the reserved ones, in place of any former one. Raises ValueError when
        there are too many engines or too few slabs."""
        if not 1 <= engines <= MAX_ENGINES or slab_count <= reserved_slabs:
            raise ValueError(
                f"slab table: {slab_count} slabs of {slab_bytes} bytes, for at most {MAX_ENGINES} engines "
                f"({reserved_slabs} are reserved); enlarge region_bytes"
            )
        header = _HEADER.pack(_MAGIC, slab_count, slab_bytes, reserved_slabs, engines, os.getpid(), 0, 0)
        owners = bytes([RESERVED]) * reserved_slabs + bytes(slab_count - reserved_slabs)
        content = header + bytes(engines * _ROW * 8) + owners + bytes(slab_count)
        with private_file(path) as file:
            file.write(content)
        return cls(path)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Exclude every other taker. Not reentrant."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def free_slabs(self, below: int | None = None) -> int:
        """How many slabs (of those below one) are free."""
        marks = self._marks[:below]
        return len(marks) - int(np.count_nonzero(marks))  # FREE is 0

    def owned_slabs(self, engine: int) -> int:
        return int(np.count_nonzero(self._marks == engine + 1))

    def owner_of(self, slab: int) -> int | None:
        """The engine that leases the slab; None while it is free or reserved."""
        mark = self._owners[slab]
        return mark - 1 if FREE < mark < STRANGER else None

    def take(self, engine: int, count: int) -> list[int] | None:
        """The lowest ``count`` free slabs, or None when there are fewer. Hold the lock."""
        slabs: list[int] = []
        at = self._first_byte
        end = at + self.header.slab_count
        for _ in range(count):
            at = self._map.find(b"\0", at, end)
            if at < 0:
                return None
            slabs.append(at - self._first_byte)
            at += 1
        self.take_these(engine, slabs)
        return slabs

    def take_run(self, engine: int, count: int) -> int | None:
        """The first of ``count`` free slabs in a row, the highest there are (KV grows from the other end); None when no
        gap is that long. Hold the lock."""
        at = self._map.rfind(bytes(count), self._first_byte, self._first_byte + self.header.slab_count)
        if at < 0:
            return None
        first = at - self._first_byte
        self._owners[first : first + count] = bytes([engine + 1]) * count
        return first

    def give_back(self, engine: int, slabs: Sequence[int], *, meaningful: bool = True) -> None:
        """Free slabs of this engine; no lock needed. ``meaningful``: their bytes are this engine's KV."""
        for slab in slabs:
            if self._owners[slab] != engine + 1:
                raise RegionError(f"engine {engine} gives back slab {slab}, which it does not lease")
            self._writers[slab] = engine + 1 if meaningful else STRANGER
            self._owners[slab] = FREE

    def changed_hands(self, engine: int, slab: int) -> bool:
        """Whether another engine wrote into the slab since this engine did. Fresh memory counts as its own: it is zero."""
        return self._writers[slab] not in (FREE, engine + 1)

    def mark_all_foreign(self) -> None:
        """Mark the bytes of all slabs as foreign to every engine."""
        self._writers[:] = bytes([STRANGER]) * self.header.slab_count

    def reclaim(self, engine: int) -> int:
        """Free all slabs of an engine that is gone, forget its row, and return how many they were. Hold the lock."""
        freed = 0
        for slab in range(self.header.slab_count):
            if engine + 1 in (self._owners[slab], self._writers[slab]):
                self._writers[slab] = STRANGER
            if self._owners[slab] == engine + 1:
                self._owners[slab] = FREE
                freed += 1
        self.counters[engine].clear()
        return freed

    # --- tickets: who starves, in the order in which it began --------------------------------------------------------

    def draw_ticket(self, engine: int) -> None:
        """Queue up as starving, unless queued already. Hold the lock."""
        if not self.counters[engine].get("ticket"):
            last = max(row.get("ticket") for row in self.counters)
            self.counters[engine].set("ticket", last + 1)

    def drop_ticket(self, engine: int) -> None:
        self.counters[engine].set("ticket", 0)

    def first_starving(self) -> int | None:
        """The engine that starves longest; None when no engine does."""
        if not any(self._tickets):
            return None
        return min((ticket, engine) for engine, ticket in enumerate(self._tickets) if ticket)[1]

    def others_starve(self, engine: int) -> bool:
        """Whether another engine starves, and has for longer than this one."""
        return self.first_starving() not in (None, engine)

    def others_want(self, engine: int) -> bool:
        """Whether the weights of another engine found no run of free slabs, and look again."""
        return any(self._wants) and any(slabs for each, slabs in enumerate(self._wants) if each != engine)

    def free_marks(self) -> npt.NDArray[np.bool_]:
        """Which slabs are free, as of now."""
        return np.equal(self._marks, FREE)

    def take_these(self, engine: int, slabs: Sequence[int]) -> None:
        """Take slabs that are free. Hold the lock."""
        for slab in slabs:
            self._owners[slab] = engine + 1

    def close(self) -> None:
        """Detach. The file stays."""
        if self._file < 0:
            return
        del self._marks
        for row in self.counters:
            row._words.release()
        for view in (self._tickets, self._wants, self._words, self._owners, self._writers, self._view):
            view.release()
        self._map.close()
        os.close(self._file)
        self._file = -1
