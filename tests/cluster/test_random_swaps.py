"""The laws of ``lawkit`` where sequences leave memory in the middle of something: swapped to host memory while instances fail,
evicted in mid-iteration; and in a fleet that is a static cluster, for nobody leaves or moves."""

from __future__ import annotations

from collections import Counter

import pytest
from lawkit import as_text, counting_swaps
from randomkit import judged

from fineserve_sim.build import build


@pytest.mark.parametrize("kind", ["swap", "requeue", "still"])
def test_the_laws_hold_in_the_first_cluster(kind: str) -> None:
    verdict = judged(kind, 0)
    assert not verdict.broken, as_text(verdict.broken)


@pytest.mark.parametrize("seed", [110, 303])
def test_an_engine_without_room_for_kv_refuses_for_memory_in_either_cluster(seed: int) -> None:
    verdict = judged("still", seed)
    assert not verdict.broken, as_text(verdict.broken)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "seeds"), [("swap", 8), ("requeue", 10), ("still", 8)])
def test_the_laws_hold_in_many(kind: str, seeds: int) -> None:
    counts: Counter[str] = Counter()
    with counting_swaps() as swaps:
        broken = []
        for seed in range(seeds):
            verdict = judged(kind, seed)
            counts += verdict.counts
            if verdict.broken:
                broken.append(f"{kind} {seed}: {as_text(verdict.broken)}")
    assert not broken, "\n".join(broken)
    assert kind != "swap" or counts["faults"] > 5
    assert kind != "swap" or build() == "compiled" or swaps["swaps"] > 100  # compiled methods cannot be watched
    assert kind != "requeue" or counts["evictions"] > 50
