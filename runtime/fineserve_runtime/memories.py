"""How a system's KV memory shapes its engines: how their memory is mapped, and in which units they take it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fineserve_runtime.engines.api import EngineConfig, Paging
from fineserve_runtime.engines.model_files import kv_geometry, read_config
from fineserve_sim.policy.memory.kvcached import MAX_RESERVED, MIN_RESERVED
from fineserve_sim.systems.spec import ContiguousSpec, KvCachedSpec, KvSlabSpec, MemorySpec, VTensorSpec

SHARED = KvSlabSpec | KvCachedSpec | VTensorSpec
"""Memories of which the engines of a device take what they need."""

_ROWS_AHEAD = (1, 1)
"""vTensor maps the row that comes next before the step that needs it (vTensor, section 5.4)."""


def paging(memory: MemorySpec) -> Paging | None:
    """How KV memory is mapped page by page; None where it is not."""
    if isinstance(memory, KvCachedSpec):
        ahead = (MIN_RESERVED, MAX_RESERVED) if memory.mode == "buffered" else (0, 0)
        return Paging(memory.page_bytes, ahead, batched=memory.mode == "contiguous")
    if isinstance(memory, VTensorSpec):
        return Paging(memory.chunk_bytes, _ROWS_AHEAD if memory.extend == "ahead" else (0, 0))
    return None


def in_memory(engine: EngineConfig, memory: MemorySpec, folder: Path) -> EngineConfig:
    """The engine under this memory; its model lies in ``folder``. A row of vTensor's chunks is its KV block. Where whole
    sequences get room, none is longer than ``max_tokens``. Raises ValueError for chunks of another size than some blocks."""
    if isinstance(memory, VTensorSpec):
        tokens = _row_tokens(engine, memory.chunk_bytes, read_config(folder))
        return replace(engine, block_tokens=tokens, prefix_caching=engine.prefix_caching or memory.prefix_cache)
    if isinstance(memory, ContiguousSpec):
        return replace(engine, max_model_len=min(engine.max_model_len, memory.max_tokens or engine.max_model_len))
    return engine


def _row_tokens(engine: EngineConfig, chunk_bytes: int, found: Mapping[str, Any]) -> int:
    """Tokens of which K or V in one layer fill a chunk. Rows are as many blocks of ``engine``, whose size suits vLLM."""
    part_bytes = kv_geometry(found, engine).block_layer_bytes // 2
    if chunk_bytes % part_bytes:
        raise ValueError(
            f"chunks of {chunk_bytes} bytes do not suit {engine.name}: take a multiple of the {part_bytes} bytes that "
            f"{engine.block_tokens} tokens (engine.block_tokens) have in a tensor"
        )
    return chunk_bytes // part_bytes * engine.block_tokens
