"""KunServe's sizes, plans and pipelines, evaluated by our own policy modules: claims KS-* that need no clock.

Microbatches pass through a pipeline (App. A). With sends that no stage waits for, microbatch k leaves stage s at

    finish[k][s] = max(finish[k-1][s], finish[k][s-1] + transfer) + t[k][s]

The paper's eq. (4) hands over in lock step: a stage only passes on when its neighbour is free. For two stages of equal cost
this is an upper bound of the recurrence. Times 5, 1, 5 take 16 with asynchronous sends and 20 by eq. (4).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from fineserve_traces import length_source
from fineserve_traces.sketch import sketch_document

from fineserve_sim.catalog import kv_token_bytes, model, precision, weight_bytes
from fineserve_sim.experiment.reproduce.judge import Evaluation, holds, numbers
from fineserve_sim.experiment.reproduce.registry import claim
from fineserve_sim.policy.groups.drop_plan import DropPlan, even_split, plan_drop
from fineserve_sim.policy.groups.microbatch import Chunk, ChunkCost, lookahead, token_count

GIB = 2**30
HBM_BYTES = 80 * GIB
NEMOTRON_PARAMETERS = 253_000_000_000
"""By its name: its layers differ from one another, so no geometry of the catalogue describes it."""

CLUSTER_A_BYTES_PER_S = 25e9
"""200 Gbps between servers (KunServe, section 5.1)."""


@claim("KS-T1")
def weight_shares() -> Evaluation:
    """Weights in 16 bits over the memory of an instance of 1, 4, 8 and 16 GPUs of 80 GiB."""
    plain = precision("W16A16")
    weights = [
        weight_bytes(model("qwen2.5-14b"), plain, 1),
        4 * weight_bytes(model("qwen2.5-72b"), plain, 4),
        2 * NEMOTRON_PARAMETERS,
        weight_bytes(model("llama-3.1-405b"), plain, 1),
    ]
    shares = [100 * size / (gpus * HBM_BYTES) for size, gpus in zip(weights, (1, 4, 8, 16), strict=True)]
    return numbers(
        *shares,
        detail=f"{', '.join(f'{size / GIB:.0f}' for size in weights)} GiB; sizes from the models' geometry, "
        "Nemotron's from its name.",
    )


@claim("KS-2-token")
def token_size() -> Evaluation:
    """KV of a token of Qwen-2.5-14B."""
    size = kv_token_bytes(model("qwen2.5-14b"), precision("W16A16"), 1)
    return numbers(size / 1024, detail="48 layers x 8 KV heads x 128 x 2 bytes, for K and V.")


# --- drop plan ---------------------------------------------------------------------------------------------------------


def _alone(instances: int) -> list[tuple[int, ...]]:
    return [(instance,) for instance in range(instances)]


@claim("KS-4.1-7layer")
def seven_layers() -> Evaluation:
    """Seven instances of a model of seven layers that need all the memory there is."""
    plan = plan_drop(_alone(7), float("inf"), copy_bytes=7)
    kept = [len(layers) for layers in even_split(7, len(plan.groups[0]))]
    return numbers(
        100 * plan.freed_bytes / (7 * 7),
        detail=f"{len(plan.groups)} group is left, each instance keeps {max(kept)} of 7 layers.",
    )


@claim("KS-6-freed")
def freed_copies() -> Evaluation:
    """The bytes that a merge frees, summed over the instances' own layers, for all numbers of instances and requirements."""
    layers, copies = 840, []  # 840 splits evenly over up to 8 stages
    for instances in range(2, 9):
        for merges in range(1, instances):
            plan = plan_drop(_alone(instances), merges * layers, copy_bytes=layers)
            copies.append((instances * layers - _held_layers(plan, layers)) / layers / merges)
    return numbers(
        float(np.mean(copies)),
        detail=f"{len(copies)} plans of up to 8 instances: layers that instances drop, over merges; between {min(copies):g} "
        f"and {max(copies):g}.",
    )


def _held_layers(plan: DropPlan, layers: int) -> int:
    """Layers that all instances hold together once every group runs as a pipeline."""
    return sum(len(part) for group in plan.groups for part in even_split(layers, len(group)))


@claim("KS-6-greedy")
def greedy_groups() -> Evaluation:
    """The largest group of each plan against the least that any grouping of equal freed memory has."""
    cases = []
    for instances in range(2, 9):
        for merges in range(1, instances):
            plan = plan_drop(_alone(instances), merges, copy_bytes=1)
            largest = max(len(group) for group in plan.groups)
            cases.append((instances, merges, largest, _least_largest_group(instances, instances - merges)))
    worse = [case for case in cases if case[2] > case[3]]
    listed = ", ".join(f"{n} instances and {k} copies: {found} instead of {best}" for n, k, found, best in worse)
    return holds(
        not worse,
        f"Of {len(cases)} cases of up to 8 instances, the two smallest groups first is best in {len(cases) - len(worse)}"
        + (f"; not for {listed}." if worse else "."),
    )


def _least_largest_group(instances: int, groups: int) -> int:
    """By brute force over all ways to write ``instances`` as a sum of ``groups`` sizes."""

    def least(left: int, parts: int, most: int) -> int:
        if parts == 1:
            return left if left <= most else instances + 1
        options = range(1, min(left - parts + 1, most) + 1)
        return min((max(size, least(left - size, parts - 1, most)) for size in options), default=instances + 1)

    return least(instances, groups, instances)


