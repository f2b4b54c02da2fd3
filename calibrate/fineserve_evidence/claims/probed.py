"""Claims that probes alone decide: driver calls, copies and starts, and steps of one engine or of two on a GPU."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd
from fineserve_calibrate.fit.step_costs import fit_chunk_cost

from fineserve_evidence.claims.evidence import GIB, MS, US, Evidence, Missing, Verdict, judged, probe, undecided
from fineserve_sim.catalog import model, precision, weight_bytes

PAGE_BYTES = 2 * 2**20
PAGES = 64
"""One page for K and one for V in each of 32 layers."""
PAGE_TOKENS = 1024
"""Tokens that a page of an 8B model holds: so many iterations ahead can the next one be mapped."""
DROPPED_BYTES = 14 * GIB
MIGRATION_14B = 29.5e9
WITHIN = 0.25
"""Two times count as the same within a quarter."""


def _calls_s(evidence: Evidence, calls: tuple[str, ...], handle_bytes: int, load: str = "idle") -> float:
    """Seconds of these driver calls on handles of this size, each measured many times in a row."""
    rows = [evidence.needed("vmm", "vmm", call=call, bytes=handle_bytes, load=load) for call in calls]
    return sum(float(measured.sort_values("count").latency_s.iloc[-1]) for measured in rows)


def call_takes_tens_of_us(evidence: Evidence) -> Verdict:
    """FS-C3-percall."""
    page_s = _calls_s(evidence, ("map", "set_access"), PAGE_BYTES)
    return judged(10 * US <= page_s <= 100 * US, f"map and set-access of a 2 MiB page: {page_s / US:.1f} us", "vmm")


def growth_takes_ms(evidence: Evidence) -> Verdict:
    """FS-C3-growth."""
    pages_s = PAGES * _calls_s(evidence, ("create", "map", "set_access"), PAGE_BYTES)
    return judged(1 * MS <= pages_s <= 10 * MS, f"{PAGES} pages created and mapped: {pages_s / MS:.2f} ms", "vmm")


def remap_takes_5_ms(evidence: Evidence) -> Verdict:
    """KS-4.1-api."""
    times: dict[int, float] = {}
    for size in sorted(set(evidence.needed("vmm", "vmm", load="idle")["bytes"].tolist())):
        with suppress(Missing):
            handle_s = _calls_s(evidence, ("unmap", "map", "set_access"), int(size))
            times[int(size)] = DROPPED_BYTES / int(size) * handle_s
    if not times:
        raise Missing(probe("vmm"))
    size, best_s = min(times.items(), key=lambda item: item[1])
    small_s, mib = times[min(times)], size / 2**20
    text = (
        f"14 GiB remapped in {best_s / MS:.2f} ms by handles of {mib:g} MiB, in {small_s / MS:.0f} ms by the smallest"
    )
    return judged(best_s <= 5 * MS * (1 + WITHIN), text, "vmm")


def extension_is_hidden(evidence: Evidence) -> Verdict:
    """VT-5-overlap: the calls end before the iterations that come before the chunk is needed, while kernels run."""
    try:
        page_s = _calls_s(evidence, ("map", "set_access"), PAGE_BYTES, "kernel")
        steps = evidence.needed("step", "step", prefill_tokens=0)
    except Missing:
        raise Missing(f"{probe('vmm')}; and {probe('step')}") from None
    ahead_s = PAGE_TOKENS * float(steps.latency_s.min())
    mapped = f"{PAGES} pages mapped under a running kernel: {PAGES * page_s / MS:.2f} ms"
    text = f"{mapped}; {PAGE_TOKENS} iterations last {ahead_s:.1f} s"
    return judged(PAGES * page_s < ahead_s, text, "vmm, step")


def _rate(evidence: Evidence, host_memory: str) -> float:
    """Bytes per second of the largest host-to-device copy."""
    rows = evidence.needed("copy", "copy", direction="host_to_device", host_memory=host_memory)
    largest = rows.sort_values("bytes").iloc[-1]
    return float(largest["bytes"] / largest.latency_s)


def small_models_activate_in_time(evidence: Evidence) -> Verdict:
    """PR-9-small: weights of an 8B model over one GPU's link."""
    rate = _rate(evidence, "pinned")
    seconds = weight_bytes(model("llama-3.1-8b"), precision("fp16"), 1) / rate
    return judged(seconds <= 0.7, f"8B weights at {rate / 1e9:.1f} GB/s pinned: {seconds:.2f} s", "copy")


def activation_14b(evidence: Evidence) -> Verdict:
    """PR-9-14b."""
    fast_s, slow_s = MIGRATION_14B / _rate(evidence, "pinned"), MIGRATION_14B / _rate(evidence, "pageable")
    text = f"29.5 GB: {fast_s:.2f} s pinned, {slow_s:.2f} s pageable, {slow_s / fast_s:.1f}x"
    return judged(abs(slow_s / fast_s / 5.5 - 1) <= WITHIN, text, "copy")


def cold_start_takes_tens_of_s(evidence: Evidence) -> Verdict:
    """PR-9-naive."""
    rows = evidence.needed("engine-start", "engine_start", mode="graphs")
    if set(rows.phase) < {"import", "start"}:
        raise Missing(probe("engine-start"))
    seconds = float(rows.groupby("phase").latency_s.median().sum())
    text = f"import and start of an engine with CUDA graphs: {seconds:.1f} s"
    return judged(10 <= seconds <= 60, text, "engine_start")


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
