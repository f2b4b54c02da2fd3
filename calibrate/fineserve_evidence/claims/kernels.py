"""Claims on attention kernels.

The imported tables hold one decode kernel (FlashAttention 3 as vLLM calls it, with a block table) and whole prompts. Other
claims compare it with vLLM's first paged kernel, with Triton's prefix kernel or with contiguous keys. They need a GPU.
"""

from __future__ import annotations

import numpy as np

from fineserve_evidence.claims.evidence import Evidence, Verdict, judged, undecided
from fineserve_sim.latency.tables import Grid, PrefillTable, match_heads

HEAD_DIM, Q_HEADS, BATCH, CONTEXT = 128, 32, 32, 16384
TABLE = "decode_attention/bfloat16/128 (imported)"
LEGACY = "a probe of vLLM's paged_attention_v1/v2, which current engines do not call, beside FlashAttention"
TRITON = "a probe of Triton's context_attention_fwd beside FlashAttention, prefixes of 16K tokens"
CONTIGUOUS = "a probe of FlashAttention with and without a block table"


def _decode_s(grid: Grid, kv_heads: int, batch: int, context: int) -> float | None:
    """Measured seconds of one layer; None where this point is not in the table."""
    axes = grid.axes
    row = np.flatnonzero((axes["heads"] == (Q_HEADS, kv_heads)).all(axis=1))
    column, depth = np.flatnonzero(axes["batch"] == batch), np.flatnonzero(axes["context"] == context)
    if not (len(row) and len(column) and len(depth)):
        return None
    seconds = float(grid.latency_s[row[0], column[0], depth[0]])
    return seconds if np.isfinite(seconds) else None


def _tflops(evidence: Evidence) -> dict[int, float]:
    """TFLOP/s of decode attention by KV heads, largest measured point of batch 32."""
    grid = evidence.imported.grids["decode_attention/bfloat16/128"]
    found = {}
    for kv_heads in (8, 4, 2, 1):
        for context in (CONTEXT, CONTEXT // 2, CONTEXT // 4, CONTEXT // 8):
            for each in (context, context + 1):
                seconds = _decode_s(grid, kv_heads, BATCH, each)
                if seconds is not None and kv_heads not in found:
                    found[kv_heads] = 4 * BATCH * each * Q_HEADS * HEAD_DIM / seconds / 1e12
    return found


def _flash_rises(evidence: Evidence) -> tuple[bool, str]:
    rates = _tflops(evidence)
    values = list(rates.values())
    text = ", ".join(f"{heads} KV heads {rate:.0f}" for heads, rate in rates.items())
    return bool(len(values) > 1 and np.all(np.diff(values) > 0)), f"FlashAttention 3 at batch 32, TFLOP/s: {text}"


def mqa_throughput(evidence: Evidence) -> Verdict:
    """VT-3-mqa."""
    rates = _tflops(evidence)
    text = (
        f"FlashAttention 3 with one KV head on an H100: {rates[1]:.0f} TFLOP/s (27.3 on the paper's A100)"
        if 1 in rates
        else ""
    )
    return undecided(LEGACY, text, TABLE if text else "")


def throughput_rises_with_intensity(evidence: Evidence) -> Verdict:
    """VT-3-trend: the half on FlashAttention is known, the flat paged kernel is not."""
    rises, text = _flash_rises(evidence)
    if not rises:
        return judged(False, text, TABLE)
    return undecided(LEGACY, f"{text}: rises, as claimed of FlexInfer", TABLE)


def second_chunk_is_slower(evidence: Evidence) -> Verdict:
    """KS-4.3-second-chunk: by whole prompts where no prefix was measured: a prompt of 2c less one of c is its second chunk."""
    steps = evidence.measured("step", decodes=0)
    if not steps.empty:
        ratios = {}
        for tokens in sorted(set(steps.prefill_tokens.tolist())):
            both = [steps[(steps.prefill_tokens == tokens) & (steps.cached_tokens == cached)] for cached in (0, tokens)]
            if not any(rows.empty for rows in both):
                ratios[tokens] = float(both[1].latency_s.median() / both[0].latency_s.median())
        if len(ratios) > 1:
            return _growing(ratios, "step of a vLLM engine", "step")
    grid = evidence.imported.grids["prefill_attention/bfloat16/128"]
    match = match_heads(grid, 40, 8) or match_heads(grid, 32, 8)
    if match is None:
        return undecided("prefill attention of 32 or 40 query heads over 8")
    table = PrefillTable(grid, match, 1, 1.0)

    def attend_s(tokens: int) -> float:
        return table.floor_s + table.beyond_floor_s(tokens, tokens * (tokens + 1) / 2)

    ratios = {tokens: attend_s(2 * tokens) / attend_s(tokens) - 1 for tokens in (1024, 2048, 4096, 8192)}
    return _growing(ratios, "attention of 40 query heads over 8 KV heads", "prefill_attention/bfloat16/128 (imported)")


def _growing(ratios: dict[int, float], what: str, table: str) -> Verdict:
    values = list(ratios.values())
    text = ", ".join(f"{tokens}: {ratio:.2f}" for tokens, ratio in ratios.items())
    holds = bool(min(values) > 1 and values[-1] > values[0])
    return judged(holds, f"second chunk / first by chunk tokens, {what}: {text}", table)
