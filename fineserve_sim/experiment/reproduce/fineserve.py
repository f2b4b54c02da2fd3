"""FineServe's claims that are no comparison of cells: slopes (Fig. 3), pairs on a GPU (Fig. 6), and Algorithm 2 on random
waiting sets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from fineserve_sim.catalog import gpu, kv_token_bytes, model, precision
from fineserve_sim.experiment.file.cells import Cell
from fineserve_sim.experiment.reproduce.judge import Evaluation, holds
from fineserve_sim.experiment.reproduce.measured import Results, metric, quantity
from fineserve_sim.experiment.reproduce.orders import Step, order
from fineserve_sim.experiment.results.stats import Estimate, difference, over_runs, ratio
from fineserve_sim.experiment.run.run_data import RunData
from fineserve_sim.policy.interfaces import EngineState, Request
from fineserve_sim.policy.scheduling.adaptive import AdaptiveBatching
from fineserve_sim.policy.scheduling.moore_hodgson import moore_hodgson

TOKEN_BYTES = {
    "FP16": kv_token_bytes(model("llama-3.1-8b"), precision("W16A16"), 1),
    "FP8": kv_token_bytes(model("llama-3.1-8b"), precision("W8A8KV8"), 1),
    "AWQ": kv_token_bytes(model("llama-3.1-8b"), precision("W4A16"), 1),
    "QoQ": kv_token_bytes(model("llama-3-8b"), precision("W4A8KV4"), 1),
}
"""KV bytes of a token, by the names of fig03's models; fig06 calls its models PAIR/NAME."""

EQUAL = 0.1
"""What is about equal in Fig. 3 and 6."""

SETS = 300
"""Random waiting sets on which Algorithm 2 is checked."""

NOW_S, SLO_S, PREFILL_TOKENS_PER_S, STEP_S = 10.0, 1.0, 40_000.0, 0.01
"""A model of the sets: prompts of up to 8,192 tokens, a prefill rate near that of an 8B model on an H100, host time a batch."""


# --- Fig. 3 -----------------------------------------------------------------------------------------------------------


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
    """Tokens a GiB by least squares over the pools of the sweep, one slope a seed. What is not KV memory is the same at each
    point, so that a step of the memory utilisation is a step of the pools, which are equal."""
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


def pair_throughput(results: Results, wanted: Callable[[str], bool]) -> Evaluation:
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
    return Evaluation(tuple(found), "By simulation, saturated; contention is modelled, not measured.")


# --- Fig. 9 -----------------------------------------------------------------------------------------------------------


def driver_calls(results: Results, what: str) -> Evaluation:
    """KV slab below kvcached without buffer at every rate, and the gap at the highest rate above that at the lowest."""
    slab, sync = (results.cells("fig09", system, sweep="rate") for system in ("kv-slab", "kvcached-sync"))
    pairs = [(metric(high, what), metric(low, what)) for high, low in zip(sync, slab, strict=True)]
    rates = [cell["axes"]["rate_scale"] for cell in slab]
    steps = [Step(f"rate {rate:g}", *pair) for rate, pair in zip(rates, pairs, strict=True)]
    gaps_s = [difference(*pair) for pair in pairs]
    steps.append(Step("the gap widens", gaps_s[-1], gaps_s[0]))
    listed = " and ".join(f"{1000 * gap.mean:.2g} ms" for gap in (gaps_s[0], gaps_s[-1]))
    return order(steps, f"kvcached without buffer; gaps of {listed} at the lowest and the highest rate.")


# --- Algorithm 2 ------------------------------------------------------------------------------------------------------


def _prefill_s(tokens: int, decoding: int = 0) -> float:
    return STEP_S + tokens / PREFILL_TOKENS_PER_S if tokens else 0.0


def _waiting_sets() -> Iterator[tuple[float, list[Request]]]:
    """(now, requests that have waited for up to the SLO), drawn anew for each set from one seed."""
    draw = random.Random(0)
    for _ in range(SETS):
        arrivals_s = [NOW_S - draw.uniform(0, SLO_S) for _ in range(draw.randint(1, 40))]
        yield (
            NOW_S,
            [Request(id, "m", arrival_s, _prompt_tokens(draw)) for id, arrival_s in enumerate(arrivals_s)],
        )


def _prompt_tokens(draw: random.Random) -> int:
    return min(8192, 1 + int(draw.lognormvariate(6, 1.2)))


def _adaptive(now: float, requests: Sequence[Request]) -> tuple[list[Request], list[Request], list[Request]]:
    """(admitted, dropped, dropped by a second call) of Algorithm 2 on an idle engine with room for all."""
    scheduler = AdaptiveBatching(SLO_S, _prefill_s)
    for request in requests:
        scheduler.add(request, 0)
    state = {0: EngineState(0, 0, 0, len(requests), 10**9, 1.0)}
    first = scheduler.schedule(now, state)
    return first.admitted, first.dropped, scheduler.schedule(now, state).dropped


def anchor(_: Results) -> Evaluation:
    """Every admitted batch ends before its earliest deadline; who is hopeless alone is dropped, and once."""
    broken = 0
    for now, requests in _waiting_sets():
        admitted, dropped, again = _adaptive(now, requests)
        finish_s = now + _prefill_s(sum(request.prompt_tokens for request in admitted))
        hopeless = {r.id for r in requests if now + _prefill_s(r.prompt_tokens) >= r.arrival_s + SLO_S}
        late = admitted and finish_s >= min(request.arrival_s for request in admitted) + SLO_S
        broken += bool(late or {request.id for request in dropped} != hopeless or again)
    return holds(not broken, f"{SETS} random waiting sets of up to 40 requests, {broken} against it.")


def batch_misses(_: Results) -> Evaluation:
    """Admitted requests that miss their deadline when the selection runs as one chunked-prefill batch."""
    misses = {"Moore-Hodgson": 0, "Algorithm 2": 0}
    reversed_ = 0
    for now, requests in _waiting_sets():
        chosen: Mapping[str, Sequence[Request]] = {
            "Moore-Hodgson": _moore_hodgson(now, requests),
            "Algorithm 2": _adaptive(now, requests)[0],
        }
        late = {name: _late_in_batch(now, batch) for name, batch in chosen.items()}
        reversed_ += late["Moore-Hodgson"] < late["Algorithm 2"]
        for name, count in late.items():
            misses[name] += count
    listed = ", ".join(f"{name} {count}" for name, count in misses.items())
    return holds(
        not reversed_ and misses["Moore-Hodgson"] > misses["Algorithm 2"],
        f"Late requests among the admitted of {SETS} random waiting sets: {listed}; {reversed_} sets the other way round.",
    )


def _moore_hodgson(now: float, requests: Sequence[Request]) -> list[Request]:
    """The requests that are on time when served one after the other, in deadline order."""
    ordered = sorted(requests, key=lambda request: (request.arrival_s, request.id))
    jobs = ((request.arrival_s + SLO_S, _prefill_s(request.prompt_tokens)) for request in ordered)
    return [ordered[index] for index in moore_hodgson(jobs, now).on_time]


def _late_in_batch(now: float, batch: Sequence[Request]) -> int:
    finish_s = now + _prefill_s(sum(request.prompt_tokens for request in batch))
    return sum(finish_s > request.arrival_s + SLO_S for request in batch)
