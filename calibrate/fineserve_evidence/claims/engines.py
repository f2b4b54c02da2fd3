"""Claims on engine steps: the chunk cost model, and two engines on a GPU."""

from __future__ import annotations

import numpy as np
import pandas as pd
from fineserve_calibrate.fit.step_costs import fit_chunk_cost

from fineserve_evidence.claims.evidence import Evidence, Missing, Verdict, judged, probe, undecided

DTYPES = ("bfloat16", "fp8", "int4_wo")


def _chunks(evidence: Evidence) -> pd.DataFrame:
    """Measured prompt chunks of one engine: the one with most rows."""
    rows = evidence.needed("step", "step", decodes=0)
    if rows.cached_tokens.nunique() < 2:
        raise Missing(probe("step"))
    engine = rows[["model", "dtype", "mode"]].agg("/".join, axis=1)
    rows = rows[engine == engine.mode().iloc[0]]
    named = {"prefill_tokens": "chunk_tokens", "cached_tokens": "prefix_tokens", "latency_s": "seconds"}
    chunks: pd.DataFrame = rows.rename(columns=named)[list(named.values())].sort_values(
        ["chunk_tokens", "prefix_tokens"]
    )
    return chunks


def _worst_errors(evidence: Evidence) -> tuple[float, float, str]:
    """Largest relative errors on every second row, of the chunk cost and of a line in the tokens, fitted on the others."""
    rows = _chunks(evidence).reset_index(drop=True)
    rows = rows.assign(row=np.arange(len(rows)))
    seen, unseen = rows[rows.row % 2 == 0], rows[rows.row % 2 == 1]
    fit = fit_chunk_cost(seen)
    if fit.refused or unseen.empty:
        raise Missing(probe("step"))
    line = np.polyfit(seen.chunk_tokens, seen.seconds, 1)
    chunk, prefix = (unseen[name].to_numpy(np.float64) for name in ("chunk_tokens", "prefix_tokens"))
    alpha, beta, gamma = (fit[name].value for name in ("alpha", "beta", "gamma"))
    cost = alpha * (prefix * chunk + (chunk**2 + chunk) / 2) + beta * chunk + gamma
    measured = unseen.seconds.to_numpy(np.float64)
    worst, by_tokens = (float(np.abs(found / measured - 1).max()) for found in (cost, np.polyval(line, chunk)))
    return worst, by_tokens, f"largest error on held-out chunks {worst:.1%}, by tokens alone {by_tokens:.1%}"


def chunk_cost_beats_token_count(evidence: Evidence) -> Verdict:
    """KS-eq1."""
    worst, by_tokens, text = _worst_errors(evidence)
    return judged(worst < by_tokens, text, "step")


def chunk_cost_error(evidence: Evidence) -> Verdict:
    """KS-eq1-err."""
    worst, by_tokens, text = _worst_errors(evidence)
    return judged(worst < 0.05 < by_tokens, text, "step")


def _pair_gain(evidence: Evidence, pair: tuple[str, str]) -> float | None:
    """Tokens a second of two decoding engines beside each other, over one FP16 engine alone."""
    rows = evidence.measured("contention", sharing="mps", prefill_tokens=0, neighbour_prefill_tokens=0)
    if rows.empty:
        return None
    alone = rows[(rows.dtype == DTYPES[0]) & (rows.neighbour == "none")]
    beside = [
        rows[(rows.dtype == mine) & (rows.neighbour == other) & (rows.neighbour_decodes > 0)]
        for mine, other in (pair, pair[::-1])
    ]
    if alone.empty or any(found.empty for found in beside):
        return None
    rate = float((alone.decodes / alone.latency_s).max())
    return float(sum((found.decodes / found.latency_s).max() for found in beside) / rate)


def every_pair_gains(evidence: Evidence) -> Verdict:
    """FS-6-all-gain."""
    pairs = [(DTYPES[i], DTYPES[j]) for i in range(3) for j in range(i, 3)]
    gains = {f"{a}-{b}": gain for a, b in pairs if (gain := _pair_gain(evidence, (a, b))) is not None}
    text = ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items())
    if len(gains) < len(pairs):
        return undecided(probe("contention-mps"), text, "contention" if gains else "")
    return judged(all(1 < gain < 2 for gain in gains.values()), text, "contention")


def fp8_pair(evidence: Evidence) -> Verdict:
    """FS-6-fp8fp8."""
    gain = _pair_gain(evidence, ("fp8", "fp8"))
    if gain is None:
        return undecided(probe("contention-mps"))
    return judged(abs(gain - 1.95) <= 0.2, f"two FP8 engines against one FP16 engine: {gain:.2f}", "contention")
