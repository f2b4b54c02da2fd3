"""KV that a sequence brings along: from another engine (live migration), or back from host memory (swap).

vLLM asks a *KV connector* about each sequence that it is about to start: how many of its tokens are computed elsewhere. It
allocates blocks for them and tells the connector which. `Carried` answers for sequences whose KV is here as bytes, and
writes the bytes at once. The region is mapped in the scheduler's process, and the step that reads the blocks has not begun.
So the sequence goes on with the next token as if it had never left: nothing is computed again.

The scheduler has this connector during ``schedule`` alone (`SlabScheduler`). vLLM's other parts see no connector, so workers
take no part in a transfer.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from dataclasses import dataclass, field
from typing import Any

from fineserve_runtime.engines.api import KvPart
from fineserve_runtime.engines.lease import SlabLease


@dataclass(slots=True)
class _Parcel:
    """``blocks`` hold the first ``tokens`` of the sequence. ``room``: blocks of the pool that are kept for them."""

    tokens: int = 0
    blocks: list[bytes] = field(default_factory=list)
    room: list[Any] = field(default_factory=list)


class Carried:
    """The KV of sequences that do not run, in host memory, by vLLM's ids."""

    supports_divergent_local_hybrid_hits = False

    def __init__(self, lease: SlabLease, block_tokens: int) -> None:
        self._lease = lease
        self._block_tokens = block_tokens
        self._parcels: dict[str, _Parcel] = {}

    def put(self, request_id: str, part: KvPart, room: Collection[Any] = ()) -> None:
        """Keep more KV of a sequence: from the block after those that are here already, or from an earlier one. ``room`` are
        blocks of the pool that are kept for it meanwhile."""
        parcel = self._parcels.setdefault(request_id, _Parcel())
        parcel.blocks[part.first_block :] = part.blocks
        parcel.tokens = part.tokens
        parcel.room += room

    def continues(self, request_id: str, part: KvPart) -> bool:
        """Whether all blocks before this part are here. They are not where the engine died since it got them."""
        parcel = self._parcels.get(request_id)
        return part.first_block <= (len(parcel.blocks) if parcel else 0)

    def tokens_of(self, request_id: str) -> int:
        parcel = self._parcels.get(request_id)
        return 0 if parcel is None else parcel.tokens

    def take_room(self, request_ids: Set[str]) -> list[Any]:
        """The blocks kept for these sequences, which are about to start and be given others."""
        found = []
        for parcel in (self._parcels[id] for id in self._parcels.keys() & request_ids):
            found += parcel.room
            parcel.room = []
        return found

    def forget(self, request_id: str) -> list[Any]:
        """The blocks that were kept for the sequence."""
        parcel = self._parcels.pop(request_id, None)
        return [] if parcel is None else parcel.room

    # --- what ``Scheduler.schedule`` calls ---------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """At least one token of a sequence is computed here, for its logits."""
        here = min(self.tokens_of(request.request_id), request.num_tokens - 1)
        return max(0, here - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """``blocks`` are all blocks of the sequence. The first ones may be a prefix that the engine had in cache."""
        parcel = self._parcels.pop(request.request_id, None)
        if parcel is None or not num_external_tokens:
            return
        tokens = min(parcel.tokens, request.num_tokens - 1)
        first, last = (tokens - num_external_tokens) // self._block_tokens, -(-tokens // self._block_tokens)
        self._lease.write_blocks(blocks.get_block_ids()[0][first:last], parcel.blocks[first:last])

    def has_pending_block_frees(self) -> bool:
        return False

    def build_connector_meta(self, scheduler_output: Any) -> None:
        """Nothing is left for workers to do."""
