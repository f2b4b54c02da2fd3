"""KV memory mapped page by page, on a CPU: kvcached's pages (Prism, section 5.1) and vTensor's chunks as leases of the region.

An engine reserves address space for all the KV it could ever hold. Its *pages* lie there one behind the other. Page ``id`` is
behind the table's slabs as soon as it is *mapped*: ``tensors`` slabs of the region, K and V of each layer, which need not be
neighbours. vLLM's layout keeps all layers of a block together, so the tensors' parts of a page do not lie apart as in kvcached;
bytes and calls are the same. Page 0 has memory of its own, for the engine's null block. Memory that is not mapped cannot be
read: a process that tries is killed.

A row of vTensor's chunks is such a page, with one block. Its kernels see the rows of a request side by side; vLLM's take a
table of blocks, so rows lie anywhere. `trim_s` has no meaning here: the region's bytes are there whether chunks use them or
not.

Each call maps one slab (mmap of the region's file), or, where ``Paging.batched``, as many as are neighbours in the region.
With ``Paging.ahead``, a thread makes the calls: the engine waits only for a page that it takes before it is mapped. Bounds of
the buffer and the order of its use follow the core's `KvCachedManager`. One thing differs. There, a page that one engine
buffers is another one's at once; here its engine gives it up between two of its steps.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from fineserve_runtime.engines.api import Paging
from fineserve_runtime.engines.table import RegionError, SlabTable, TableHeader

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_FAILED = ctypes.c_void_p(-1).value
_PROT_NONE = 0
_MAP_FIXED = 0x10  # Linux on every processor that vLLM has a CPU backend for, as the next one
_MAP_NORESERVE = 0x4000
_NOBODYS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


class AddressSpace:
    """Address space for ``pages`` of ``tensors`` slabs each over the region's file at ``path``; ``array`` is all of it, int8.
    Raises RegionError when it is not to be had. It is given back when nothing uses it or a view of it any more."""

    def __init__(self, path: Path, slab_bytes: int, tensors: int, pages: int) -> None:
        self.slab_bytes = slab_bytes
        self.page_bytes = tensors * slab_bytes
        self.pages = pages
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            reserved = mmap.mmap(-1, pages * self.page_bytes, flags=_NOBODYS)
        except OSError as error:
            raise RegionError(f"no address space for {pages} pages over {path}: {error.strerror}") from None
        self.array: npt.NDArray[np.int8] = np.frombuffer(reserved, dtype=np.int8)
        self._first = self.array.ctypes.data
        self._forbid(self.page_bytes, (pages - 1) * self.page_bytes)

    def map(self, page: int, slabs: Sequence[int], *, batched: bool) -> None:
        """These slabs are behind the page from now on. Raises RegionError when the kernel refuses."""
        flags = mmap.MAP_SHARED | _MAP_FIXED | mmap.MAP_POPULATE
        at = page * self.page_bytes
        for run in _runs(slabs) if batched else [[slab] for slab in slabs]:
            length = len(run) * self.slab_bytes
            _place(
                self._first + at, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, self._file, run[0] * self.slab_bytes
            )
            at += length

    def unmap(self, page: int, *, batched: bool) -> None:
        """Nothing is behind the page any more."""
        length = self.page_bytes if batched else self.slab_bytes
        for at in range(page * self.page_bytes, (page + 1) * self.page_bytes, length):
            self._forbid(at, length)

    def fill(self, page: int, byte: int) -> None:
        self.array.view(np.uint8)[page * self.page_bytes : (page + 1) * self.page_bytes] = byte

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def _forbid(self, at: int, length: int) -> None:
        if length:
            _place(self._first + at, length, _PROT_NONE, _NOBODYS | _MAP_FIXED, -1, 0)


def _place(address: int, length: int, access: int, flags: int, file: int, offset: int) -> None:
    if _libc.mmap(address, length, access, flags, file, offset) == _FAILED:
        raise RegionError(f"{length} bytes of KV memory cannot be mapped: {os.strerror(ctypes.get_errno())}")


def _runs(slabs: Sequence[int]) -> list[list[int]]:
    """Slabs in their order, cut where a slab is not the neighbour of the one before."""
    runs: list[list[int]] = []
    for slab in slabs:
        if runs and runs[-1][-1] + 1 == slab:
            runs[-1].append(slab)
        else:
            runs.append([slab])
    return runs


def pages_of(header: TableHeader, tensors: int) -> int:
    """Pages that all slabs of the table make, and page 0."""
    return header.slab_count // tensors + 1


def check_pages(slab_count: int) -> None:
    """Raises ValueError for more slabs than the kernel maps for a process, each on its own; it needs some for other things."""
    most = int(Path("/proc/sys/vm/max_map_count").read_text()) // 2
    if slab_count > most:
        raise ValueError(
            f"the region is {slab_count} pages; half of vm.max_map_count is {most}: enlarge that, or memory.page_bytes"
        )


_spaces: WeakValueDictionary[tuple[Path, int], AddressSpace] = WeakValueDictionary()


def address_space(path: Path, engine: int, header: TableHeader, tensors: int, *, anew: bool) -> AddressSpace:
    """The address space of an engine of this process: the scheduler maps pages in the one that the worker made ``anew``."""
    space = None if anew else _spaces.get((path, engine))
    if space is None:
        space = AddressSpace(path, header.slab_bytes, tensors, pages_of(header, tensors))
        _spaces[path, engine] = space
    return space


class PageBacking:
    """Pages of ``space`` as an engine's units, the lowest that is free first. The pages of its buffer are spare."""

    reserved = 1

    def __init__(self, table: SlabTable, space: AddressSpace, engine: int, paging: Paging) -> None:
        self.table = table
        self.unit_bytes = space.page_bytes
        self.units = space.pages
        self.limit = space.pages - 1
        self._space = space
        self._engine = engine
        self._paging = paging
        self._tensors = space.page_bytes // space.slab_bytes
        self._slabs: dict[int, list[int]] = {}  # by page that is mapped or about to be
        self._foreign: set[int] = set()
        self._buffer: deque[int] = deque()
        self._mapped: dict[int, Future[None]] = {}  # pages whose calls nobody has waited for
        self._unmapped: dict[int, Future[None]] = {}
        self._numbers = count(1)
        self._returned: list[int] = []  # a min-heap
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pages") if paging.ahead != (0, 0) else None
        self._free = 0
        self.look()

    @property
    def spare_bytes(self) -> int:
        return len(self._buffer) * self.unit_bytes

    def look(self) -> None:
        self._free = self.table.free_slabs() // self._tensors
        for page in [page for page, call in self._unmapped.items() if call.done()]:
            self._unmapped.pop(page).result()

    def obtainable(self) -> int:
        return len(self._buffer) + self._free

    def take(self, count: int) -> list[int]:
        buffered = [self._buffer.popleft() for _ in range(min(count, len(self._buffer)))]
        pages = buffered + [self._map() for _ in range(count - len(buffered))]
        for page in pages:
            self._wait_for(page)
        return pages

    def give_back(self, unit: int, *, meaningful: bool) -> None:
        if not meaningful:
            self._foreign.add(unit)
        if len(self._buffer) < self._paging.ahead[1] and not self._wanted_by_others():
            self._buffer.appendleft(unit)
        else:
            self._unmap(unit)

    def fill(self, unit: int, byte: int) -> None:
        self._space.fill(unit, byte)

    def foreign(self, unit: int) -> bool:
        """Asked once: what is written from now on is the engine's."""
        foreign = unit in self._foreign
        self._foreign.discard(unit)
        return foreign

    def holds(self, unit: int) -> bool:
        return unit in self._slabs and unit not in self._buffer

    def crowded(self) -> bool:
        return self._free + len(self._unmapped) < max(1, self.limit // 16)

    def settle(self, *, may_take: bool) -> None:
        if self._wanted_by_others():
            while self._buffer and self._wanted_by_others():
                self._unmap(self._buffer.pop())
            return
        while may_take and len(self._buffer) < self._paging.ahead[0] and self._free > max(1, self.limit // 16):
            self._buffer.append(self._map())

    def give_up_spares(self) -> None:
        while self._buffer:
            self._unmap(self._buffer.pop())
        for call in self._unmapped.values():
            call.result()
        self.look()

    def check(self, leased: int) -> None:
        slabs = [slab for page in self._slabs.values() for slab in page]
        assert len(self._slabs) == leased + len(self._buffer), "pages leased"
        assert len(set(slabs)) == len(slabs) == self._tensors * len(self._slabs), "a slab is behind two pages"
        assert all(self.table.owner_of(slab) == self._engine for slab in slabs), (
            "a slab behind a page is somebody else's"
        )
        assert len(self._buffer) <= self._paging.ahead[1], "buffered pages"

    def close(self) -> None:
        """Pages are unmapped before their slabs can be anybody's: the worker's tensors may outlive this."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        for page in self._slabs:
            self._space.unmap(page, batched=True)
        self._slabs.clear()
        self.table.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _wanted_by_others(self) -> bool:
        """Another engine starves or wakes and finds no memory, or is about to."""
        return self.table.others_starve(self._engine) or self.table.others_want(self._engine) or self.crowded()

    def _map(self) -> int:
        """Have a page mapped, by and by."""
        slabs = self.table.take(self._engine, self._tensors)
        assert slabs is not None, "the table grants fewer slabs than it counted"
        self._free -= 1
        page = heappop(self._returned) if self._returned else next(self._numbers)
        self._slabs[page] = slabs
        if any(self.table.changed_hands(self._engine, slab) for slab in slabs):
            self._foreign.add(page)
        self._mapped[page] = self._call(lambda: self._space.map(page, slabs, batched=self._paging.batched), "map")
        return page

    def _wait_for(self, page: int) -> None:
        """Raises RegionError when it could not be mapped."""
        call = self._mapped.pop(page, None)
        if call is not None:
            call.result()

    def _unmap(self, page: int) -> None:
        slabs = self._slabs.pop(page)
        meaningful = page not in self._foreign
        self._foreign.discard(page)
        self._mapped.pop(page, None)

        def work() -> None:
            self._space.unmap(page, batched=self._paging.batched)
            self.table.give_back(self._engine, slabs, meaningful=meaningful)

        self._unmapped[page] = self._call(work, "unmap")
        heappush(self._returned, page)  # calls are made in order

    def _call(self, work: Callable[[], None], what: str) -> Future[None]:
        def timed() -> None:
            begun_ns = time.perf_counter_ns()
            work()
            row = self.table.counters[self._engine]
            row.add(f"{what}_ns", time.perf_counter_ns() - begun_ns)
            row.add(f"pages_{what}ped", 1)

        if self._thread is not None:
            return self._thread.submit(timed)
        done: Future[None] = Future()
        timed()
        done.set_result(None)
        return done
