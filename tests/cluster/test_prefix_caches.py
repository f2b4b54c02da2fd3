"""What prefix caches find in a recorded trace does not depend on the kind of cluster (figures: docs/performance.md)."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from fineserve_traces import Trace, read_trace

ROOT = Path(__file__).parents[2]
MOONCAKE = ROOT.parent / "shared" / "data" / "traces" / "mooncake_conversation.jsonl.gz"


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import prefix_caches

    return prefix_caches


@pytest.fixture(scope="module")
def recorded() -> Trace:
    if not MOONCAKE.exists():
        pytest.skip("needs shared/data/traces/mooncake_conversation.jsonl.gz")
    return read_trace(MOONCAKE)


def test_an_unlimited_cache_finds_full_blocks_and_leaves_a_token_to_compute(caches: ModuleType) -> None:
    trace = Trace(
        np.arange(3.0),
        np.zeros(3, dtype=np.int32),
        np.array([1024, 1024, 1100]),
        np.ones(3, dtype=np.int64),
        ("m",),
        "by hand",
        prefix_hashes=((1, 2), (1, 2), (1, 2, 3)),
        prefix_block_tokens=512,
    )
    assert caches.unlimited(trace) == 512 + 1024


def test_every_kind_of_cluster_finds_what_there_is(caches: ModuleType, recorded: Trace) -> None:
    trace = recorded.take(np.arange(150))
    oracle = caches.unlimited(trace)
    assert oracle > 0
    assert {one.system: one.tokens for one in caches.with_everything(trace)} == {
        "static": oracle,
        "Prism fleet": oracle,
        "KunServe pipeline": oracle,
    }


def test_caches_that_lose_blocks_find_the_same_in_a_fleet_as_in_a_static_cluster(
    caches: ModuleType, recorded: Trace
) -> None:
    trace = recorded.take(np.arange(400))
    static, *others = caches.as_recorded(trace, 2)
    assert 0 < static.tokens < caches.unlimited(trace)
    assert [other.tokens for other in others] == [static.tokens, static.tokens]


def test_the_whole_trace_has_the_share_that_the_page_names(caches: ModuleType, recorded: Trace) -> None:
    assert caches.unlimited(recorded) / recorded.prompt_tokens.sum() == pytest.approx(0.3734, abs=5e-5)
    assert caches.unlimited(recorded.take(np.arange(2000))) == 8_066_048


@pytest.mark.slow
def test_the_page_names_what_engines_find_of_the_trace_as_recorded(caches: ModuleType, recorded: Trace) -> None:
    static = caches.found("static", recorded, "dedicated", caches.pinned(recorded, 4), gpus=4)
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert f"{100 * static.tokens / static.total:.2f} %, {static.tokens:,} tokens, each" in page
