"""Two figures of the papers in small, on real engines and beside the simulator.

    python benchmarks/runtime_figures.py bursts FOLDER     KunServe, Fig. 13: bursts that overflow the KV of two engines
    python benchmarks/runtime_figures.py idle FOLDER       Prism, Fig. 6: four models, two of which are idle at any time

Systems play a trace one after the other in real time, then the next one, of its own seed; a pair is a trace under two systems.
The twin's simulator predicts each system from the requests and the steps that the engines had under the first system alone
("predicted"). Steps of pipelines come from a probe before it, a trace that no system plays. The simulator also has the run
from that run's own steps ("own steps"). The difference between the two is the *pace*. What is left between "own steps" and the
engines is the *queue*: batching, memory, policy, and what drops and swaps take.

Prints the tables of docs/parity.md; ``--keep`` keeps their runs in docs/data. What was played stays in the folder, so a stopped
command goes on. Needs vLLM on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from fineserve_runtime.config import load_file
from fineserve_runtime.engines.api import Logprobs, Sampling, TinyModel
from fineserve_runtime.jobs import End, Job
from fineserve_runtime.launch import Running, launch
from fineserve_runtime.serve import served_scenario
from fineserve_runtime.twin import Memory, Question, Twin

SIDES = ("real", "predicted", "own steps")
CLUSTER = """\
fineserve: 1
title: {title}
cluster:
  count: {devices}
  gpu: {{name: cpu, memory_gib: 4, memory_bytes_per_s: 1.0e+10, bf16_flops_per_s: 1.0e+11, pcie_bytes_per_s: 1.0e+9,
         efficiency: roofline-scaled, source: "not used: steps are measured"}}
