"""vTensor's claims that take several cells or another unit than the experiment files state.

Both are said of all three applications. *Slow-down*: "up to 59 % slowdown for emerging LLM applications such as
single-generation, multi-turn chat, and prefix sharing", so the worst of their points. *Mean*: "an average of 1.86x speedups
across 3 applications on 3 predominant LLMs", so the mean of the three applications' means. A mean over points cannot be meant.
The paper's own numbers are 1.8, 1.3 and 1.4 (Fig. 9) and at most 2.42 (Fig. 10). Over our 21 and 7 points it would be
1.73 at most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fineserve_sim.experiment.file.plan import Cell
from fineserve_sim.experiment.reproduce.finished import Results, metric, quantity
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.experiment.results.stats import Estimate, ratio

BASELINE, SYSTEM = "vllm-v0.4.2", "flexinfer"
APPLICATIONS = {
    "single generation": ("vtensor_fig09", "token_throughput_per_s", ("Yi-6B", "Yi-9B", "Yi-34B")),
    "multi-turn chat": ("vtensor_fig10", "token_throughput_per_s", (None,)),
    "prefix sharing": ("vtensor_fig10_sharing", "throughput_per_s", (None,)),
}
"""The experiment of each, its throughput, and the models that it tells apart."""
NEEDS = tuple(experiment for experiment, _, _ in APPLICATIONS.values())


def _pairs(results: Results, name: str) -> list[tuple[Cell, Cell]]:
    """FlexInfer's and vLLM's cells of an experiment, batch by batch."""
    return list(zip(results.cells(name, SYSTEM), results.cells(name, BASELINE), strict=True))


def _speedups(results: Results) -> dict[str, list[Estimate]]:
    """FlexInfer's throughput over vLLM's at every point of each application."""
    return {
        title: [
            ratio(metric(high, what, model), metric(low, what, model))
            for high, low in _pairs(results, experiment)
            for model in models
        ]
        for title, (experiment, what, models) in APPLICATIONS.items()
    }


def _mean(estimates: Sequence[Estimate]) -> Estimate:
    """Mean of independent estimates; one without an interval adds none."""
    spread = math.hypot(*(0.0 if math.isnan(each.half_width) else each.half_width for each in estimates))
    return Estimate(sum(each.mean for each in estimates) / len(estimates), spread / len(estimates))


@claim("VT-1-slowdown", needs=NEEDS)
def slowdown(results: Results) -> Evaluation:
    """By how many per cent vLLM is slower at the worst point of all applications."""
    worst = {title: max(found, key=lambda each: each.mean) for title, found in _speedups(results).items()}
    title = max(worst, key=lambda each: worst[each].mean)
    mean, half_width = worst[title]
    listed = ", ".join(f"{name} {100 * (1 - 1 / each.mean):.1f} %" for name, each in worst.items())
    loss = Quantity(100 * (1 - 1 / mean), 100 * half_width / mean**2, title)
    return Evaluation((loss,), f"Throughput of vLLM v0.4.2 below FlexInfer's at the worst point: {listed}.")


@claim("VT-avg", needs=NEEDS)
def average(results: Results) -> Evaluation:
    means = {title: _mean(found) for title, found in _speedups(results).items()}
    listed = ", ".join(f"{title} {each.mean:.2f}" for title, each in means.items())
    return Evaluation((quantity(_mean(list(means.values()))),), f"Mean of three applications' means: {listed}.")
