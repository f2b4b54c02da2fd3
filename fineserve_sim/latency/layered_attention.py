"""Attention of layers that are not all alike, out of attentions of layers that are.

* ``Windowed``: layers whose queries see the last tokens alone. A batch's decodes count as equally long, and so do its chunks;
  then the query-key pairs inside the window follow from the running sums. A chunk of c tokens after a prefix of P has
  ``pairs / tokens = P + (c + 1) / 2`` and ``context / tokens = P / c``.
* ``Chosen``: layers whose queries see so many tokens that an index chooses.
* ``Behind``: layers that keep K and V compressed. Decodes compute on the compressed vectors; prompts unfold the vectors of a
prefix. * ``PerSequence``: layers that keep a state of constant size for each sequence. * ``Summed``: all kinds of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from fineserve_sim.latency.attention import Attention
from fineserve_sim.latency.tables import PiecewiseLinear

CHUNK_TOKENS = 64
"""Tokens of a chunk in the kernel of the delta rule for prompts."""

COPIES = 4
"""Times that a copy out of the cache and back moves a state: it is read and written on either way."""


def capped(curve: PiecewiseLinear, at: float) -> PiecewiseLinear:
    """The curve up to ``at``, and its value there from then on."""
    kept = [(start, value) for start, value in zip(curve.starts, curve.values, strict=True) if start < at]
    starts, values = [start for start, _ in kept], [value for _, value in kept]
    return PiecewiseLinear([*starts, at], [*values, curve.at(at)], 0.0)


def summed(curves: list[PiecewiseLinear]) -> PiecewiseLinear:
    """The sum of curves that start together."""
    starts = sorted({start for curve in curves for start in curve.starts})
    values = [sum(curve.at(start) for curve in curves) for start in starts]
    return PiecewiseLinear(starts, values, sum(curve.slopes[-1] for curve in curves))


def windowed_pairs(tokens: int, pairs: float, context: int, window: int) -> tuple[float, int]:
    """Query-key pairs inside the window, and the cached tokens that they reach, of equal chunks with these sums."""
    mean_keys, prefix_ratio = pairs / tokens, context / tokens
    chunk = max((mean_keys - 0.5) / (prefix_ratio + 0.5), 1.0)
    prefix = prefix_ratio * chunk
    if prefix + chunk <= window:
        return pairs, context
    growing = min(max(window - prefix, 0.0), chunk)  # queries whose window is not full yet
    inside = growing * prefix + growing * (growing + 1.0) / 2.0 + (chunk - growing) * window
    return inside * tokens / chunk, int(min(prefix, window) * tokens / chunk)


@dataclass(frozen=True)
class Windowed:
    """``full`` attention, of which a query sees the last ``tokens`` tokens."""

    full: Attention
    tokens: int

    @cached_property
    def pair_s(self) -> float:
        return self.full.pair_s

    @cached_property
    def kv_s(self) -> float:
        return self.full.kv_s

    @cached_property
    def floor_s(self) -> float:
        return self.full.floor_s

    def decode(self, decodes: int) -> PiecewiseLinear:
        return capped(self.full.decode(decodes), float(decodes * self.tokens))

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        inside, reached = windowed_pairs(tokens, pairs, context, self.tokens)
        return self.full.prefill_s(tokens, max(inside, float(tokens)), reached if inside == pairs else 0)

    def beside_prompts_s(self, decodes: int, tokens: int) -> float:
        return self.full.beside_prompts_s(decodes, tokens)

    def decode_source(self, decodes: int, context: int) -> int:
        return self.full.decode_source(decodes, min(context, decodes * self.tokens))

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        inside, reached = windowed_pairs(tokens, pairs, context, self.tokens)
        return self.full.prefill_source(tokens, max(inside, float(tokens)), reached)


@dataclass(frozen=True)
class Chosen(Windowed):
    """``full`` attention to ``tokens`` tokens that an index chooses: where there are fewer, the rest is computed and masked."""

    def decode(self, decodes: int) -> PiecewiseLinear:
        return PiecewiseLinear([0.0], [self.full.decode(decodes).at(float(decodes * self.tokens))], 0.0)

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        return self.full.prefill_s(tokens, float(tokens * self.tokens), 0)


@dataclass(frozen=True)
class Behind:
    """Compressed attention: ``folded_s`` of a decode's pair (None: as ``plain`` has it), ``unfold_s`` of a prompt's cached
    token; else as ``plain``."""

    plain: Attention
    folded_s: float | None
    unfold_s: float

    @cached_property
    def pair_s(self) -> float:
        return self.plain.pair_s

    @cached_property
    def kv_s(self) -> float:
        return self.plain.kv_s

    @cached_property
    def floor_s(self) -> float:
        return self.plain.floor_s

    def decode(self, decodes: int) -> PiecewiseLinear:
        if self.folded_s is None:
            return self.plain.decode(decodes)
        return PiecewiseLinear([0.0], [self.floor_s], max(self.kv_s, self.folded_s))

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        return self.plain.prefill_s(tokens, pairs, context) + context * self.unfold_s

    def beside_prompts_s(self, decodes: int, tokens: int) -> float:
        return self.plain.beside_prompts_s(decodes, tokens)

    def decode_source(self, decodes: int, context: int) -> int:
        return self.plain.decode_source(decodes, context)

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        return self.plain.prefill_source(tokens, pairs, context)


@dataclass(frozen=True)
class PerSequence:
    """A state for each sequence: seconds of a batch's decodes by their number, and of prompts by their tokens.

    ``source`` is where the seconds come from; launches take ``floor_s``.

    Beside prompts, decodes go through the prompts' kernel, as vLLM's do. Each fills a chunk of its own. Its state is copied out
    of the cache and back, which takes ``copied_s``. Source: ``gdn_linear_attn`` and ``qwen3_next`` of vLLM 0.11 to 0.17.
    """

    decodes: PiecewiseLinear
    prompts: PiecewiseLinear
    floor_s: float
    source: int
    copied_s: float
    pair_s: float = 0.0
    kv_s: float = 0.0

    def decode(self, decodes: int) -> PiecewiseLinear:
        return PiecewiseLinear([0.0], [self.decodes.at(decodes)], 0.0)

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        return self.prompts.at(tokens)

    def beside_prompts_s(self, decodes: int, tokens: int) -> float:
        chunked_s = self.prompts.at(tokens + CHUNK_TOKENS * decodes) - self.prompts.at(tokens)
        alone_s = self.decodes.at(decodes) - self.floor_s
        return max(0.0, chunked_s + decodes * self.copied_s - alone_s)

    def decode_source(self, decodes: int, context: int) -> int:
        return self.source

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        return self.source


@dataclass(frozen=True)
class Summed:
    """Every kind of attention of a model, one after the other. The provenance of the seconds is the longest kind's."""

    kinds: tuple[Attention, ...]

    @cached_property
    def pair_s(self) -> float:
        return sum(kind.pair_s for kind in self.kinds)

    @cached_property
    def kv_s(self) -> float:
        return sum(kind.kv_s for kind in self.kinds)

    @cached_property
    def floor_s(self) -> float:
        return sum(kind.floor_s for kind in self.kinds)

    def decode(self, decodes: int) -> PiecewiseLinear:
        return summed([kind.decode(decodes) for kind in self.kinds])

    def prefill_s(self, tokens: int, pairs: float, context: int) -> float:
        return sum([kind.prefill_s(tokens, pairs, context) for kind in self.kinds])

    def beside_prompts_s(self, decodes: int, tokens: int) -> float:
        return sum([kind.beside_prompts_s(decodes, tokens) for kind in self.kinds])

    def decode_source(self, decodes: int, context: int) -> int:
        longest = max(self.kinds, key=lambda kind: kind.decode(decodes).at(context + decodes))
        return longest.decode_source(decodes, context)

    def prefill_source(self, tokens: int, pairs: float, context: int) -> int:
        longest = max(self.kinds, key=lambda kind: kind.prefill_s(tokens, pairs, context))
        return longest.prefill_source(tokens, pairs, context)
