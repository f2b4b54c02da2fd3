"""How fast is the engine? Simulates a request trace and prints requests per CPU-second of the simulation loop.

    python benchmarks/engine.py [--trace workload.csv | --requests 10000] [--replicas N | --colocated | --groups NAME]
                                [--stretch K] [--plain] [--peer NAME [--peer-python PATH]] [--repeat N] [--profile]
                                [--json] [--against CHECKOUT [--rounds N]]

The set-up is the one that published figures of other simulators use: Llama-3.1-8B FP16 on one H100, token budget 512, at most
128 running requests, KV blocks of 16 tokens, no prefix cache. Without ``--trace`` a workload with the same law is drawn.
``--replicas N`` serves N replicas round robin with times divided by N. ``--colocated`` serves four models on two GPUs under
FineServe (KV slab, Algorithm 2) at the same total rate. ``--groups vllm-dp`` and ``--groups llumnix`` serve eight instances
with times divided by eight; their KV memory is short enough for preemptions and migrations. ``--stretch K`` makes outputs and
gaps K times longer.

``--plain`` also runs one event an iteration, checks that the results are the same bits (exit status 1 if not), and prints the
ratio. ``--peer`` also runs another simulator on the very requests simulated here, see ``peers.py``. Both ratios are of one
run on one machine; seconds of different runs say little. ``--profile`` adds where the time of the loop goes.

``--against CHECKOUT`` runs all of these set-ups alternately with the simulator that Python imports here and with another one,
``--rounds`` times each. It prints the ratios of requests per CPU-second, this one over the other. The other one need not have
this file. A compiled build (``dev.py compile``) is such a checkout: ``--against build/compiled``, or, with
``PYTHONPATH=build/compiled``, against another compiled build.

CPU seconds count this process. ``loop_s`` is the best of ``--repeat`` loops; ``startup_s`` (interpreter, imports,
trace, set-up), ``process_s`` and ``peak_mb`` count the whole process up to the end of the first simulation.
"""

from __future__ import annotations

import argparse
import cProfile
import csv
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import CodeType

import numpy as np
from fineserve_traces import Lognormal, LognormalLengths, Trace, generate, poisson, read_trace

import fineserve_sim
from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import EngineSettings, Gpu, RunResult, Scenario, ServedModel, simulate
from fineserve_sim.policy import controller
from fineserve_sim.systems import SystemSpec, load_systems
from fineserve_sim.systems.spec import PinnedPlacementSpec

THIS = Path(fineserve_sim.__file__).resolve().parents[1]
"""The checkout, or compiled build, whose simulator is imported."""

SETTINGS = EngineSettings(token_budget=512, max_sequences=128, block_tokens=16)
COLOCATED = ("W16A16", "W8A8KV8", "W4A16", "W8A8KV8")
GROUPS = ("vllm-dp", "llumnix")
INSTANCES = 8
GROUP_KV_BYTES = 16_500 * 128 * 1024
"""KV memory of an instance: of 10,000 requests, vLLM-DP preempts 340, and Llumnix 296 while it migrates 621."""
SET_UPS: dict[str, list[str]] = {
    "one replica": [],
    "8 replicas": ["--replicas", "8"],
    "co-located": ["--colocated"],
    **{f"{name}, {INSTANCES} instances": ["--groups", name] for name in GROUPS},
}
RATE_PER_S = 8.2
LENGTHS = LognormalLengths(prompt=Lognormal(615, 485, 3000), output=Lognormal(245, 198, 1000))
RESULTS = ("first_token_s", "finish_s", "fate", "preemptions", "engine", "iterations", "end_s")
"""What both modes must agree on, bit for bit."""


# --- what is simulated -------------------------------------------------------------------------------------------------


def workload(requests: int, rate_per_s: float = RATE_PER_S, seed: int = 0) -> Trace:
    """Poisson arrivals and lognormal lengths with the parameters of the published comparison."""
    rng = np.random.default_rng(seed)
    return generate(poisson(rng, rate_per_s, requests), LENGTHS, rng)


def stretch(trace: Trace, factor: float) -> Trace:
    """Outputs and gaps ``factor`` times as long: the same load with longer requests."""
    return replace(
        trace,
        arrival_s=trace.arrival_s * factor,
        output_tokens=np.maximum(1, np.rint(trace.output_tokens * factor)).astype(np.int64),
    )