engine: {{block_tokens: 32, max_sequences: 64, token_budget: 256, context_bytes: 0}}
workload: {{lengths: {{prompt_tokens: 56, output_tokens: 150}}, requests: 100}}
slo: {{ttft_s: {slo_s}}}
seeds: 1
"""

Row = tuple[float, int, int, int]
"""A request: arrival in seconds, number of its model, prompt and output tokens."""

Trace = Sequence[Row]
Incident = Callable[[str, dict[str, object]], None]
PROBE_SEED, PROBE_S, STAGES = 1000, 30.0, 5  # STAGES: a column of the twin's steps
WARM = 8
"""Requests before each trace: the first steps of an engine are slow."""

KEPT = Path(__file__).resolve().parents[1] / "docs" / "data" / "runtime_figures.json"


@dataclass(frozen=True)
class Figure:
    """A figure in small. ``systems`` as a file has them, by name; ratios are to the first. ``value``: the figure's, of what the
    twin answers, and ``scale`` times as much is printed. Requests of each model arrive at a ``rate`` by the time, at most
    ``most``, in requests a second. With a ``backlog`` it is a part of what the first system serves of so many at once.
    ``probe``: a system with pipelines, whose steps are measured first."""

    title: str
    says: str
    value: str
    scale: float
    systems: Mapping[str, str]
    models: int
    devices: int
    region_bytes: int
    slo_s: float
    rate: Callable[[int, float], float]
    most: float
    prompt: tuple[float, float, int, int]  # log-normal: mean and deviation of the logarithm, bounds
    output: tuple[float, float, int, int]
    probe: str | None = None
    backlog: int = 0

    def draw(self, seed: int, seconds: float, unit_per_s: float) -> list[Row]:
        """Poisson arrivals of each model, thinned to its rate."""
        rng = np.random.default_rng(seed)
        rows: list[Row] = []
        for model in range(self.models):
            gap_s = 1 / (self.most * unit_per_s)
            now_s = rng.exponential(gap_s)
            while now_s < seconds:
                if rng.random() < self.rate(model, now_s) / self.most:
                    rows.append((now_s, model, _length(rng, self.prompt), _length(rng, self.output)))
                now_s += rng.exponential(gap_s)
        return sorted(rows)

    def at_once(self, requests: int) -> list[Row]:
        """So many requests at once, of all models in turn."""
        rng = np.random.default_rng(PROBE_SEED)
        return [
            (0.0, number % self.models, _length(rng, self.prompt), _length(rng, self.output))
            for number in range(requests)
        ]

    def file(self, folder: Path) -> Path:
        """The experiment file of all systems, in ``folder``, and its models."""
        from fineserve_runtime.engines.tiny_model import tiny_model

        paths = {f"m{number}": tiny_model(TinyModel(seed=number + 1), folder).name for number in range(self.models)}
        model = "  - {{id: {}, model: {{config: {}/config.json}}, precision: W16A16, rate_per_s: 1}}"
        runtime = {
            "region_bytes": self.region_bytes,
            "region_name": f"figures-{os.getpid()}",
            "weights_in_region": True,
            "queued_requests": 10000,
            "models": {name: {"path": path, "max_model_len": 512} for name, path in paths.items()},
        }
        parts = [
            CLUSTER.format(title=self.title, devices=self.devices, slo_s=self.slo_s),
            "models:\n" + "".join(model.format(*each) + "\n" for each in paths.items()),
            f"systems: [{', '.join(self.systems.values())}]\n",
            f"runtime: {json.dumps(runtime)}\n",
        ]
        path = folder / "figure.yaml"
        path.write_text("".join(parts), encoding="utf-8")
        return path


def _length(rng: np.random.Generator, law: tuple[float, float, int, int]) -> int:
    return int(np.clip(rng.lognormal(*law[:2]), *law[2:]))


def _bursts(model: int, now_s: float) -> float:
    """For five seconds in the middle of every fifteen, twice as many as two engines serve; else few."""
    return 2.0 if 5 <= now_s % 15 < 10 else 0.1


def _by_turns(model: int, now_s: float) -> float:
    """Each model is asked for half of the time, two at any moment."""
    return 1.6 if (now_s / 24 + model / 4) % 1 < 0.5 else 0.0


FIGURES = {
    "bursts": Figure(
        "KunServe's Fig. 13 in small",
        "P99 TTFT in ms",
        "ttft_p99_s",
        1e3,
        {name: name for name in ("vllm-dp", "kunserve", "vllm-pp", "infercept", "llumnix")},
        models=1,
        devices=2,
        region_bytes=208 * 32768,  # of which some 53 blocks are left beside the weights
        slo_s=5.0,
        rate=_bursts,
        most=2.0,
        prompt=(3.9, 0.5, 16, 160),
        output=(5.0, 0.3, 64, 256),
        probe="vllm-pp",
        backlog=120,
    ),
    "idle": Figure(
        "Prism's comparison in small",
        "first tokens in time, %",
        "in_time",
        100,
        {
            "muxserve++": "{base: muxserve++, name: muxserve++, memory: {policy: kvcached, page_bytes: 16384}}",
            "qlm": "{base: qlm, name: qlm, residency: {policy: qlm, swap_s: 0.1, tick_s: 0.05}}",
            "prism": "{base: prism, name: prism, memory: {policy: kvcached, page_bytes: 16384},"
            " residency: {policy: prism, idle_s: 2.0, move: false, tick_s: 0.2}}",
        },
        models=4,
        devices=1,
        region_bytes=700 * 32768,
        slo_s=0.5,
        rate=_by_turns,
        most=1.6,
        prompt=(3.9, 0.5, 16, 160),
        output=(5.0, 0.3, 64, 256),
    ),
}


class _Sink:
    ended_as: str | None = None

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...], last: bool) -> None: ...

    def ended(self, end: End) -> None:
        self.ended_as = end.kind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", choices=FIGURES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=45.0)
    parser.add_argument("--systems", nargs="+", help="the first system of the figure first")
    parser.add_argument("--keep", action="store_true", help="keep the runs in docs/data")
    options = parser.parse_args()
    figure, folder = FIGURES[options.figure], options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    systems = options.systems or list(figure.systems)
    unit_per_s = pace(folder, figure)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    for number in range(options.pairs):
        trace = figure.draw(number, options.seconds, unit_per_s)
        probed = probe(folder, figure, number, unit_per_s)
        for name in systems:
            others = systems[1:] if name == systems[0] else ()
            run = partial(play, figure.file(folder), figure, name, trace, others, probed)
            found[name].append(once(folder / f"{name}-{number}.json", run))
    print(f"a rate of 1: {unit_per_s:.2f} requests/s", table(found, figure), sep="\n\n")
    if options.keep:
        keep(options.figure, found)


def once(path: Path, measured: Callable[[], Any]) -> Any:
    """What was measured, now or before."""
    if not path.exists():
        path.write_text(json.dumps(measured()))
    return json.loads(path.read_text())


def keep(figure: str, found: Mapping[str, Any]) -> None:
    """The runs of a figure in docs/data, with six digits."""
    rounded = json.loads(json.dumps(found), parse_float=lambda digits: float(f"{float(digits):.6g}"))
    kept = json.loads(KEPT.read_text(encoding="utf-8")) | {figure: rounded}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


@contextmanager
def started(file: Path, system: str, on_incident: Incident) -> Iterator[tuple[Running, Memory, Twin]]:
    loaded = load_file(file, serving=False)
    scenario = served_scenario(loaded, system)
    memory = Memory({model.id: number for number, model in enumerate(scenario.models)})
    with launch(loaded, scenario, observers=(memory,), on_incident=on_incident) as running:
        memory.hear(running)
        yield running, memory, Twin(loaded, scenario, running, memory, lambda errors: None, lambda what, facts: None)


def pace(folder: Path, figure: Figure) -> float:
    """Requests a second that a rate of 1 stands for on this machine."""

    def measured() -> float:
        with started(figure.file(folder), next(iter(figure.systems)), lambda what, facts: None) as (running, memory, _):
            warm(running, memory, figure)
            begin_s = time.monotonic()
            send(running, figure.at_once(figure.backlog), list(memory.models), figure.slo_s)
            return figure.backlog / (time.monotonic() - begin_s)

    return float(once(folder / "pace.json", measured)) if figure.backlog else 1.0


def probe(folder: Path, figure: Figure, number: int, unit_per_s: float) -> list[list[float]]:
    """Steps of pipelines, as the twin's memory has them."""
    system = figure.probe
    if system is None:
        return []

    def measured() -> list[list[float]]:
        with started(figure.file(folder), system, lambda what, facts: None) as (running, memory, _):
            warm(running, memory, figure)
            trace = figure.draw(PROBE_SEED + number, PROBE_S, unit_per_s)
            send(running, trace, list(memory.models), figure.slo_s)
            steps = memory.steps.copy()
        pipelines: list[list[float]] = steps[steps[:, STAGES] > 1].tolist()
        return pipelines

    found: list[list[float]] = once(folder / f"probe-{number}.json", measured)
    return found


