"""The sums over a batch that its step time depends on."""

from __future__ import annotations

from typing import NamedTuple


class Batch(NamedTuple):
    """Running sums over the batch of one step.

    * ``decodes``: sequences that decode one token each; ``decode_context``: their cached tokens before the step.
    * ``prefill_tokens``: prompt tokens that are computed; ``prefill_context``: the cached tokens before them.
    * ``prefill_pairs``: query-key pairs of the prompts. A chunk of c tokens after a cached prefix has
      c * prefix + c * (c + 1) / 2.
    * ``sampled``: sequences that produce a token.
    """

    decodes: int
    decode_context: int
    prefill_tokens: int
    prefill_pairs: float
    prefill_context: int
    sampled: int
