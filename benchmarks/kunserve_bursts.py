"""KunServe's Fig. 13 in small: bursts that overflow the KV of two real engines, under four systems, beside the simulator.

    python benchmarks/kunserve_bursts.py FOLDER [--pairs N] [--seconds S] [--systems NAME...]

Each system plays the same traces in real time, each of its own seed; a pair is a trace under two systems. The twin's simulator
predicts each system from the requests and the steps that the engines had under vllm-dp alone ("predicted"). It also simulates
the run from that run's own steps ("own steps"). The difference between the two is the *pace*. What is left between "own
steps" and the engines is the *queue*: batching, memory, policy, and what pipelines and drops take.

Prints the tables of docs/parity.md. A system that was played stays. Needs vLLM on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fineserve_runtime.config import load_file
from fineserve_runtime.engines.api import Logprobs, Sampling, TinyModel
from fineserve_runtime.jobs import End, Job
from fineserve_runtime.launch import Running, launch
from fineserve_runtime.serve import served_scenario
from fineserve_runtime.twin import Memory, Question, Twin

SYSTEMS = ("vllm-dp", "infercept", "llumnix", "kunserve")
BLOCK_BYTES, BLOCKS = 32768, 208  # of which some 53 are left beside the weights
BASE_PER_S, BURST_PER_S = 0.8, 6.0  # requests a second, and how many times as many in a burst
SIDES = ("real", "predicted", "own steps")
PERIOD_S, BURST_S = 15.0, 5.0
PROMPT, OUTPUT = (3.9, 0.5, 16, 160), (5.0, 0.3, 64, 256)  # log-normal: mean and deviation of the logarithm, bounds

FILE = """\
fineserve: 1
title: KunServe's Fig. 13 in small
cluster:
  count: 2
  gpu: {{name: cpu, memory_gib: 4, memory_bytes_per_s: 1.0e+10, bf16_flops_per_s: 1.0e+11, pcie_bytes_per_s: 1.0e+9,
         efficiency: roofline-scaled, source: "not used: steps are measured"}}
engine: {{block_tokens: 32, max_sequences: 64, token_budget: 256, context_bytes: 0}}
models:
  - {{id: m, model: {{config: {model}/config.json}}, precision: W16A16, rate_per_s: {rate}}}
workload: {{lengths: {{prompt_tokens: 56, output_tokens: 150}}, requests: 100}}
slo: {{ttft_s: 5.0}}
systems: [{systems}]
seeds: 1
runtime:
  region_bytes: {region_bytes}
  region_name: {name}
  weights_in_region: true
  queued_requests: 10000
  models:
    m: {{path: {model}, max_model_len: 512}}
"""


Trace = Sequence[tuple[float, int, int]]


class _Sink:
    ended_as: str | None = None

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]) -> None: ...

    def ended(self, end: End) -> None:
        self.ended_as = end.kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, choices=SYSTEMS, help="vllm-dp first")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    traces = [draw(seed, options.seconds) for seed in range(options.pairs)]
    found = {name: played(folder, name, options.systems, traces) for name in options.systems}
    print(table(found))


def draw(seed: int, seconds: float) -> list[tuple[float, int, int]]:
    """Arrival, prompt and output tokens of each request: Poisson, with a burst in the middle of each period."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[float, int, int]] = []
    now_s = 0.0
    while True:
        burst = PERIOD_S - 2 * BURST_S <= now_s % PERIOD_S < PERIOD_S - BURST_S
        now_s += rng.exponential(1 / (BASE_PER_S * (BURST_PER_S if burst else 1.0)))
        if now_s > seconds:
            return rows
        prompt, output = (int(np.clip(rng.lognormal(*each[:2]), *each[2:])) for each in (PROMPT, OUTPUT))
        rows.append((now_s, prompt, output))


