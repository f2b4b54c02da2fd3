"""Twelve models on eight and on seven H100: a plan, ``balanced`` and the systems of papers, on later requests of the trace.

    PYTHONPATH=build/compiled python benchmarks/plan_twelve.py [--data ../shared/data] [--evaluations 250]

The trace is ``azure2023_conv`` ten times as fast, each model has the same share, and the TTFT limit is a second. All is chosen
by requests 0 to 3,000, and judged by 6,000 to 9,000 and 12,000 to 15,000. Prints the percent of first tokens in time, and the
seconds of one core that the search takes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import yaml
from fineserve_traces import Trace, read_trace

sys.path.append(str(Path(__file__).parents[1]))  # last: a compiled build goes first

from benchmarks.plan_matrix import PAPERS, SITUATIONS, kept_by
from fineserve_sim.planning.find import Budget, search
from fineserve_sim.planning.islands import on_time
from fineserve_sim.planning.judge import on
from fineserve_sim.planning.problem import Problem
from fineserve_sim.planning.wish import Wish, model_wish, problem_on, whole_of

FASTER, TTFT_S = 10.0, 1.0
CHOSEN, JUDGED = range(3000), (range(6000, 9000), range(12_000, 15_000))


def part(trace: Trace, rows: range) -> Trace:
    """These requests, of which the first comes at once."""
    taken = trace.take(np.array(rows))
    return replace(taken, arrival_s=taken.arrival_s - taken.arrival_s[0])


def case(data: Path, folder: Path, gpus: int) -> tuple[Problem, list[Trace]]:
    """What is chosen for, and the later requests. The trace is written into ``folder``."""
    trace = read_trace(next((data / "traces").glob("azure2023_conv.*"))).take(np.arange(JUDGED[-1].stop))
    path = folder / "twelve.csv"
    replace(trace, arrival_s=trace.arrival_s / FASTER).to_csv(path)
    names = yaml.safe_load(SITUATIONS.read_text(encoding="utf-8"))["mixes"]["twelve"]
    models = tuple(model_wish(f"m{number}={model}") for number, model in enumerate(names))
    wish = Wish(path, models, gpus, TTFT_S, spread=True)
    dealt = whole_of(wish).whole_trace
    return problem_on(wish, part(dealt, CHOSEN)), [part(dealt, rows) for rows in JUDGED]


def lines(problem: Problem, later: Sequence[Trace], evaluations: int) -> Iterator[str]:
    began_s = time.process_time()
    best = search(problem, Budget(evaluations))
    yield f"{len(problem.scenario.gpus)} GPUs, a search of {time.process_time() - began_s:.0f} s"
    yield _line("plan", [float(np.mean(on_time(on(problem, each), 0, best.layout))) for each in later])
    for name in ("balanced", *PAPERS):
        yield _line(name, [share(problem, name, each) for each in later])


def share(problem: Problem, name: str, trace: Trace) -> float:
    """What a system keeps of these requests; NaN where it cannot run."""
    kept = kept_by(problem, name, trace)
    return float("nan") if kept is None else float(np.mean(kept))


def _line(name: str, kept: list[float]) -> str:
    return f"  {name:12} {'  '.join(f'{100 * each:.1f}' for each in kept)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder with traces/")
    parser.add_argument("--evaluations", type=int, default=250)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for gpus in (8, 7):
            print("\n".join(lines(*case(options.data, Path(folder), gpus), options.evaluations)), flush=True)


if __name__ == "__main__":
    main()
