"""KV geometry: how many bytes a token, a KV block and a KV slab take on one GPU.

FineServe, section 3.2 (C1), gives the two equations for one layer:

    TokenSize    = (heads / TP) x head dim x 2 (K and V) x bytes per element
    KV blocksize = tokens per block x TokenSize + quantisation parameters

"Heads" are KV heads: with grouped-query attention only those are cached. An engine stores all layers of a block together,
so memory is accounted over the layers that the GPU holds; the per-layer sizes are for kernels.

Models with different block sizes share a KV tensor in slabs of one size (section 5.2). Every engine sees the tensor as
an array of its own blocks (the *grid* of its block size, or *key*): block ``id`` always starts at byte ``id * block``.
Slab ``s`` owns the grid blocks that lie wholly in it:

    first(s) = ceil(s * slab / block)      end(s) = floor((s + 1) * slab / block)      id = first(s) + local

The paper's rule is the least common multiple (LCM): the slab size is a multiple of every block size. Then this is the
paper's ``id = s * blocks_per_slab + local``, and no byte is lost. The LCM explodes with uneven sizes (340 MiB for five
common models), so above a cap some keys give up the rule. We call such a key a *grid key*. Its blocks that straddle a slab
boundary are never used: on average less than one block per slab.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

MAX_LCM_BYTES = 64 * 2**20  # our choice, the paper gives none: about a thousand slabs on an 80 GiB GPU


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of one model's KV cache on one GPU of its tensor-parallel group.

    This GPU holds ``layers``: all of them unless pipeline-parallel or partly dropped. The whole model has ``kv_heads``, each of
    ``head_dim`` elements of ``element_bytes`` (2 for FP16, 1 for FP8, 0.5 for INT4). The block stores
    ``quant_bytes_per_head`` of scale and zero point for each head of each token, for K and for V alike. That is 0 where the
    scale lies outside (FP16; FP8 per tensor), and 4 for QoQ's KV4, an FP16 scale and zero. ``tp`` is the tensor-parallel
    degree.

    ``mean_token_layer_bytes`` is for layers that are not alike: the bytes of a token in one layer, on average over layers and
    over sequences of usual length. It stands for heads and elements.

    Raises ValueError for a count below 1, KV heads that do not divide over the group, or a token that is no whole byte.
    """

    layers: int
    kv_heads: int
    head_dim: int
    element_bytes: float
    quant_bytes_per_head: int = 0
    tokens_per_block: int = 16
    tp: int = 1
    mean_token_layer_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "tokens_per_block", "tp", "quant_bytes_per_head"):
            value, least = getattr(self, name), int(name != "quant_bytes_per_head")
            if value < least:
                raise ValueError(f"KV geometry: {name} is {value}; it must be at least {least}")
        if self.kv_heads % self.tp and self.tp % self.kv_heads:
            raise ValueError(
                f"KV geometry: {self.kv_heads} KV heads do not spread over tp={self.tp}; "
                "one must be a multiple of the other"
            )
        exact = self.heads_per_gpu * self.head_dim * 2 * self.element_bytes
        if exact <= 0 or exact != int(exact):
            raise ValueError(
                f"KV geometry: element_bytes={self.element_bytes} makes a token of {exact} bytes a layer; "
                "it must be a positive whole number"
            )

    @property
    def heads_per_gpu(self) -> int:
        """KV heads kept by each GPU; one head is replicated when the group is larger than the number of heads."""
        return max(1, self.kv_heads // self.tp)

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of K and V of one token in one layer, without quantisation parameters (the paper's TokenSize)."""
        if self.mean_token_layer_bytes is not None:
            return self.mean_token_layer_bytes
        return int(self.heads_per_gpu * self.head_dim * 2 * self.element_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in a block: all layers, quantisation parameters included."""
        return self.block_bytes // self.tokens_per_block

    @property
    def block_layer_bytes(self) -> int:
        """Bytes of one block in one layer (the paper's KV blocksize), quantisation parameters of K and V included."""
        quant_bytes = 0 if self.mean_token_layer_bytes else self.heads_per_gpu * 2 * self.quant_bytes_per_head
        return self.tokens_per_block * (self.token_layer_bytes + quant_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers: the key by which a KV slab is formatted."""
        return self.layers * self.block_layer_bytes

    def blocks_for_tokens(self, tokens: int) -> int:
        """Blocks that a sequence of ``tokens`` tokens occupies; its last block may be partly filled."""
        return -(-tokens // self.tokens_per_block)


@dataclass(frozen=True, slots=True)
class SlabPlan:
    """The slab size of a GPU and the block sizes (keys) that its slabs can be formatted to."""

    slab_bytes: int
    block_bytes: tuple[int, ...]

    def is_grid(self, key: int) -> bool:
        """Whether blocks of this size straddle slab boundaries, so that bytes are lost."""
        return self.slab_bytes % key != 0

    def span(self, key: int, slab: int) -> tuple[int, int]:
        """Block ids ``[first, end)`` that the slab owns when it is formatted to ``key``."""
        return -(-slab * self.slab_bytes // key), (slab + 1) * self.slab_bytes // key

    def least_blocks(self, key: int) -> int:
        """Blocks that any slab holds at least: one of a grid key may have a block less than its bytes say."""
        return self.slab_bytes // key - self.is_grid(key)


def plan_slabs(block_bytes: Iterable[int], *, cap_bytes: int = MAX_LCM_BYTES, multiple: int = 1) -> SlabPlan:
    """The slab size for co-located models with these block sizes (duplicates allowed).

    The slab is ``multiple`` times the LCM of the block sizes (the paper's k, which it does not give). While the LCM
    exceeds ``cap_bytes``, the key whose removal lowers it most leaves the LCM and becomes a grid key. Among equals it is the
    smallest, which loses least. The last key stays in any case. With grid keys, the multiple grows, beyond the cap
    if it must, until a slab is two of their blocks long: then each slab holds one, wherever it starts.
    Raises ValueError for no block size, or a size, cap or multiple below 1.
    """
    keys = tuple(sorted(set(block_bytes)))
    if not keys or keys[0] < 1:
        raise ValueError(f"slab plan: the block sizes are {list(keys)}; there must be some, all of at least 1 byte")
    if cap_bytes < 1 or multiple < 1:
        raise ValueError(f"slab plan: cap_bytes={cap_bytes} and multiple={multiple} must both be at least 1")
    aligned = list(keys)
    while math.lcm(*aligned) > cap_bytes and len(aligned) > 1:
        aligned.remove(min(aligned, key=lambda key: math.lcm(*(other for other in aligned if other != key))))
    lcm = math.lcm(*aligned)
    largest_dropped = max((key for key in keys if lcm % key), default=0)
    return SlabPlan(lcm * max(multiple, -(-2 * largest_dropped // lcm)), keys)
