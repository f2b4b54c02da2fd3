"""Attention of a step over all layers: by roofline, or by measured tables where there are any.

    attention = max(decode[decodes](context), floor if any prefill) + prefill

One kernel serves decodes and prefills, so its floor (launches) is paid once. Decode attention is piecewise linear in the
summed context for each batch size. By roofline, decode attention reads the KV cache, and prefill is the larger of its
query-key pairs over the compute rate and its KV over the bandwidth.

By tables, prefill is read for prompts of equal length with as many keys per query, 2 * pairs / tokens - 1: exact for equal
prompts without a prefix. A chunk after a cached prefix, which no table has, counts as the part of such a prompt that its
tokens are. It takes at least what it takes without the prefix, and the time to read the prefix's KV (assumed).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

from fineserve_sim.catalog import GemmKernel, ModelSpec, kv_heads_per_gpu
from fineserve_sim.latency.cost import ASSUMED, EXTRAPOLATED, MEASURED, ROOFLINE, rate_code
from fineserve_sim.latency.tables import DecodeTable, PiecewiseLinear, PrefillTable

TILE_ROWS = 64
"""Rows of a tile of FlashAttention 2 over paged KV (kBlockM of its split kernel; Dao-AILab/flash-attention)."""
IDLE_TILE_S = 3.0e-7
"""Seconds for which a tile without rows keeps an SM. Source: LLMServingSim's profile of vLLM 0.19 (@ 5daddb2). Decodes take
longer beside 2,048 prompt tokens than beside 64, by 0.30 us an idle tile and SM on an RTX 4090 and on an RTX PRO 6000."""
WAVE_TILES = 2
"""Tiles of decodes that an SM takes at a time. Source: as of ``TAIL_SMS``."""
TAIL_SMS = 0.16
"""The part of the SMs whose time the longest of uneven sequences costs. Source: the same profile's times of uneven batches.
Those below two tiles an SM have no such time (0.00 to 0.02). The medians of larger batches are 0.19 to 0.23 on an RTX 4090
(2 to 8 tiles). On an RTX PRO 6000 they are 0.10 to 0.16 (2.7 to 5.4 tiles, five pairs of heads)."""


class Tail(NamedTuple):
    """From ``least`` decodes on, the longest delays a step as much as ``sequences`` that hold its excess over the mean."""

    least: int
    sequences: float

    def tokens(self, decodes: int, longest: int, context: int) -> int:
        """Tokens of context that take as long. The longest of so many decodes has ``longest``, all have ``context``."""
        return int(self.sequences * (decodes * longest - context) / decodes)


class Tiles:
    """Attention of decodes by FlashAttention 2, on one GPU and over all layers: a GPU with so many ``sms``.

    Alone, a decode has a tile for each KV head. When they are more than the SMs take at a time, the tiles of the longest
    sequence end last (``tail``). Beside prompts, a decode fills a tile for each query head, and all rows are computed. So 16,
    64 and 128 decodes of 1,024 tokens on an RTX 4090 take 1.7, 2.1 and 2.6 times as long as alone.
    The kernel also starts as many tiles for every sequence as the longest chunk has. They are idle, and take ``idle_s`` for
    each ``TILE_ROWS`` rows of the chunk.
    """

    def __init__(self, model: ModelSpec, tp: int, sms: int) -> None:
        heads = kv_heads_per_gpu(model, tp)
        self.tail = Tail(-(-WAVE_TILES * sms // heads), TAIL_SMS * sms / heads)
        self.idle_s = model.layers * (model.q_heads // tp) * IDLE_TILE_S / sms


class Attention(Protocol):
    """Attention of one GPU over all layers.

    A query-key pair of a prefill needs the compute units for ``pair_s``. A cached token needs the memory for ``kv_s``.
    Launches take ``floor_s``. Sources are codes of ``SOURCES``.
    """

    @property
    def pair_s(self) -> float: ...
    @property
    def kv_s(self) -> float: ...
    @property
    def floor_s(self) -> float: ...

    def decode(self, decodes: int) -> PiecewiseLinear:
        """Seconds of ``decodes`` decoding sequences (> 0) against their summed context, new tokens included."""

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        """Seconds beyond the floor of prompt chunks with these sums (``Batch``); ``tokens`` > 0."""

    def beside_prompts_s(self, decodes: int, tokens: int) -> float:
        """Seconds that ``decodes`` decoding sequences (> 0) take more beside prompt chunks of ``tokens`` tokens (> 0)."""

    def decode_source(self, decodes: int, context: int) -> int:
        """Where the decodes' seconds come from."""

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        """Where the seconds of prompt chunks come from."""


