"""Prism, Fig. 3, 8 and section 5.1: the memory of two models on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fineserve_sim.experiment.reproduce.curves import Step, order
from fineserve_sim.experiment.reproduce.finished import Results, percent_above, tokens_per_s
from fineserve_sim.experiment.reproduce.judge import Evaluation, numbers
from fineserve_sim.experiment.reproduce.papers.prism.end_to_end import PRISM
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.experiment.results.stats import Estimate, over_runs
from fineserve_sim.experiment.run.run_data import Floats, RunData
from fineserve_sim.policy.memory.kvcached import PAGE_BYTES, KvCachedManager, VirtualKV

FIG03_T1_S, FIG03_T2_S = (5.0, 120.0), (480.0, 600.0)
FIG08_SURGE_S = (20.0, 60.0)
"""Windows in which the phases of these experiments lie, without the time in which memory fills, a swap included."""


def _mean_kv(results: Results, name: str, system: str, start_s: float, end_s: float) -> Estimate:
    """Mean KV bytes of all models between two times, in GiB."""
    runs = results.runs(name, results.cell(name, system))
    return over_runs([float(_kv(run, start_s, end_s).mean()) / 2**30 for run in runs])


def _kv(run: RunData, start_s: float, end_s: float) -> Floats:
    inside = (run.sample_s >= start_s) & (run.sample_s < end_s)
    used: Floats = run.kv_used_bytes[inside].sum(axis=1).astype(np.float64)
    return used


def _ranked(results: Results, name: str, ranks: Sequence[str], window_s: tuple[float, float]) -> tuple[list[Step], str]:
    """KV memory in use falls along ``ranks``."""
    found = {system: _mean_kv(results, name, system, *window_s) for system in ranks}
    steps = [Step(f"{high} over {low}", found[high], found[low]) for high, low in pairwise(ranks)]
    return steps, ", ".join(f"{system} {value.mean:.1f}" for system, value in found.items())


@claim("PR-3-T1", needs=("prism_fig03",))
def both_active(results: Results) -> Evaluation:
    steps, listed = _ranked(results, "prism_fig03", ("muxserve", "s-partition"), FIG03_T1_S)
    runs = results.runs("prism_fig03", results.cell("prism_fig03", "qlm"))
    empty = over_runs([float(np.mean(_kv(run, *FIG03_T1_S) == 0)) for run in runs])
    steps.append(Step("QLM at zero for over 1 % of the time", empty, Estimate(0.01, 0.0)))
    return order(steps, f"GiB in use: {listed}; QLM holds nothing {100 * empty.mean:.0f} % of the time.")


@claim("PR-3-T2", needs=("prism_fig03",))
def one_surges(results: Results) -> Evaluation:
    steps, listed = _ranked(results, "prism_fig03", ("qlm", "muxserve", "s-partition"), FIG03_T2_S)
    return order(steps, f"GiB in use: {listed}.")


@claim("PR-8-kv", needs=("prism_fig08",))
def kv_after_surge(results: Results) -> Evaluation:
    steps, listed = _ranked(results, "prism_fig08", (PRISM, "static"), FIG08_SURGE_S)
    return order(steps, f"GiB in use after the surge: {listed}.")


@claim("PR-8-throughput", needs=("prism_fig08",))
def tokens_after_surge(results: Results) -> Evaluation:
    found = {}
    for system in (PRISM, "static"):
        runs = results.runs("prism_fig08", results.cell("prism_fig08", system))
        found[system] = over_runs([tokens_per_s(run, *FIG08_SURGE_S) for run in runs])
    listed = ", ".join(f"{system} {value.mean:,.0f}" for system, value in found.items())
    return order([Step("Prism over static", *found.values())], f"Tokens/s after the surge: {listed}; by simulation.")


@claim("PR-5.1-overhead", needs=("prism_sec51",))
def overhead(results: Results) -> Evaluation:
    """By how many per cent kvcached raises mean TTFT and TPOT over a static pool."""
    at = {"sweep": "rate", "rate_scale": 1.0}
    paged, static = (results.cell("prism_sec51", system, **at) for system in ("kvcached-buffered", "static"))
    found = (percent_above(paged, static, f"{moment}_mean_s", moment.upper()) for moment in ("ttft", "tpot"))
    return Evaluation(tuple(found), "By simulation, with the driver costs that public reports give.")


@claim("PR-5.1-pages")
def mapped_pages() -> Evaluation:
    """MB a physical page over a life of allocations: mapped memory is 2 MB x tensors x non-empty pages, no more."""
    manager = KvCachedManager(40 * 2**30, {0: VirtualKV(tensors=64, block_bytes=32 * 1024)})
    held: list[list[int]] = []
    for blocks in (1, 63, 64, 200, 7):
        held.append(manager.alloc(0, blocks) or [])
        pages = {block // 64 for ids in held for block in ids}  # of 64 blocks, in each of the 64 tensors
        assert manager.mapped_bytes() == len(pages) * 64 * PAGE_BYTES
    for ids in held:
        manager.free(0, ids)
    assert manager.mapped_bytes() == 0
    return numbers(
        PAGE_BYTES / 2**20,
        detail="After each of 5 allocations mapped bytes are 2 MB x 64 tensors x non-empty pages, and none once all are freed.",
    )
