"""Claims on driver calls, copies and starts. Probes alone decide them; nothing of it was imported."""

from __future__ import annotations

from contextlib import suppress

from fineserve_evidence.claims.evidence import GIB, MS, US, Evidence, Missing, Verdict, judged, probe
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
