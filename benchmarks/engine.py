"""How fast is the engine? Simulates a request trace and prints requests per CPU-second of the simulation loop.

    python benchmarks/engine.py --trace workload.csv [--json] [--plain] [--replicas N] [--colocated] [--stretch K]

The set-up is the one that published figures of other simulators use: Llama-3.1-8B FP16 on one H100, token budget 512, at most
128 running requests, KV blocks of 16 tokens, no prefix cache. ``--replicas N`` serves N replicas round robin with times
divided by N; ``--colocated`` serves four models on two GPUs under FineServe at the same total rate; ``--stretch K`` makes outputs
and gaps K times longer; ``--plain`` also runs one event an iteration, checks that the results are the same bits, and prints
the ratio. CPU seconds are those of this process; ``startup_s`` is everything before the loop, ``process_s`` the whole.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from dataclasses import replace

import numpy as np
from fineserve_traces import Trace, read_trace

from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import EngineSettings, Gpu, RunResult, Scenario, ServedModel, simulate
from fineserve_sim.systems import load_systems
from fineserve_sim.systems.spec import PinnedPlacementSpec

SETTINGS = EngineSettings(token_budget=512, max_sequences=128, block_tokens=16)
COLOCATED = ("W16A16", "W8A8KV8", "W4A16", "W8A8KV8")


def solo(trace: Trace, replicas: int) -> Scenario:
    """``replicas`` engines of one model, each alone on its GPU, first come first served."""
    trace = replace(trace, arrival_s=trace.arrival_s / replicas, model=np.zeros(len(trace), np.int32), models=("m0",))
    system = load_systems()["dedicated"]
    groups = {"m0": tuple((replica,) for replica in range(replicas))}
    system = system.model_copy(update={"placement": PinnedPlacementSpec(groups=groups)})
    return _scenario(trace, system, ["W16A16"], gpus=replicas)


def colocated(trace: Trace) -> Scenario:
    """Four 8B models in mixed precision on two GPUs under FineServe (KV slab, Algorithm 2)."""
    ids = tuple(f"m{i}" for i in range(len(COLOCATED)))
    trace = replace(trace, model=np.arange(len(trace), dtype=np.int32) % len(ids), models=ids)
    return _scenario(trace, load_systems()["fineserve"], list(COLOCATED), gpus=2)


def _scenario(trace: Trace, system: object, precisions: list[str], gpus: int) -> Scenario:
    rate_per_s = len(trace) / trace.arrival_s[-1] / len(precisions)
    served = tuple(
        ServedModel(
            id=f"m{i}",
            model=model("llama-3.1-8b"),
            precision=precision(name),
            tp=1,
            rate_per_s=rate_per_s,
            ttft_slo_s=0.5,
            mean_prompt_tokens=float(trace.prompt_tokens.mean()),
            mean_output_tokens=float(trace.output_tokens.mean()),
        )
        for i, name in enumerate(precisions)
    )
    cards = tuple(Gpu(id=i, node=0, spec=gpu("h100-sxm")) for i in range(gpus))
    return Scenario(system=system, models=served, gpus=cards, trace=trace, engine=SETTINGS, sample_s=0.0)


def stretch(trace: Trace, factor: float) -> Trace:
    return replace(
        trace,
        arrival_s=trace.arrival_s * factor,
        output_tokens=np.maximum(1, np.rint(trace.output_tokens * factor)).astype(np.int64),
    )


def report(trace: Trace, result: RunResult, startup_s: float) -> dict[str, object]:
    longer = trace.output_tokens > 1
    tpot_s = (result.finish_s - result.first_token_s)[longer] / (trace.output_tokens[longer] - 1)
    return {
        "requests": len(trace),
        "requests_per_cpu_s": len(trace) / result.loop_cpu_s,
        "iterations_per_cpu_s": result.iterations / result.loop_cpu_s,
        "events": result.events,
        "iterations": result.iterations,
        "loop_s": result.loop_cpu_s,
        "startup_s": startup_s,
        "process_s": time.process_time(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "ttft_s": float(np.nanmean(result.first_token_s - trace.arrival_s)),
        "tpot_s": float(np.nanmean(tpot_s)),
    }


def against_plain(scenario: Scenario, merged: RunResult) -> dict[str, object]:
    """The same run with one event an iteration: the same bits, and how much slower."""
    plain = simulate(replace(scenario, exact_steps=True))
    same = all(
        np.array_equal(getattr(plain, name), getattr(merged, name), equal_nan=name.endswith("_s"))
        for name in ("first_token_s", "finish_s", "fate", "preemptions", "engine")
    )
    return {
        "plain_events": plain.events,
        "plain_requests_per_cpu_s": len(plain.fate) / plain.loop_cpu_s,
        "event_ratio": plain.events / merged.events,
        "speed_ratio": plain.loop_cpu_s / merged.loop_cpu_s,
        "same_results": same,
    }


def machine() -> dict[str, object]:
    return {"python": platform.python_version(), "machine": platform.machine(), "system": platform.system()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="CSV: arrival_s, prompt_tokens, output_tokens")
    parser.add_argument("--replicas", type=int, default=1, help="replicas behind round robin, times divided by N")
    parser.add_argument("--colocated", action="store_true", help="four models on two GPUs under FineServe")
    parser.add_argument("--stretch", type=float, default=1.0, help="make outputs and gaps this much longer")
    parser.add_argument("--plain", action="store_true", help="also run one event an iteration and compare")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    trace = stretch(read_trace(args.trace), args.stretch)
    scenario = colocated(trace) if args.colocated else solo(trace, args.replicas)
    before_s = time.process_time()
    result = simulate(scenario)
    startup_s = before_s + (time.process_time() - before_s - result.loop_cpu_s)
    rows = report(scenario.trace, result, startup_s)
    if args.plain:
        rows |= against_plain(scenario, result)
    if args.json:
        print(json.dumps({"machine": machine(), **rows}, indent=2))
    else:
        for name, value in rows.items():
            print(f"{name:28} {value:.6g}" if isinstance(value, float) else f"{name:28} {value}")
    return 0 if rows.get("same_results", True) else 1


if __name__ == "__main__":
    sys.exit(main())
