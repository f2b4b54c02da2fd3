"""KunServe, section 2 and Fig. 12: bursts, demand beyond the memory, and what throttling does to requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fineserve_sim.catalog import kv_token_bytes, model, precision
from fineserve_sim.experiment.reproduce.curves import Step, order
from fineserve_sim.experiment.reproduce.finished import Results, metric, quantity
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity
from fineserve_sim.experiment.reproduce.papers.kunserve.cells import (
    BURST_S,
    SLO_SCALE,
    WINDOW_S,
    cells,
    known,
    per_run,
    windowed_ttft,
)
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.experiment.results.stats import Estimate, over_runs
from fineserve_sim.experiment.run.run_data import Floats, RunData

LINGER_S = 10.0
"""How long after memory was out a late request may still come of it."""


@claim("KS-2-burst", needs=("kunserve_fig02",))
def burst_memory(results: Results) -> Evaluation:
    cell = results.cell("kunserve_fig02", "vllm-dp")
    runs = results.runs("kunserve_fig02", cell)
    peak = metric(cell, "kv_demand_peak")
    per_gpu_bytes = runs[0].kv_capacity_bytes / runs[0].gpus
    token_bytes = kv_token_bytes(model("qwen2.5-14b"), precision("W16A16"), 1)
    return Evaluation(
        (quantity(peak, "tokens", per_gpu_bytes / token_bytes), quantity(peak, "GiB", per_gpu_bytes / 2**30)),
        f"Peak demand is {peak.mean:.2f} of the KV memory, the heads of the queues included; mean over 8 GPUs.",
    )


@claim("KS-2-rate", needs=("kunserve_fig13",))
def arrivals(results: Results) -> Evaluation:
    cell = next(cells(results, "vllm-dp"))

    def rise(run: RunData) -> float:
        before = np.sum(run.arrival_s < BURST_S[0]) / BURST_S[0]
        after = np.sum((run.arrival_s >= BURST_S[0]) & (run.arrival_s < BURST_S[0] + 5)) / 5
        return float(after / before)

    rate = per_run(results, "kunserve_fig13", cell, rise)
    return Evaluation((quantity(rate),), "The phases of the experiment double the rate at 45 s: an input.")


@claim("KS-2-stay", needs=("kunserve_fig02",))
def stay(results: Results) -> Evaluation:
    cell = results.cell("kunserve_fig02", "vllm-dp")
    moments: Mapping[str, Callable[[Floats], float]] = {"mean": np.mean, "spread": np.std, "longest": np.max}
    stays = [known(run.finish_s - run.arrival_s) for run in results.runs("kunserve_fig02", cell)]
    found = (quantity(over_runs([float(of(each)) for each in stays]), label) for label, of in moments.items())
    return Evaluation(tuple(found), "Arrival to last token under vLLM (DP), 640 s with both bursts.")


@claim("KS-2-events", needs=("kunserve_fig02",))
def events(results: Results) -> Evaluation:
    return Evaluation((quantity(metric(results.cell("kunserve_fig02", "vllm-dp"), "throttlings")),))


@claim("KS-2-provision", needs=("kunserve_fig02",))
def provision(results: Results) -> Evaluation:
    demand = metric(results.cell("kunserve_fig02", "vllm-dp"), "kv_demand_mean")
    return Evaluation((Quantity(1 / demand.mean, demand.half_width / demand.mean**2),))


@claim("KS-load", needs=("kunserve_fig13",))
def load(results: Results) -> Evaluation:
    found = [quantity(metric(cell, "kv_demand_mean"), str(cell["sweep"]), 100) for cell in cells(results, "vllm-dp")]
    return Evaluation(tuple(found), "Under vLLM (DP), 128 s window.")


@claim("KS-2-spikes", needs=("kunserve_fig13",))
def spikes(results: Results) -> Evaluation:
    def windowed(run: RunData) -> float:
        return float(np.nanmax(windowed_ttft(run)) / np.nanmedian(run.ttft_s))

    def tail(run: RunData) -> float:
        return float(np.nanpercentile(run.ttft_s, 99) / np.nanmedian(run.ttft_s))

    measures = {"vllm-dp": windowed, "infercept": windowed, "llumnix": tail}
    found = (
        quantity(per_run(results, "kunserve_fig13", next(cells(results, system)), number), system)
        for system, number in measures.items()
    )
    return Evaluation(tuple(found), "Largest mean TTFT of 2 s over the median; for Llumnix P99 over the median.")


@claim("KS-12-coincide", needs=("kunserve_fig12",))
def coincide(results: Results) -> Evaluation:
    steps = []
    for system in ("vllm-dp", "infercept", "llumnix"):
        cell, ours = (results.cell("kunserve_fig12", each) for each in (system, "kunserve"))
        inside = per_run(results, "kunserve_fig12", cell, _late_while_full)
        steps.append(Step(f"{system}: share of peaks while memory is out", inside, Estimate(0.9, 0.0)))
        peaks = [
            per_run(results, "kunserve_fig12", each, lambda run: float(np.nanmax(windowed_ttft(run))))
            for each in (cell, ours)
        ]
        steps.append(Step(f"{system}: peak above KunServe's", *peaks))
    return order(steps, "Peaks are windows of 2 s with 5 times the median TTFT; memory is out while requests queue.")


def _late_while_full(run: RunData) -> float:
    """Share of the late windows that lie within 10 s after a sample at which requests queued; 1 where none is late."""
    means = windowed_ttft(run)
    late_s = WINDOW_S * np.flatnonzero(means > SLO_SCALE * np.nanmedian(run.ttft_s))
    queued_s = run.sample_s[run.waiting.sum(axis=1) > 0]
    if not len(late_s):
        return 1.0
    return float(np.mean([np.any((queued_s <= at_s + WINDOW_S) & (queued_s >= at_s - LINGER_S)) for at_s in late_s]))