def solo(trace: Trace, replicas: int, settings: EngineSettings = SETTINGS) -> Scenario:
    """``replicas`` engines of one model, each alone on its GPU, first come first served; times divided by ``replicas``."""
    trace = replace(trace, arrival_s=trace.arrival_s / replicas)
    placement = PinnedPlacementSpec(groups={"m0": tuple((replica,) for replica in range(replicas))})
    system = load_systems()["dedicated"].model_copy(update={"placement": placement})
    return scenario_of(trace, system, ["W16A16"], gpus=replicas, settings=settings)


def colocated(trace: Trace) -> Scenario:
    """Four 8B models in mixed precision on two GPUs under FineServe (KV slab, Algorithm 2)."""
    return scenario_of(trace, load_systems()["fineserve"], list(COLOCATED), gpus=2)


def groups(trace: Trace, name: str) -> Scenario:
    """Eight instances of one model under ``vllm-dp`` or ``llumnix``, short of memory; times divided by eight."""
    trace = replace(trace, arrival_s=trace.arrival_s / INSTANCES)
    fitting = partial(scenario_of, system=load_systems()[name], precisions=["W16A16"], gpus=INSTANCES)
    roomy = fitting(trace.take(np.arange(2)))
    spare_bytes = simulate(roomy).kv_capacity_bytes[0] - GROUP_KV_BYTES  # whatever this checkout takes beside KV
    share = roomy.engine.memory_utilization - spare_bytes / roomy.gpus[0].spec.memory_bytes
    return fitting(trace, settings=replace(SETTINGS, memory_utilization=share))


def _trace_of(scenario: Scenario) -> Trace:
    """That of a scenario made here: older checkouts know no other requests."""
    assert isinstance(scenario.trace, Trace)
    return scenario.trace


def scenario_of(
    trace: Trace,
    system: SystemSpec,
    precisions: list[str],
    gpus: int,
    settings: EngineSettings = SETTINGS,
    ttft_slo_s: float = 0.5,
) -> Scenario:
    """One 8B model a precision, each with its turn of the requests, on ``gpus`` H100 of one node."""
    ids = tuple(f"m{i}" for i in range(len(precisions)))
    trace = replace(trace, model=np.arange(len(trace), dtype=np.int32) % len(ids), models=ids)
    rate_per_s = len(trace) / trace.arrival_s[-1] / len(precisions)
    served = tuple(
        ServedModel(
            id=id,
            model=model("llama-3.1-8b"),
            precision=precision(name),
            tp=1,
            rate_per_s=rate_per_s,
            ttft_slo_s=ttft_slo_s,
            mean_prompt_tokens=float(trace.prompt_tokens.mean()),
            mean_output_tokens=float(trace.output_tokens.mean()),
        )
        for id, name in zip(ids, precisions, strict=True)
    )
    cards = tuple(Gpu(id=i, node=0, spec=gpu("h100-sxm")) for i in range(gpus))
    return Scenario(system=system, models=served, gpus=cards, trace=trace, engine=settings, sample_s=0.0)


# --- what is measured --------------------------------------------------------------------------------------------------


def fastest(scenario: Scenario, repeat: int) -> RunResult:
    """The run whose loop took the least CPU time; all of them give the same results."""
    return min((simulate(scenario) for _ in range(repeat)), key=lambda result: result.loop_cpu_s)


def measure(scenario: Scenario, repeat: int) -> tuple[RunResult, dict[str, object]]:
    """Simulate; the counters and the means of the best run, the costs of the process up to the end of the first."""
    first = simulate(scenario)
    process_s = time.process_time()
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    best = min(first, fastest(scenario, repeat - 1), key=lambda run: run.loop_cpu_s) if repeat > 1 else first
    trace = _trace_of(scenario)
    longer = trace.output_tokens > 1
    tpot_s = (best.finish_s - best.first_token_s)[longer] / (trace.output_tokens[longer] - 1)
    return best, {
        "requests": len(trace),
        "requests_per_cpu_s": len(trace) / best.loop_cpu_s,
        "iterations_per_cpu_s": best.iterations / best.loop_cpu_s,
        "events": best.events,
        "iterations": best.iterations,
        "loop_s": best.loop_cpu_s,
        "startup_s": process_s - first.loop_cpu_s,
        "process_s": process_s,
        "peak_mb": peak_mb,
        "ttft_s": float(np.nanmean(best.first_token_s - trace.arrival_s)),
        "tpot_s": float(np.nanmean(tpot_s)),
    }


