"""From the contract's sampling parameters to vLLM's, and back from its log probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from fineserve_runtime.engines.api import Logprobs, Sampling

_PARSED = ("choice", "json_object")
"""Constraints that vLLM takes as values; the others are texts."""


def vllm_sampling(sampling: Sampling, eos_token_ids: Iterable[int]) -> Any:
    """vLLM's SamplingParams. Raises ValueError for a value that vLLM does not take."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    stop = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(eos_token_ids))
    params = SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=sorted(stop),
        ignore_eos=True,  # eos is among the stop ids where it counts
        logit_bias=dict(sampling.logit_bias) or None,
        allowed_token_ids=None if sampling.allowed_token_ids is None else list(sampling.allowed_token_ids),
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        structured_outputs=_structured(sampling.constraint),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    if sampling.bad_words_token_ids:  # vLLM would ask a tokenizer for them
        params._bad_words_token_ids = [list(word) for word in sampling.bad_words_token_ids]
    return params


def _structured(constraint: tuple[str, str] | None) -> Any:
    from vllm.sampling_params import StructuredOutputsParams

    if constraint is None:
        return None
    kind, text = constraint
    return StructuredOutputsParams(**{kind: json.loads(text) if kind in _PARSED else text})


def logprobs(found: Any) -> tuple[Logprobs, ...]:
    """The log probabilities of one output of vLLM's, or of its prompt, a place a token; none where none were asked for."""
    if found is None:
        return ()
    rows = zip(found.logprob_token_ids.tolist(), found.logprobs.tolist(), strict=True)
    return tuple(tuple(zip(ids, values, strict=True)) for ids, values in rows)