def played(folder: Path, system: str, systems: Sequence[str], traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """By trace what the engines did, and what the simulator says of it."""
    from fineserve_runtime.engines.tiny_model import tiny_model

    path = folder / f"{system}.json"
    if not path.exists():
        model, file = tiny_model(TinyModel(seed=1), folder), folder / "bursts.yaml"
        names = {"systems": ", ".join(SYSTEMS), "model": model.name, "name": f"bursts-{os.getpid()}"}
        file.write_text(FILE.format(region_bytes=BLOCKS * BLOCK_BYTES, rate=BASE_PER_S, **names))
        others = systems[1:] if system == systems[0] else ()
        path.write_text(json.dumps(play(file, system, traces, others)))
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def play(file: Path, system: str, traces: Sequence[Trace], others: Sequence[str]) -> list[dict[str, Any]]:
    """One system on real engines, trace after trace. After each, when all requests have ended, the twin is asked for it and for
    ``others``. Raises RuntimeError where a request failed."""
    loaded = load_file(file, serving=False)
    scenario = served_scenario(loaded, system)
    memory, incidents, found = Memory({"m": 0}), list[str](), list[dict[str, Any]]()
    with launch(loaded, scenario, observers=(memory,), on_incident=lambda what, _: incidents.append(what)) as running:
        memory.hear(running)
        twin = Twin(loaded, scenario, running, memory, lambda errors: None, lambda what, facts: None)
        for trace in traces:
            memory.requests, memory.steps = Memory({}).requests, Memory({}).steps
            load, drops = os.getloadavg()[0], incidents.count("layers dropped")
            send(running, trace)
            answer = twin.ask(Question())
            found.append(
                {
                    "real": answer["measured"],
                    "own steps": answer["simulated"],
                    "others": {name: twin.ask(Question(system=name))["whatif"] for name in others},
                    "drops": incidents.count("layers dropped") - drops,
                    "load": [load, os.getloadavg()[0]],
                }
            )
    return found


def send(running: Running, trace: Trace) -> None:
    """All requests at their times, until they have ended. Raises RuntimeError where one failed."""
    prompts = [tuple(random.Random(n).choices(range(10, 250), k=row[1])) for n, row in enumerate(trace)]
    sinks, begin_s = [], time.monotonic()
    for prompt, (arrival_s, _, output) in zip(prompts, trace, strict=True):
        time.sleep(max(0.0, begin_s + arrival_s - time.monotonic()))
        sampling, sink = Sampling(max_tokens=output, ignore_eos=True), _Sink()
        sinks.append(sink)
        running.driver.submit(lambda id: Job(id, "m", prompt, sampling, sink, 300.0))  # noqa: B023  # called at once
    if not running.driver.wait_empty(300) or {sink.ended_as for sink in sinks} != {"finished"}:
        raise RuntimeError("requests did not finish")


# --- tables ------------------------------------------------------------------------------------------------------------


Played = Mapping[str, Sequence[dict[str, Any]]]


def table(found: Played) -> str:
    base, *_ = found
    lines = [
        f"| | real | predicted | own steps | real / {base} | predicted / {base} | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in found:
        p99 = {side: _p99(found, name, side) for side in SIDES}
        ratio = {side: p99[side] / _p99(found, base, side) for side in SIDES[:2]}
        off = np.median(np.abs(ratio["predicted"] / ratio["real"] - 1))
        values = [f"{1e3 * np.median(each):.0f}" for each in p99.values()]
        ratios = [_interval(each) for each in ratio.values()]
        lines.append(f"| {name} | {' | '.join([*values, *ratios])} | {off:.0%} |")
    loads = [load for runs in found.values() for run in runs for load in run["load"]]
    drops = {name: [run["drops"] for run in runs] for name, runs in found.items() if any(run["drops"] for run in runs)}
    lines += [
        "",
        f"P99 TTFT in ms, medians of the traces; load {min(loads):.1f} to {max(loads):.1f}; drops {drops}",
        "",
    ]
    return "\n".join([*lines, *_split(found)])


def _p99(found: Played, name: str, side: str) -> np.ndarray:
    base, *_ = found
    if side == "predicted" and name != base:
        return np.array([run["others"][name]["ttft_p99_s"] for run in found[base]])
    return np.array([run["own steps" if side == "predicted" else side]["ttft_p99_s"] for run in found[name]])


def _interval(ratios: np.ndarray) -> str:
    """The geometric mean, and its 95 % interval by bootstrap over the traces."""
    logs = np.log(ratios)
    draws = np.random.default_rng(0).choice(logs, (2000, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(draws, (0.025, 0.975)))
    return f"{np.exp(logs.mean()):.2f} ({low:.2f} to {high:.2f})"


def _split(found: Played) -> list[str]:
    """What is between prediction and engines, in each trace."""
    lines = ["| gap of P99 TTFT | all | pace | queue |", "|---|---|---|---|"]
    for name in found:
        real, predicted, own = (_p99(found, name, side) for side in SIDES)
        parts = predicted / real - 1, predicted / own - 1, own / real - 1
        lines.append(f"| {name} | {' | '.join(', '.join(f'{each:+.0%}' for each in part) for part in parts)} |")
    return lines


if __name__ == "__main__":
    main()
