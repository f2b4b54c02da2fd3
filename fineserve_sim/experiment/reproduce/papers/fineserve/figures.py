"""FineServe's figures: slopes of cached tokens (Fig. 3), pairs on a GPU (Fig. 6), driver calls (Fig. 9)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fineserve_sim.catalog import gpu, kv_token_bytes, model, precision
from fineserve_sim.experiment.file.plan import Cell
from fineserve_sim.experiment.reproduce.curves import Step, order
from fineserve_sim.experiment.reproduce.finished import Results, metric, quantity
from fineserve_sim.experiment.reproduce.judge import Evaluation
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.experiment.results.stats import Estimate, difference, over_runs, ratio
from fineserve_sim.experiment.run.run_data import RunData

TOKEN_BYTES = {
    "FP16": kv_token_bytes(model("llama-3.1-8b"), precision("W16A16"), 1),
    "FP8": kv_token_bytes(model("llama-3.1-8b"), precision("W8A8KV8"), 1),
    "AWQ": kv_token_bytes(model("llama-3.1-8b"), precision("W4A16"), 1),
    "QoQ": kv_token_bytes(model("llama-3-8b"), precision("W4A8KV4"), 1),
}
"""KV bytes of a token, by the names of fig03's models; fig06 calls its models PAIR/NAME."""

EQUAL = 0.1
"""What is about equal in Fig. 3 and 6."""


# --- Fig. 3 -----------------------------------------------------------------------------------------------------------


@claim("FS-3-order", needs=("fig03",))
def slopes(results: Results) -> Evaluation:
    """Cached tokens against KV pool size, a slope for each precision."""
    cells = results.cells("fig03", "alone", sweep="pool")
    found = {name: _slope(results, cells, name) for name in ("QoQ", "FP8", "FP16", "AWQ")}
    apart = Estimate(abs(found["FP16"].mean - found["AWQ"].mean), 0.0)
    steps = [
        Step("QoQ over FP8", found["QoQ"], found["FP8"]),
        Step("FP8 over FP16", found["FP8"], found["FP16"]),
        Step("AWQ as FP16", Estimate(EQUAL * found["FP16"].mean, 0.0), apart),
    ]
    listed = ", ".join(f"{name} {slope.mean:,.0f}" for name, slope in found.items())
    return order(steps, f"Tokens a GiB: {listed}.")


def _slope(results: Results, cells: Sequence[Cell], name: str) -> Estimate:
    """Tokens a GiB by least squares over the pools of the sweep, one slope a seed. Memory other than KV is the same at each
    point, so a step of the memory utilisation is a step of the pools, which are equal."""
    memory_gib = gpu("h100-sxm").memory_bytes / 2**30 / len(TOKEN_BYTES)
    pools_gib = [memory_gib * cell["axes"]["engine.memory_utilization"] for cell in cells]
    by_cell = (results.runs("fig03", cell) for cell in cells)
    fits = (
        np.polyfit(pools_gib, [_cached_tokens(run, name) for run in runs], 1) for runs in zip(*by_cell, strict=True)
    )
    return over_runs([float(fit[0]) for fit in fits])


def _cached_tokens(run: RunData, name: str) -> float:
    """Mean cached tokens of a model over the measured window."""
    start_s, end_s = run.window_s
    inside = (run.sample_s >= start_s) & (run.sample_s <= end_s)
    engine = run.engine_models.index(name)
    return float(run.kv_used_bytes[inside, engine].mean()) / TOKEN_BYTES[name.rpartition("/")[2].rstrip("2")]


# --- Fig. 6 -----------------------------------------------------------------------------------------------------------


def _pairs(names: Iterable[str]) -> dict[str, list[str]]:
    """The models of each pair; ``FP16`` is the one alone."""
    pairs: dict[str, list[str]] = {}
    for name in names:
        pairs.setdefault(name.partition("/")[0], []).append(name)
    return pairs


@claim("FS-6-tokens-per-mem", needs=("fig06",))
def tokens_per_memory(results: Results) -> Evaluation:
    """Cached tokens a byte of KV memory of each pair, over FP16 alone."""
    cell = results.cell("fig06", "pairs")
    runs = results.runs("fig06", cell)
    one = Estimate(1.0, 0.0)
    steps, listed = [], []
    for pair, names in _pairs(runs[0].engine_models).items():
        gain = over_runs([_tokens_per_byte(run, names) * TOKEN_BYTES["FP16"] for run in runs])
        listed.append(f"{pair} {gain.mean:.2f}")
        if "FP8" in pair:
            steps.append(Step(f"{pair} above 1", gain, one))
        elif pair != "FP16":
            steps.append(Step(f"{pair} about 1", Estimate(EQUAL, 0.0), Estimate(abs(gain.mean - 1), 0.0)))
    return order(steps, f"{', '.join(listed)}.")


def _tokens_per_byte(run: RunData, names: Sequence[str]) -> float:
    tokens = [_cached_tokens(run, name) for name in names]
    sizes = [TOKEN_BYTES[name.rpartition("/")[2].rstrip("2")] for name in names]
    return sum(tokens) / sum(count * size for count, size in zip(tokens, sizes, strict=True))


@claim("FS-6-all-gain", needs=("fig06",))
def all_pairs(results: Results) -> Evaluation:
    return _pair_throughput(results, lambda pair: True)


@claim("FS-6-fp8fp8", needs=("fig06",))
def fp8_pair(results: Results) -> Evaluation:
    return _pair_throughput(results, lambda pair: pair == "FP8-FP8")


def _pair_throughput(results: Results, wanted: Callable[[str], bool]) -> Evaluation:
    """Requests a second of pairs over FP16 alone."""
    cell = results.cell("fig06", "pairs")
    pairs = _pairs(results.runs("fig06", cell)[0].engine_models)
    (alone,) = pairs.pop("FP16")
    found = []
    for pair, names in pairs.items():
        parts = [metric(cell, "throughput_per_s", name) for name in names]
        both = Estimate(sum(part.mean for part in parts), math.hypot(*(part.half_width for part in parts)))
        if wanted(pair):
            found.append(quantity(ratio(both, metric(cell, "throughput_per_s", alone)), pair))
    return Evaluation(tuple(found), "By simulation, each model asked for what FP16 alone completes.")


# --- Fig. 9 -----------------------------------------------------------------------------------------------------------


@claim("FS-9-ttft", needs=("fig09",))
def ttft_of_driver_calls(results: Results) -> Evaluation:
    return _driver_calls(results, "ttft_mean_s")


@claim("FS-9-tpot", needs=("fig09",))
def tpot_of_driver_calls(results: Results) -> Evaluation:
    return _driver_calls(results, "tpot_mean_s")


def _driver_calls(results: Results, what: str) -> Evaluation:
    """KV slab below kvcached without buffer at every rate, and the gap at the highest rate above that at the lowest."""
    slab, sync = (results.cells("fig09", system, sweep="rate") for system in ("kv-slab", "kvcached-sync"))
    pairs = [(metric(high, what), metric(low, what)) for high, low in zip(sync, slab, strict=True)]
    rates = [cell["axes"]["rate_scale"] for cell in slab]
    steps = [Step(f"rate {rate:g}", *pair) for rate, pair in zip(rates, pairs, strict=True)]
    gaps_s = [difference(*pair) for pair in pairs]
    steps.append(Step("the gap widens", gaps_s[-1], gaps_s[0]))
    listed = " and ".join(f"{1000 * gap.mean:.2g} ms" for gap in (gaps_s[0], gaps_s[-1]))
    return order(steps, f"kvcached without buffer; gaps of {listed} at the lowest and the highest rate.")