@dataclass(frozen=True)
class RooflineAttention:
    """Attention by roofline, on one GPU and over all layers: FLOPs of a query-key pair of a prefill, KV bytes of a token."""

    kernel: GemmKernel
    layers: int
    pair_flops: int
    token_bytes: int

    @cached_property
    def pair_s(self) -> float:
        return self.pair_flops / self.kernel.flops_per_s.value

    @cached_property
    def kv_s(self) -> float:
        return self.token_bytes / self.kernel.bytes_per_s.value

    @cached_property
    def floor_s(self) -> float:
        return self.kernel.launch_s.value * self.layers

    def decode(self, decodes: int) -> PiecewiseLinear:
        return PiecewiseLinear([0.0], [self.floor_s], self.kv_s)

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        attend_s = pairs * self.pair_s
        read_s = (context + tokens) * self.kv_s
        return attend_s if attend_s > read_s else read_s

    def beside_prompts_s(self, decodes: int, tokens: int) -> float:
        return 0.0

    def decode_source(self, decodes: int, context: int) -> int:
        return rate_code(self.kernel.bytes_per_s)

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        computes = pairs * self.pair_s > (context + tokens) * self.kv_s
        return rate_code(self.kernel.flops_per_s if computes else self.kernel.bytes_per_s)


@dataclass(frozen=True)
class TableAttention(RooflineAttention):
    """Attention by tables, and by roofline where one is missing.

    Beyond a launch, decodes take ``decode_slowdown`` times the table's seconds, and at least ``read_s`` a token of context.
    ``inside`` tells where interpolated seconds come from: measured, or roofline on another GPU than the tables'.
    """

    decode_table: DecodeTable | None
    prefill_table: PrefillTable | None
    decode_slowdown: float
    read_s: float
    inside: int

    @cached_property
    def floor_s(self) -> float:
        return self.prefill_table.floor_s if self.prefill_table else super().floor_s

    def decode(self, decodes: int) -> PiecewiseLinear:
        if self.decode_table is None:
            return super().decode(decodes)
        return self.decode_table.curve(decodes, self.layers, self.decode_slowdown).at_least(self.read_s)

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        if self.prefill_table is None:
            return super().prefill_s(tokens, pairs, context)
        attend_s = self.prefill_table.beyond_floor_s(tokens, pairs, context)
        read_s = (context + tokens) * self.kv_s
        return attend_s if attend_s > read_s else read_s

    def decode_source(self, decodes: int, context: int) -> int:
        if self.decode_table is None:
            return super().decode_source(decodes, context)
        covered = self.decode_table.covers(decodes, context / decodes + 1)
        return self._tabled(covered, self.decode_table.exact)

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        if self.prefill_table is None:
            return super().prefill_source(tokens, pairs, context)
        covered = 2.0 * pairs / tokens - 1.0 <= self.prefill_table.longest
        return self._tabled(covered, self.prefill_table.exact and not context)

    def _tabled(self, covered: bool, exact: bool) -> int:
        """``exact``: the table has such rows itself; else what stands for them is assumed."""
        if not covered and self.inside == MEASURED:
            return EXTRAPOLATED
        return self.inside if covered and exact else ASSUMED if covered else ROOFLINE
