"""The record: what a provider's hour and a marketplace's day cost to simulate.

    PYTHONPATH=build/compiled python benchmarks/record.py hour         2,000 models, 1,000 H100, 1,000,000 requests
    PYTHONPATH=build/compiled python benchmarks/record.py day          100 models, 1,200 H100, 10,000,000 requests
    python benchmarks/record.py hour --scale 0.01                      a hundredth of models, GPUs and requests
    python benchmarks/record.py day --part 0.1 --system fineserve      its first tenth, of one system
    python benchmarks/record.py hour --scale 0.05 --gpus 2             on twice as many GPUs

Popularity, bursts and lengths follow ``fineserve_traces.ProviderDay``. Requests stream in and outcomes stream out
(``simulate_streamed``); metrics are tallied on the way. Each system is a process of its own, so that its peak of memory is its
own. CPU seconds count the whole process, and the hash is one of what became of every request. A run into a pipe says
how far it is twice a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import numpy as np
from fineserve_traces import ProviderDay, length_source
from numpy.typing import NDArray

from fineserve_sim.build import build
from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import Gpu, Scenario, ServedModel, simulate_streamed
from fineserve_sim.cluster.scenario import EndedRequests, Timeline
from fineserve_sim.experiment.results.hits import Batches
from fineserve_sim.experiment.results.stats import of_share
from fineserve_sim.experiment.results.tally import ALL, Tally
from fineserve_sim.experiment.run.run_data import Limits
from fineserve_sim.systems import load_systems

UInt64s: TypeAlias = NDArray[np.uint64]

NODE_GPUS = 8
TTFT_S = 1.0
SAMPLE_S = 10.0
TOLD_S = 30.0


@dataclass(frozen=True)
class Tier:
    """A load and a cluster. ``kinds`` of models take turns down the list of popularity: name, precision, TP degree."""

    title: str
    models: int
    gpus: int
    requests: int
    duration_s: float
    window_s: float
    kinds: tuple[tuple[str, str, int], ...]
    systems: tuple[str, ...]


TIERS = {
    "hour": Tier(
        "a provider's hour",
        models=2000,
        gpus=1000,
        requests=1_000_000,
        duration_s=3600.0,
        window_s=150.0,
        kinds=(
            ("llama-3.2-1b", "W16A16", 1),
            ("llama-3.1-8b", "fp8", 1),
            ("llama-3.2-3b", "W16A16", 1),
            ("llama-3.1-8b", "W16A16", 1),
            ("qwen2.5-14b", "fp8", 1),
        ),
        systems=("fineserve", "static*", "prism", "muxserve++"),
    ),
    "day": Tier(
        "a marketplace's day",
        models=100,
        gpus=1200,
        requests=10_000_000,
        duration_s=86400.0,
        window_s=600.0,
        kinds=(
            ("llama-3.1-8b", "W16A16", 1),
            ("llama-3.3-70b", "fp8", 4),
            ("qwen2.5-14b", "W16A16", 1),
            ("qwen3-32b", "fp8", 2),
            ("llama-3.1-8b", "fp8", 1),
        ),
        systems=("fineserve", "prism"),
    ),
}


def scenario_of(tier: Tier, system: str, scale: float, part: float, seed: int) -> Scenario:
    """``scale`` times the models, GPUs and requests; ``part`` of the time, from its beginning."""
    models, nodes = max(5, round(tier.models * scale)), max(1, round(tier.gpus * scale / NODE_GPUS))
    rate_per_s = tier.requests * scale / tier.duration_s
    lengths = length_source("sharegpt_v3_first_turn")
    requests = ProviderDay(
        tuple(f"m{rank}" for rank in range(models)),
        rate_per_s,
        tier.duration_s,
        tier.duration_s * part,
        tier.window_s,
        lengths,
        seed,
    )
    prompt, output = requests.mean_tokens
    served = []
    for rank, (id, own_per_s) in enumerate(zip(requests.models, requests.rates_per_s, strict=True)):
        name, format, tp = tier.kinds[rank % len(tier.kinds)]
        served.append(ServedModel(id, model(name), precision(format), tp, own_per_s, TTFT_S, prompt, output))
    cards = tuple(Gpu(number, number // NODE_GPUS, gpu("h100-sxm")) for number in range(nodes * NODE_GPUS))
    return Scenario(
        load_systems()[system], tuple(served), cards, requests, sample_s=SAMPLE_S, tell=Progress(system).told
    )


class Progress:
    """Lines on stderr: how many requests have ended, and when the rest will have."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began_s = self._told_s = time.monotonic()

    def told(self, ended: int, requests: int) -> None:
        now = time.monotonic()
        if now - self._told_s < TOLD_S or not ended:
            return
        self._told_s = now
        left_s = (now - self._began_s) * (requests / ended - 1)
        print(
            f"  {self._name}: {ended:,} of {requests:,} requests, {left_s / 60:.0f} min to go",
            file=sys.stderr,
            flush=True,
        )


