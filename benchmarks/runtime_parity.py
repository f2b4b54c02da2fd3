"""Do real engines and the simulator agree? The same file and trace on both, with step times measured on this machine.

    python benchmarks/runtime_parity.py FOLDER [--pairs N] [--rate N] [--json]

Makes two tiny models, a trace and an experiment file in FOLDER, then N times: plays the file as ``fineserve-run replay`` does,
system by system, with a probe of the engines' steps (``fineserve-run steps``) before, between and after, and simulates it with
``fineserve-sim run`` and the probes' table. Prints the tables of docs/parity.md. Needs vLLM on the CPU; a pair takes two to
three minutes.

What is between the two sides is split. Every step of the real engines is noted with its composition. *pace*: how much longer
than the table says the steps took, all of them. A second simulation takes steps that are longer by that; what is left between
it and the engines is *queue*: batching, memory, policy.

The load is made so that everything happens: bursts that overlap or not, requests whose deadline cannot be met, and too little
KV memory, so that engines preempt. Memory of the simulated device is set such that its KV bytes equal the region's, less the
slab without an owner.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fineserve_runtime.config import load_file
from fineserve_runtime.engines.api import EngineHost, EngineListener, HostConfig, StepReport
from fineserve_runtime.launch import start_real_host
from fineserve_runtime.serve import served_scenario
from fineserve_runtime.step_probe import Noted, Period, Row, note, periods, probe_steps, write_table

from fineserve_sim.catalog import activation_bytes, gpu, graph_bytes, model_from_hf_config, precision, weight_bytes
from fineserve_sim.cluster.scenario import Fate, RunResult, Scenario
from fineserve_sim.experiment import run_loaded
from fineserve_sim.experiment.results.metrics import measure
from fineserve_sim.experiment.run.run_data import RunData
from fineserve_sim.experiment.run.store import Store
from fineserve_sim.latency import StepModel
from fineserve_sim.latency.measured_steps import load_step_model

REGION_BYTES = 6 * 2**20
SLAB_BYTES = 64 * 2**10  # a block of 32 tokens of the tiny model
MEMORY_GIB = 2  # each engine counts half a GiB of CUDA graphs, which are not there
TOKEN_BUDGET, SEQUENCES = 256, 16
SLO_S = 0.5
SYSTEMS = ("fineserve", "static*")
EVERY = 4  # samples are a second apart; of the KV bytes over time, every fourth is shown

UNMEASURED = [("engine.step_times", None, "real engines take their own time")]

FILE = """\
# Made by benchmarks/runtime_parity.py.
fineserve: 1
title: Two tiny models on real engines and in the simulator

cluster:
  count: 1
  sharing: in_turn  # engines of one process
  gpu: {{name: cpu, memory_gib: {memory_gib}, memory_bytes_per_s: 1.0e+10, bf16_flops_per_s: 1.0e+11, pcie_bytes_per_s: 1.0e+9,
         efficiency: roofline-scaled, source: "not used: steps are measured"}}
engine: {{block_tokens: 32, max_sequences: {sequences}, token_budget: {budget}, context_bytes: 0,
         memory_utilization: {utilization!r}, step_times: steps.parquet}}

models:
  - {{id: A, model: {{config: {model}/config.json}}, precision: W16A16}}
  - {{id: B, model: {{config: {model}/config.json}}, precision: W16A16}}

workload: {{trace: trace.csv}}
slo: {{ttft_s: {slo_s}}}
systems: [{systems}]
seeds: 1