@claim("KS-4.2-tpot")
def exchange_a_token() -> Evaluation:
    """A full instance sends half of its KV, spread over the tokens of a response."""
    weights = weight_bytes(model("qwen2.5-14b"), precision("W16A16"), 1)
    kv_bytes = 0.9 * HBM_BYTES - weights
    moved = 1 - len(even_split(48, 2)[0]) / 48
    stall_s = kv_bytes * moved / CLUSTER_A_BYTES_PER_S
    return numbers(
        1000 * stall_s / 200,
        detail=f"Two instances of Qwen-2.5-14B merge: each sends {moved:.0%} of {kv_bytes / GIB:.1f} GiB at 25 GB/s, both ways "
        f"at once, in {stall_s:.2f} s.",
    )


# --- microbatches and pipelines ----------------------------------------------------------------------------------------


@claim("KS-9-imbalance")
def fig9_microbatches() -> Evaluation:
    """Fig. 9's five requests, one token each and then four, in microbatches of four tokens. One unit of cost for a token and
    for a query-key pair each."""
    work = [Chunk(request, 0, 1) for request in range(4)] + [Chunk(4, 0, 4)]
    cost = ChunkCost(alpha=1.0, beta=1.0, gamma=0.0)
    by_count, by_cost = token_count(work, 4), lookahead(work, 4, cost)
    spread = [max(map(cost.batch, cut)) / min(map(cost.batch, cut)) for cut in (by_count, by_cost)]
    as_printed = [sorted({chunk.request for chunk in batch}) for batch in by_count] == [[0, 1, 2, 3], [4]]
    return holds(
        as_printed and spread[1] < spread[0],
        f"Token counts put R0 to R3 and R4 apart, costs {spread[0]:.2f} to 1; lookahead {spread[1]:.2f} to 1, as near "
        "as whole tokens come.",
    )


@claim("KS-eq4")
def lockstep() -> Evaluation:
    """Eq. (4) against a two-stage pipeline played step by step, hand-over only when both stages are free."""
    draw = random.Random(4)
    costs = [[draw.uniform(0.1, 5) for _ in range(draw.randint(1, 12))] for _ in range(200)]
    errors = [abs(lockstep_bound_s(each) - _lockstep_s(each)) for each in costs]
    shorter = [finish_times_s([[c, c] for c in each])[-1][-1] / lockstep_bound_s(each) for each in costs]
    example = [5.0, 1.0, 5.0]
    return holds(
        max(errors) < 1e-9 and max(shorter) <= 1 + 1e-9,
        f"{len(costs)} random sequences; with sends that nobody waits for, the pipeline is done in {min(shorter):.2f} to "
        f"{max(shorter):.2f} of that. Costs 5, 1, 5: {lockstep_bound_s(example):g} against "
        f"{finish_times_s([[c, c] for c in example])[-1][-1]:g}.",
    )


def _lockstep_s(cost_s: Sequence[float]) -> float:
    """Both stages start together: the second one what the first one had, the first one the next; then they wait for each
    other."""
    stages = [0.0, *cost_s, 0.0]
    return sum(max(ahead, behind) for behind, ahead in pairwise(stages))


@claim("KS-3-ppcomm")
def stage_traffic() -> Evaluation:
    """Bytes between two instances for a token: one activation vector, against the all-reduces of tensor parallelism."""
    spec = model("qwen2.5-14b")
    vector_bytes = 2 * spec.hidden_size
    stages, ranks = 2, 2
    pipeline_bytes = (stages - 1) * vector_bytes
    per_rank = 2 * (ranks - 1) / ranks * vector_bytes  # a ring all-reduce
    tensor_bytes = 2 * spec.layers * per_rank
    return numbers(
        pipeline_bytes / tensor_bytes,
        detail=f"{pipeline_bytes / 1024:g} KiB across the stage boundary against {2 * spec.layers} all-reduces of the same "
        f"vector, {tensor_bytes / 1024:g} KiB from each of two ranks.",
    )


# --- workloads ---------------------------------------------------------------------------------------------------------


@claim("KS-data")
def lengths() -> Evaluation:
    """Mean lengths of the sets that stand for ShareGPT and LongBench here."""
    means = []
    for name in ("sharegpt_multiturn_4k", "arxiv_sample"):
        prompt, output = length_source(name).sample(np.random.default_rng(0), 200_000)
        means += [float(prompt.mean()), float(output.mean())]
    real = [sketch_document(name)["original"] for name in ("sharegpt_multiturn_4k", "arxiv_sample")]
    return numbers(
        *means,
        detail="Sketches of sarathi-serve's multi-turn ShareGPT up to 4,096 prompt tokens (real means "
        f"{real[0]['prompt_mean']:.0f}/{real[0]['output_mean']:.0f}) and, for LongBench, of arXiv articles "
        f"({real[1]['prompt_mean']:.0f}/{real[1]['output_mean']:.0f}); BurstGPT's requests are not at hand.",
    )


def finish_times_s(stage_s: Sequence[Sequence[float]], transfer_s: float = 0.0) -> list[list[float]]:
    """When each microbatch leaves each stage, shape (microbatches, stages), all being ready at time 0.

    ``stage_s[k][s]`` are the seconds of microbatch k in stage s; ``transfer_s`` passes between two stages.
    """
    finish: list[list[float]] = []
    for batch in stage_s:
        above = finish[-1] if finish else [0.0] * len(batch)
        row: list[float] = []
        for stage, seconds in enumerate(batch):
            ready_s = row[-1] + transfer_s if stage else 0.0
            row.append(max(above[stage], ready_s) + seconds)
        finish.append(row)
    return finish


def lockstep_bound_s(cost_s: Sequence[float]) -> float:
    """Eq. (4): two stages of equal cost, handing over in lock step. 0 without microbatches."""
    if not cost_s:
        return 0.0
    return cost_s[0] + sum(max(pair) for pair in pairwise(cost_s)) + cost_s[-1]
