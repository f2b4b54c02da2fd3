"""How does the cost of a simulation grow? CPU seconds of the loop against four sizes, with log-log slopes and a figure.

    python -m benchmarks.scaling [--json] [--repeat N] [--figure docs/performance.svg]
    python -m benchmarks.scaling --costs [--json] [--repeat N]    what a decision costs, see costs.py

* requests: one replica at 8.2 requests a second, merged; slope 1 is linear.
* replicas: 1,000 requests a replica, the same load on each; slope 1 is no cost of being many.
* queue: so many requests arrive within one second at one replica, with an SLO of an hour: no request is dropped, and half of
  them wait on average. CPU seconds a request, for each local scheduler; slope 0 does not see the queue.
* batch: a full batch of so many running sequences, outputs stretched 4 times, 16 requests a slot: the number of iterations
  stays about the same. CPU seconds an iteration, one event each (plain); slope 0 does not see the batch.

Slopes are least squares of log y on log x. The workload is ``engine.workload``: the law of the published comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.cluster_costs import CLUSTER_COSTS
from benchmarks.costs import COSTS, slope, table
from benchmarks.costs import measure as measure_cost
from benchmarks.engine import SETTINGS, fastest, machine, scenario_of, solo, stretch, workload
from fineserve_sim.cluster import Scenario
from fineserve_sim.systems import load_systems
from fineserve_sim.systems.spec import AdaptiveSpec, FcfsSpec, MooreHodgsonSpec, SchedulerSpec

REQUESTS = (500, 1000, 2000, 4000, 8000, 16000, 32000)
REPLICAS = (1, 2, 4, 8, 16, 32)
QUEUES: dict[str, tuple[SchedulerSpec, tuple[int, ...]]] = {
    "FCFS": (FcfsSpec(), (500, 1000, 2000, 4000, 8000, 16000)),
    "Algorithm 2": (AdaptiveSpec(), (500, 1000, 2000, 4000, 8000, 16000)),
    "Moore-Hodgson": (MooreHodgsonSpec(), (250, 500, 1000, 2000, 4000)),
}
BATCHES = (2, 4, 8, 16, 32, 64, 128)
REQUESTS_A_REPLICA = 1000
REQUESTS_A_SLOT = 16


@dataclass(frozen=True)
class Curve:
    """CPU seconds ``y`` of something against its size ``x``; ``events`` are exact, and the same on any machine."""

    name: str
    x_label: str
    y_label: str
    x: list[float]
    y: list[float]
    events: list[int]
    slope: float


def curve(name: str, labels: tuple[str, str], points: list[tuple[int, Scenario]], per: str, repeat: int) -> Curve:
    """Simulate each (size, scenario); ``per`` divides the loop's CPU time by "run", "request" or "iteration"."""
    x, y, events = [], [], []
    for size, scenario in points:
        result = fastest(scenario, repeat)
        divisor = {"run": 1, "request": len(result.fate), "iteration": result.iterations}[per]
        x.append(float(size))
        y.append(result.loop_cpu_s / divisor)
        events.append(result.events)
    return Curve(name, *labels, x, y, events, slope(x, y))


def burst(requests: int, scheduler: SchedulerSpec) -> Scenario:
    """All requests within about a second at one replica, and time enough for each."""
    system = load_systems()["dedicated"].model_copy(update={"scheduler": scheduler})
    trace = workload(requests, rate_per_s=float(requests))
    return scenario_of(trace, system, ["W16A16"], gpus=1, ttft_slo_s=3600.0)


def full_batch(slots: int) -> Scenario:
    """``slots`` sequences run at any time until the last leave; one event an iteration."""
    requests = slots * REQUESTS_A_SLOT
    trace = replace(stretch(workload(requests), 4.0), arrival_s=np.linspace(0.0, 1.0, requests))
    return replace(solo(trace, 1, replace(SETTINGS, max_sequences=slots)), exact_steps=True)


def curves(repeat: int) -> Iterator[Curve]:
    labels = "requests", "CPU s a run"
    yield curve("requests", labels, [(n, solo(workload(n), 1)) for n in REQUESTS], "run", repeat)
    labels = "replicas", "CPU s a run"
    points = [(n, solo(workload(n * REQUESTS_A_REPLICA), n)) for n in REPLICAS]
    yield curve("replicas", labels, points, "run", repeat)
    labels = "requests in the burst", "CPU s a request"
    for name, (scheduler, sizes) in QUEUES.items():
        yield curve(f"queue, {name}", labels, [(n, burst(n, scheduler)) for n in sizes], "request", repeat)
    labels = "running sequences", "CPU s an iteration"
    yield curve("batch", labels, [(n, full_batch(n)) for n in BATCHES], "iteration", repeat)


def draw(measured: list[Curve], path: Path) -> None:
    """One log-log panel a size. The same figures give the same bytes."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    from fineserve_sim.experiment.show.plot_style import house_style, look_at

    with house_style():
        figure = Figure(figsize=(9.2, 2.7), layout="constrained")
        panels = dict.fromkeys(one.x_label for one in measured)
        for axes, x_label in zip(figure.subplots(1, len(panels)), panels, strict=True):
            shown = [one for one in measured if one.x_label == x_label]
            for place, one in enumerate(shown):
                label = f"{one.name.removeprefix('queue, ')}: slope {one.slope:.2f}"
                axes.loglog(one.x, one.y, **look_at(place), markersize=4, label=label)
            axes.set(xlabel=x_label, ylabel=shown[0].y_label)
            low, high = axes.get_ylim()
            axes.set_ylim(low / 3, high * 6)
            axes.yaxis.set_minor_formatter(NullFormatter())
            axes.legend(loc="upper left", fontsize=7)
        figure.savefig(path, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=1, help="take the best of so many loops")
    parser.add_argument("--figure", type=Path, help="also draw this SVG")
    parser.add_argument("--costs", action="store_true", help="measure the costs of decisions instead of simulations")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    if args.costs:
        costs = [measure_cost(cost, args.repeat) for cost in (*COSTS, *CLUSTER_COSTS)]
        print(json.dumps([asdict(one) for one in costs], indent=1) if args.json else table(costs))
        return 0 if all(one.holds for one in costs) else 1
    measured = list(curves(args.repeat))
    if args.json:
        print(json.dumps({"machine": machine(), "curves": [asdict(one) for one in measured]}, indent=1))
    else:
        for one in measured:
            print(f"{one.name}: slope {one.slope:.2f}")
            for x, y, events in zip(one.x, one.y, one.events, strict=True):
                print(f"  {x:8g} {one.x_label:24} {y:10.3g} {one.y_label:20} {events:9} events")
    if args.figure:
        draw(measured, args.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
