"""vLLM's block pool over leased slabs.

vLLM's own pool keeps all free blocks in one queue. A free block goes back into its slab at once, and the slab to the table
when all its blocks are free. Only blocks that carry a cached prefix stay behind when their last reader leaves. They are *idle*
and count as free. They are evicted in least-recently-used order when blocks or slabs run short.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.block_pool import BlockHashToBlockMap, BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from fineserve_runtime.engines.lease import SlabLease


class _Blocks(dict[int, KVCacheBlock]):
    """Block objects by id, made when first used: ids span the region, of which an engine uses a small part."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self._pool = pool

    def __missing__(self, block_id: int) -> KVCacheBlock:
        block = self[block_id] = KVCacheBlock(block_id, pool=self._pool)
        return block


class SlabBlockPool(BlockPool):  # type: ignore[misc]
    """``num_gpu_blocks`` counts what the engine could get at most; ``free_block_queue`` holds the idle blocks alone."""

    def __init__(self, num_gpu_blocks: int, enable_caching: bool, *args: Any, lease: SlabLease, **kwargs: Any) -> None:
        super().__init__(1, enable_caching, *args, **kwargs)  # the null block, nothing else
        self.num_gpu_blocks = lease.capacity_blocks + 1
        self.blocks = _Blocks(self)
        self.blocks[0] = self.null_block
        self._lease = lease

    @property
    def idle_blocks(self) -> int:
        return int(self.free_block_queue.num_free_blocks)

    def get_num_free_blocks(self) -> int:
        return int(self.free_block_queue.num_free_blocks) + self._lease.free_blocks()

    def get_usage(self) -> float:
        in_use = self._lease.used_blocks - self.idle_blocks
        return in_use / max(1, self.num_gpu_blocks - 1)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        fresh = min(num_blocks, self._lease.free_blocks())
        if num_blocks - fresh > self.idle_blocks:
            raise ValueError(f"{num_blocks} blocks wanted, {self.get_num_free_blocks()} are free")
        ids = self._lease.alloc(fresh)
        assert ids is not None, "the lease promised these blocks"
        blocks = [self.blocks[block_id] for block_id in ids]
        blocks.extend(self._evict_oldest() for _ in range(num_blocks - fresh))
        for block in blocks:
            assert block.ref_cnt == 0
            block.ref_cnt = 1
            if self.metrics_collector:
                self.metrics_collector.on_block_allocated(block)
        return blocks

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        to_keep: list[KVCacheBlock] = []
        to_return: list[KVCacheBlock] = []
        for block in ordered_blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                keep = self.enable_caching and block.block_hash is not None
                (to_keep if keep else to_return).append(block)
        self.free_block_queue.append_n(to_keep)
        if to_return:
            self._lease.free([block.block_id for block in to_return])

    def make_room(self) -> None:
        """Give up idle prefixes, oldest first, while the region is crowded, and memory held ahead of need."""
        while self.idle_blocks and self._lease.crowded():
            self._lease.free([self._evict_oldest().block_id])
        self._lease.settle()

    def forget_idle(self) -> None:
        """Give up all idle prefixes."""
        while self.idle_blocks:
            self._lease.free([self._evict_oldest().block_id])

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes and give their blocks back. False, and nothing done, while blocks are in use."""
        if self._lease.used_blocks > self.idle_blocks:
            return False
        if self.idle_blocks:
            idle = self.free_block_queue.popleft_n(self.idle_blocks)
            for block in idle:
                block.reset_hash()
            self._lease.free([block.block_id for block in idle])
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.cached_block_hashes_by_block.clear()
        return True

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Any) -> None:
        raise NotImplementedError("the KV slab keeps no blocks readable after they were released (HiSparse)")

    def _evict_oldest(self) -> KVCacheBlock:
        block = self.free_block_queue.popleft()
        self._maybe_evict_cached_block(block)
        return block
