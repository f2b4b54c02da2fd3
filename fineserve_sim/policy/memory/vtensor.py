"""vTensor: each request's KV in virtual tensors of its own, mapped chunk by chunk (vTensor/FlexInfer, section 5).

A request gets a virtual range of the maximum sequence length in each of ``2 * layers`` tensors. Physical chunks of 2 MB come
behind it as it grows, so that kernels see contiguous KV. Chunks of all tensors of a request grow, are shared and are freed
together. One chunk in every tensor is a *row*. A row is this memory's KV block: so many tokens that K or V of one layer fill
2 MB.

* *pSet*: the chunks that exist. Freed chunks stay in it, unmapped, for the next request that allocates (lazy deallocation).
  After ``trim_s`` without use they go back to the GPU. [R: the paper's memory shrinks with its load, though its rule is to
  keep them until the end.]
* *rTree*: the records of finished requests' prefixes (prefix.py). A match copies page table entries and raises reference
  counts; no chunk is taken, nothing is copied. Records are given up, least recently used first, when rows run out.

Chunks are alike, so the pSet is a count with times; rows have identities, for they are shared. The virtual ranges (vSet)
cost no memory and belong to the requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, islice

from fineserve_sim.policy.interfaces import KVLedger
from fineserve_sim.policy.memory.kvcached import PAGE_BYTES
from fineserve_sim.policy.memory.prefix import SharedBlocks
from fineserve_sim.policy.memory.slab import Owners

CHUNK_BYTES = PAGE_BYTES


def tokens_per_chunk(tensor_token_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Tokens in a chunk; ``tensor_token_bytes`` is K or V of one, in one layer on this GPU. ValueError if it holds none."""
    if not 0 < tensor_token_bytes <= chunk_bytes:
        raise ValueError(f"vTensor: a token of {tensor_token_bytes} bytes does not fit a chunk of {chunk_bytes}")
    return chunk_bytes // tensor_token_bytes


@dataclass(frozen=True, slots=True)
class ChunkCosts:
    """Host seconds a chunk on the way to a kernel: to create one (only new chunks) and to map it (every chunk). With
    ``ahead``, a row is mapped while the step before runs and costs a step nothing (vTensor 5.4 and 6)."""

    create_s: float = 0.0
    map_s: float = 0.0
    ahead: bool = True


@dataclass
class _Tenant:
    """One engine: rows of ``tensors`` chunks each, every one with a new name. ``ready_s``: when its last row is mapped."""

    tensors: int
    rows: SharedBlocks = field(default_factory=SharedBlocks)
    names: Iterator[int] = field(default_factory=count)
    ready_s: float = float("-inf")


