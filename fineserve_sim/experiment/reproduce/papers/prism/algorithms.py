"""Prism's algorithms 1 and 2 against exhaustive search."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, permutations, product

import numpy as np

from fineserve_sim.experiment.reproduce.judge import Evaluation, holds
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement.kvpr import KvprPlacement
from fineserve_sim.policy.scheduling.moore_hodgson import moore_hodgson

INSTANCES = 150
"""Random instances of each algorithm that are compared with exhaustive search."""


@claim("PR-alg1-bound")
def kvpr_bound() -> Evaluation:
    """KVPR greedy against every placement of up to six models on two or three GPUs."""
    draw = random.Random(1)
    ratios: list[float] = []
    bounded = True
    while len(ratios) < INSTANCES:
        sizes = [draw.randint(1, 30) for _ in range(draw.randint(2, 6))]
        models = [ModelDemand(f"m{i}", draw.uniform(1, 50), 1.0, 1, size, 1) for i, size in enumerate(sizes)]
        compared = _kvpr_against_the_best(models, round(sum(sizes) * draw.uniform(0.4, 1.2)), draw.randint(2, 3))
        if compared is not None:
            found, bound, best = compared
            bounded = bounded and found <= best * bound * (1 + 1e-9)
            ratios.append(found / best)
    return holds(
        bounded,
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


@claim("PR-alg1-tp")
def tp_parts_apart() -> Evaluation:
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
    return holds(
        apart,
        f"{parts:,} parts of models with TP 1 to 8 on 16 GPUs, placed and placed again after their rates changed.",
    )


@claim("PR-alg2-optimal")
def moore_hodgson_optimal() -> Evaluation:
    """Moore-Hodgson against all subsets in all orders of up to six requests on one machine."""
    draw = random.Random(3)
    worse = 0
    for _ in range(INSTANCES):
        jobs = sorted((draw.uniform(0, 10), draw.uniform(0.1, 5)) for _ in range(draw.randint(1, 6)))
        on_time = len(moore_hodgson(jobs, 0.0).on_time)
        worse += on_time != max(size for size in range(len(jobs) + 1) if _can_all_be_on_time(jobs, size))
    return holds(
        worse == 0,
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