runtime:
  region_bytes: {region_bytes}
  region_name: parity
  models:
    A: {{path: {model}, max_model_len: 1024}}
    B: {{path: {model}, max_model_len: 1024}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--rate", type=float, default=14.0, help="mean requests a second of both models together")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    pairs = [play_pair(folder / f"pair-{number}", options.rate) for number in range(options.pairs)]
    print(json.dumps(pairs) if options.json else "\n\n".join(table(system, pairs) for system in SYSTEMS))


# --- one pair ----------------------------------------------------------------------------------------------------------


def play_pair(folder: Path, rate_per_s: float) -> dict[str, Any]:
    """Measure, play, simulate and compare; a pair that was played stays. Values of all sides by system and line."""
    if not (folder / "played.json").exists():
        folder.mkdir(exist_ok=True)
        (folder / "played.json").write_text(json.dumps(play_and_simulate(folder, rate_per_s)))
    played: dict[str, Any] = json.loads((folder / "played.json").read_text())
    return played | {name: compare(folder, name) for name in SYSTEMS}


def play_and_simulate(folder: Path, rate_per_s: float) -> dict[str, Any]:
    """Fills the folder. Returns the machine's load before and after, and the engines' pace by system."""
    file = write_inputs(folder, rate_per_s)
    load = os.getloadavg()[0]
    played = play_real(file, folder)
    command("fineserve-sim", "run", file, "--out", folder / "simulated", "--jobs", "1")
    shape = model_from_hf_config(folder / json.loads((folder / "model.json").read_text()))
    steps = load_step_model(folder / "steps.parquet", shape, precision("W16A16"), gpu("h100-sxm"))
    paces = {name: pace_of(found, steps) for name, found in played.items()}
    for name, pace in paces.items():
        simulate_at_pace(file, folder, name, pace["pace"])
    return {"load": [load, os.getloadavg()[0]], "pace": paces}


def command(program: str, *arguments: object) -> None:
    """One of the project's commands, in this environment, with one thread an engine."""
    path = Path(sys.executable).with_name(program)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([path, *map(str, arguments)], check=True, env=environment, stdout=sys.stderr)


def write_inputs(folder: Path, rate_per_s: float) -> Path:
    """Model, trace and file; returns the file."""
    from fineserve_runtime.engines.api import TinyModel
    from fineserve_runtime.engines.tiny_model import tiny_model

    model = tiny_model(TinyModel(seed=1), folder)
    (folder / "model.json").write_text(json.dumps(model.name))
    (folder / "trace.csv").write_text(draw_trace(rate_per_s))
    file = folder / "parity.yaml"
    file.write_text(experiment(model))
    return file


def experiment(model: Path) -> str:
    """The text of the file."""
    return FILE.format(
        model=model.name,
        memory_gib=MEMORY_GIB,
        sequences=SEQUENCES,
        budget=TOKEN_BUDGET,
        utilization=utilization(model),
        slo_s=SLO_S,
        systems=", ".join(f'"{name}"' for name in SYSTEMS),
        region_bytes=REGION_BYTES,
    )


def utilization(model: Path) -> float:
    """The part of the memory that two engines use, when their KV memory is the region less one slab."""
    spec, format_ = model_from_hf_config(model), precision("W16A16")
    fixed = weight_bytes(spec, format_, 1) + activation_bytes(spec, 1, TOKEN_BUDGET, min(SEQUENCES, TOKEN_BUDGET))
    fixed += graph_bytes(spec, 1)
    return (2 * fixed + REGION_BYTES - SLAB_BYTES + 0.5) / (MEMORY_GIB * 2**30)


def draw_trace(rate_per_s: float, seconds: float = 40.0) -> str:
    """Two models whose rates swing against one another, with three bursts of both: ``arrival_s,model,...`` rows."""
    rng = np.random.default_rng(7)
    rows: list[tuple[float, str, int, int]] = []
    for name, phase in (("A", 0.0), ("B", 0.5)):
        now = 0.0
        while now < seconds:
            swing = 1 + 0.8 * np.sin(2 * np.pi * (now / 16 + phase))
            burst = 4.0 if now % 13 > 11.5 else 1.0
            now += rng.exponential(1 / (rate_per_s / 2 * swing * burst))
            prompt = int(np.clip(rng.lognormal(5.0, 0.6), 16, 480))
            output = int(np.clip(rng.lognormal(4.2, 0.6), 8, 240))
            rows.append((now, name, prompt, output))
    lines = [f"{now:.4f},{name},{prompt},{output}" for now, name, prompt, output in sorted(rows)]
    return "\n".join(["arrival_s,model,prompt_tokens,output_tokens", *lines, ""])


# --- the pace of real engines ------------------------------------------------------------------------------------------


class StepLog:
    """Starts real engines and notes their steps."""

    def __init__(self) -> None:
        self.steps: list[Noted] = []

    def start(self, config: HostConfig, listener: EngineListener) -> EngineHost:
        """A ``StartHost``; what was noted of engines before is forgotten."""
        self.steps.clear()
        log = self.steps

        class Tap:
            def on_step(self, report: StepReport) -> None:
                log.append(note(report))
                listener.on_step(report)

            def on_died(self, engine: int, reason: str, lost: tuple[int, ...], crashed: bool = False) -> None:
                listener.on_died(engine, reason, lost, crashed)

        return start_real_host(config, Tap())

    def played(self) -> list[Noted]:
        """From the first step that answered a request of the trace on: before it, engines warmed up."""
        ours = (n for n, step in enumerate(self.steps) if any(c.request_id < 10**9 for c in step.report.chunks))
        return self.steps[next(ours) :]


def play_real(file: Path, folder: Path) -> dict[str, list[Noted]]:
    """As ``fineserve-run replay`` does, with probes before, between and after, whose table is ``steps.parquet``. Returns the
    steps by system."""
    from fineserve_runtime.replay import claim_folder, replay_on

    loaded = load_file(file, changes=UNMEASURED, serving=False)
    claim_folder(folder / "real", "cpu")
    log, played, rows = StepLog(), dict[str, list[Noted]](), list[Row]()
    play = replay_on(loaded, start=log.start)

    def probe() -> None:
        rows.extend(probe_steps(loaded, served_scenario(loaded, None), seed=len(rows)))

    def noted(scenario: Scenario) -> RunResult:
        probe()
        result = play(scenario)
        played[scenario.system.name] = log.played()
        return result

    run_loaded(loaded.experiment, folder / "real", jobs=1, decisions=True, simulate=noted)
    probe()
    write_table(rows, folder / "steps.parquet")
    return played


def pace_of(played: list[Noted], steps: StepModel) -> dict[str, float]:
    """``pace``: seconds of the steps that followed another at once against the table's; ``processor``: their processor time;
    ``alone`` and ``in_turn``: of those steps; ``median``: of the single steps' ratios."""
    found = list(periods(played))
    took_s = np.array([period.seconds for period in found])
    predicted_s = np.array([_predicted_s(period, steps) for period in found])
    in_turn = np.array([period.in_turn for period in found])
    return {
        "steps": float(len(played)),
        "pace": float(took_s.sum() / predicted_s.sum()),
        "processor": float(sum(period.processor_s for period in found) / predicted_s.sum()),
        "median": float(np.median(took_s / predicted_s)),
        "alone": float(took_s[~in_turn].sum() / predicted_s[~in_turn].sum()),
        "in_turn": float(took_s[in_turn].sum() / predicted_s[in_turn].sum()),
        "share_in_turn": float(in_turn.mean()),
    }


def _predicted_s(period: Period, steps: StepModel) -> float:
    """What the table says of its composition; prompts begin in this step, as nearly all do."""
    report = period.report
    new, decodes = report.prefill_tokens, report.decodes
    batch = decodes, report.context_tokens if decodes else 0, new, new * (new + 1) / 2, 0, decodes + (new > 0)
    need = steps.demand(*batch)
    return need.step_s + need.turn_s * period.in_turn


def simulate_at_pace(file: Path, folder: Path, system: str, pace: float) -> None:
    """The simulation with all steps longer by the same factor."""
    table = pq.read_table(folder / "steps.parquet")
    place = table.column_names.index("latency_s")
    path = folder / f"steps-{SYSTEMS.index(system)}.parquet"
    pq.write_table(table.set_column(place, "latency_s", pc.multiply(table["latency_s"], pace)), path)
    out = folder / f"paced-{SYSTEMS.index(system)}"
    command("fineserve-sim", "run", file, "--out", out, "--set", f"engine.step_times={path}", "--jobs", "1")


# --- both sides --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """A line of the table: what is compared, how it is said, and how far apart it may be."""

    name: str
    value: Callable[[RunData], float]
    form: str
    limit: float | None = None
    relative: bool = True


def _metric(name: str) -> Callable[[RunData], float]:
    return lambda run: measure(run, dict.fromkeys(run.models, SLO_S), None).values[name][""]


def _attainment(run: RunData) -> float:
    hits = measure(run, dict.fromkeys(run.models, SLO_S), None).hits["ttft_attainment"][""]
    return hits.sum() / len(hits)


LINES = (
    Line("requests finished a second", _metric("throughput_per_s"), "{:.2f}", 0.05),
    Line("TTFT, median, ms", lambda run: 1e3 * float(np.nanmedian(run.ttft_s)), "{:.1f}", 0.15),
    Line("TPOT, median, ms", lambda run: 1e3 * float(np.nanmedian(run.tpot_s)), "{:.2f}", 0.15),
    Line("TTFT, 99th percentile, ms", lambda run: 1e3 * float(np.nanpercentile(run.ttft_s, 99)), "{:.0f}"),
    Line("TTFT attainment", _attainment, "{:.3f}", 0.05, relative=False),
    Line("dropped", lambda run: float(np.sum(run.fate == Fate.DROPPED)), "{:.0f}"),
    Line("preemptions", lambda run: float(run.preemptions.sum()), "{:.0f}"),
    Line("KV bytes in use, mean, MiB", lambda run: float(run.kv_used_bytes.sum(axis=1).mean()) / 2**20, "{:.2f}"),
    Line("KV bytes in use, largest, MiB", lambda run: float(run.kv_used_bytes.sum(axis=1).max()) / 2**20, "{:.2f}"),
)


def compare(folder: Path, system: str) -> dict[str, Any]:
    """Real and simulated value of each line, the share of requests with the same fate, and how KV bytes go together."""
    sides = ("real", "simulated", f"paced-{SYSTEMS.index(system)}")
    runs = [_run(folder / side, system) for side in sides]
    real = runs[0]
    if any(not np.array_equal(real.arrival_s, run.arrival_s) for run in runs):
        raise RuntimeError(f"{folder}: the sides did not get the same requests")
    return {line.name: [line.value(run) for run in runs] for line in LINES} | {
        "requests": len(real.arrival_s),
        "same fate": [float(np.mean(real.fate == run.fate)) for run in runs],
        "KV correlation": [_correlation(real, run) for run in runs],
        "KV MiB": [(run.kv_used_bytes.sum(axis=1)[::EVERY] / 2**20).round(1).tolist() for run in runs],
    }


def _run(results: Path, system: str) -> RunData:
    """The one run of a system in a results folder."""
    cells = json.loads((results / "summary.json").read_text())["cells"]
    (key,) = next(cell["runs"] for cell in cells if cell["system"] == system)
    return Store(results).read(key)


def _correlation(one: RunData, other: RunData) -> float:
    """Of the KV bytes in use, looked at once in each second, at the same times."""
    sums = [run.kv_used_bytes.sum(axis=1).astype(float) for run in (one, other)]
    seconds = min(map(len, sums))
    return float(np.corrcoef(sums[0][:seconds], sums[1][:seconds])[0, 1])


# --- the table ---------------------------------------------------------------------------------------------------------


def table(system: str, pairs: list[dict[str, Any]]) -> str:
    """Means over pairs: both sides, their gap, that of each pair, and the gap that is left at the real pace."""
    head = ("", "real", "simulated", "gap", "gap of each pair", "allowed", "at the real pace", "gap: queue part")
    rows = [f"### {system}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for line in LINES:
        values = [[pair[system][line.name][side] for pair in pairs] for side in range(3)]
        real, simulated, paced = map(fmean, values)
        each = ", ".join(_gap_text(line, _gap(line, a, b)) for a, b in zip(values[0], values[1], strict=True))
        allowed = "" if line.limit is None else _gap_text(line, line.limit).lstrip("+")
        cells = [line.name, line.form.format(real), line.form.format(simulated)]
        cells += [_gap_text(line, _gap(line, real, simulated)), each, allowed]
        cells += [line.form.format(paced), _gap_text(line, _gap(line, real, paced))]
        rows.append(f"| {' | '.join(cells)} |")
    for name, allowed in (("same fate", "0.950"), ("KV correlation", "")):
        values = [[pair[system][name][side] for pair in pairs] for side in (1, 2)]
        each = ", ".join(f"{value:.3f}" for value in values[0])
        rows.append(f"| {name} | | {fmean(values[0]):.3f} | | {each} | {allowed} | {fmean(values[1]):.3f} | |")
    return "\n".join([*rows, "", *_paces(system, pairs), "", *_kv(system, pairs[0])])


def _paces(system: str, pairs: list[dict[str, Any]]) -> list[str]:
    head = "| pair | load before, after | steps | pace | processor | median step | alone | in turn | steps in turn |"
    rows = [head, "|---" * (head.count("|") - 1) + "|"]
    for number, pair in enumerate(pairs):
        pace = pair["pace"][system]
        cells = [str(number), ", ".join(f"{load:.1f}" for load in pair["load"]), f"{pace['steps']:.0f}"]
        cells += [f"{pace[name] - 1:+.1%}" for name in ("pace", "processor", "median", "alone", "in_turn")]
        rows.append(f"| {' | '.join([*cells, format(pace['share_in_turn'], '.0%')])} |")
    return rows


def _kv(system: str, pair: dict[str, Any]) -> list[str]:
    """KV bytes in use over time, of one pair."""
    sides = dict(zip(("real", "simulated", "at the real pace"), pair[system]["KV MiB"], strict=True))
    shown = min(map(len, sides.values()))
    head = [f"{EVERY * n} s" for n in range(shown)]
    rows = [f"| KV MiB at | {' | '.join(head)} |", "|---" * (shown + 1) + "|"]
    return rows + [f"| {name} | {' | '.join(map(str, values[:shown]))} |" for name, values in sides.items()]


def _gap(line: Line, real: float, simulated: float) -> float:
    """Simulated against real: relative where real is not zero, else the difference."""
    return simulated / real - 1 if line.relative and real else simulated - real


def _gap_text(line: Line, gap: float) -> str:
    return f"{gap:+.1%}" if line.relative else f"{gap * 100:+.1f} points"


if __name__ == "__main__":
    main()
