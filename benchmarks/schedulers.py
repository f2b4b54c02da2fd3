"""Milliseconds per call of the local schedulers on long queues.

    python benchmarks/schedulers.py [--json]

Adaptive batching (FineServe, Algorithm 2): a steady queue of 10,000 with 10 arrivals between two calls, in regimes that
stress its parts differently. As many requests leave as arrive: they are admitted, expire, or the oldest clients give up
between two calls. ``unchanged_until`` is timed beside it.
Moore-Hodgson (Prism, Algorithm 2): one call on 10,000 waiting requests of four engines.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from dataclasses import asdict, dataclass

from fineserve_sim.policy.interfaces import Admission, EngineFacts, EngineState, Request
from fineserve_sim.policy.scheduling.adaptive import AdaptiveBatching
from fineserve_sim.policy.scheduling.moore_hodgson import MooreHodgson

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
    Regime("10 expire, no slot free", slo_s=9.9, gap_s=0.01, free_slots=0, free_kv_tokens=100_000),
    Regime("some expire, batch cut by deadline and slots", slo_s=9.9, gap_s=0.01, free_slots=8, free_kv_tokens=100_000),
    Regime("256 start at once", slo_s=9.9, gap_s=0.01, free_slots=256, free_kv_tokens=100_000),
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


def prefill(tokens: int, decoding: int, pairs: int) -> float:
    """Chunks of 2048 tokens, 80 ms each: about an 8B model on one H100."""
    return math.ceil(tokens / (2048 - decoding)) * 0.08


def prompt_tokens(rng: random.Random) -> int:
    """Log-normal with a mean of about 420 tokens, up to 8192."""
    return min(8192, max(4, round(rng.lognormvariate(5.5, 1.05))))


def timing(name: str, samples_ms: list[float], left: int) -> Timing:
    ordered = sorted(samples_ms)
    p99_ms = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return Timing(name, statistics.fmean(ordered), p99_ms, ordered[-1], left / len(ordered))


class SteadyQueue:
    """Adaptive batching with 10,000 requests that have arrived evenly up to ``now``."""

    def __init__(self, regime: Regime) -> None:
        self.scheduler = AdaptiveBatching(regime.slo_s, prefill)
        self.now = 0.0
        self._gap_s = regime.gap_s
        self._rng = random.Random(1)
        self._waiting: dict[int, None] = {}
        self._next_id = 0
        for _ in range(QUEUE // ARRIVALS):
            self.arrive(ARRIVALS)
            self.now += regime.gap_s

    def arrive(self, count: int) -> None:
        for _ in range(count):
            self.scheduler.add(Request(self._next_id, "m", self.now, prompt_tokens(self._rng)), engine=0)
            self._waiting[self._next_id] = None
            self._next_id += 1

    def settle(self, answer: Admission) -> None:
        """After a call: let the oldest leave, or more arrive, so that 10 arrivals make 10,000; move the clock."""
        for request in answer.admitted + answer.dropped:
            del self._waiting[request.id]
        surplus = len(self.scheduler) - (QUEUE - ARRIVALS)
        for id in list(self._waiting)[: max(0, surplus)]:
            self.scheduler.remove(id)
            del self._waiting[id]
        self.arrive(-surplus)
        self.now += self._gap_s


def adaptive(regime: Regime) -> list[Timing]:
    """Time ``CALLS`` rounds of 10 arrivals and ``schedule``, and of ``unchanged_until``. The arrivals count into the
    time of the call, as the structures that they update exist for its sake alone."""
    queue = SteadyQueue(regime)
    states = {0: EngineState(100, 100, 0, regime.free_slots, regime.free_kv_tokens + 1600, 1.1)}
    queue.settle(queue.scheduler.schedule(queue.now, states))
    left = 0
    schedule_ms, unchanged_ms = [], []
    for _ in range(CALLS):
        start = time.perf_counter()
        queue.arrive(ARRIVALS)
        answer = queue.scheduler.schedule(queue.now, states)
        middle = time.perf_counter()
        queue.scheduler.unchanged_until(queue.now, states)
        unchanged_ms.append((time.perf_counter() - middle) * 1e3)
        schedule_ms.append((middle - start) * 1e3)
        left += len(answer.admitted) + len(answer.dropped)
        queue.settle(answer)
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
        start = time.perf_counter()
        answer = scheduler.schedule(10.0, states)
        samples_ms.append((time.perf_counter() - start) * 1e3)
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
