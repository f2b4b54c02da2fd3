"""A grammar-aware fuzzer of the server: requests made by a grammar and then spoiled, beside a neighbour and a control.

    python benchmarks/fuzz.py FOLDER [--requests N] [--seeds N] [--first-seed N] [--batch N] [--calm S] [--show SEED NUMBER]

A seed is a server of its own and so many requests, which are for one of its two models. A client of the other one times its
tokens meanwhile, and before, while no other client asks. Engines are processes, weights lie in the region, and freed memory is
poisoned. After each batch the control's greedy texts are compared with the start's, and the memory of idle engines is read.

Exit code 1 where a bound is broken:

* an answer of 5xx that is no refusal by name, of another shape, or after more than 30 s;
* memory after the last batch is more than 5 % above that after the first;
* the neighbour waits for a token longer than a second, or than five times its longest wait without the fuzzer;
* another text of the control, or an engine that died.

``--show`` prints a request.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.chaos_server import MODELS, Server, write_file
from benchmarks.fuzz_clients import Tally, control, neighbour, shoot
from benchmarks.fuzz_grammar import draw

GROWTH = 1.05
IDLE_S = 3.0
"""Seconds after which idle engines have given freed memory back."""

LONGEST_GAP_S, TIMES = 1.0, 5.0
CLIENT_NICE = 10
CHANGES = {
    "runtime.silent_s": "60",
    "runtime.queued_s": "60",
    "runtime.region_bytes": str(64 * 2**20),
    "models.0.ttft_slo_s": "60.0",
    "models.1.ttft_slo_s": "60.0",
}
"""Changes to the chaos campaign's settings: there is room for all, and no request is refused because the machine is busy."""

_REPORTED = 20


@dataclass
class Played:
    """What a seed came to. ``rss_mb`` after each batch, of the server and of each engine; gaps in seconds, each batch's."""

    seed: int
    requests: int
    calm_gap_s: list[float] = field(default_factory=list)
    gap_s: list[list[float]] = field(default_factory=list)
    rss_mb: list[list[float]] = field(default_factory=list)
    wrong_controls: int = 0
    deaths: float = 0.0
    took_s: float = 0.0
    load: float = 0.0
    problems: list[str] = field(default_factory=list)


def play(folder: Path, seed: int, options: argparse.Namespace) -> tuple[Played, Tally]:
    """The requests of a seed against a new server."""
    file, _ = write_file(folder, "vllm")
    target, other = MODELS[seed % 2], MODELS[1 - seed % 2]
    played, tally, begun_s = Played(seed, options.requests), Tally(), time.monotonic()
    server = Server(file, "vllm", log=folder / f"fuzz-{seed}.log", changes=CHANGES)
    try:
        asyncio.run(shoot(server.url, [(n, draw(-1, n, target)) for n in range(100)], Tally()))  # what comes up once
        before, engines = control(server.url, MODELS), server.engine_pids()
        with _timed(server.url, other) as calm:
            time.sleep(options.calm)
        played.calm_gap_s = _quantiles(calm, played)
        for first in range(0, options.requests, options.batch):
            numbers = range(first, min(first + options.batch, options.requests))
            with _timed(server.url, other) as heard:
                _patiently(shoot(server.url, ((n, draw(seed, n, target)) for n in numbers), tally))
            played.gap_s.append(_quantiles(heard, played))
            played.wrong_controls += control(server.url, MODELS) != before
            time.sleep(IDLE_S)
            played.rss_mb.append([round(server.rss_mb(pid), 1) for pid in (server.process.pid, *server.engine_pids())])
            print(f"seed {seed}: {numbers.stop} requests, {played.rss_mb[-1]} MB", file=sys.stderr, flush=True)
        played.deaths = server.metric("fineserve:engine_deaths_total") + (server.engine_pids() != engines)
    finally:
        code = server.stop()
    played.problems += [f"exit code {code}"] * (code != 0) + tally.problems
    played.took_s, played.load = round(time.monotonic() - begun_s, 1), round(os.getloadavg()[1], 1)
    played.problems += broken_bounds(played)
    return played, tally


def _patiently(sending: Coroutine[Any, Any, None]) -> None:
    """Run it in a thread of lower priority: clients of a real server have machines of their own."""

    def run() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), CLIENT_NICE)
        asyncio.run(sending)

    with ThreadPoolExecutor(1) as threads:
        threads.submit(run).result()