def play(
    file: Path, figure: Figure, system: str, trace: Trace, others: Sequence[str], probed: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """One system on real engines, and one trace. When all its requests have ended, the twin is asked for it and for ``others``.
    Raises RuntimeError where a request failed."""
    incidents: list[tuple[str, dict[str, object]]] = []
    with started(file, system, lambda *told: incidents.append(told)) as (running, memory, twin):
        warm(running, memory, figure)
        load, before = os.getloadavg()[0], len(incidents)
        send(running, trace, list(memory.models), figure.slo_s)
        answer = twin.ask(Question())
        for step in probed:
            memory.steps.add(tuple(step))
        return {
            "real": answer["measured"],
            "own steps": answer["simulated"],
            "others": {name: twin.ask(Question(system=name))["whatif"] for name in others},
            "incidents": incidents[before:],
            "load": [load, os.getloadavg()[0]],
        }


def warm(running: Running, memory: Memory, figure: Figure) -> None:
    """A few requests, which do not count."""
    send(running, figure.at_once(WARM), list(memory.models), figure.slo_s)
    memory.requests, memory.steps = Memory({}).requests, Memory({}).steps


def send(running: Running, trace: Trace, names: Sequence[str], slo_s: float) -> None:
    """All requests at their times, until they have ended. Raises RuntimeError where one failed."""
    prompts = [tuple(random.Random(number).choices(range(10, 250), k=row[2])) for number, row in enumerate(trace)]
    sinks, begin_s = [], time.monotonic()
    for prompt, (arrival_s, model, _, output) in zip(prompts, trace, strict=True):
        time.sleep(max(0.0, begin_s + arrival_s - time.monotonic()))
        sampling, sink, name = Sampling(max_tokens=output, ignore_eos=True), _Sink(), names[model]
        sinks.append(sink)
        running.driver.submit(lambda id: Job(id, name, prompt, sampling, sink, slo_s))  # noqa: B023  # called at once
    if not running.driver.wait_empty(300) or not {sink.ended_as for sink in sinks} <= {"finished", "refused"}:
        raise RuntimeError("requests did not finish")


# --- tables ------------------------------------------------------------------------------------------------------------


Played = Mapping[str, Sequence[dict[str, Any]]]


def table(found: Played, figure: Figure) -> str:
    base, *_ = found
    lines = [
        f"| | real | predicted | own steps | real / {base} | predicted / {base} | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in found:
        value = {side: _values(found, figure, name, side) for side in SIDES}
        ratio = {side: value[side] / _values(found, figure, base, side) for side in SIDES[:2]}
        off = np.median(np.abs(ratio["predicted"] / ratio["real"] - 1))
        values = [f"{figure.scale * np.median(each):.0f}" for each in value.values()]
        ratios = [_interval(each) for each in ratio.values()]
        lines.append(f"| {name} | {' | '.join([*values, *ratios])} | {off:.0%} |")
    loads = [load for runs in found.values() for run in runs for load in run["load"]]
    lines += ["", f"{figure.says}, medians of the traces; load {min(loads):.1f} to {max(loads):.1f}", ""]
    return "\n".join([*lines, *_split(found, figure), "", *_incidents(found)])


def _values(found: Played, figure: Figure, name: str, side: str) -> np.ndarray:
    base, *_ = found
    if side == "predicted" and name != base:
        return np.array([run["others"][name][figure.value] for run in found[base]])
    return np.array([run["own steps" if side == "predicted" else side][figure.value] for run in found[name]])


def _interval(ratios: np.ndarray) -> str:
    """The geometric mean, and its 95 % interval by bootstrap over the traces."""
    logs = np.log(ratios)
    draws = np.random.default_rng(0).choice(logs, (2000, len(logs))).mean(axis=1)
    low, high = np.exp(np.quantile(draws, (0.025, 0.975)))
    return f"{np.exp(logs.mean()):.2f} ({low:.2f} to {high:.2f})"


def _split(found: Played, figure: Figure) -> list[str]:
    """What is between prediction and engines, in each trace."""
    lines = ["| gap | all | pace | queue |", "|---|---|---|---|"]
    for name in found:
        real, predicted, own = (_values(found, figure, name, side) for side in SIDES)
        parts = predicted / real - 1, predicted / own - 1, own / real - 1
        lines.append(f"| {name} | {' | '.join(', '.join(f'{each:+.0%}' for each in part) for part in parts)} |")
    return lines


def _incidents(found: Played) -> list[str]:
    """How often each system told what, by trace. Of drops: how many the simulator has in their place, and what they took."""
    lines = []
    for name, runs in found.items():
        kinds = sorted({what for run in runs for what, _ in run["incidents"]})
        counts = {kind: [sum(what == kind for what, _ in run["incidents"]) for run in runs] for kind in kinds}
        lines += [f"{name}: {counts}"] if counts else []
        drops = [facts for run in runs for what, facts in run["incidents"] if what == "layers dropped"]
        if drops:
            lines.append(f"  simulated drops, from own steps: {[run['own steps'].get('drops') for run in runs]}")
        for part in ("stop_s", "reshape_s", "deliver_s") if drops else ():
            lines.append(f"  {part}: median {1e3 * np.median([each[part] for each in drops]):.0f} ms")
    return lines


if __name__ == "__main__":
    main()
