"""What a trace looks like: rates, burstiness, lengths, model shares, prefix reuse."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from fineserve_traces.schema import FloatArray, IntArray, Trace

_MINUTE_S = 60.0


class TokenStats(NamedTuple):
    """Tokens of one side of the requests."""

    mean: float
    p50: float
    p95: float
    max: int


@dataclass(frozen=True, slots=True)
class TraceStats:
    """``span_s`` runs from the first to the last arrival; per-minute figures count whole minutes from the first arrival
    and leave out the last, partial one. Cv: population standard deviation over mean. None where a figure does not exist (too
    short a trace, no prefix hashes). ``prefix_hit_ratio``: see `prefix_hit_ratio`."""

    requests: int
    dropped_rows: int
    span_s: float
    rate_per_s: float | None
    prompt: TokenStats
    output: TokenStats
    peak_per_minute: int | None
    mean_per_minute: float | None
    cv_per_minute: float | None
    cv_inter_arrival: float | None
    model_shares: dict[str, float]
    prefix_hit_ratio: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self) | {"prompt": self.prompt._asdict(), "output": self.output._asdict()}


def describe(trace: Trace) -> TraceStats:
    """The statistics of ``trace``."""
    span_s = float(trace.arrival_s[-1] - trace.arrival_s[0])
    minutes = _per_minute(trace.arrival_s)
    shares = np.bincount(trace.model, minlength=len(trace.models)) / len(trace)
    return TraceStats(
        requests=len(trace),
        dropped_rows=trace.dropped_rows,
        span_s=span_s,
        rate_per_s=len(trace) / span_s if span_s > 0 else None,
        prompt=_token_stats(trace.prompt_tokens),
        output=_token_stats(trace.output_tokens),
        peak_per_minute=int(minutes.max()) if minutes.size else None,
        mean_per_minute=float(minutes.mean()) if minutes.size else None,
        cv_per_minute=_cv(minutes),
        cv_inter_arrival=_cv(np.diff(trace.arrival_s)),
        model_shares=dict(zip(trace.models, shares.tolist(), strict=True)),
        prefix_hit_ratio=prefix_hit_ratio(trace),
    )


def prefix_hit_ratio(trace: Trace) -> float | None:
    """The share of prompt tokens that an infinite prefix cache, filled in arrival order, would not compute again. These are
    the leading blocks whose id came before; all models share the cache, as the ids do. None without prefix hashes."""
    if trace.prefix_hashes is None or trace.prefix_tokens is None or trace.prefix_block_tokens is None:
        return None
    ends: dict[int, int] = {}  # by id, the tokens that are known up to the end of its block, or of what covers it
    hit_tokens, each = 0, trace.prefix_block_tokens
    rows = zip(trace.prefix_hashes, trace.prefix_tokens.tolist(), trace.prompt_tokens.tolist(), strict=True)
    for blocks, covered, prompt in rows:
        hit = 0
        for place, block in enumerate(blocks):
            if hit == place * each:
                hit = min(ends.get(block, hit), hit + each)
            ends[block] = max(ends.get(block, 0), min((place + 1) * each, covered))
        hit_tokens += min(hit, covered, prompt)
    return hit_tokens / int(trace.prompt_tokens.sum())


def _per_minute(arrival_s: FloatArray) -> IntArray:
    minute = ((arrival_s - arrival_s[0]) // _MINUTE_S).astype(np.int64)
    whole = int(minute[-1])
    return np.bincount(minute, minlength=whole + 1)[:whole].astype(np.int64)


def _token_stats(tokens: IntArray) -> TokenStats:
    p50, p95 = np.quantile(tokens, [0.5, 0.95])
    return TokenStats(float(tokens.mean()), float(p50), float(p95), int(tokens.max()))


def _cv(values: FloatArray | IntArray) -> float | None:
    return float(values.std() / values.mean()) if values.size and values.mean() > 0 else None
