"""What do prefix caches find in a recorded trace, in every kind of cluster?

    python -m benchmarks.prefix_caches TRACE [--requests N] [--gpus 4]

* spaced: requests come one after the other and memory holds everything. In every cluster (one engine that stays, one of a
Prism fleet, a KunServe pipeline of two stages) it must find what an unlimited cache would. * recorded: requests come as they
did, on ``--gpus`` H100 with their own memory, so that caches lose blocks. A fleet whose engines stay, and groups of one stage
that take turns, must find what the static cluster finds.

Llama-3.1-8B FP8, blocks of 512 tokens, as long as those that Mooncake's traces tell apart. What is found is what engines did
not have to compute of all prompts. Exit status 1 when two that must agree do not.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from fineserve_traces import Trace, read_trace

from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import EngineSettings, Gpu, Scenario, ServedModel, simulate
from fineserve_sim.systems import SystemSpec, load_systems

BLOCK_TOKENS = 512
SETTINGS = EngineSettings(block_tokens=BLOCK_TOKENS, max_sequences=256, token_budget=8192)
EVERYTHING_GIB = 40_000
SLOWEST_TOKENS_PER_S = 5_000.0
"""Slower than any prefill here: a request that is given so long has ended when the next one comes."""

Axes = Mapping[str, Any]
FIXED = {"scheduler": {"policy": "fcfs"}, "memory": {"policy": "private", "prefix_cache": True}}
STAYING = {"policy": "prism", "evict": False, "move": False}
PIPELINE = {"policy": "pipeline", "stages": 2, "microbatches": "lookahead", "lookahead": "direct"}
NO_RESTORE = {"policy": "kunserve_drop", "restore": False}


@dataclass(frozen=True)
class Found:
    """Prompt tokens that a cluster did not compute, of ``total``; preempted requests are computed again."""

    system: str
    tokens: int
    total: int
    preemptions: int
    cpu_s: float

    def __str__(self) -> str:
        share = 100 * self.tokens / self.total
        counts = f"{self.tokens:>11,} tokens  {self.preemptions:>5} preemptions  {self.cpu_s:.0f} s"
        return f"{self.system:22} {share:6.2f} %  {counts}"


def unlimited(trace: Trace) -> int:
    """Prompt tokens in full blocks that an earlier prompt began with, but for one token that must be computed."""
    assert trace.prefix_hashes is not None
    seen: set[int] = set()
    tokens = 0
    for ids, prompt in zip(trace.prefix_hashes, trace.prompt_tokens.tolist(), strict=True):
        for id in ids[: (prompt - 1) // BLOCK_TOKENS]:
            if id not in seen:
                break
            tokens += BLOCK_TOKENS
        seen.update(ids[: prompt // BLOCK_TOKENS])
    return tokens


def spaced(trace: Trace) -> Trace:
    """The same requests, each after the one before has ended; four tokens of answer are enough for that."""
    takes_s = trace.prompt_tokens / SLOWEST_TOKENS_PER_S + 1.0
    arrival_s = np.concatenate([[0.0], np.cumsum(takes_s)[:-1]])
    return replace(trace, arrival_s=arrival_s, output_tokens=np.minimum(trace.output_tokens, 4))


def pinned(trace: Trace, gpus: int) -> Axes:
    """An engine on each GPU."""
    return {"placement": {"policy": "pinned", "groups": {trace.models[0]: [[number] for number in range(gpus)]}}}


def found(name: str, trace: Trace, base: str, axes: Axes, *, gpus: int, memory_gib: int | None = None) -> Found:
    """Run ``trace`` on a system with prefix caches, one engine a GPU or all GPUs in a row."""
    device = gpu("h100-sxm")
    if memory_gib is not None:
        device = device.model_copy(update={"memory_gib": memory_gib})
    shape = model("llama-3.1-8b").model_copy(update={"max_context_tokens": 200_000})
    served = ServedModel(trace.models[0], shape, precision("fp8"), 1, 1.0, 10.0, 12_000, 100)
    spec = SystemSpec.model_validate(load_systems()[base].model_dump() | FIXED | dict(axes))
    computed = 0  # of a pipeline in its first stage, the others compute the same tokens

    def count(line: dict[str, Any]) -> None:
        nonlocal computed
        if line.get("span") == "EngineComputed" and (line["engine"] == 0 or axes.get("execution") is not PIPELINE):
            computed += line["prefill_tokens"]

    cards = tuple(Gpu(number, 0, device) for number in range(gpus))
    start_s = time.process_time()
    result = simulate(Scenario(spec, (served,), cards, trace, SETTINGS, sample_s=0.0, log=count))
    total = int(trace.prompt_tokens.sum())
    return Found(name, total - computed, total, int(result.preemptions.sum()), time.process_time() - start_s)


def with_everything(trace: Trace) -> list[Found]:
    """The kinds of cluster, with memory for everything."""
    kinds: list[tuple[str, str, Axes, int]] = [
        ("static", "dedicated", pinned(trace, 1), 1),
        ("Prism fleet", "prism", {**pinned(trace, 1), "residency": STAYING}, 1),
        ("KunServe pipeline", "kunserve", {"execution": PIPELINE, "drop": NO_RESTORE}, 2),
    ]
    apart = spaced(trace)
    return [found(name, apart, base, axes, gpus=gpus, memory_gib=EVERYTHING_GIB) for name, base, axes, gpus in kinds]


def as_recorded(trace: Trace, gpus: int) -> list[Found]:
    """The same assignment and memory in three kinds of cluster."""
    turns = {"execution": {"policy": "pipeline", "stages": 1}, "dispatch": {"policy": "round_robin"}}
    kinds: list[tuple[str, str, Axes]] = [
        ("static", "dedicated", pinned(trace, gpus)),
        ("Prism fleet", "prism", {**pinned(trace, gpus), "residency": STAYING}),
        ("vLLM-DP, in turns", "vllm-dp", turns),
    ]
    return [found(name, trace, base, axes, gpus=gpus) for name, base, axes in kinds]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="with the ids of prefix blocks, as Mooncake's")
    parser.add_argument("--requests", type=int, help="the first so many alone")
    parser.add_argument("--gpus", type=int, default=4)
    args = parser.parse_args(arguments)
    trace = read_trace(args.trace)
    if args.requests:
        trace = trace.take(np.arange(args.requests))
    oracle, total = unlimited(trace), int(trace.prompt_tokens.sum())
    print(
        f"{'unlimited cache':22} {100 * oracle / total:6.2f} %  {oracle:>11,} tokens of {len(trace.arrival_s):,} requests"
    )
    print("spaced, memory for everything")
    alone = with_everything(trace)
    print(*alone, sep="\n")
    print(f"as recorded, {args.gpus} H100")
    together = as_recorded(trace, args.gpus)
    print(*together, sep="\n")
    agree = {one.tokens for one in alone} == {oracle} and len({(one.tokens, one.preemptions) for one in together}) == 1
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
