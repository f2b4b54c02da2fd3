"""Paged attention of one layer: vLLM's FlashAttention or CPU kernel, else torch's attention over contiguous keys.

The blocks of a sequence lie anywhere in the cache, as they do in an engine that has served a while. On a GPU, cache, layouts
and call follow vLLM's FlashAttention backend (0.32). Keys and values share a row. The axes are layers L, blocks B, KV heads H,
tokens of a block N and that row C; a layout is their order in memory. FlashAttention 3 plans a batch once, not in every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fineserve_calibrate.probes.schema import Point, Prepared, Unavailable

if TYPE_CHECKING:
    from fineserve_calibrate.probes.torch_device import Call, TorchDevice

CUDA_BLOCK, CPU_BLOCK = 16, 32
LAYOUT = "LBNHC"
"""vLLM's own choice where nothing asks for another."""
LAYERS = 32  # of a cache whose layouts are compared


@dataclass(frozen=True, slots=True)
class Shape:
    """A batch of equal sequences: ``new`` queries each, over ``keys`` keys with the new ones."""

    batch: int
    new: int
    keys: int
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str

    @property
    def kv_bytes(self) -> int:
        """Bytes of the cached keys and values."""
        return 2 * self.batch * self.keys * self.kv_heads * self.head_dim * (1 if self.kv_dtype == "fp8" else 2)


def _shape(point: Point, new: int, keys: int) -> Shape:
    q_heads, kv_heads, head_dim, batch = (int(point[name]) for name in ("q_heads", "kv_heads", "head_dim", "batch"))
    return Shape(batch, new, keys, q_heads, kv_heads, head_dim, str(point["kv_dtype"]))


