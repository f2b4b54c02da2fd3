"""KunServe's claims, from the runs of experiments/kunserve_*.yaml.

SLO scale N means N times the median of the best baseline. The burst of the 128 s window starts at 45 s and lasts 30 s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from fineserve_sim.catalog import deployment, gpu, kv_token_bytes, model, precision
from fineserve_sim.experiment.file.cells import Cell
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity, holds
from fineserve_sim.experiment.reproduce.measured import (
    Results,
    ends,
    metric,
    percent_above,
    quantity,
    ratio_of,
    tokens_per_s,
)
from fineserve_sim.experiment.reproduce.orders import Step, order
from fineserve_sim.experiment.results.stats import Estimate, over_runs, ratio
from fineserve_sim.experiment.run.run_data import RunData
from fineserve_sim.latency import StepModel

Floats = NDArray[np.float64]

BASELINES = ("vllm-dp", "vllm-pp", "infercept", "llumnix")
WORKLOADS = ("burstgpt", "sharegpt", "longbench")
SLO_SCALE = 5
"""Runs of fig13 differ by their SLO scale alone, and these systems ignore it: one scale has them all."""

BURST_S = (45.0, 75.0)
WINDOW_S = 2.0
SCALES = range(1, 11)
PREFILL_TOKENS = 2048
LOOSE = 5
"""The first SLO scale above 4."""
LINGER_S = 10.0
"""How long after memory was out a late request may still come of it."""


def _cells(results: Results, system: str) -> Iterator[Cell]:
    for sweep in WORKLOADS:
        yield results.cell("kunserve_fig13", system, sweep=sweep, slo_scale=SLO_SCALE)


def _per_run(results: Results, name: str, cell: Cell, number: Callable[[RunData], float]) -> Estimate:
    return over_runs([number(run) for run in results.runs(name, cell)])


def _known(values: Floats) -> Floats:
    return values[np.isfinite(values)]


# --- section 2: what throttling is ------------------------------------------------------------------------------------


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


def arrivals(results: Results) -> Evaluation:
    cell = next(_cells(results, "vllm-dp"))

    def rise(run: RunData) -> float:
        before = np.sum(run.arrival_s < BURST_S[0]) / BURST_S[0]
        after = np.sum((run.arrival_s >= BURST_S[0]) & (run.arrival_s < BURST_S[0] + 5)) / 5
        return float(after / before)

    rate = _per_run(results, "kunserve_fig13", cell, rise)
    return Evaluation((quantity(rate),), "The phases of the experiment double the rate at 45 s: an input.")


def stay(results: Results) -> Evaluation:
    cell = results.cell("kunserve_fig02", "vllm-dp")
    moments: Mapping[str, Callable[[Floats], float]] = {"mean": np.mean, "spread": np.std, "longest": np.max}
    stays = [_known(run.finish_s - run.arrival_s) for run in results.runs("kunserve_fig02", cell)]
    found = (quantity(over_runs([float(of(each)) for each in stays]), label) for label, of in moments.items())
    return Evaluation(tuple(found), "Arrival to last token under vLLM (DP), 640 s with both bursts.")


def events(results: Results) -> Evaluation:
    return Evaluation((quantity(metric(results.cell("kunserve_fig02", "vllm-dp"), "throttlings")),))


def provision(results: Results) -> Evaluation:
    demand = metric(results.cell("kunserve_fig02", "vllm-dp"), "kv_demand_mean")
    return Evaluation((Quantity(1 / demand.mean, demand.half_width / demand.mean**2),))


def load(results: Results) -> Evaluation:
    found = [quantity(metric(cell, "kv_demand_mean"), str(cell["sweep"]), 100) for cell in _cells(results, "vllm-dp")]
    return Evaluation(tuple(found), "Under vLLM (DP), 128 s window.")


def spikes(results: Results) -> Evaluation:
    def windowed(run: RunData) -> float:
        return float(np.nanmax(_windowed_ttft(run)) / np.nanmedian(run.ttft_s))

    def tail(run: RunData) -> float:
        return float(np.nanpercentile(run.ttft_s, 99) / np.nanmedian(run.ttft_s))

    measures = {"vllm-dp": windowed, "infercept": windowed, "llumnix": tail}
    found = (
        quantity(_per_run(results, "kunserve_fig13", next(_cells(results, system)), number), system)
        for system, number in measures.items()
    )
    return Evaluation(tuple(found), "Largest mean TTFT of 2 s over the median; for Llumnix P99 over the median.")


def _windowed_ttft(run: RunData) -> Floats:
    """Mean TTFT of the requests that arrived in each window of 2 s; NaN for an empty one."""
    window = (run.arrival_s // WINDOW_S).astype(int)
    known = np.isfinite(run.ttft_s)
    sums = np.bincount(window[known], run.ttft_s[known], window.max() + 1)
    counts = np.bincount(window[known], minlength=window.max() + 1)
    means: Floats = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


# --- section 4 --------------------------------------------------------------------------------------------------------


def stages(results: Results) -> Evaluation:
    systems = ("vllm-dp", "pp2", "pp4", "pp8")
    steps = []
    for name, (fewer, more) in product(("ttft_mean_s", "tpot_mean_s"), pairwise(systems)):
        for low, high in zip(
            results.cells("kunserve_fig05", fewer), results.cells("kunserve_fig05", more), strict=True
        ):
            place = f"{name[:4]}, {fewer} to {more}, {low['axes']['rate_scale']:g}/s"
            steps.append(Step(place, metric(high, name), metric(low, name)))
    return order(steps)


def stall(results: Results) -> Evaluation:
    cell = results.cell("kunserve_fig13", "kunserve", sweep="burstgpt", slo_scale=SLO_SCALE)
    return Evaluation(
        (quantity(metric(cell, "exchange_mean_s")),), "Remap to last byte, mean over the exchanges of a run."
    )


# --- Fig. 12 and 13 ---------------------------------------------------------------------------------------------------


def p99_ttft(results: Results) -> Evaluation:
    found = [
        ratio_of(cell, ours, "ttft_p99_s", f"{system}, {ours['sweep']}")
        for system in BASELINES
        for cell, ours in zip(_cells(results, system), _cells(results, "kunserve"), strict=True)
    ]
    return Evaluation(ends(found), "Least and largest over 4 baselines and 3 workloads.")


def coincide(results: Results) -> Evaluation:
    steps = []
    for system in ("vllm-dp", "infercept", "llumnix"):
        cell, ours = (results.cell("kunserve_fig12", each) for each in (system, "kunserve"))
        inside = _per_run(results, "kunserve_fig12", cell, _late_while_full)
        steps.append(Step(f"{system}: share of peaks while memory is out", inside, Estimate(0.9, 0.0)))
        peaks = [
            _per_run(results, "kunserve_fig12", each, lambda run: float(np.nanmax(_windowed_ttft(run))))
            for each in (cell, ours)
        ]
        steps.append(Step(f"{system}: peak above KunServe's", *peaks))
    return order(steps, "Peaks are windows of 2 s with 5 times the median TTFT; memory is out while requests queue.")


def _late_while_full(run: RunData) -> float:
    """Share of the late windows that lie within 10 s after a sample at which requests queued; 1 where none is late."""
    means = _windowed_ttft(run)
    late_s = WINDOW_S * np.flatnonzero(means > SLO_SCALE * np.nanmedian(run.ttft_s))
    queued_s = run.sample_s[run.waiting.sum(axis=1) > 0]
    if not len(late_s):
        return 1.0
    return float(np.mean([np.any((queued_s <= at_s + WINDOW_S) & (queued_s >= at_s - LINGER_S)) for at_s in late_s]))


def pipeline_throughput(results: Results) -> Evaluation:
    found = []
    for system in ("vllm-dp", "infercept", "llumnix", "kunserve"):
        for cell, pipeline in zip(_cells(results, system), _cells(results, "vllm-pp"), strict=True):
            theirs, ours = (_per_run(results, "kunserve_fig13", each, _busy_tokens_per_s) for each in (cell, pipeline))
            kept = ratio(ours, theirs)
            found.append(Quantity(100 * (1 - kept.mean), 100 * kept.half_width, f"{system}, {cell['sweep']}"))
    return Evaluation(
        ends(found), "Output tokens/s from the burst to the last arrival, over 4 systems and 3 workloads."
    )


def _busy_tokens_per_s(run: RunData) -> float:
    """Output tokens a second from the start of the burst to the last arrival."""
    return tokens_per_s(run, BURST_S[0], float(run.arrival_s[-1]))


def pipeline_tail(results: Results) -> Evaluation:
    return _above(results, ("vllm-pp",), "kunserve", ("ttft_p50_s", "ttft_p99_s"), WORKLOADS)


def swap_tail(results: Results) -> Evaluation:
    steps = [
        Step(f"{other}, {cell['sweep']}", metric(cell, "tpot_p99_s"), metric(low, "tpot_p99_s"))
        for other in ("vllm-dp", "llumnix")
        for cell, low in zip(_cells(results, "infercept"), _cells(results, other), strict=True)
    ]
    return order(steps)


def median_ttft(results: Results) -> Evaluation:
    return _above(results, BASELINES, "kunserve", ("ttft_p50_s",), ("longbench",))


def _above(
    results: Results, higher: Sequence[str], lower: str, names: Sequence[str], sweeps: Sequence[str]
) -> Evaluation:
    """Metrics of some systems are no lower than another's."""
    steps = [
        Step(f"{system}, {name[:8]}, {high['sweep']}", metric(high, name), metric(low, name))
        for system, name in product(higher, names)
        for high, low in zip(_cells(results, system), _cells(results, lower), strict=True)
        if high["sweep"] in sweeps
    ]
    return order(steps)


