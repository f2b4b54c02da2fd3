"""Other simulators on the same requests, each by an adapter that feeds it a CSV in its own format.

    PYTHON benchmarks/peers.py aisimulate --trace requests.csv [--replicas N] [--repeat N]

PYTHON is an interpreter that has the simulator; nothing else is imported. ``engine.py --peer`` runs this file and prints the
ratio. The JSON printed has ``loop_s``, the CPU seconds of the best of ``--repeat`` runs, ``requests_per_cpu_s``,
``startup_s`` (the CPU seconds of everything before), ``ttft_s``, ``tpot_s``, ``name`` and ``version``.

AISimulate (PyPI ``aisimulate``, tested with 0.12.0.dev2; its core is Rust) replays traces in Mooncake's format. Its core is
called once to load its performance tables, which counts as start-up, and only then timed. Reading the trace lies inside the
timed call and weighs a few percent.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.metadata
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TRACE_BLOCK_TOKENS = 512
"""Mooncake's unit of prompt hashes; unrelated to the KV block."""

AISIMULATE_DATA = "0.24.0"
"""The vLLM version whose kernel timings AISimulate 0.12.0.dev2 lists as current for the H100."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", choices=sorted(PEERS))
    parser.add_argument("--trace", type=Path, required=True, help="CSV: arrival_s, prompt_tokens, output_tokens")
    parser.add_argument("--replicas", type=int, default=1, help="replicas behind round robin; times as they are")
    parser.add_argument("--repeat", type=int, default=1, help="take the best of so many runs")
    args = parser.parse_args()
    try:
        version = importlib.metadata.version(args.peer)
    except importlib.metadata.PackageNotFoundError:
        parser.error(f"{sys.executable} has no package {args.peer!r}; install it there, or name another interpreter")
    answer = PEERS[args.peer](args.trace, args.replicas, args.repeat)
    print(json.dumps({"name": args.peer, "version": version, **answer}, indent=2))
    return 0


def aisimulate(trace: Path, replicas: int, repeat: int) -> dict[str, float]:
    """Replay ``trace`` with AISimulate's engine: vLLM, Llama-3.1-8B FP16, H100 SXM, the settings of ``engine.py``."""
    config = importlib.import_module("aisimulate.config")
    compiler = importlib.import_module("aisimulate.compiler")
    runner = importlib.import_module("aisimulate.runner")
    core = TimedCore(importlib.import_module("aisimulate._runtime"), repeat)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        requests, output_tokens = write_mooncake(trace, path)
        prediction = config.CorePredictionConfig.model_validate(prediction_config(path, replicas))
        spec = compiler.prediction_to_replay_spec(prediction)
        runner.EngineReplayRunnerFactory(runtime=core).create(0).run(spec)
    done = core.summary["completed_requests"], core.summary["total_output_tokens"]
    if done != (requests, output_tokens):
        raise SystemExit(f"AISimulate finished {done} of {(requests, output_tokens)} (requests, output tokens)")
    return {
        "requests_per_cpu_s": requests / core.loop_s,
        "loop_s": core.loop_s,
        "startup_s": core.startup_s,
        "ttft_s": core.summary["mean_ttft_ms"] / 1e3,
        "tpot_s": core.summary["mean_tpot_ms"] / 1e3,
    }


class TimedCore:
    """Takes the place of AISimulate's compiled core (the seam that its runner offers) and times the calls to it."""

    def __init__(self, core: Any, repeat: int) -> None:
        self._core = core
        self._repeat = repeat
        self.startup_s = self.loop_s = 0.0
        self.summary: dict[str, float] = {}

    def run_replay_json(self, spec: str) -> str:
        self._core.run_replay_json(spec)
        begin_s = time.process_time()
        loops_s = []
        for _ in range(self._repeat):
            start_s = time.process_time()
            report: str = self._core.run_replay_json(spec)
            loops_s.append(time.process_time() - start_s)
        self.loop_s = min(loops_s)
        self.startup_s = begin_s - self.loop_s
        self.summary = json.loads(report)
        return report


def write_mooncake(source: Path, target: Path) -> tuple[int, int]:
    """Write the CSV ``source`` as a Mooncake trace in which no two prompts share a block. Returns its requests and output
    tokens."""
    requests = output_tokens = blocks = 0
    with source.open(newline="") as rows, target.open("w") as lines:
        for row in csv.DictReader(rows):
            prompt = int(row["prompt_tokens"])
            own = -(-prompt // TRACE_BLOCK_TOKENS)
            line = {
                "timestamp": float(row["arrival_s"]) * 1e3,
                "input_length": prompt,
                "output_length": int(row["output_tokens"]),
                "hash_ids": list(range(blocks, blocks + own)),
            }
            lines.write(json.dumps(line) + "\n")
            blocks += own
            requests += 1
            output_tokens += int(row["output_tokens"])
    return requests, output_tokens


def prediction_config(trace: Path, replicas: int) -> dict[str, object]:
    """The set-up of ``engine.py`` in AISimulate's terms; the KV pool has its default size (90 % of the GPU)."""
    worker = {
        "parallelism": {"replicas": replicas},
        "scheduler": {"max_batched_tokens": 512, "max_sequences": 128},
        "kv_cache": {"block_size": 16, "prefix_caching": False},
    }
    return {
        "engine": {
            "mode": "aggregated",
            "model": "meta-llama/Meta-Llama-3.1-8B",
            "hardware": "h100_sxm",
            "backend": "vllm",
            "backend_version": AISIMULATE_DATA,
            "workers": {"aggregated": worker},
        },
        "traffic": {
            "source": {
                "type": "trace",
                "paths": [str(trace)],
                "format": "mooncake",
                "block_size": TRACE_BLOCK_TOKENS,
            },
            "load": {"type": "trace_timestamps"},
        },
    }


PEERS: dict[str, Callable[[Path, int, int], dict[str, float]]] = {"aisimulate": aisimulate}

if __name__ == "__main__":
    sys.exit(main())