class VTensorManager:
    """The KV memory of one GPU in rows of chunks; a `TimedKVManager` and a `PrefixKVManager` (see interfaces.py).

    ``limit_bytes`` of physical memory are for chunks. ``owners``: by engine, how many tensors it has (K and V of each layer
    that the GPU holds). An unused chunk stays for ``trim_s``; infinity keeps all until the end. Raises ValueError for a
    negative limit, or an engine without tensors.
    """

    def __init__(
        self,
        limit_bytes: int,
        owners: Mapping[int, int],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        trim_s: float = 1.0,
        costs: ChunkCosts | None = None,
    ) -> None:
        if limit_bytes < 0 or min(owners.values(), default=1) < 1:
            raise ValueError(
                f"vTensor: limit {limit_bytes} bytes, tensors {dict(owners)}; need limit >= 0, tensors >= 1"
            )
        self.chunk_bytes = chunk_bytes
        self._limit_bytes = limit_bytes
        self._limit_chunks = limit_bytes // chunk_bytes
        self._trim_s = trim_s
        self._costs = costs or ChunkCosts()
        self._tenants = Owners("vTensor", {owner: _Tenant(tensors) for owner, tensors in owners.items()})
        self._now = 0.0
        self._held_chunks = 0
        self._spare: deque[tuple[float, int]] = deque()  # (time of release, chunks), oldest first

    def alloc(self, owner: int, blocks: int) -> list[int] | None:
        """``blocks`` rows for one sequence, or None when they do not all fit even without any record; then nothing is taken.
        Raises ValueError for an unknown owner or a negative number."""
        tenant = self._tenants[owner]
        if blocks < 0:
            raise ValueError(f"vTensor: owner {owner} asks for {blocks} rows; it must be 0 or more")
        chunks = blocks * tenant.tensors
        if chunks > self._free_chunks():
            return None
        missing = self._held_chunks + chunks - self._limit_chunks
        for giver in (tenant, *(other for other in self._tenants.values() if other is not tenant)):  # its own first
            if missing > 0:
                missing -= self._release(giver, giver.rows.evict(-(-missing // giver.tensors)))
        self._take_chunks(tenant, chunks)
        ids = list(islice(tenant.names, blocks))
        tenant.rows.add(ids)
        return ids

    def free(self, owner: int, block_ids: Sequence[int]) -> None:
        """A sequence lets go of rows. Raises ValueError for one that no sequence of ``owner`` holds, or that is given twice;
        then nothing is given back."""
        tenant = self._tenants[owner]
        try:
            freed = tenant.rows.drop(block_ids)
        except ValueError as error:
            raise ValueError(f"vTensor: owner {owner}: {error}") from None
        self._release(tenant, freed)

    def match(self, owner: int, keys: Sequence[int]) -> list[int]:
        return self._tenants[owner].rows.match(keys)

    def record(self, owner: int, keys: Sequence[int], block_ids: Sequence[int]) -> None:
        self._tenants[owner].rows.record(keys, block_ids)

    def references(self, owner: int, block: int) -> int:
        """How many virtual tensors and records map the row."""
        return self._tenants[owner].rows.references(block)

    def _release(self, tenant: _Tenant, rows: Sequence[int]) -> int:
        """Unmap rows that no sequence holds: their chunks, so many, are spare from now on."""
        chunks = len(rows) * tenant.tensors
        self._held_chunks -= chunks
        if chunks:
            self._spare.append((self._now, chunks))
            self.advance(self._now)
        return chunks

    def _take_chunks(self, tenant: _Tenant, chunks: int) -> None:
        """pAlloc and Map: spare chunks first, those released last before others; new ones for the rest."""
        self._held_chunks += chunks
        new = chunks
        while new and self._spare:
            released_s, spare = self._spare.pop()
            if spare > new:
                self._spare.append((released_s, spare - new))
            new -= min(spare, new)
        if not self._costs.ahead:
            seconds = chunks * self._costs.map_s + new * self._costs.create_s
            tenant.ready_s = max(tenant.ready_s, self._now) + seconds

    def advance(self, now: float) -> None:
        """pFree chunks that were spare for long enough."""
        self._now = now
        while self._spare and self._spare[0][0] + self._trim_s <= now:
            self._spare.popleft()

    def exposed_s(self, owner: int) -> float:
        """Seconds from now until the driver has mapped what this engine waits for; 0 when it maps ahead."""
        return max(0.0, self._tenants[owner].ready_s - self._now)

    def _free_chunks(self) -> int:
        """Chunks under the limit once all records are given up."""
        evictable = sum(tenant.rows.evictable * tenant.tensors for tenant in self._tenants.values())
        return self._limit_chunks - self._held_chunks + evictable

    def free_blocks(self, owner: int) -> int:
        """How many rows ``owner`` could get now, all records given up."""
        return self._free_chunks() // self._tenants[owner].tensors

    def capacity_blocks(self, owner: int) -> int:
        return self._limit_chunks // self._tenants[owner].tensors

    def used_bytes(self, owner: int) -> int:
        """Bytes of the rows that sequences and records of ``owner`` hold, each counted once."""
        tenant = self._tenants[owner]
        return len(tenant.rows) * tenant.tensors * self.chunk_bytes

    def fits(self, demands: Mapping[int, int]) -> bool:
        """Whether all these rows would be granted in any order and without host time, with records given up if need be. Owners
        that are not registered here are ignored."""
        tenants = self._tenants
        chunks = sum(blocks * tenants[owner].tensors for owner, blocks in demands.items() if owner in tenants)
        return not chunks or (self._costs.ahead and chunks <= self._free_chunks())

    def mapped_bytes(self) -> int:
        """Physical memory in use by the pSet: rows, and spare chunks not yet trimmed."""
        return (self._held_chunks + sum(chunks for _, chunks in self._spare)) * self.chunk_bytes

    def ledger(self) -> KVLedger:
        """The bytes under the limit. Nothing is stranded, for a chunk serves any tensor; spare chunks are free."""
        held = self._held_chunks * self.chunk_bytes
        lost = self._limit_bytes % self.chunk_bytes
        return KVLedger(self._limit_bytes, held, 0, self._limit_bytes - lost - held, lost)

    def check(self) -> None:
        held = 0
        for tenant in self._tenants.values():
            tenant.rows.check()
            held += len(tenant.rows) * tenant.tensors
        assert held == self._held_chunks, f"{held} chunks are held, {self._held_chunks} are counted"
        assert self.mapped_bytes() <= self._limit_bytes, "more chunks than there is memory"
        assert min(self.ledger()) >= 0, f"the ledger does not add up: {self.ledger()}"