@contextmanager
def _timed(url: str, model: str) -> Iterator[list[Any]]:
    """A neighbour of its own process for as long as the block lasts; then gaps and problems are in the list."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=neighbour, args=(url, model, theirs), daemon=True)
    process.start()
    heard: list[Any] = []
    try:
        yield heard
    finally:
        ours.send("stop")
        heard += ours.recv()
        process.join()


def _quantiles(heard: list[Any], played: Played) -> list[float]:
    """Median, 99th percentile, largest."""
    gaps, problems = heard
    played.problems += problems
    return [round(float(each), 4) for each in np.quantile(gaps, [0.5, 0.99, 1])]


def broken_bounds(played: Played) -> list[str]:
    """In words."""
    first, last = sum(played.rss_mb[0]), sum(played.rss_mb[-1])
    longest, calm = max(gaps[2] for gaps in played.gap_s), played.calm_gap_s[2]
    broken = {
        f"memory grew from {first:.0f} to {last:.0f} MB": last > GROWTH * first,
        f"the neighbour waited {longest:.3f} s for a token": longest > LONGEST_GAP_S,
        f"the neighbour waited {longest:.3f} s, and {calm:.3f} s without the fuzzer": longest > TIMES * calm,
        f"the control was wrong after {played.wrong_controls} batches": played.wrong_controls > 0,
        f"{played.deaths:.0f} engines died": played.deaths > 0,
    }
    return [what for what, is_broken in broken.items() if is_broken]


# --- the report ----------------------------------------------------------------------------------------------------------


def report(seeds: list[Played], tallies: list[Tally]) -> str:
    """Markdown."""
    tally = Tally()
    for each in tallies:
        tally.statuses += each.statuses
        tally.refused += each.refused
        tally.surprises += each.surprises
    lines = ["| endpoint | " + " | ".join(kinds := sorted({kind for _, kind in tally.statuses})) + " |"]
    lines.append("|---" * (len(kinds) + 1) + "|")
    for path in sorted({path for path, _ in tally.statuses}):
        counts = [str(tally.statuses[path, kind]) for kind in kinds]
        lines.append(f"| {path} | {' | '.join(counts)} |")
    lines += ["", f"503 by reason: {dict(tally.refused) or 'none'}; longest {max(t.longest_s for t in tallies):.1f} s"]
    lines += [
        "",
        "| seed | requests | took, load | memory after each batch (MB) | control wrong | neighbour's gaps (ms): ",
    ]
    lines[-1] += "median, P99, longest without; worst with | problems |"
    lines.append("|---" * 7 + "|")
    lines += [_row(each) for each in seeds]
    lines += ["", "What the grammar made and was refused:", *_counted(tally.surprises)]
    return "\n".join([*lines, "", "Problems:", *(f"- seed {s.seed}: {p}" for s in seeds for p in s.problems)])


def _row(played: Played) -> str:
    memory = ", ".join(f"{sum(each):.0f}" for each in played.rss_mb)
    worst = [max(each) for each in zip(*played.gap_s, strict=True)]
    gaps = "; ".join(", ".join(f"{1000 * each:.0f}" for each in some) for some in (played.calm_gap_s, worst))
    took = f"{played.took_s:.0f} s, {played.load}"
    wrong = f"{played.wrong_controls} of {len(played.rss_mb)}"
    return f"| {played.seed} | {played.requests} | {took} | {memory} | {wrong} | {gaps} | {len(played.problems)} |"


def _counted(found: Counter[str]) -> list[str]:
    return [f"- {count} x {what}" for what, count in found.most_common(_REPORTED)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=10_000, help="of a seed")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--calm", type=float, default=30.0, help="seconds that the neighbour is alone")
    parser.add_argument("--show", type=int, nargs=2, metavar=("SEED", "NUMBER"))
    options = parser.parse_args()
    if options.show:
        seed, number = options.show
        print(draw(seed, number, MODELS[seed % 2]))
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    found = []
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        found.append(play(options.folder, seed, options))
        with (options.folder / "seeds.jsonl").open("a", encoding="utf-8") as out:
            out.write(json.dumps(asdict(found[-1][0])) + "\n")
    print(report([played for played, _ in found], [tally for _, tally in found]))
    return 1 if any(played.problems for played, _ in found) else 0


if __name__ == "__main__":
    sys.exit(main())
