"""Steps that take longer than the model alone makes them.

By a factor, or shorter: what a model error of that size would make of a cluster. Every part of a step is multiplied, the host's
time included, so that all shares of it stay as they are. By copies of KV: some seconds a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fineserve_sim.latency.attention import Attention
from fineserve_sim.latency.cost import ASSUMED, Cost, Floats
from fineserve_sim.latency.operators import Adjusted
from fineserve_sim.latency.rates import Provenance
from fineserve_sim.latency.tables import PiecewiseLinear


@dataclass(frozen=True)
class SlowedAttention:
    """The attention of ``plain``, in ``factor`` times the seconds."""

    plain: Attention
    factor: float

    @property
    def pair_s(self) -> float:
        return self.factor * self.plain.pair_s

    @property
    def kv_s(self) -> float:
        return self.factor * self.plain.kv_s

    @property
    def floor_s(self) -> float:
        return self.factor * self.plain.floor_s

    def decode(self, decodes: int) -> PiecewiseLinear:
        return self.plain.decode(decodes).scaled(self.factor)

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        return self.factor * self.plain.prefill_s(tokens, pairs, context)

    def beside_prompts_s(self, decodes: int, tokens: int) -> float:
        return self.factor * self.plain.beside_prompts_s(decodes, tokens)

    def decode_source(self, decodes: int, context: int) -> int:
        return self.plain.decode_source(decodes, context)

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        return self.plain.prefill_source(tokens, pairs, context)


@dataclass(frozen=True)
class Slowed(Adjusted):
    """The operators of ``plain``, each in ``factor`` times the seconds. Attention is slowed apart."""

    factor: float

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        return {name: self._slowed(cost) for name, cost in self.plain.by_tokens(tokens).items()}

    def by_sampled(self, rows: Floats) -> dict[str, Cost]:
        return {name: self._slowed(cost) for name, cost in self.plain.by_sampled(rows).items()}

    def _slowed(self, cost: Cost) -> Cost:
        seconds, compute_s, memory_s = (self.factor * part for part in cost[:3])
        return Cost(seconds, compute_s, memory_s, cost.source)

    def provenance(self) -> list[Provenance]:
        """The numbers of ``plain``, and the factor."""
        told = Provenance("step_time_factor", self.factor, "x", "assumed", "engine.step_time_factor")
        return [*self.plain.provenance(), told]


@dataclass(frozen=True)
class Offloaded(Adjusted):
    """The operators of ``plain`` in an engine that copies the KV of each token to the host, which takes ``token_s``."""

    token_s: float

    def by_tokens(self, tokens: Floats) -> dict[str, Cost]:
        """As ``plain``, and the copies, which keep no unit of the GPU busy."""
        nothing = np.zeros(tokens.shape)
        copies = Cost(self.token_s * tokens, nothing, nothing, np.full(tokens.shape, ASSUMED))
        return self.plain.by_tokens(tokens) | {"kv_offloading": copies}

    def provenance(self) -> list[Provenance]:
        """The numbers of ``plain``, and the copies."""
        told = Provenance("kv_offloading.token_s", self.token_s, "s", "assumed", "engine.kv_offloading.store_s_per_gib")
        return [*self.plain.provenance(), told]
