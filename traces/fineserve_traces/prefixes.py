"""Prompts that have something in common: a prefix shared by all requests, and conversations of several turns.

A turn's prompt is all that was said before, answers included, and something new. So its KV is known from the turn before,
and prefix hashes cover answers too, to their last token.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fineserve_traces.schema import Trace, TraceError

HASH_TOKENS = 256
"""Tokens a prefix hash stands for."""


def conversations(
    trace: Trace, *, shared_tokens: int = 0, turns: int = 1, gap_s: float = 0.0, hash_tokens: int = HASH_TOKENS
) -> Trace:
    """Every request of ``trace`` opens a conversation of ``turns`` turns, each with as many new prompt and output tokens as the
    first. All prompts begin with the same ``shared_tokens``; turn k arrives ``k * gap_s`` after the first.

    The new columns hold whole prompts, and ids of all tokens of prompts and answers. Raises TraceError when shared tokens are
    no whole number of hashes of ``hash_tokens``, or turns or gap are out of range.
    """
    if turns < 1 or gap_s < 0 or hash_tokens < 1 or shared_tokens < 0 or shared_tokens % hash_tokens:
        raise TraceError(
            f"{trace.source}: conversations of {turns} turns, {gap_s:g} s apart, with {shared_tokens} shared tokens; give "
            f"turns >= 1, a gap >= 0, and a multiple of {hash_tokens} tokens"
        )
    session = np.tile(np.arange(len(trace)), turns)
    turn = np.repeat(np.arange(turns), len(trace))
    arrival_s = trace.arrival_s[session] + turn * gap_s
    order = np.argsort(arrival_s, kind="stable")
    session, turn = session[order], turn[order]
    new, output = trace.prompt_tokens[session], trace.output_tokens[session]
    prompt = shared_tokens + new + turn * (new + output)
    blocks = -(-(prompt + output) // hash_tokens)
    longest = int(blocks.max())
    hashes = tuple(
        _hashes(opened, count, shared_tokens // hash_tokens, longest)
        for opened, count in zip(session.tolist(), blocks.tolist(), strict=True)
    )
    return replace(
        trace,
        arrival_s=arrival_s[order],
        model=trace.model[session],
        prompt_tokens=prompt,
        output_tokens=output,
        prefix_hashes=hashes,
        prefix_block_tokens=hash_tokens,
        prefix_tokens=prompt + output,
    )


def _hashes(session: int, count: int, shared: int, longest: int) -> tuple[int, ...]:
    """Ids of the first ``count`` blocks of a session: the shared prefix's, then its own."""
    own = shared + session * longest
    return (*range(min(shared, count)), *range(own, own + max(0, count - shared)))