def median_tpot(results: Results) -> Evaluation:
    place = {"sweep": "longbench", "slo_scale": SLO_SCALE}
    ours, *cells = (results.cell("kunserve_fig13", system, **place) for system in ("kunserve", *BASELINES))
    found = [percent_above(ours, cell, "tpot_p50_s", str(cell["system"])) for cell in cells]
    return Evaluation(ends(found), "Least and largest over 4 baselines.")


def tails(results: Results) -> Evaluation:
    def worst(run: RunData) -> float:
        return float(np.nanmax(run.ttft_s) / np.nanmedian(run.ttft_s))

    found = [
        quantity(_per_run(results, "kunserve_fig13", cell, worst), f"{system}, {cell['sweep']}")
        for system in BASELINES
        for cell in _cells(results, system)
    ]
    return Evaluation(ends(found), "Least and largest over 4 baselines and 3 workloads.")


def violations(results: Results) -> Evaluation:
    """Points fewer violations than a baseline, mean over scales and baselines and over TTFT and TPOT, a workload each."""
    found = []
    for sweep in WORKLOADS:
        curves = _violation_curves(results, sweep)
        reduction = np.mean([curves[system] - curves["kunserve"] for system in BASELINES])
        found.append(Quantity(100 * float(reduction), label=sweep))
    return Evaluation(tuple(found), "Mean over scales 1 to 10, four baselines, TTFT and TPOT.")