def against_plain(scenario: Scenario, merged: RunResult, repeat: int) -> dict[str, object]:
    """The same run with one event an iteration: whether the bits are the same, and how much slower it is."""
    plain = fastest(replace(scenario, exact_steps=True), repeat)
    return {
        "plain_events": plain.events,
        "plain_requests_per_cpu_s": len(plain.fate) / plain.loop_cpu_s,
        "event_ratio": plain.events / merged.events,
        "speed_ratio": plain.loop_cpu_s / merged.loop_cpu_s,
        "same_results": all(
            np.array_equal(getattr(plain, name), getattr(merged, name), equal_nan=name.endswith("_s"))
            for name in RESULTS
        ),
    }


def against_peer(name: str, python: str, trace: Trace, replicas: int, repeat: int) -> dict[str, object]:
    """What ``peers.py`` measures of another simulator on ``trace``, run by the interpreter that has it; keys get ``peer_``.

    Raises SystemExit with the adapter's last line when it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.csv"
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
            rows.writerows(zip(*(column.tolist() for column in _lengths(trace)), strict=True))
        adapter = [python, str(Path(__file__).with_name("peers.py")), name, "--trace", str(path)]
        options = ["--replicas", str(replicas), "--repeat", str(repeat)]
        done = subprocess.run([*adapter, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"engine.py: --peer {name}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
    return {f"peer_{key}": value for key, value in json.loads(done.stdout).items()}


def against_checkout(other: Path, options: list[str], rounds: int) -> Iterator[tuple[str, dict[str, float]]]:
    """For each of ``SET_UPS``, requests per CPU-second of both checkouts (medians), and the median, smallest and largest
    ratio of pairs of runs that followed each other. Raises SystemExit with the last line of a run that fails."""
    for name, set_up in SET_UPS.items():
        pairs = []
        for number in range(rounds):
            order = (THIS, other) if number % 2 else (other, THIS)
            speeds = {checkout: _speed(checkout, [*set_up, *options]) for checkout in order}
            pairs.append((speeds[THIS], speeds[other]))
        ratios = [new / old for new, old in pairs]
        yield (
            name,
            {
                "requests_per_cpu_s": statistics.median(new for new, _ in pairs),
                "other_requests_per_cpu_s": statistics.median(old for _, old in pairs),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            },
        )


def _speed(checkout: Path, options: list[str]) -> float:
    """Requests per CPU-second that this very file measures of the simulator in ``checkout``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(checkout), str(checkout / "traces")))}
    command = [sys.executable, str(Path(__file__).resolve()), *options, "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"engine.py: {checkout}: {(done.stderr.strip().splitlines() or ['no answer'])[-1]}")
    speed: float = json.loads(done.stdout)["requests_per_cpu_s"]
    return speed


def _lengths(trace: Trace) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return trace.arrival_s, trace.prompt_tokens, trace.output_tokens


def profile(scenario: Scenario, functions: int = 12) -> list[dict[str, object]]:
    """Where a simulation spends its time: all modules with 1 % or more, then the top functions. ``own_share`` is time in the
    code itself, ``with_callees_share`` counts what it calls too; "built-in" is everything in C.

    The profiler's own cost weighs on calls: shares tell where to look, not what a change would gain.
    """
    profiler = cProfile.Profile()
    profiler.runcall(simulate, scenario)
    entries = sorted(profiler.getstats(), key=lambda entry: -entry.inlinetime)
    total_s = sum(entry.inlinetime for entry in entries)
    modules: Counter[str] = Counter()
    for entry in entries:
        modules[_module(entry.code)] += entry.inlinetime / total_s  # type: ignore[assignment]
    by_module = [
        {"code": f"{name} (module)", "own_share": share} for name, share in modules.most_common() if share >= 0.01
    ]
    return by_module + [
        {
            "code": entry.code if isinstance(entry.code, str) else f"{_module(entry.code)}.{entry.code.co_name}",
            "own_share": entry.inlinetime / total_s,
            "with_callees_share": entry.totaltime / total_s,
            "calls": entry.callcount,
        }
        for entry in entries[:functions]
    ]


def _module(code: CodeType | str) -> str:
    """Folder and file that the code comes from; functions in C have none."""
    return "built-in" if isinstance(code, str) else "/".join(Path(code.co_filename).with_suffix("").parts[-2:])


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "build": "pure Python" if str(controller.__file__).endswith(".py") else "compiled",
        "platform": f"{platform.system()} {platform.machine()}",
    }


