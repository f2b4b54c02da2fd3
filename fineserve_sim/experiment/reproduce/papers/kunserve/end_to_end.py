"""KunServe, Fig. 5 and 13: latency, throughput and violations beside the baselines. SLO scale N means N times the median of the
best baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

import numpy as np

from fineserve_sim.experiment.reproduce.curves import Step, order
from fineserve_sim.experiment.reproduce.finished import (
    Results,
    ends,
    metric,
    percent_above,
    quantity,
    ratio_of,
    tokens_per_s,
)
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity, holds
from fineserve_sim.experiment.reproduce.papers.kunserve.cells import (
    BASELINES,
    BURST_S,
    SLO_SCALE,
    WORKLOADS,
    cells,
    known,
    per_run,
)
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.experiment.results.stats import ratio
from fineserve_sim.experiment.run.run_data import Floats, RunData

SCALES = range(1, 11)
LOOSE = 5
"""The first SLO scale above 4."""


# --- section 4 --------------------------------------------------------------------------------------------------------


@claim("KS-5", needs=("kunserve_fig05",))
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


@claim("KS-4.2-stall", needs=("kunserve_fig13",))
def stall(results: Results) -> Evaluation:
    cell = results.cell("kunserve_fig13", "kunserve", sweep="burstgpt", slo_scale=SLO_SCALE)
    return Evaluation(
        (quantity(metric(cell, "exchange_mean_s")),), "Remap to last byte, mean over the exchanges of a run."
    )


# --- Fig. 12 and 13 ---------------------------------------------------------------------------------------------------


@claim("KS-13-p99ttft", needs=("kunserve_fig13",))
def p99_ttft(results: Results) -> Evaluation:
    found = [
        ratio_of(cell, ours, "ttft_p99_s", f"{system}, {ours['sweep']}")
        for system in BASELINES
        for cell, ours in zip(cells(results, system), cells(results, "kunserve"), strict=True)
    ]
    return Evaluation(ends(found), "Least and largest over 4 baselines and 3 workloads.")


@claim("KS-12-pp", needs=("kunserve_fig13",))
def pipeline_throughput(results: Results) -> Evaluation:
    found = []
    for system in ("vllm-dp", "infercept", "llumnix", "kunserve"):
        for cell, pipeline in zip(cells(results, system), cells(results, "vllm-pp"), strict=True):
            theirs, ours = (per_run(results, "kunserve_fig13", each, _busy_tokens_per_s) for each in (cell, pipeline))
            kept = ratio(ours, theirs)
            found.append(Quantity(100 * (1 - kept.mean), 100 * kept.half_width, f"{system}, {cell['sweep']}"))
    return Evaluation(
        ends(found), "Output tokens/s from the burst to the last arrival, over 4 systems and 3 workloads."
    )


def _busy_tokens_per_s(run: RunData) -> float:
    """Output tokens a second from the start of the burst to the last arrival."""
    return tokens_per_s(run, BURST_S[0], float(run.arrival_s[-1]))


@claim("KS-12-pp-tail", needs=("kunserve_fig13",))
def pipeline_tail(results: Results) -> Evaluation:
    return _above(results, ("vllm-pp",), "kunserve", ("ttft_p50_s", "ttft_p99_s"), WORKLOADS)


@claim("KS-13-swap-tpot", needs=("kunserve_fig13",))
def swap_tail(results: Results) -> Evaluation:
    steps = [
        Step(f"{other}, {cell['sweep']}", metric(cell, "tpot_p99_s"), metric(low, "tpot_p99_s"))
        for other in ("vllm-dp", "llumnix")
        for cell, low in zip(cells(results, "infercept"), cells(results, other), strict=True)
    ]
    return order(steps)


@claim("KS-13-p50ttft-lb", needs=("kunserve_fig13",))
def median_ttft(results: Results) -> Evaluation:
    return _above(results, BASELINES, "kunserve", ("ttft_p50_s",), ("longbench",))


def _above(
    results: Results, higher: Sequence[str], lower: str, names: Sequence[str], sweeps: Sequence[str]
) -> Evaluation:
    """Metrics of some systems are no lower than another's."""
    steps = [
        Step(f"{system}, {name[:8]}, {high['sweep']}", metric(high, name), metric(low, name))
        for system, name in product(higher, names)
        for high, low in zip(cells(results, system), cells(results, lower), strict=True)
        if high["sweep"] in sweeps
    ]
    return order(steps)


@claim("KS-13-tpot-lb", needs=("kunserve_fig13",))
def median_tpot(results: Results) -> Evaluation:
    place = {"sweep": "longbench", "slo_scale": SLO_SCALE}
    ours, *cells = (results.cell("kunserve_fig13", system, **place) for system in ("kunserve", *BASELINES))
    found = [percent_above(ours, cell, "tpot_p50_s", str(cell["system"])) for cell in cells]
    return Evaluation(ends(found), "Least and largest over 4 baselines.")


@claim("KS-13-tail", needs=("kunserve_fig13",))
def tails(results: Results) -> Evaluation:
    def worst(run: RunData) -> float:
        return float(np.nanmax(run.ttft_s) / np.nanmedian(run.ttft_s))

    found = [
        quantity(per_run(results, "kunserve_fig13", cell, worst), f"{system}, {cell['sweep']}")
        for system in BASELINES
        for cell in cells(results, system)
    ]
    return Evaluation(ends(found), "Least and largest over 4 baselines and 3 workloads.")


@claim("KS-13-slo", needs=("kunserve_fig13",))
def violations(results: Results) -> Evaluation:
    """Points fewer violations than a baseline, mean over scales and baselines and over TTFT and TPOT, a workload each."""
    found = []
    for sweep in WORKLOADS:
        curves = _violation_curves(results, sweep)
        reduction = np.mean([curves[system] - curves["kunserve"] for system in BASELINES])
        found.append(Quantity(100 * float(reduction), label=sweep))
    return Evaluation(tuple(found), "Mean over scales 1 to 10, four baselines, TTFT and TPOT.")


@claim("KS-13-slo4", needs=("kunserve_fig13",))
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
        latencies[system] = ttft, np.concatenate([known(run.tpot_s[run.measured]) for run in runs])
    best = [min(float(np.median(latencies[system][part])) for system in BASELINES) for part in range(2)]
    return {
        system: np.array([[np.mean(both[part] > scale * best[part]) for scale in SCALES] for part in range(2)])
        for system, both in latencies.items()
    }


@claim("KS-13-72b", needs=("kunserve_fig13_72b",))
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
