"""Another attention kernel: the plain one's, times what the kernel takes longer (catalog, legacy table).

Decode attention is scaled as a whole. Prefill attention is scaled when prompt tokens attend to cached ones, a prefix or
earlier chunks; a prompt that starts from nothing runs the plain kernel in every system. A slower kernel needs the units of
the GPU for no more work, so its shares are smaller.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fineserve_sim.catalog import AttentionVariant
from fineserve_sim.latency.attention import Attention
from fineserve_sim.latency.cost import ASSUMED
from fineserve_sim.latency.rates import Provenance
from fineserve_sim.latency.tables import PiecewiseLinear


@dataclass(frozen=True)
class LegacyAttention:
    """The attention of ``kernel``, for which ``plain`` is known, with so many query heads a KV head."""

    plain: Attention
    kernel: AttentionVariant
    heads_per_kv_head: float

    @cached_property
    def decode_factor(self) -> float:
        """How many times longer the kernel takes for decodes."""
        return self.kernel.decode_factor(self.heads_per_kv_head)

    @property
    def pair_s(self) -> float:
        return self.plain.pair_s

    @property
    def kv_s(self) -> float:
        return self.plain.kv_s

    @property
    def floor_s(self) -> float:
        return self.plain.floor_s

    def decode(self, decodes: int) -> PiecewiseLinear:
        return self.plain.decode(decodes).scaled(self.decode_factor)

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        return self.plain.prefill_s(tokens, pairs, context) * (self.kernel.prefix_prefill if context else 1.0)

    def beside_prompts_s(self, decodes: int, tokens: int) -> float:
        return self.plain.beside_prompts_s(decodes, tokens)

    def decode_source(self, decodes: int, context: int) -> int:
        return ASSUMED

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        return ASSUMED if context else self.plain.prefill_source(tokens, pairs, context)

    def provenance(self) -> list[Provenance]:
        """The factors and their source."""
        factors = {"decode": self.decode_factor, "prefix_prefill": self.kernel.prefix_prefill}
        kernel = self.kernel
        return [
            Provenance(f"{kernel.name}.{name}", value, "x", "assumed", kernel.source) for name, value in factors.items()
        ]
