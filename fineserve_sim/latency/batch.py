"""What of a batch its step time depends on."""

from __future__ import annotations

from typing import NamedTuple


class Batch(NamedTuple):
    """Running sums over the batch of one step.

    ``decodes`` sequences decode one token each, with ``decode_context`` tokens cached in all before the step;
    ``prefill_tokens`` prompt tokens are computed, with ``prefill_pairs`` query-key pairs (for a chunk of c tokens after a
    cached prefix: c * prefix + c * (c + 1) / 2) and ``prefill_context`` cached prefix tokens in all; ``sampled`` sequences
    produce a token.
    """

    decodes: int
    decode_context: int
    prefill_tokens: int
    prefill_pairs: float
    prefill_context: int
    sampled: int