def few_violations(results: Results) -> Evaluation:
    broken = []
    for sweep in WORKLOADS:
        curves = _violation_curves(results, sweep)
        worst = float(curves["kunserve"][:, LOOSE - 1 :].max())
        if worst >= 0.01:
            broken.append(f"KunServe {100 * worst:.1f} % at {sweep}")
        broken += [f"{system} 0 at {sweep}" for system in BASELINES if not curves[system][:, -1].max() > 0]
    return holds(not broken, "; ".join(broken) or "At every workload, for TTFT and TPOT.")


def _violation_curves(results: Results, sweep: str) -> Mapping[str, Floats]:
    """Share of requests above N times the best baseline's median, by system: (2, 10), TTFT and TPOT by scales 1 to 10."""
    latencies: dict[str, tuple[Floats, Floats]] = {}
    for system in (*BASELINES, "kunserve"):
        cell = results.cell("kunserve_fig13", system, sweep=sweep, slo_scale=SLO_SCALE)
        runs = results.runs("kunserve_fig13", cell)
        ttft = np.concatenate([np.nan_to_num(run.ttft_s[run.measured], nan=np.inf) for run in runs])
        latencies[system] = ttft, np.concatenate([_known(run.tpot_s[run.measured]) for run in runs])
    best = [min(float(np.median(latencies[system][part])) for system in BASELINES) for part in range(2)]
    return {
        system: np.array([[np.mean(both[part] > scale * best[part]) for scale in SCALES] for part in range(2)])
        for system, both in latencies.items()
    }


def large_model(results: Results) -> Evaluation:
    ours = results.cell("kunserve_fig13_72b", "kunserve", slo_scale=SLO_SCALE)
    baselines = [results.cell("kunserve_fig13_72b", system, slo_scale=SLO_SCALE) for system in BASELINES]
    tail = [ratio_of(cell, ours, "ttft_p99_s", str(cell["system"])) for cell in baselines]
    slower = [
        percent_above(ours, cell, name, f"{cell['system']}, {name[:8]}")
        for name, cell in product(("tpot_p50_s", "tpot_p99_s"), baselines)
    ]
    found = (
        replace(each, part=part) for part, each in [*((0, q) for q in ends(tail)), *((1, q) for q in ends(slower))]
    )
    detail = "P99 TTFT of baselines over KunServe; P50 and P99 TPOT above them in %: least and largest."
    return Evaluation(tuple(found), detail)


