"""Where the seconds of steps come from, operator by operator.

The parts of a step are its operators, attention of decodes and of prompt chunks, ``host_floor`` and ``host_overhead``. They
sum to ``step_s``. ``host_floor`` is what the host's floor adds to the device's time. A step's time depends on the sums of
``Batch``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fineserve_sim.latency.cost import ASSUMED, SOURCES, Codes, Floats, Source
from fineserve_sim.latency.step import StepModel


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


class Part(NamedTuple):
    """Seconds of one part in each of n steps, and their sources (indices of ``SOURCES``), shapes (n,)."""

    seconds: Floats
    source: Codes


def parts(step: StepModel, batches: Sequence[Batch]) -> dict[str, Part]:
    """Every part of the steps of ``batches``, none of them empty."""
    sums = np.array(batches, dtype=np.float64).reshape(-1, len(Batch._fields))
    by_name = dict(zip(Batch._fields, sums.T, strict=True))
    tokens, sampled = by_name["decodes"] + by_name["prefill_tokens"], by_name["sampled"]
    costs = step.operators.by_tokens(tokens) | step.operators.by_sampled(np.maximum(sampled, 1.0))
    found = {name: Part(cost.seconds, cost.source) for name, cost in costs.items()}
    found["lm_head"] = Part(np.where(sampled > 0, costs["lm_head"].seconds, 0.0), costs["lm_head"].source)
    found |= _attention(step, batches)
    device_s = sum((part.seconds for part in found.values()), np.zeros(len(batches)))
    floor = step.deployment.floor(step.precision.name, step.model.layers, step.tp)
    host_s = step.overhead_s + sampled * step.sequence_s + np.where(by_name["prefill_tokens"] > 0, step.prompt_s, 0.0)
    for name, seconds, quantity in (
        ("host_floor", np.maximum(step.floor_s - device_s, 0.0), floor),
        ("host_overhead", host_s, step.deployment.overhead_s),
    ):
        source = SOURCES.index(quantity.kind) if quantity else ASSUMED
        found[name] = Part(seconds, np.full(len(batches), source))
    return found


def _attention(step: StepModel, batches: Sequence[Batch]) -> dict[str, Part]:
    """Decodes alone, and what prompt chunks add to them: their own seconds and what is left of the floor."""
    attention = step.attention
    decode, prefill = np.zeros((2, len(batches))), np.zeros((2, len(batches)))
    for place, batch in enumerate(batches):
        decode_s, prefill_s = step.attention_s(*batch[:5])
        if batch.decodes:
            decode[:, place] = decode_s, attention.decode_source(batch.decodes, batch.decode_context)
        if batch.prefill_tokens:
            beyond_s = max(attention.floor_s - decode_s, 0.0) + prefill_s
            prefill[:, place] = beyond_s, attention.prefill_source(*batch[2:5])
    return {
        "decode_attention": Part(decode[0], decode[1].astype(np.intp)),
        "prefill_attention": Part(prefill[0], prefill[1].astype(np.intp)),
    }


def time_shares(step: StepModel, batches: Sequence[Batch]) -> dict[str, dict[Source, float]]:
    """Fraction of the steps' time by part and source. Every step weighs the same, so that batches sampled evenly over time
    give an engine's shares. The fractions sum to 1; there must be a batch."""
    found = parts(step, batches)
    step_s = sum((part.seconds for part in found.values()), np.zeros(len(batches)))
    shares: dict[str, dict[Source, float]] = defaultdict(dict)
    for name, part in found.items():
        for code, source in enumerate(SOURCES):
            share = float((part.seconds / step_s)[part.source == code].sum()) / len(batches)
            if share > 0:
                shares[name][source] = share
    return dict(shares)
