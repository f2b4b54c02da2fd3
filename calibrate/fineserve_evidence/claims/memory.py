"""Claims on driver calls, copies and starts: decided by probes alone, nothing of it was imported."""

from __future__ import annotations

import numpy as np

from fineserve_evidence.claims.evidence import GIB, MS, US, Evidence, Verdict, judged, probe, undecided
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
VMM = probe("vmm")


def _call_s(evidence: Evidence, call: str, handle_bytes: int, load: str = "idle") -> float | None:
    """Seconds of one driver call on handles of this size, many in a row; None where not measured."""
    rows = evidence.measured("vmm", call=call, bytes=handle_bytes, load=load)
    return None if rows.empty else float(rows.sort_values("count").latency_s.iloc[-1])


def _sum_s(evidence: Evidence, calls: tuple[str, ...], handle_bytes: int, load: str = "idle") -> float | None:
    parts = [_call_s(evidence, call, handle_bytes, load) for call in calls]
    return None if None in parts else float(np.sum([part for part in parts if part is not None]))


def call_takes_tens_of_us(evidence: Evidence) -> Verdict:
    """FS-C3-percall."""
    page_s = _sum_s(evidence, ("map", "set_access"), PAGE_BYTES)
    if page_s is None:
        return undecided(VMM)
    return judged(10 * US <= page_s <= 100 * US, f"map and set-access of a 2 MiB page: {page_s / US:.1f} us", "vmm")


def growth_takes_ms(evidence: Evidence) -> Verdict:
    """FS-C3-growth."""
    page_s = _sum_s(evidence, ("create", "map", "set_access"), PAGE_BYTES)
    if page_s is None:
        return undecided(VMM)
    return judged(
        1 * MS <= PAGES * page_s <= 10 * MS, f"{PAGES} pages created and mapped: {PAGES * page_s / MS:.2f} ms", "vmm"
    )


def remap_takes_5_ms(evidence: Evidence) -> Verdict:
    """KS-4.1-api."""
    rows = evidence.measured("vmm", load="idle")
    if rows.empty:
        return undecided(VMM)
    times = {}
    for size in sorted(set(rows["bytes"].tolist())):
        handle_s = _sum_s(evidence, ("unmap", "map", "set_access"), int(size))
        if handle_s is not None:
            times[int(size)] = DROPPED_BYTES / int(size) * handle_s
    if not times:
        return undecided(VMM)
    size, best_s = min(times.items(), key=lambda item: item[1])
    small_s = times[min(times)]
    mib = size / 2**20
    text = (
        f"14 GiB remapped in {best_s / MS:.2f} ms by handles of {mib:g} MiB, in {small_s / MS:.0f} ms by the smallest"
    )
    return judged(best_s <= 5 * MS * (1 + WITHIN), text, "vmm")


def extension_is_hidden(evidence: Evidence) -> Verdict:
    """VT-5-overlap: the calls end before the iterations that come before the chunk is needed, kernels running."""
    page_s = _sum_s(evidence, ("map", "set_access"), PAGE_BYTES, "kernel")
    steps = evidence.measured("step", prefill_tokens=0)
    if page_s is None or steps.empty:
        return undecided(f"{VMM}; and {probe('step')}")
    ahead_s = PAGE_TOKENS * float(steps.latency_s.min())
    mapped = f"{PAGES} pages mapped under a running kernel: {PAGES * page_s / MS:.2f} ms"
    text = f"{mapped}; {PAGE_TOKENS} iterations last {ahead_s:.1f} s"
    return judged(PAGES * page_s < ahead_s, text, "vmm, step")


def _rate(evidence: Evidence, host_memory: str) -> float | None:
    """Bytes per second of the largest host-to-device copy."""
    rows = evidence.measured("copy", direction="host_to_device", host_memory=host_memory)
    if rows.empty:
        return None
    largest = rows.sort_values("bytes").iloc[-1]
    return float(largest["bytes"] / largest.latency_s)


def small_models_activate_in_time(evidence: Evidence) -> Verdict:
    """PR-9-small: weights of an 8B model over one GPU's link."""
    rate = _rate(evidence, "pinned")
    if rate is None:
        return undecided(probe("copy"))
    seconds = weight_bytes(model("llama-3.1-8b"), precision("fp16"), 1) / rate
    return judged(seconds <= 0.7, f"8B weights at {rate / 1e9:.1f} GB/s pinned: {seconds:.2f} s", "copy")


def activation_14b(evidence: Evidence) -> Verdict:
    """PR-9-14b."""
    pinned, pageable = _rate(evidence, "pinned"), _rate(evidence, "pageable")
    if pinned is None or pageable is None:
        return undecided(probe("copy"))
    fast_s, slow_s = MIGRATION_14B / pinned, MIGRATION_14B / pageable
    text = f"29.5 GB: {fast_s:.2f} s pinned, {slow_s:.2f} s pageable, {slow_s / fast_s:.1f}x"
    return judged(abs(slow_s / fast_s / 5.5 - 1) <= WITHIN, text, "copy")


def cold_start_takes_tens_of_s(evidence: Evidence) -> Verdict:
    """PR-9-naive."""
    rows = evidence.measured("engine_start", mode="graphs")
    if rows.empty or set(rows.phase) < {"import", "start"}:
        return undecided(probe("engine-start"))
    seconds = float(rows.groupby("phase").latency_s.median().sum())
    return judged(
        10 <= seconds <= 60, f"import and start of an engine with CUDA graphs: {seconds:.1f} s", "engine_start"
    )