# --- Fig. 14 ----------------------------------------------------------------------------------------------------------


def _burst_quantile(results: Results, system: str, of: Callable[[RunData], Floats], percent: float) -> Estimate:
    """A percentile over the requests that arrive in the burst."""

    def value(run: RunData) -> float:
        inside = (run.arrival_s >= BURST_S[0]) & (run.arrival_s < BURST_S[1])
        return float(np.percentile(_known(of(run)[inside]), percent))

    return _per_run(results, "kunserve_fig14", results.cell("kunserve_fig14", system), value)


def _burst_ratio(results: Results, of: str, over: str, what: str, percent: float) -> Estimate:
    """Percentile of one system over another's."""
    measure: Callable[[RunData], Floats] = (lambda run: run.tpot_s) if what == "TPOT" else (lambda run: run.ttft_s)
    high, low = (_burst_quantile(results, system, measure, percent) for system in (of, over))
    return ratio(high, low)


def dynamic_drop(results: Results) -> Evaluation:
    found = (
        quantity(_burst_ratio(results, "vllm-dp", "kunserve-drop", "TTFT", percent), f"P{percent:g}")
        for percent in (90, 99, 99.9)
    )
    return Evaluation(tuple(found), "Requests that arrive in the burst.")


def queued(results: Results) -> Evaluation:
    def late(run: RunData) -> float:
        return float(np.sum(~(run.ttft_s <= SLO_SCALE * np.nanmedian(run.ttft_s))))

    cell = results.cell("kunserve_fig14", "vllm-dp")
    return Evaluation((quantity(_per_run(results, "kunserve_fig14", cell, late)),))


def drop_tpot(results: Results) -> Evaluation:
    found = []
    for percent in (50, 90, 99, 99.9):
        value, half_width = _burst_ratio(results, "kunserve-drop", "vllm-dp", "TPOT", percent)
        found.append(Quantity(100 * (value - 1), 100 * half_width, f"P{percent:g}"))
    return Evaluation(ends(found), "Least and largest of P50, P90, P99, P99.9; requests that arrive in the burst.")


def coordination(results: Results) -> Evaluation:
    pair = ("kunserve-drop", "kunserve-exchange")
    found = [
        Quantity(*_burst_ratio(results, *pair, "TTFT", percent), f"P{percent:g} TTFT", part=part)
        for part, percent in enumerate((99, 99.9))
    ]
    for percent in (90, 99.9):
        value, half_width = _burst_ratio(results, *pair, "TPOT", percent)
        found.append(Quantity(100 * (1 - 1 / value), 100 * half_width, f"P{percent:g} TPOT, % less", part=2))
    return Evaluation(tuple(found), "Requests that arrive in the burst.")


def exchange(results: Results) -> Evaluation:
    moved = quantity(metric(results.cell("kunserve_fig14", "kunserve-exchange"), "exchange_mean_s"), "exchange, s")
    cell = results.cell("kunserve_fig14", "vllm-dp")
    run = results.runs("kunserve_fig14", cell)[0]
    spec, bits = model("qwen2.5-14b"), precision("fp16")
    tokens = run.kv_capacity_bytes // run.gpus // kv_token_bytes(spec, bits, 1)
    decodes = int(tokens / (run.prompt_tokens + run.output_tokens).mean())
    step = StepModel(spec, bits, 1, gpu("a800"), deployment("vllm-cudagraph"))
    prefill_s = step.prefill_s(PREFILL_TOKENS, 0, PREFILL_TOKENS)
    decode_s = step.step_s(decodes, tokens, 0, 0, 0, decodes)
    return Evaluation(
        (moved, Quantity(1000 * prefill_s, label="prefill, ms"), Quantity(1000 * decode_s, label="decode, ms")),
        f"Mean exchange; a step of {PREFILL_TOKENS:,} prompt tokens, and one of {decodes} decodes that fill a GPU's KV memory.",
    )


def bubbles(results: Results) -> Evaluation:
    found = (
        quantity(metric(results.cell("kunserve_fig14", system), "bubble_fraction"), label, 100)
        for system, label in (("kunserve-exchange", "token count"), ("kunserve", "lookahead"))
    )
    return Evaluation(tuple(found))
