"""vTensor's claims that take several cells or another unit than the experiment files state."""

from __future__ import annotations

import math

from fineserve_sim.experiment.file.cells import Cell
from fineserve_sim.experiment.reproduce.finished import Results, metric, quantity
from fineserve_sim.experiment.reproduce.judge import Evaluation, Quantity
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.experiment.results.stats import Estimate, ratio

BASELINE, SYSTEM = "vllm-v0.4.2", "flexinfer"


def _pairs(results: Results, name: str) -> list[tuple[Cell, Cell]]:
    """FlexInfer's and vLLM's cells of an experiment, batch by batch."""
    return list(zip(results.cells(name, SYSTEM), results.cells(name, BASELINE), strict=True))


@claim("VT-1-slowdown", needs=("vtensor_fig10",))
def slowdown(results: Results) -> Evaluation:
    """By how many per cent vLLM is slower in multi-turn chat, at worst."""
    ratios = [
        ratio(metric(low, "token_throughput_per_s"), metric(high, "token_throughput_per_s"))
        for high, low in _pairs(results, "vtensor_fig10")
    ]
    worst = min(ratios, key=lambda each: each.mean)
    return Evaluation(
        (Quantity(100 * (1 - worst.mean), 100 * worst.half_width),),
        "Tokens/s of vLLM v0.4.2 with prefix caching below FlexInfer's in multi-turn chat, at the worst batch.",
    )


@claim("VT-avg", needs=("vtensor_fig09", "vtensor_fig10", "vtensor_fig10_sharing"))
def average(results: Results) -> Evaluation:
    """Mean of the throughput ratios of single generation (three models), multi-turn chat and prefix sharing."""
    ratios = [
        ratio(metric(high, "token_throughput_per_s", name), metric(low, "token_throughput_per_s", name))
        for high, low in _pairs(results, "vtensor_fig09")
        for name in ("Yi-6B", "Yi-9B", "Yi-34B")
    ]
    for experiment, what in (
        ("vtensor_fig10", "token_throughput_per_s"),
        ("vtensor_fig10_sharing", "throughput_per_s"),
    ):
        ratios += [ratio(metric(high, what), metric(low, what)) for high, low in _pairs(results, experiment)]
    mean = sum(each.mean for each in ratios) / len(ratios)
    spread = math.hypot(*(0.0 if math.isnan(each.half_width) else each.half_width for each in ratios)) / len(ratios)
    return Evaluation((quantity(Estimate(mean, spread)),), f"Mean over {len(ratios)} points of three scenarios.")
