"""From a memory policy of systems/spec.py that is no plain pool to its manager, its block, its kernel.

Driver time comes from the catalog (``driver.yaml``): a page of kvcached is created and mapped in every tensor, or by one
batched call where layers lie side by side; a chunk of vTensor is created unless a spare one is at hand, and mapped.
"""

from __future__ import annotations

from collections.abc import Mapping

from fineserve_sim.catalog import AttentionVariant, attention_variant, driver_costs
from fineserve_sim.policy.memory.geometry import KVGeometry
from fineserve_sim.policy.memory.kvcached import KvCachedManager, VirtualKV
from fineserve_sim.policy.memory.vtensor import ChunkCosts, VTensorManager, tokens_per_chunk
from fineserve_sim.systems.spec import ContiguousSpec, KvCachedSpec, MemorySpec, PrivatePoolsSpec, VTensorSpec


def tokens_per_block(spec: MemorySpec, block: KVGeometry, max_context_tokens: int) -> int:
    """Tokens of the unit in which a memory policy gives KV to an engine: its rows of chunks, its whole reservation, or the
    engine's own block. Raises ValueError when a chunk holds no token."""
    if isinstance(spec, VTensorSpec):
        tensor_token_bytes = block.block_layer_bytes // block.tokens_per_block // 2
        return tokens_per_chunk(tensor_token_bytes, spec.chunk_bytes)
    if isinstance(spec, ContiguousSpec):
        return min(max_context_tokens, spec.max_tokens or max_context_tokens)
    return block.tokens_per_block


def legacy_kernel(spec: MemorySpec) -> AttentionVariant | None:
    """The attention kernel that a memory policy forces upon its engines; None: today's."""
    if isinstance(spec, PrivatePoolsSpec) and spec.attention != "current":
        return attention_variant(spec.attention)
    return None


def caches_prefixes(spec: MemorySpec) -> bool:
    """Whether blocks of sequences that ended serve others with the same prefix."""
    return isinstance(spec, PrivatePoolsSpec | VTensorSpec) and spec.prefix_cache


def build_kvcached(
    spec: KvCachedSpec, kv_bytes: int, blocks: Mapping[int, KVGeometry], *, virtual_bytes: int | None = None
) -> KvCachedManager:
    """kvcached over ``kv_bytes``, at most ``virtual_bytes`` ever, for engines with these KV blocks. Raises ValueError when a
    page may hold no block."""
    buffered = spec.mode == "buffered"
    return KvCachedManager(
        kv_bytes,
        {engine: virtual_kv(spec, block) for engine, block in blocks.items()},
        page_bytes=spec.page_bytes,
        min_reserved=spec.min_reserved if buffered else 0,
        max_reserved=max(spec.min_reserved, spec.max_reserved) if buffered else 0,
        virtual_bytes=virtual_bytes,
    )


def virtual_kv(spec: KvCachedSpec, block: KVGeometry) -> VirtualKV:
    """The KV tensors of an engine with this block."""
    costs, tensors = driver_costs(), 2 * block.layers
    if spec.mode == "contiguous":
        map_s = unmap_s = costs.batched_map_s.value
    else:
        map_s = tensors * (costs.create_s.value + costs.map_s.value)
        unmap_s = tensors * costs.unmap_s.value
    return VirtualKV(tensors, block.block_layer_bytes // 2, map_s, unmap_s)


def build_vtensor(spec: VTensorSpec, kv_bytes: int, blocks: Mapping[int, KVGeometry]) -> VTensorManager:
    """vTensor memory over ``kv_bytes`` for engines with these KV blocks."""
    costs = driver_costs()
    return VTensorManager(
        kv_bytes,
        {engine: 2 * block.layers for engine, block in blocks.items()},
        chunk_bytes=spec.chunk_bytes,
        trim_s=spec.trim_s,
        costs=ChunkCosts(costs.create_s.value, costs.map_s.value, ahead=spec.extend == "ahead"),
    )
