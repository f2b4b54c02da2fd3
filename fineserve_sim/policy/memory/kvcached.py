"""kvcached: KV memory of a GPU mapped page by page under virtual tensors (Prism, section 5.1).

An engine reserves virtual address space for all the KV it could ever hold: one tensor for K and one for V in each
layer. Physical memory comes in pages of 2 MB and is mapped when blocks need it. A *page* here is the same page index in
every tensor, for a block of tokens lies in all layers. Growing by one page costs ``2 * layers`` physical pages and as many
driver calls. Where the layers lie side by side (the contiguous layout), it costs one batched call.

Pages are never shared between engines, so that inside a mapped page an engine allocates as in a slab of its own (slab.py).
An empty page goes to its engine's buffer of mapped pages, or is unmapped. Unmapped memory is for the engine that maps next.

Time. Mapping and unmapping take host seconds. Without a buffer they delay the engine (``exposed_s``). With one, a
thread keeps ``min_reserved`` pages mapped ahead. The buffer is a queue of the moments at which its pages are mapped. A page
that is taken before its moment delays the engine until then. All of it is a function of the times given to ``advance``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fineserve_sim.policy.interfaces import KVLedger
from fineserve_sim.policy.memory.geometry import SlabPlan
from fineserve_sim.policy.memory.slab import KVSlabManager, Owners

PAGE_BYTES = 2 * 2**20
"""Granularity of the CUDA driver's virtual memory (Prism 5.1, vTensor 5.1)."""

MIN_RESERVED, MAX_RESERVED = 5, 10
"""Pages of an engine that a thread keeps mapped ahead, and emptied ones that stay mapped: kvcached's own defaults."""

MAPPED_LONG_AGO = float("-inf")


@dataclass(frozen=True, slots=True)
class VirtualKV:
    """The KV tensors of one engine on one GPU: ``tensors`` grow together, K and V of each layer. A KV block takes
    ``block_bytes`` in one of them. ``map_s`` and ``unmap_s`` are host seconds for one page in all of them."""

    tensors: int
    block_bytes: int
    map_s: float = 0.0
    unmap_s: float = 0.0


