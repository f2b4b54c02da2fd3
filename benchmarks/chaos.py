"""A campaign that tries to break the server: real clients under load while everything goes wrong that can be made to.

    python benchmarks/chaos.py FOLDER [--requests N] [--segment N] [--seed N] [--engines vllm|fake|ray] [--minutes N]
        [--gap S] [--long-gap S] [--clients N] [--grace S] [--report]

A segment is a server of its own and so many requests through OpenAI's client. Its engines are processes, freed memory is
poisoned, and there is less memory than the load wants. Faults are drawn from the seed and the segment's number. Segments are
kept in FOLDER: a campaign that was interrupted goes on with the next one. ``--report`` prints what is there, as Markdown. Exit
code 1 where something happened that must not.

Checked are every text against an undisturbed server, every wait and length, the words of every refusal, hostile clients'
answers, and ``/health`` from another process ten times a second. At the end of a segment both models serve again, no KV is in
use, and as much is free as at the start. The server stops with code 0 and leaves nothing behind.

With ``--engines ray`` devices are actors on two nodes of a Ray cluster of this machine, engines the fake ones, and actors and
nodes are lost, too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.chaos_clients import (
    Expected,
    Health,
    Load,
    Prompt,
    Tally,
    burst,
    draw_prompts,
    reference,
    watch_health,
)
from benchmarks.chaos_faults import Faults
from benchmarks.chaos_ray import Nodes, nodes_for
from benchmarks.chaos_report import report
from benchmarks.chaos_server import LATEST_S, LONGEST_S, MODELS, Server, waited_s, write_file

_PROMPTS = 60  # of each model
_SETTLE_S = 180.0
_GROWTH_MB = 16.0


class Ground(NamedTuple):
    """What all segments share. ``third``: the model that comes and goes, as an operator adds it."""

    file: Path
    third: dict[str, Any]
    nodes: Nodes | None
    prompts: list[Prompt]
    expected: list[Expected]


def play_segment(folder: Path, number: int, options: argparse.Namespace, ground: Ground) -> dict[str, Any]:
    """The figures of a segment."""
    file, _, nodes, prompts, expected = ground
    tally, rng = Tally(), random.Random(f"{options.seed}-{number}")
    begun_s = time.monotonic()
    server = Server(file, options.engines, nodes=nodes, log=folder / f"server-{number}.log")
    try:
        _, free_bytes = _kv(server)
        asyncio.run(Load(server.url, prompts, expected, tally, number).run(200, 16))  # what it allocates once
        storm_s, waited = time.monotonic(), (server.waited_s(), waited_s())
        storm = asyncio.run(_storm(server, ground, rng, options, tally, number))
        no_core_s = [server.waited_s() - waited[0], waited_s() - waited[1], time.monotonic() - storm_s]
        faults, health = storm.faults, storm.health
        beside_burst = [each for each in health if each.asked_s >= storm.burst_s]
        problems = [*tally.problems, *faults.problems, *_settled(server, free_bytes, prompts, expected)]
        rss_mb = [*storm.rss_mb, server.rss_mb()]
        deaths = server.metric("fineserve:engine_deaths_total")
        preemptions = server.metric("vllm:num_preemptions_total")
        lost = server.metric("fineserve:log_lines_lost_total")
    finally:
        code = server.stop()
    problems += [f"exit code {code}"] * (code != 0) + [f"left behind: {each}" for each in server.left_behind()]
    problems += _waits(tally, options.grace) + _growth(storm.rss_mb)
    return {
        "segment": number,
        "took_s": round(time.monotonic() - begun_s, 1),
        "requests": tally.requests + sum(storm.burst.values()),
        "outcomes": dict(tally.outcomes),
        "burst": dict(storm.burst),
        "faults": dict(faults.counts),
        "deaths": deaths,
        "preemptions": preemptions,
        "log_lines_lost": lost,
        "longest_wait_s": round(tally.longest_wait_s, 2),
        "longest_s": round(tally.longest_s, 2),
        "health_s": _quantiles([each.took_s for each in health]),
        "health_cpu_s": _quantiles([each.cpu_s for each in health]),
        "burst_health_s": [(round(each.took_s, 4), round(each.cpu_s, 4)) for each in beside_burst],
        "health_bad": sum(each.status != 200 for each in health),
        "no_core_s": [round(each, 1) for each in no_core_s],
        "load": [round(each, 1) for each in os.getloadavg()[:2]],
        "rss_mb": [round(each, 1) for each in rss_mb],
        "problems": problems,
    }


def _quantiles(seconds: list[float]) -> list[float]:
    """Median, 99th percentile, largest."""
    return [round(float(each), 4) for each in np.quantile(seconds, [0.5, 0.99, 1])]


@dataclass(frozen=True)
class _Storm:
    """What a storm came to. ``rss_mb``: memory of the server at ten times until the burst, which began at ``burst_s``."""

    faults: Faults
    health: list[Health]
    burst_s: float
    burst: Counter[str]
    rss_mb: list[float]


async def _storm(
    server: Server, ground: Ground, rng: random.Random, options: argparse.Namespace, tally: Tally, number: int
) -> _Storm:
    """Load and faults; a burst when the load has ended, so that its 1,500 requests are alone with the 20 MB."""
    _, third, _, prompts, expected = ground
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    watcher = context.Process(target=watch_health, args=(server.url, server.process.pid, theirs), daemon=True)
    watcher.start()
    faults = Faults(server, third, rng, options.gap, options.long_gap or 5 * options.gap)
    striking = asyncio.create_task(faults.run())
    rss_mb: list[float] = []
    sampling = asyncio.create_task(_sample_memory(server, rss_mb))
    await Load(server.url, prompts, expected, tally, options.seed * 1000 + number).run(options.segment, options.clients)
    sampling.cancel()
    faults.end()
    await striking
    burst_s = time.monotonic()
    bursts = await burst(server.url, prompts[0])
    ours.send("stop")
    health = await asyncio.to_thread(ours.recv)
    watcher.join()
    bad = [each for each in bursts if each not in ("200", "503", "413")]
    faults.problems += [f"burst: {bursts[each]} x {each}" for each in bad]
    return _Storm(faults, health, burst_s, bursts, rss_mb[:: -(-len(rss_mb) // 10)])


async def _sample_memory(server: Server, rss_mb: list[float]) -> None:
    while True:
        rss_mb.append(server.rss_mb())
        await asyncio.sleep(1)


def _settled(server: Server, free_bytes: float, prompts: list[Prompt], expected: list[Expected]) -> list[str]:
    """What is not as it was when nothing strikes any more."""
    end_s = time.monotonic() + _SETTLE_S
    while time.monotonic() < end_s and not server.ready():
        time.sleep(0.2)
    problems = [] if server.ready() else ["the models are not ready again"]
    calm = Tally()
    asyncio.run(Load(server.url, prompts, expected, calm, 0).run(40, 4))
    problems += calm.problems + [f"calm, and yet {each}" for each in calm.outcomes if each not in ("finished", "left")]
    used, free = _kv(server)
    while time.monotonic() < end_s and (used or free != free_bytes):
        time.sleep(0.1)
        used, free = _kv(server)
    if used or free != free_bytes:
        problems.append(f"{used:.0f} bytes of KV are in use, {free:.0f} free, not {free_bytes:.0f}")
    return problems


def _kv(server: Server) -> tuple[float, float]:
    """Bytes in use, and free, over all devices."""
    return server.metric("fineserve:kv_used_bytes{"), server.metric("fineserve:region_bytes", 'part="free"')


def _waits(tally: Tally, grace_s: float) -> list[str]:
    late = [(tally.longest_s, LONGEST_S, "a request lasted")]
    late += [(tally.longest_wait_s, LATEST_S, "a client waited for its first token")]
    return [f"{what} {took:.1f} s, more than {most:g}" for took, most, what in late if took > most + grace_s]


def _growth(rss_mb: list[float]) -> list[str]:
    """Over the second half of a load: what a server allocates once, it has by then."""
    half, end = rss_mb[(len(rss_mb) - 1) // 2], rss_mb[-1]
    return [f"memory grew from {half:.0f} to {end:.0f} MB over half of the load"] if end > half + _GROWTH_MB else []


# --- the campaign ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--segment", type=int, default=5_000, help="requests of a segment")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--gap", type=float, default=0.5, help="seconds between short faults; long ones: five times that"
    )
    parser.add_argument("--long-gap", type=float, help="seconds between long faults, if not that")
    parser.add_argument("--engines", choices=["vllm", "fake", "ray"], default="vllm")
    parser.add_argument("--grace", type=float, default=1.0, help="seconds that a wait may be longer than it should")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no segment after so long")
    parser.add_argument("--report", action="store_true", help="print what is there, and leave")
    options = parser.parse_args()
    if not options.report:
        play(options)
    segments = done(options.folder)
    print(report(segments))
    return 1 if any(segment["problems"] for segment in segments) else 0


def play(options: argparse.Namespace) -> None:
    """The segments that are not there yet. Raises ValueError for a folder with a campaign of other options."""
    end_s = time.monotonic() + options.minutes * 60
    options.folder.mkdir(parents=True, exist_ok=True)
    file, third = write_file(options.folder, options.engines)
    prompts = draw_prompts(options.seed, MODELS, _PROMPTS)
    expected = _expected(options, file, prompts)
    with nodes_for(options.engines) as nodes:
        for number in range(len(done(options.folder)), -(-options.requests // options.segment)):
            if time.monotonic() > end_s:
                return
            found = play_segment(options.folder, number, options, Ground(file, third, nodes, prompts, expected))
            with (options.folder / "segments.jsonl").open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
            print(f"segment {number}: {found['requests']} requests, {len(found['problems'])} problems", file=sys.stderr)


def _expected(options: argparse.Namespace, file: Path, prompts: list[Prompt]) -> list[Expected]:
    """The answers of an undisturbed server on this machine, asked once for a folder."""
    kept = options.folder / "reference.json"
    plan = {key: getattr(options, key) for key in ("seed", "segment", "engines", "clients", "gap", "long_gap")}
    if not kept.exists():
        server = Server(file, options.engines, log=options.folder / "reference.log")
        try:
            found = reference(server.url, prompts, logprobs=options.engines == "vllm")
        finally:
            server.stop()
        kept.write_text(json.dumps({"plan": plan, "expected": found}), encoding="utf-8")
    read = json.loads(kept.read_text(encoding="utf-8"))
    if read["plan"] != plan:
        raise ValueError(f"{options.folder} has a campaign of {read['plan']}; take another folder")
    return [Expected(text, tuple(ties)) for text, ties in read["expected"]]


def done(folder: Path) -> list[dict[str, Any]]:
    path = folder / "segments.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