# --- command line ------------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="CSV: arrival_s, prompt_tokens, output_tokens")
    parser.add_argument("--requests", type=int, default=10_000, help="without --trace: how many to draw")
    parser.add_argument("--replicas", type=int, default=1, help="replicas behind round robin, times divided by N")
    parser.add_argument("--colocated", action="store_true", help="four models on two GPUs under FineServe")
    parser.add_argument("--groups", choices=GROUPS, help="eight instances of one model, short of memory")
    parser.add_argument("--stretch", type=float, default=1.0, help="make outputs and gaps this much longer")
    parser.add_argument("--plain", action="store_true", help="also run one event an iteration and compare")
    parser.add_argument("--peer", metavar="NAME", help="also run this simulator (aisimulate) and compare")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="interpreter that has the peer (default: this one)"
    )
    parser.add_argument("--repeat", type=int, default=1, help="take the best of so many loops")
    parser.add_argument("--profile", action="store_true", help="also show where the time of the loop goes")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--against", metavar="CHECKOUT", type=Path, help="all set-ups, this checkout and that one in turn"
    )
    parser.add_argument("--rounds", type=int, default=5, help="with --against: pairs of runs a set-up")
    args = parser.parse_args(arguments)
    if min(args.replicas, args.repeat, args.requests, args.rounds) < 1 or args.stretch <= 0:
        parser.error("--replicas, --repeat, --requests, --rounds must be at least 1, and --stretch positive")
    for option in ("colocated", "groups", "against"):
        others = [other for other in ("colocated", "groups", "against") if other != option and getattr(args, other)]
        if getattr(args, option) and (args.replicas > 1 or args.peer or others):
            parser.error(
                f"--{option} is a set-up of its own: it takes neither --replicas nor --peer nor another set-up"
            )
    if args.against and not (args.against / "fineserve_sim").is_dir():
        parser.error(f"--against {args.against}: no checkout, it has no folder fineserve_sim")
    return args


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.against:
        return compare(args)
    trace = stretch(read_trace(args.trace) if args.trace else workload(args.requests), args.stretch)
    scenario = set_up(args, trace)
    result, rows = measure(scenario, args.repeat)
    if args.plain:
        rows |= against_plain(scenario, result, args.repeat)
    if args.peer:
        rows |= against_peer(args.peer, args.peer_python, _trace_of(scenario), args.replicas, args.repeat)
        rows["peer_speed_ratio"] = rows["peer_loop_s"] / result.loop_cpu_s  # type: ignore[operator]
    tables = {"profile": profile(scenario)} if args.profile else {}
    if args.profile and args.plain:
        tables["plain_profile"] = profile(replace(scenario, exact_steps=True))
    if args.json:
        print(json.dumps({"machine": machine(), **rows, **tables}, indent=2))
    else:
        show(rows, tables)
    return 0 if rows.get("same_results", True) else 1


def set_up(args: argparse.Namespace, trace: Trace) -> Scenario:
    if args.groups:
        return groups(trace, args.groups)
    return colocated(trace) if args.colocated else solo(trace, args.replicas)


def compare(args: argparse.Namespace) -> int:
    """Print what ``--against`` asks for, a line a set-up as soon as it is measured."""
    load = ["--trace", args.trace] if args.trace else ["--requests", str(args.requests)]
    options = [*load, "--stretch", str(args.stretch), "--repeat", str(args.repeat)]
    found = {}
    for name, row in against_checkout(args.against.resolve(), options, args.rounds):
        found[name] = row
        if not args.json:
            print(
                f"{name:22} {row['requests_per_cpu_s']:9.0f} requests/CPU s, other {row['other_requests_per_cpu_s']:9.0f}, "
                f"ratio {row['ratio']:.3f} ({row['ratio_min']:.3f} to {row['ratio_max']:.3f})",
                flush=True,
            )
    if args.json:
        print(json.dumps({"machine": machine(), "set_ups": found}, indent=2))
    return 0


def show(rows: dict[str, object], tables: dict[str, list[dict[str, object]]]) -> None:
    for name, value in {**machine(), **rows}.items():
        print(f"{name:28} {value:.6g}" if isinstance(value, float) else f"{name:28} {value}")
    for name, lines in tables.items():
        print(f"\n{name:48} {'own':>7} {'total':>7} {'calls':>9}")
        for row in lines:
            total = f"{row['with_callees_share']:7.1%} {row['calls']:9}" if "calls" in row else ""
            print(f"{row['code']:48} {row['own_share']:7.1%} {total}")


if __name__ == "__main__":
    sys.exit(main())
