"""Does sharing KV memory pay on real engines? Fig. 4 in small: two models on and off, the slab against a static split.

    python benchmarks/runtime_benefit.py FOLDER [--pairs N] [--json]

Plays ``on_off.yaml`` of ``fineserve-run demo`` (made in FOLDER) on real vLLM engines, both systems on the same requests in
each pair, in alternating order. A pair's ratio is of the requests a second that met their TTFT SLO, dynamic over static.
The geometric mean has a 95 % interval by Student's t over the logarithms. Needs vLLM on the CPU; a pair takes a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from fineserve_runtime.config import RuntimeFile, load_file
from fineserve_runtime.demo import make_demo
from fineserve_runtime.replay import replay_on

from fineserve_sim.cluster.scenario import Fate
from fineserve_sim.experiment.results.stats import over_runs
from fineserve_sim.experiment.run.run import Run, scenario

SYSTEMS = ("static", "dynamic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    make_demo(options.folder, 0)
    file = load_file(options.folder / "on_off.yaml", serving=False)
    pairs = [play_pair(file, number) for number in range(options.pairs)]
    found = {"pairs": pairs} | interval([pair["dynamic"] / pair["static"] for pair in pairs])
    print(json.dumps(found) if options.json else text(found))


def play_pair(file: RuntimeFile, number: int) -> dict[str, Any]:
    """SLO-attained requests a second by system, on the requests of seed ``number``, and the machine's load before."""
    result: dict[str, Any] = {"load": os.getloadavg()[0]}
    for system in SYSTEMS[:: 1 if number % 2 else -1]:
        result[system] = attained_per_s(file, system, number)
    return result


def attained_per_s(file: RuntimeFile, system: str, seed: int) -> float:
    setup = file.experiment.setup
    slo_s = file.experiment.file.slo.ttft_s
    assert slo_s is not None
    described = scenario(Run(setup, (), system, None, 1.0, seed, (slo_s,) * len(setup.models)))
    result = replay_on(file)(described)
    arrival_s = described.whole_trace.arrival_s
    met = (result.fate == Fate.FINISHED) & (result.first_token_s - arrival_s <= slo_s)
    return float(np.sum(met) / (arrival_s[-1] - arrival_s[0]))


def interval(ratios: list[float]) -> dict[str, float]:
    """Geometric mean of the ratios and its 95 % interval."""
    found = over_runs([math.log(ratio) for ratio in ratios])
    low, high = found.mean - found.half_width, found.mean + found.half_width
    return {"ratio": math.exp(found.mean), "low": math.exp(low), "high": math.exp(high)}


def text(found: dict[str, Any]) -> str:
    rows = ["| pair | load | static | dynamic | ratio |", "|---|---|---|---|---|"]
    for number, pair in enumerate(found["pairs"]):
        cells = [f"{pair[name]:.2f}" for name in SYSTEMS]
        rows.append(f"| {number} | {pair['load']:.1f} | {' | '.join(cells)} | {pair['dynamic'] / pair['static']:.2f} |")
    mean = f"ratio {found['ratio']:.2f}, 95 % interval {found['low']:.2f} to {found['high']:.2f}"
    return "\n".join([*rows, "", mean])


if __name__ == "__main__":
    main()