class Digest:
    """A hash of what became of every request, its moments in whole microseconds: their last bits depend on the vector
    instructions with which numpy reads latency tables. Rows are hashed one by one and summed, so that the order in which they
    are told does not count: it depends on when the cluster is looked at."""

    COLUMNS = ("request", "first_token_s", "finish_s", "fate", "preemptions", "engine")

    def __init__(self) -> None:
        self._sum = 0

    def add(self, came: EndedRequests) -> None:
        rows = np.zeros(len(came.ended.request), dtype=np.uint64)
        for name in self.COLUMNS:
            column = getattr(came.ended, name)
            if column.dtype.kind == "f":
                column = np.rint(1e6 * np.nan_to_num(column, nan=-1.0))
            rows = _mixed(rows ^ column.astype(np.int64).view(np.uint64))
        self._sum = (self._sum + int(rows.sum(dtype=np.uint64))) % 2**64

    def text(self) -> str:
        return f"{self._sum:016x}"[:12]


def _mixed(words: UInt64s) -> UInt64s:
    """SplitMix64's finaliser, of each word; one step more, so that 0 is not 0."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def measure(tier: Tier, system: str, scale: float, part: float, seed: int) -> dict[str, object]:
    """One system, in this process."""
    scenario, digest, samples = scenario_of(tier, system, scale, part, seed), Digest(), 0
    tally = Tally(Batches(scenario.trace, 0), Limits(dict.fromkeys(scenario.trace.models, TTFT_S)))

    def ended(came: EndedRequests) -> None:
        tally.add(came)
        digest.add(came)

    def sampled(timeline: Timeline) -> None:
        nonlocal samples
        samples += len(timeline.time_s)

    result = simulate_streamed(scenario, ended, sampled)
    share, values, usage = of_share([tally.hits("ttft_attainment", ALL)]), tally.values(ALL), resource.getrusage
    counts, used = tally.counts(), usage(resource.RUSAGE_SELF)
    cpu_s, gpu_hours = used.ru_utime + used.ru_stime, len(scenario.gpus) * result.end_s / 3600
    return {
        "system": system,
        "models": len(scenario.models),
        "gpus": len(scenario.gpus),
        "requests": counts["arrived"],
        "finished": counts["finished"],
        "unplaced": len(result.placement.unplaced),
        "within_ttft": share.mean,
        "half_width": share.half_width,
        "ttft_p95_s": values["ttft_p95_s"],
        "iterations": result.iterations,
        "samples": samples,
        "gpu_hours": gpu_hours,
        "cpu_s": cpu_s,
        "requests_per_cpu_s": counts["arrived"] / cpu_s,
        "cpu_ms_per_gpu_hour": 1000 * cpu_s / gpu_hours,
        "peak_mb": used.ru_maxrss / (1024 if sys.platform == "linux" else 1024**2),
        "hash": digest.text(),
    }


COLUMNS = (
    ("system", "{:12}"),
    ("models", "{:7,}"),
    ("gpus", "{:6,}"),
    ("requests", "{:11,}"),
    ("within_ttft", "{:12.4f}"),
    ("ttft_p95_s", "{:11.3f}"),
    ("cpu_s", "{:8.1f}"),
    ("requests_per_cpu_s", "{:19,.0f}"),
    ("cpu_ms_per_gpu_hour", "{:20.1f}"),
    ("peak_mb", "{:8.0f}"),
    ("hash", "{:>13}"),
)


def machine() -> str:
    """What the figures were measured on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cpu = names[0] if names else platform.processor() or platform.machine()
    return f"{cpu}, {os.cpu_count()} cores; Python {platform.python_version()}; {build()}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tier", choices=TIERS)
    parser.add_argument("--system", action="append", help="only this one; may be repeated")
    parser.add_argument("--scale", type=float, default=1.0, help="of models, GPUs and requests")
    for part in ("models", "gpus", "requests"):
        parser.add_argument(f"--{part}", type=float, default=1.0, metavar="FACTOR", help=f"times as many {part}")
    parser.add_argument("--part", type=float, default=1.0, help="of the time, with its requests")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON, a line a system")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if not (args.scale > 0 and 0 < args.part <= 1):
        parser.error("--scale must be positive, --part within (0, 1]")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    tier = TIERS[args.tier]
    for part in ("models", "gpus", "requests"):
        tier = replace(tier, **{part: round(getattr(tier, part) * getattr(args, part))})
    if args.here:
        print(json.dumps(measure(tier, args.system[0], args.scale, args.part, args.seed)))
        return 0
    if not args.json:
        print(f"{tier.title}, scale {args.scale:g}, part {args.part:g}, seed {args.seed}; {machine()}")
        print("".join(f"{name:>{len(format.format(0))}}" for name, format in COLUMNS))
    given = ("models", "gpus", "requests", "scale", "part", "seed")
    options = [args.tier, "--here", *(f"--{name}={getattr(args, name)}" for name in given)]
    for system in args.system or tier.systems:
        command = [sys.executable, __file__, *options, "--system", system]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if told.returncode:
            print(f"{system}: failed", flush=True)
            return 1
        row = json.loads(told.stdout)
        print(
            told.stdout.strip() if args.json else "".join(form.format(row[name]) for name, form in COLUMNS), flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
