"""Prism's traces, algorithms and activation costs, evaluated: claims PR-1*, PR-2*, PR-9-* and PR-alg*.

The claims on traces are what our generators (``fineserve_traces.prism``) are made from, since the traces are private: the
findings say whether a generated trace shows the statistics that the paper reports, not that the world does.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from itertools import combinations, permutations, product

import numpy as np
from fineserve_traces import ConstantLengths
from fineserve_traces.model_stats import ModelStats, model_stats, tail_share
from fineserve_traces.prism import arena_trace, provider_trace

from fineserve_sim.catalog import model, precision, weight_bytes
from fineserve_sim.experiment.analytic.finding import Finding
from fineserve_sim.policy.fleet.activation_cost import activation_cost
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement.kvpr import KvprPlacement
from fineserve_sim.policy.scheduling.moore_hodgson import moore_hodgson

HOURS = 48
"""Length of the generated traces: statistics per hour of 24 models settle within a few per cent."""

FOUR_MONTHS_H = 4 * 30.4 * 24
MANY = 0.3
"""The paper's "many models", not quantified there: at least this part of them (the ledger's reading)."""

SIZES = (("llama-3.1-8b", 1), ("qwen2.5-14b", 1), ("llama-3.1-70b", 8))
"""Models of Fig. 9 with their TP degrees: the ends and the middle."""


@cache
def _provider() -> tuple[ModelStats, ...]:
    """24 models, as Hyperbolic has."""
    models = [f"m{rank:02}" for rank in range(24)]
    trace = provider_trace(np.random.default_rng(0), models, HOURS * 3600.0, lengths=ConstantLengths(1, 1))
    return tuple(model_stats(trace, HOURS * 3600.0))


@cache
def _arena() -> tuple[ModelStats, ...]:
    """84 models, as Arena-Chat has."""
    models = [f"m{rank:02}" for rank in range(84)]
    trace = arena_trace(np.random.default_rng(0), models, HOURS * 3600.0, lengths=ConstantLengths(1, 1))
    return tuple(model_stats(trace, HOURS * 3600.0))


def _exceeded_by(part: float, values: Sequence[float]) -> float:
    """What this part of the values exceeds."""
    return float(np.quantile(values, 1 - part))


def _idle_s(stats: Sequence[ModelStats]) -> list[float]:
    return [found.median_idle_s or 0.0 for found in stats]


def _cv(stats: Sequence[ModelStats]) -> list[float]:
    return [found.cv_per_minute or 0.0 for found in stats]


# --- traces ------------------------------------------------------------------------------------------------------------


def evaluate_PR_1a_tail() -> Finding:
    """Requests per hour of the models that the paper calls the tail."""
    stats = _provider()
    tail = [found.per_hour for found in stats[-round(0.6 * len(stats)) :]]
    head = 1 - tail_share([found.requests for found in stats])
    return Finding(
        float(np.median(tail)),
        "requests/h of the median tail model",
        f"Of 24 generated models, {sum(rate < 100 for rate in tail)} of the {len(tail)} least popular stay below 100 an hour; "
        f"the others make {100 * head:.0f} % of the requests.",
    )


def evaluate_PR_1_idle_count() -> Finding:
    """Idle periods over 10 s in four months."""
    periods = [found.idle_per_hour * FOUR_MONTHS_H for found in _provider()]
    return Finding(
        (100.0 * sum(count > 1000 for count in periods) / len(periods), _exceeded_by(0.6, periods)),
        "% of models with over 1000 periods; periods that 60 % of models exceed",
        f"Rates per hour over {HOURS} generated hours, extended to four months; the least is {min(periods):.0f}.",
    )


def evaluate_PR_1b_fluct() -> Finding:
    """The largest ratio of rates in bins of 10 s within a minute, for the three most popular models."""
    swings = [found.swing or 1.0 for found in _provider()[:3]]
    return Finding(
        min(swings),
        "ratio, the least of three models",
        f"The three most popular generated models swing {', '.join(f'{swing:.0f}' for swing in swings)}-fold in a minute; an "
        "empty bin counts as one request.",
    )


def evaluate_PR_2a_share() -> Finding:
    """What the least popular 60 % of models request."""
    shares = [100 * tail_share([found.requests for found in stats]) for stats in (_provider(), _arena())]
    return Finding(
        (60.0, shares[0]),
        "% of models; % of requests",
        f"Zipf shares made for it; drawn, {shares[0]:.1f} % in the provider's trace and {shares[1]:.1f} % in the Arena's.",
    )


def evaluate_PR_2b_idle() -> Finding:
    """Medians of idle times over models."""
    provider, arena = _idle_s(_provider()), _idle_s(_arena())
    return Finding(
        (min(_exceeded_by(MANY, provider), _exceeded_by(MANY, arena)), _exceeded_by(0.5, arena)),
        "s that 30 % of models exceed in every trace; s that half of the Arena's exceed",
        f"Medians of gaps over 10 s: {100 * np.mean(np.array(provider) > 30):.0f} % of the provider's models are above 30 s, "
        f"{100 * np.mean(np.array(arena) > 80):.0f} % of the Arena's above 80 s.",
    )


def evaluate_PR_2c_idle_rate() -> Finding:
    """Idle intervals per hour over models."""
    rates = [found.idle_per_hour for found in _provider()]
    return Finding(
        (float(np.median(rates)), max(rates), 100 * max(rates) * 10 / 3600),
        "intervals/h of the median and of the extreme model; % of its time idle at least",
        f"Gaps over 10 s in {HOURS} generated hours of 24 models; {sum(rate > 100 for rate in rates)} have over 100 an hour.",
    )


def evaluate_PR_2d_cv() -> Finding:
    """Variation of requests per minute over models."""
    provider, arena = _cv(_provider()), _cv(_arena())
    return Finding(
        (_exceeded_by(MANY, provider), _exceeded_by(MANY, arena)),
        "cv that 30 % of models exceed: provider; Arena",
        f"{100 * np.mean(np.array(provider) > 1):.0f} % of the provider's models are above 1.0, "
        f"{100 * np.mean(np.array(arena) > 0.5):.0f} % of the Arena's above 0.5.",
    )


# --- activation --------------------------------------------------------------------------------------------------------


def _load_s(name: str, tp: int, *, pool: bool = True, parallel: bool = True) -> float:
    shard_bytes = weight_bytes(model(name), precision("W16A16"), tp)
    return activation_cost(engine_pool=pool, parallel_loading=parallel).alone_s(shard_bytes, tp)


_INPUT = "The rates of the cost model were read off these figures of the paper, so this is an input."


def evaluate_PR_9_small() -> Finding:
    """Activation of an 8B model."""
    return Finding(_load_s("llama-3.1-8b", 1), "s", f"16.1 GB at 22.7 GB/s and 0.02 s of engine work. {_INPUT}")


def evaluate_PR_9_14b() -> Finding:
    """Activation of a 14B model, with parallel loading and without."""
    fast, naive = (_load_s("qwen2.5-14b", 1, parallel=parallel) for parallel in (True, False))
    return Finding((fast, naive, naive / fast), "s; s; ratio", f"29.5 GB at 22.7 and at 4.2 GB/s. {_INPUT}")


def evaluate_PR_9_70b() -> Finding:
    """Activation of a 70B model on eight GPUs."""
    return Finding(_load_s("llama-3.1-70b", 8), "s", f"Eight shards over a node that delivers 94 GB/s. {_INPUT}")


def evaluate_PR_9_range() -> Finding:
    """Plain copy against parallel loading over model sizes, engines from the pool in both cases."""
    ratios = [_load_s(name, tp, parallel=False) / _load_s(name, tp) for name, tp in SIZES]
    return Finding(
        (min(ratios), max(ratios)),
        "ratio, least and largest",
        f"8B {ratios[0]:.1f}, 14B {ratios[1]:.1f}, 70B on eight GPUs {ratios[2]:.1f}: the ranks of the 70B load side by side "
        "with plain copies too.",
    )


def evaluate_PR_9_order() -> Finding:
    """Both optimisations shorten every activation, and parallel loading helps the TP model least."""
    steps = [
        [_load_s(n, tp, pool=p, parallel=q) for p, q in ((False, False), (True, False), (True, True))]
        for n, tp in SIZES
    ]
    gains = [plain / fast for _, plain, fast in steps]
    return Finding(
        all(cold > plain > fast for cold, plain, fast in steps) and min(gains) == gains[-1],
        "whether each step shortens, and TP gains least",
        "Seconds cold, with the pool, and with parallel loading: "
        + "; ".join(
            f"{name} {' > '.join(f'{s:.1f}' for s in row)}" for (name, _), row in zip(SIZES, steps, strict=True)
        )
        + ".",
    )


# --- algorithms --------------------------------------------------------------------------------------------------------

INSTANCES = 150
"""Random instances of each algorithm that are compared with exhaustive search."""


def evaluate_PR_alg1_bound() -> Finding:
    """KVPR greedy against every placement of up to six models on two or three GPUs."""
    draw = random.Random(1)
    ratios: list[float] = []
    holds = True
    while len(ratios) < INSTANCES:
        sizes = [draw.randint(1, 30) for _ in range(draw.randint(2, 6))]
        models = [ModelDemand(f"m{i}", draw.uniform(1, 50), 1.0, 1, size, 1) for i, size in enumerate(sizes)]
        compared = _kvpr_against_the_best(models, round(sum(sizes) * draw.uniform(0.4, 1.2)), draw.randint(2, 3))
        if compared is not None:
            found, bound, best = compared
            holds = holds and found <= best * bound * (1 + 1e-9)
            ratios.append(found / best)
    return Finding(
        holds,
        "whether max KVPR <= OPT (1 + C / (S - w))",
        f"In {INSTANCES} random instances, up to 6 models on 2 or 3 GPUs, that the greedy could place, many of them tight: it "
        f"is {max(ratios):.1f} times the optimum at worst, {float(np.mean(ratios)):.2f} times on average.",
    )


def _kvpr_against_the_best(
    models: Sequence[ModelDemand], capacity: int, gpus: int
) -> tuple[float, float, float] | None:
    """Max KVPR of the greedy, the factor of its bound, and the least max KVPR of any placement. None when the greedy finds no
    place for a model."""

    def pressure(homes: Sequence[int], gpu: int) -> float:
        here = [m for m, home in zip(models, homes, strict=True) if home == gpu]
        left = capacity - sum(m.weight_bytes for m in here)
        return sum(m.rate_per_s for m in here) / left if left > 0 else float("inf")

    placement = KvprPlacement().place(models, [GpuSlot(gpu, 0, capacity) for gpu in range(gpus)])
    if placement.unplaced:
        return None
    home = {instance.model: instance.gpus[0] for instance in placement.instances}
    homes = [home[m.id] for m in models]
    bottleneck = max(range(gpus), key=lambda gpu: pressure(homes, gpu))
    charged = [instance.footprint_bytes for instance in placement.instances if instance.gpus == (bottleneck,)]
    choices = product(range(gpus), repeat=len(models))
    best = min(max(pressure(choice, gpu) for gpu in range(gpus)) for choice in choices)
    return pressure(homes, bottleneck), 1 + capacity / (capacity - sum(charged)), best


def evaluate_PR_alg1_tp() -> Finding:
    """Parts of a TP model on distinct GPUs of one node, from scratch and when models move."""
    draw = random.Random(2)
    gpus = [GpuSlot(gpu, gpu // 8, 80) for gpu in range(16)]
    node_of = {gpu.id: gpu.node for gpu in gpus}
    apart = True
    parts = 0
    for _ in range(INSTANCES):
        models = [
            ModelDemand(
                f"m{i}",
                draw.uniform(0.1, 9),
                draw.choice([1.0, 5.0]),
                draw.choice([1, 1, 2, 4, 8]),
                draw.randint(1, 20),
                1,
            )
            for i in range(12)
        ]
        first = KvprPlacement().place(models, gpus).instances
        current = {instance.model: instance.gpus for instance in first}
        changed = [
            ModelDemand(m.id, draw.uniform(0.1, 9), m.slo_s, m.tp, m.weight_bytes, 1) for m in models if m.id in current
        ]
        tp = {m.id: m.tp for m in models}
        for instance in (*first, *KvprPlacement().place(changed, gpus, current).instances):
            one_node = len({node_of[gpu] for gpu in instance.gpus}) == 1
            apart = apart and one_node and len(set(instance.gpus)) == tp[instance.model]
            parts += tp[instance.model]
    return Finding(
        apart,
        "whether all parts are on distinct GPUs of one node",
        f"{parts:,} parts of models with TP 1 to 8 on 16 GPUs, placed and placed again after their rates changed.",
    )


def evaluate_PR_alg2_optimal() -> Finding:
    """Moore-Hodgson against all subsets in all orders of up to six requests on one machine."""
    draw = random.Random(3)
    worse = 0
    for _ in range(INSTANCES):
        jobs = sorted((draw.uniform(0, 10), draw.uniform(0.1, 5)) for _ in range(draw.randint(1, 6)))
        on_time = len(moore_hodgson(jobs, 0.0).on_time)
        worse += on_time != max(size for size in range(len(jobs) + 1) if _can_all_be_on_time(jobs, size))
    return Finding(
        worse == 0,
        "whether no schedule has fewer late requests",
        f"{INSTANCES} random sets of up to 6 requests against exhaustive search, {worse} of them with more late ones; requests "
        "are served one after another there, as the proof presumes.",
    )


def _can_all_be_on_time(jobs: Sequence[tuple[float, float]], size: int) -> bool:
    """Whether some ``size`` of the (deadline, duration) jobs, in some order, all end on time."""
    return any(_on_time(order) for chosen in combinations(jobs, size) for order in permutations(chosen))


def _on_time(order: Sequence[tuple[float, float]]) -> bool:
    end_s = 0.0
    for deadline_s, duration_s in order:
        end_s += duration_s
        if end_s > deadline_s:
            return False
    return True
