"""Profile tables as global placement reads them, computed from the step model (FineServe's offline profiles).

The batch always has b requests of p prompt and o output tokens. Each stays for its own prefill steps and o - 1 decode
steps. A step lasts ``t``, the time of b decodes at mean context, and longer if it carries prompt chunks. While one request
stays, each of the b slots turns over once, so b prefills are added in all:

    stay = (o - 1 + prefill steps) * t + b * x        x = extra seconds of the steps that carry one request's prompt
    throughput = b / stay
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from fineserve_sim.catalog import activation_bytes, kv_sequence_bytes
from fineserve_sim.latency.step import StepModel
from fineserve_sim.policy.interfaces import OperatingPoint


class Steps(Protocol):
    """Seconds of engine steps, as ``StepModel.step_s`` has them."""

    def step_s(
        self, decodes: int, decode_context: int, new: int, new_pairs: float, new_context: int, sampled: int, /
    ) -> float: ...


BatchBytes = Callable[[int, int], tuple[int, int]]
"""Activation bytes, and KV bytes of a batch of so many requests at a mean context of so many tokens; each per GPU."""


def batch_sizes(largest: int) -> list[int]:
    """1, 2, 4, ... and ``largest`` itself."""
    return [*(2**i for i in range((largest - 1).bit_length())), largest]


def batch_prefill_s(step: Steps, prompts: int, prompt_tokens: int, budget: int) -> float:
    """Seconds to prefill ``prompts`` prompts together on an idle engine, first come first served in steps of ``budget``
    tokens, attention to cached prefixes included."""
    seconds, done, total = 0.0, 0, prompts * prompt_tokens
    while done < total:
        end = min(done + budget, total)
        pairs = context = touched = 0
        for prompt in range(done // prompt_tokens, (end - 1) // prompt_tokens + 1):
            prefix = max(done - prompt * prompt_tokens, 0)
            chunk = min(end - prompt * prompt_tokens, prompt_tokens) - prefix
            pairs += chunk * prefix + chunk * (chunk + 1) // 2
            context += prefix
            touched += 1
        seconds += step.step_s(0, 0, end - done, pairs, context, touched)
        done = end
    return seconds


def _extra_s(step: Steps, batch: int, mean_context: int, prompt_tokens: int, budget: int) -> tuple[float, int]:
    """Seconds that one request's prompt adds to the steps that carry it beside the other decodes, and their number."""
    decodes = batch - 1
    context = decodes * mean_context
    decode_s = step.step_s(decodes, context, 0, 0, 0, decodes) if decodes else 0.0
    extra_s, done, steps = 0.0, 0, 0
    while done < prompt_tokens:
        chunk = min(budget - decodes, prompt_tokens - done)
        pairs = chunk * done + chunk * (chunk + 1) // 2
        extra_s += step.step_s(decodes, context, chunk, pairs, done, batch) - decode_s
        done += chunk
        steps += 1
    return extra_s, steps


def _point(step: Steps, bytes_of: BatchBytes, batch: int, prompt: int, output: int, budget: int) -> OperatingPoint:
    mean_context = prompt + output // 2
    extra_s, prefill_steps = _extra_s(step, batch, mean_context, prompt, budget)
    decode_s = step.step_s(batch, batch * mean_context, 0, 0, 0, batch)
    waits = prefill_steps if batch > 1 else 0
    stay_s = (output - 1 + waits) * decode_s + batch * extra_s
    activations, kv = bytes_of(batch, mean_context)
    return OperatingPoint(
        batch=batch,
        throughput_per_s=batch / stay_s,
        ttft_s=batch_prefill_s(step, batch, prompt, budget),
        activation_bytes=activations,
        kv_bytes=kv,
    )


def profile(
    step: StepModel, mean_prompt_tokens: float, mean_output_tokens: float, budget: int, max_sequences: int
) -> tuple[OperatingPoint, ...]:
    """Operating points at 1, 2, 4, ... ``max_sequences`` concurrent requests of mean length.

    TTFT is a static batch's: an idle engine prefills all prompts together. KV bytes count requests midway through their
    output; activation bytes are the peak of a full step. Both are per GPU. Batch sizes that leave no token of ``budget`` for
    prefill are left out.
    """

    def bytes_of(batch: int, context: int) -> tuple[int, int]:
        activations = activation_bytes(step.model, step.tp, budget, batch, step.deployment.logit_bytes)
        return activations, batch * kv_sequence_bytes(step.model, step.precision, step.tp, context)

    return profile_of(step, bytes_of, mean_prompt_tokens, mean_output_tokens, budget, max_sequences)


def profile_of(
    step: Steps,
    bytes_of: BatchBytes,
    mean_prompt_tokens: float,
    mean_output_tokens: float,
    budget: int,
    max_sequences: int,
) -> tuple[OperatingPoint, ...]:
    """The profile of any step times, such as steps measured on an engine."""
    prompt, output = max(1, math.ceil(mean_prompt_tokens)), max(1, math.ceil(mean_output_tokens))
    sizes = batch_sizes(min(max_sequences, budget))
    return tuple(_point(step, bytes_of, batch, prompt, output, budget) for batch in sizes)
