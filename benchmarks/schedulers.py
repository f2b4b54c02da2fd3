"""Milliseconds per call of the local schedulers on long queues.

    python benchmarks/schedulers.py [--json]

Adaptive batching (FineServe, Algorithm 2): a steady queue of 10,000 with 10 arrivals between two calls, in regimes that
stress its parts differently. As many requests leave as arrive: they are admitted, expire, or (with no slot free and a
loose SLO) their oldest clients give up. ``unchanged_until`` is timed beside it.
Moore-Hodgson (Prism, Algorithm 2): one call on 10,000 waiting requests of four engines.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from fineserve_sim.policy.adaptive import AdaptiveBatching
from fineserve_sim.policy.interfaces import Admission, EngineState, Request
from fineserve_sim.policy.moore_hodgson import EngineFacts, MooreHodgson

QUEUE = 10_000
ARRIVALS = 10
CALLS = 300


@dataclass(frozen=True)
class Regime:
    """A load under which adaptive batching holds 10,000 requests: ``gap_s`` seconds pass between two calls."""

    name: str
    slo_s: float
    gap_s: float
    free_slots: int
    free_kv_tokens: int


REGIMES = (
    Regime("expiring, batch cut by the deadline", slo_s=10.0, gap_s=0.01, free_slots=256, free_kv_tokens=100_000),
    Regime("expiring, no slot free", slo_s=10.0, gap_s=0.01, free_slots=0, free_kv_tokens=100_000),
    Regime("all in time, batch cut by slots", slo_s=3600.0, gap_s=0.01, free_slots=10, free_kv_tokens=100_000),
    Regime("half in time, batch cut by slots", slo_s=75.0, gap_s=0.01, free_slots=10, free_kv_tokens=100_000),
    Regime("half in time, no memory for the first", slo_s=75.0, gap_s=0.01, free_slots=10, free_kv_tokens=20),
)


@dataclass(frozen=True)
class Timing:
    name: str
    mean_ms: float
    p99_ms: float
    worst_ms: float
    left_per_call: float


def prefill(tokens: int, decoding: int) -> float:
    """Chunks of 2048 tokens, 80 ms each: about an 8B model on one H100."""
    return math.ceil(tokens / (2048 - decoding)) * 0.08


def prompt_tokens(rng: random.Random) -> int:
    """Log-normal with a mean of about 420 tokens, up to 8192."""
    return min(8192, max(4, round(rng.lognormvariate(5.5, 1.05))))


def timed(call: Callable[[], Admission | float]) -> tuple[float, Admission | float]:
    start = time.perf_counter()
    answer = call()
    return (time.perf_counter() - start) * 1e3, answer


def timing(name: str, samples_ms: list[float], left: int) -> Timing:
    ordered = sorted(samples_ms)
    p99_ms = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return Timing(name, statistics.fmean(ordered), p99_ms, ordered[-1], left / len(ordered))


def adaptive(regime: Regime) -> list[Timing]:
    """Time ``CALLS`` rounds of arrivals, ``schedule`` and ``unchanged_until``. The arrivals count into the time of the
    call, as the structures that they update exist for its sake alone."""
    rng = random.Random(1)
    scheduler = AdaptiveBatching(regime.slo_s, prefill)
    waiting: dict[int, None] = {}
    state = EngineState(100, 100, 0, regime.free_slots, regime.free_kv_tokens + 1600, 1.1)
    now, next_id, left = 0.0, 0, 0
    schedule_ms, unchanged_ms = [], []

    def arrive(count: int) -> None:
        nonlocal next_id
        for _ in range(count):
            scheduler.add(Request(next_id, "m", now, prompt_tokens(rng)), engine=0)
            waiting[next_id] = None
            next_id += 1

    def arrivals_and_schedule() -> Admission:
        arrive(ARRIVALS)
        return scheduler.schedule(now, {0: state})

    for _ in range(QUEUE // ARRIVALS):
        arrive(ARRIVALS)
        now += regime.gap_s
    for _ in range(CALLS):
        arrive(QUEUE - ARRIVALS - len(scheduler))
        spent_ms, answer = timed(arrivals_and_schedule)
        assert isinstance(answer, Admission)
        schedule_ms.append(spent_ms)
        unchanged_ms.append(timed(lambda: scheduler.unchanged_until(now, {0: state}))[0])
        gone = [request.id for request in answer.admitted + answer.dropped]
        left += len(gone)
        for id in gone:
            del waiting[id]
        for id in list(waiting)[: len(scheduler) - (QUEUE - ARRIVALS)]:
            scheduler.remove(id)
            del waiting[id]
        now += regime.gap_s
    return [
        timing(f"adaptive schedule: {regime.name}", schedule_ms, left),
        timing(f"adaptive unchanged_until: {regime.name}", unchanged_ms, 0),
    ]


def moore_hodgson(slo_s: float) -> Timing:
    """One call on a fresh queue of 10,000 requests over four engines, repeated."""
    samples_ms, left = [], 0
    for seed in range(20):
        rng = random.Random(seed)
        facts = {engine: EngineFacts(25_000.0, slo_s * (1 + engine / 4), 400_000) for engine in range(4)}
        scheduler = MooreHodgson(facts)
        for id in range(QUEUE):
            scheduler.add(Request(id, "m", id * 1e-3, prompt_tokens(rng)), engine=id % 4)
        states = {engine: EngineState(20, 20, 0, 8, 100_000, 1.0) for engine in facts}
        spent_ms, answer = timed(lambda scheduler=scheduler, states=states: scheduler.schedule(10.0, states))
        assert isinstance(answer, Admission)
        samples_ms.append(spent_ms)
        left += len(answer.admitted) + len(answer.dropped)
    return timing(f"Moore-Hodgson schedule: SLO {slo_s:g} s", samples_ms, left)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON list instead of a table")
    arguments = parser.parse_args()
    timings = [timing for regime in REGIMES for timing in adaptive(regime)]
    timings += [moore_hodgson(slo_s) for slo_s in (12.0, 100.0, 3600.0)]
    if arguments.json:
        print(json.dumps([asdict(timing) for timing in timings], indent=1))
        return
    print(f"{'':66} {'mean ms':>8} {'p99 ms':>8} {'max ms':>8} {'left/call':>9}")
    for row in timings:
        print(f"{row.name:66} {row.mean_ms:8.3f} {row.p99_ms:8.3f} {row.worst_ms:8.3f} {row.left_per_call:9.1f}")


if __name__ == "__main__":
    main()