class _Engine:
    """One engine: ``pages`` allocates blocks in its virtual pages; ``mapped_at_s`` is its buffer, earliest page first.

    It may launch its next kernels from ``ready_s`` on; its thread is busy until ``thread_s``. Any page holds ``sure_blocks``
    at least: a block that straddles two belongs to neither.
    """

    def __init__(self, owner: int, kv: VirtualKV, page_bytes: int, virtual_bytes: int) -> None:
        plan = SlabPlan(page_bytes, (kv.block_bytes,))
        self.kv = kv
        self.page_bytes = kv.tensors * page_bytes
        self.sure_blocks = plan.least_blocks(kv.block_bytes)
        if self.sure_blocks < 1:
            raise ValueError(f"kvcached: a page of {page_bytes} bytes may hold no block of {kv.block_bytes}")
        self.pages = KVSlabManager(virtual_bytes // self.page_bytes * page_bytes, {owner: kv.block_bytes}, plan=plan)
        self.mapped_at_s: deque[float] = deque()
        self.ready_s = self.thread_s = MAPPED_LONG_AGO

    @property
    def held_pages(self) -> int:
        """Pages with blocks in them."""
        return self.pages.slab_count - self.pages.free_slabs

    def wait(self, now: float, seconds: float) -> None:
        """The engine itself spends ``seconds`` on the driver before it can go on."""
        self.ready_s = max(self.ready_s, now) + seconds


class KvCachedManager:
    """The KV memory of one GPU under virtual memory; a `TimedKVManager` (see interfaces.py).

    ``limit_bytes`` are the bytes that all engines together may hold and buffer (see ``set_limit``), ``owners`` are the KV
    tensors of each engine, in pages of ``page_bytes``. ``min_reserved`` and ``max_reserved`` bound each engine's buffer, in
    pages. The thread fills up to the minimum, and emptied pages stay up to the maximum. With 0 and 0 there is no buffer and no
    thread. kvcached itself takes 5 and 10. ``virtual_bytes`` of address space are reserved for each engine: the most that the
    limit can ever be; by default ``limit_bytes``.

    Raises ValueError for a negative limit, bounds of the buffer in the wrong order, or a page that may hold no block.
    """

    def __init__(
        self,
        limit_bytes: int,
        owners: Mapping[int, VirtualKV],
        *,
        page_bytes: int = PAGE_BYTES,
        min_reserved: int = 0,
        max_reserved: int = 0,
        virtual_bytes: int | None = None,
    ) -> None:
        if limit_bytes < 0 or not 0 <= min_reserved <= max_reserved:
            raise ValueError(
                f"kvcached: limit {limit_bytes} bytes, buffer of {min_reserved} to {max_reserved} pages; "
                "need limit >= 0 and 0 <= min <= max"
            )
        self._limit_bytes = limit_bytes
        self._min_reserved, self._max_reserved = min_reserved, max_reserved
        self._now = 0.0
        self._page_bytes = page_bytes
        self._virtual_bytes = limit_bytes if virtual_bytes is None else virtual_bytes
        engines = {owner: _Engine(owner, kv, page_bytes, self._virtual_bytes) for owner, kv in owners.items()}
        self._engines = Owners("kvcached", engines)
        self._held_bytes = 0
        # Serving begins with buffers that were filled long ago, a page for each engine in turn.
        for engine in [*engines.values()] * min_reserved:
            if self._may_buffer(engine):
                engine.mapped_at_s.append(MAPPED_LONG_AGO)

    def alloc(self, owner: int, blocks: int) -> list[int] | None:
        """As ``KVSlabManager.alloc``; where it takes nothing, no time passes either."""
        engine = self._engines[owner]
        held, obtainable = engine.held_pages, self._obtainable_pages(engine)
        if (ids := engine.pages.alloc(owner, blocks)) is None:
            return None
        grown = engine.held_pages - held
        if grown > obtainable:
            engine.pages.free(owner, ids)
            return None
        for _ in range(grown):
            self._take_page(engine)
        return ids

    def free(self, owner: int, block_ids: Sequence[int]) -> None:
        """As ``KVSlabManager.free``."""
        engine = self._engines[owner]
        held = engine.held_pages
        engine.pages.free(owner, block_ids)
        emptied = held - engine.held_pages
        for _ in range(emptied):
            self._held_bytes -= engine.page_bytes
            self._put_away(engine)
        if emptied:
            self._refill(self._engines.values())

    def _take_page(self, engine: _Engine) -> None:
        """A page from the buffer, else one mapped now, for which others may have to give up theirs."""
        if engine.mapped_at_s:
            engine.ready_s = max(engine.ready_s, engine.mapped_at_s.popleft())
        else:
            for mapped_s, unmap_s in self._give_up(self._limit_bytes - engine.page_bytes):
                engine.ready_s = max(engine.ready_s, mapped_s)
                engine.wait(self._now, unmap_s)
            engine.wait(self._now, engine.kv.map_s)
        self._held_bytes += engine.page_bytes
        self._refill([engine])

    def _put_away(self, engine: _Engine) -> None:
        """A page became empty: keep it mapped, or unmap it."""
        if len(engine.mapped_at_s) < self._max_reserved and self._may_buffer(engine):
            engine.mapped_at_s.appendleft(MAPPED_LONG_AGO)
        elif self._max_reserved:
            engine.thread_s = max(engine.thread_s, self._now) + engine.kv.unmap_s
        else:
            engine.wait(self._now, engine.kv.unmap_s)

    def _give_up(self, mapped_bytes: int) -> list[tuple[float, float]]:
        """Unmap buffered pages, of the engine that has most, until no more than ``mapped_bytes`` are in use or no buffer is
        left. Returns by page the moment at which it was mapped, and the seconds to unmap it."""
        given = []
        while self.mapped_bytes() > mapped_bytes:
            donor = max(self._engines.values(), key=lambda engine: len(engine.mapped_at_s))
            if not donor.mapped_at_s:
                break
            given.append((donor.mapped_at_s.pop(), donor.kv.unmap_s))
        return given

    def _refill(self, engines: Iterable[_Engine]) -> None:
        """Have the threads of these engines map pages up to the minimum, as far as the limits allow."""
        for engine in engines:
            while len(engine.mapped_at_s) < self._min_reserved and self._may_buffer(engine):
                engine.thread_s = max(engine.thread_s, self._now) + engine.kv.map_s
                engine.mapped_at_s.append(engine.thread_s)

    def _may_buffer(self, engine: _Engine) -> bool:
        own = engine.held_pages + len(engine.mapped_at_s) + 1
        return own <= engine.pages.slab_count and self.mapped_bytes() + engine.page_bytes <= self._limit_bytes

    def _obtainable_pages(self, engine: _Engine) -> int:
        """Pages that the engine could still come to hold: all buffers can be given up."""
        return min(engine.pages.free_slabs, max(0, self._limit_bytes - self._held_bytes) // engine.page_bytes)

    def advance(self, now: float) -> None:
        self._now = now

    def exposed_s(self, owner: int) -> float:
        return max(0.0, self._engines[owner].ready_s - self._now)

    def join(self, owner: int, kv: VirtualKV) -> None:
        """Another engine comes to the GPU. ValueError for one that is there, and as the constructor raises."""
        if owner in self._engines:
            raise ValueError(f"kvcached: owner {owner} joins twice")
        self._engines[owner] = _Engine(owner, kv, self._page_bytes, self._virtual_bytes)
        self._refill(self._engines.values())

    def leave(self, owner: int) -> None:
        """An engine goes, with its buffer. ValueError while it holds pages."""
        if pages := self._engines[owner].held_pages:
            raise ValueError(f"kvcached: owner {owner} leaves with {pages} pages in use")
        del self._engines[owner]
        self._refill(self._engines.values())

    def set_limit(self, limit_bytes: int) -> None:
        """Set the bytes that the GPU leaves for KV, after weights came or went. A limit below the held bytes bounds new pages
        at once, while held ones come back as requests end; buffers are given up first. Raises ValueError when negative."""
        if limit_bytes < 0:
            raise ValueError(f"kvcached: a limit of {limit_bytes} bytes; it must be 0 or more")
        self._limit_bytes = limit_bytes
        self._give_up(limit_bytes)
        self._refill(self._engines.values())

    def free_blocks(self, owner: int) -> int:
        """How many blocks ``owner`` could get now: exact when blocks fill pages, else on the safe side."""
        engine = self._engines[owner]
        return engine.pages.spare_blocks(owner) + self._obtainable_pages(engine) * engine.sure_blocks

    def capacity_blocks(self, owner: int) -> int:
        engine = self._engines[owner]
        return min(self._limit_bytes // engine.page_bytes, engine.pages.slab_count) * engine.sure_blocks

    def used_bytes(self, owner: int) -> int:
        """Bytes of the blocks that ``owner`` holds, over its tensors."""
        engine = self._engines[owner]
        return engine.pages.used_bytes(owner) * engine.kv.tensors

    def fits(self, demands: Mapping[int, int]) -> bool:
        """Whether all these blocks would be granted in any order and without host time: they then lie in pages held already.
        Owners that are not registered here are ignored."""
        engines = self._engines
        return all(
            owner not in engines or blocks <= engines[owner].pages.spare_blocks(owner)
            for owner, blocks in demands.items()
        )

    def mapped_bytes(self) -> int:
        """Physical memory of the GPU in use: held and buffered pages of all engines."""
        buffered = sum(len(engine.mapped_at_s) * engine.page_bytes for engine in self._engines.values())
        return self._held_bytes + buffered

    def block_bytes_held(self, owner: int) -> int:
        """Bytes of the blocks in the pages that ``owner`` holds, used or not, over its tensors."""
        engine = self._engines[owner]
        return self.used_bytes(owner) + engine.pages.spare_blocks(owner) * engine.kv.tensors * engine.kv.block_bytes

    def ledger(self) -> KVLedger:
        """The bytes under the limit, and bytes held beyond a lowered limit. Buffered pages are free, for they are
        given up on demand; a page's ends that hold no block are lost while the page is held."""
        used = sum(map(self.used_bytes, self._engines))
        stranded = sum(map(self.block_bytes_held, self._engines)) - used
        total = max(self._limit_bytes, self._held_bytes)
        return KVLedger(total, used, stranded, total - self._held_bytes, self._held_bytes - used - stranded)

    def check(self) -> None:
        held = 0
        for owner, engine in self._engines.items():
            engine.pages.check()
            held += engine.held_pages * engine.page_bytes
            buffered = list(engine.mapped_at_s)
            assert len(buffered) <= self._max_reserved, f"owner {owner} buffers {len(buffered)} pages"
            assert buffered == sorted(buffered), f"owner {owner} would take a page before an earlier one"
        assert held == self._held_bytes, f"{held} bytes are held, {self._held_bytes} are counted"
        assert self.mapped_bytes() <= max(self._limit_bytes, held), "buffers beyond the limit"
        assert min(self.ledger()) >= 0, f"the ledger does not add up: {self.ledger()}"
