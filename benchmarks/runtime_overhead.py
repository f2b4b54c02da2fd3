"""What does the KV slab cost a single model? Steps a stock vLLM engine and one over the slab in turn and compares.

    python benchmarks/runtime_overhead.py [--rounds N] [--requests N] [--sequences N] [--poison] [--json]

Both engines run the same tiny model (the cheaper the model, the larger the share of the host's work) in one process, on the
CPU backend, with one thread. They get the same requests and take turns step by step, so that both see the same noise of the
machine. With plenty of memory their batches are the same, which is checked, tokens included. The slab's side of a step is all
that the runtime does in it: lock, leases, step report, engine state and the counters for onlookers.

A round serves all requests once. Its ``added_us_per_step`` is the median over its steps of the paired difference, its
``throughput_ratio`` (slab over stock) the ratio of the median step times. Other users of the machine stretch single steps
tenfold. Both are given as means over rounds with 95 % intervals, for CPU seconds of the stepping thread and for wall seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from fineserve_runtime.engines.api import EngineConfig, Sampling, Submission, TinyModel
from fineserve_runtime.engines.host import model_folder
from fineserve_runtime.engines.model_files import kv_geometry, read_config
from fineserve_runtime.engines.process import build_slab_core
from fineserve_runtime.engines.region import CpuRegion, RegionPaths
from fineserve_runtime.engines.settings import SlabSettings
from fineserve_runtime.engines.table import SlabTable
from fineserve_runtime.engines.vllm_engine import SteppedCore, build_core, engine_arguments, prepare_environment

from fineserve_sim.experiment.results.stats import Estimate, over_runs

REGION_BYTES = 256 * 2**20
SLAB_MULTIPLE = 8


@dataclass
class Round:
    """Seconds of each step of one round, (steps,) each, by engine and clock."""

    stock_cpu_s: list[float] = field(default_factory=list)
    slab_cpu_s: list[float] = field(default_factory=list)
    stock_wall_s: list[float] = field(default_factory=list)
    slab_wall_s: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=16, help="max_num_seqs of both engines")
    parser.add_argument("--poison", action="store_true", help="fill freed slabs with 0xFF, so that blocks are zeroed")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    prepare_environment()
    with tempfile.TemporaryDirectory() as folder:
        stock, slab = build_pair(Path(folder), options.sequences, options.poison)
        requests = draw_requests(options.requests)
        run_round(stock, slab, requests)  # warm-up
        rounds = [run_round(stock, slab, requests) for _ in range(options.rounds)]
    report(summary(rounds), options.json)


def build_pair(folder: Path, sequences: int, poison: bool) -> tuple[SteppedCore, SteppedCore]:
    """A stock engine and one over the slab, of the same model."""
    config = EngineConfig("tiny", TinyModel(), max_sequences=sequences, max_model_len=1024)
    model_dir = model_folder(config, folder)
    block_bytes = kv_geometry(read_config(model_dir), config).block_bytes
    slab_bytes = block_bytes * SLAB_MULTIPLE
    paths = RegionPaths(folder, "overhead")
    CpuRegion.create(paths.bytes_file, REGION_BYTES)
    SlabTable.create(paths.table, REGION_BYTES // slab_bytes, slab_bytes, engines=1)
    settings = SlabSettings(str(paths.table), str(paths.bytes_file), "cpu", 0, block_bytes, poison_freed=poison)
    stock = SteppedCore(build_core(engine_arguments(config, model_dir, "cpu", REGION_BYTES)), 0)
    return stock, build_slab_core(config, model_dir, settings, REGION_BYTES, ())


def draw_requests(count: int, seed: int = 0) -> list[Submission]:
    rng = random.Random(seed)
    return [
        Submission(
            number,
            tuple(rng.randrange(2, 512) for _ in range(rng.randrange(10, 300))),
            Sampling(max_tokens=rng.randrange(32, 128), ignore_eos=True),
        )
        for number in range(count)
    ]


def run_round(stock: SteppedCore, slab: SteppedCore, requests: list[Submission]) -> Round:
    """Serve all requests on both engines, a step of each in turn. Raises RuntimeError when their tokens differ."""
    for request in requests:
        stock.add(request)
        slab.add(request)
    result, steps = Round(), 0
    while stock.core.scheduler.has_requests():
        sides = [("stock", stock.core.step_fn), ("slab", lambda: slab_step(slab))]
        outcome = {}
        for name, step in sides if steps % 2 else sides[::-1]:
            outcome[name], cpu_s, wall_s = timed(step)
            getattr(result, f"{name}_cpu_s").append(cpu_s)
            getattr(result, f"{name}_wall_s").append(wall_s)
        expected = {
            int(output.request_id): tuple(output.new_token_ids)
            for batch in outcome["stock"][0].values()
            for output in batch.outputs
        }
        found = {chunk.request_id: chunk.token_ids for chunk in outcome["slab"].chunks} if outcome["slab"] else {}
        if expected != found:
            raise RuntimeError(f"step {steps}: the engines' tokens differ")
        steps += 1
    return result


def slab_step(slab: SteppedCore) -> Any:
    report = slab.step()
    slab.publish()
    return report


def timed(step: Callable[[], Any]) -> tuple[Any, float, float]:
    """What the call returned, CPU seconds of this thread, wall seconds."""
    wall_s, cpu_s = time.perf_counter(), time.thread_time()
    result = step()
    return result, time.thread_time() - cpu_s, time.perf_counter() - wall_s


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Means over rounds with half widths of their 95 % intervals."""
    figures: dict[str, Any] = {"rounds": len(rounds), "steps_per_round": len(rounds[0].slab_cpu_s)}
    for clock in ("cpu", "wall"):
        pairs = [(getattr(row, f"stock_{clock}_s"), getattr(row, f"slab_{clock}_s")) for row in rounds]
        figures[f"stock_{clock}_us_per_step"] = _plain(over_runs([median(stock) * 1e6 for stock, _ in pairs]))
        added_us = [median(b - a for a, b in zip(stock, slab, strict=True)) * 1e6 for stock, slab in pairs]
        figures[f"added_{clock}_us_per_step"] = _plain(over_runs(added_us))
        figures[f"throughput_ratio_{clock}"] = _plain(
            over_runs([median(stock) / median(slab) for stock, slab in pairs])
        )
    return figures


def _plain(estimate: Estimate) -> dict[str, float]:
    return {"mean": round(estimate.mean, 4), "half_width": round(estimate.half_width, 4)}


def report(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:28}", f"{value['mean']} ± {value['half_width']}" if isinstance(value, dict) else value)


if __name__ == "__main__":
    main()