def _pages(device: TorchDevice, shape: Shape, block: int) -> tuple[int, Any, Any, Any]:
    """Blocks in all, the block table, where each sequence's queries start, and how many keys each has."""
    torch = device.torch
    each = -(-shape.keys // block)
    total = shape.batch * each
    table = torch.randperm(total, device=device.name, dtype=torch.int32).reshape(shape.batch, each)
    starts = torch.arange(shape.batch + 1, device=device.name, dtype=torch.int32) * shape.new
    keys = torch.full((shape.batch,), shape.keys, device=device.name, dtype=torch.int32)
    return total, table, starts, keys


def cache_layers(device: TorchDevice, layout: str, layers: int, blocks: int, shape: Shape) -> list[tuple[Any, Any]]:
    """Make keys and values of each layer, shape (blocks, tokens, KV heads, head dimension), as views of one cache."""
    sizes = {"L": layers, "B": blocks, "H": shape.kv_heads, "N": CUDA_BLOCK, "C": 2 * shape.head_dim}
    dtype = device.torch.float8_e4m3fn if shape.kv_dtype == "fp8" else device.torch.bfloat16
    cache = device.random(*(sizes[axis] for axis in layout), dtype=dtype)
    ordered = cache.permute([layout.index(axis) for axis in "LBNHC"])
    return [tuple(layer.split(shape.head_dim, dim=-1)) for layer in ordered]


def _flash_version() -> int:
    """The FlashAttention that vLLM chooses on this GPU: 3 on Hopper, 4 on Blackwell, else 2."""
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version

    version = get_flash_attn_version()
    if version is None:
        raise Unavailable("vLLM has no FlashAttention for this GPU")
    return int(version)


def _flash(device: TorchDevice, shape: Shape, version: int, layout: str = LAYOUT, layers: int = 1) -> list[Call]:
    """A call for each layer of one batch."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    torch, eight = device.torch, shape.kv_dtype == "fp8"
    total, table, starts, keys = _pages(device, shape, CUDA_BLOCK)
    dtype = torch.float8_e4m3fn if eight else torch.bfloat16
    query = device.random(shape.batch * shape.new, shape.q_heads, shape.head_dim, dtype=dtype)
    out = torch.empty(query.shape, device=device.name, dtype=torch.bfloat16)
    scale = torch.ones(1, device=device.name).expand(shape.batch, shape.kv_heads) if eight else None
    plan = None
    if version == 3:
        plan = get_scheduler_metadata(
            batch_size=shape.batch,
            max_seqlen_q=shape.new,
            max_seqlen_k=shape.keys,
            num_heads_q=shape.q_heads,
            num_heads_kv=shape.kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=keys,
            qkv_dtype=dtype,
            cu_seqlens_q=starts,
            page_size=CUDA_BLOCK,
            causal=True,
        )

    def attend(k: Any, v: Any) -> Call:
        return lambda: flash_attn_varlen_func(
            q=query,
            k=k,
            v=v,
            out=out,
            max_seqlen_q=shape.new,
            cu_seqlens_q=starts,
            max_seqlen_k=shape.keys,
            seqused_k=keys,
            causal=True,
            block_table=table,
            scheduler_metadata=plan,
            fa_version=version,
            q_descale=scale,
            k_descale=scale,
            v_descale=scale,
        )

    return [attend(k, v) for k, v in cache_layers(device, layout, layers, total, shape)]


def _cpu(device: TorchDevice, shape: Shape) -> Call:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    torch, ops, sixteen = device.torch, device.ops, device.torch.bfloat16
    kv_dtype = "fp8" if shape.kv_dtype == "fp8" else "auto"
    total, table, starts, keys = _pages(device, shape, CPU_BLOCK)
    query = device.random(shape.batch * shape.new, shape.q_heads, shape.head_dim)
    stored = torch.float8_e4m3fn if kv_dtype == "fp8" else sixteen
    cache = device.random(total, shape.kv_heads, 2 * CPU_BLOCK, shape.head_dim, dtype=stored)
    cache = cache.view(torch.uint8) if kv_dtype == "fp8" else cache
    k, v = cache.chunk(2, dim=2)
    out = torch.empty_like(query)
    plan = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=shape.batch,
        num_heads=shape.q_heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        seq_lens=keys,
        dtype=sixteen,
        query_start_loc=starts,
        causal=True,
        sliding_window_size=-1,
        isa=_get_attn_isa(sixteen, CPU_BLOCK, shape.head_dim, kv_dtype),
        enable_kv_split=True,
        kv_cache_dtype=kv_dtype,
    )
    return lambda: ops.cpu_attention_with_kv_cache(
        query=query,
        key_cache=k,
        value_cache=v,
        output=out,
        query_start_loc=starts,
        seq_lens=keys,
        scale=shape.head_dim**-0.5,
        causal=True,
        alibi_slopes=None,
        sliding_window=-1,
        block_table=table,
        softcap=0.0,
        scheduler_metadata=plan,
        s_aux=None,
        kv_cache_dtype=kv_dtype,
    )


def _torch(device: TorchDevice, shape: Shape) -> Call:
    if shape.kv_dtype != "bfloat16":
        raise Unavailable(f"a KV cache in {shape.kv_dtype} needs vLLM's kernels")
    from torch.nn.attention.bias import causal_lower_right

    query = device.random(shape.batch, shape.q_heads, shape.new, shape.head_dim)
    k, v = (device.random(shape.batch, shape.kv_heads, shape.keys, shape.head_dim) for _ in range(2))
    mask = causal_lower_right(shape.new, shape.keys) if shape.new > 1 else None
    attend = device.torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(query, k, v, attn_mask=mask, enable_gqa=shape.q_heads != shape.kv_heads)


def _prepare(device: TorchDevice, shape: Shape) -> Prepared:
    buffers = device.buffers(shape.kv_bytes + 4 * shape.batch * shape.new * shape.q_heads * shape.head_dim)
    if device.ops is None:
        return device.timed([_torch(device, shape) for _ in range(buffers)], "torch attention, not paged")
    if device.on_cpu:
        return device.timed([_cpu(device, shape) for _ in range(buffers)], "vllm cpu attention")
    version = _flash_version()
    if shape.kv_dtype == "fp8" and version == 2:
        raise Unavailable("FlashAttention 2 has no fp8 KV cache")
    calls = [call for _ in range(buffers) for call in _flash(device, shape, version)]
    return device.timed(calls, f"vllm FlashAttention {version}")


def prefill(device: TorchDevice, point: Point) -> Prepared:
    """Prepare causal attention of new tokens over themselves and a cached prefix."""
    new, cached = int(point["new_tokens"]), int(point["cached_tokens"])
    return _prepare(device, _shape(point, new, new + cached))


def decode(device: TorchDevice, point: Point) -> Prepared:
    """Prepare attention of one new token a sequence over its context."""
    return _prepare(device, _shape(point, 1, int(point["context"])))


def kv_layout(device: TorchDevice, point: Point) -> Prepared:
    """Prepare decode attention over all layers of a cache in one layout; a sample is one layer."""
    if device.on_cpu or device.ops is None:
        raise Unavailable("layouts are those of vLLM's caches on a GPU")
    shape = _shape(point, 1, int(point["context"]))
    calls = _flash(device, shape, _flash_version(), str(point["layout"]), LAYERS)
    return device.timed(calls, f"vllm FlashAttention {_flash_version()}")
