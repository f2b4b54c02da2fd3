"""KV memory that takes time, prefix caching and legacy kernels inside the engine: worked examples on one GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fineserve_traces import conversations
from simkit import H100, served, solo, step_model, with_kv_blocks

from fineserve_sim.catalog import attention_variant, driver_costs
from fineserve_sim.cluster import EngineSettings, Fate, ScenarioError, simulate
from fineserve_sim.cluster.compose import profiling
from fineserve_sim.cluster.scenario import RunResult

M = served(name="llama-3.1-8b")
GROWTH_S = 64 * (driver_costs().create_s.value + driver_costs().map_s.value)
"""One page of Llama-3.1-8B: 32 layers, K and V."""


def run(rows: list[tuple[float, int, int]], memory: object, settings: EngineSettings | None = None) -> RunResult:
    result = simulate(solo(rows, settings, m=M, memory=memory, sample_s=0, check=True))
    assert (result.fate == Fate.FINISHED).all()
    return result


def assert_equal(a: RunResult, b: RunResult) -> None:
    assert np.array_equal(a.first_token_s, b.first_token_s) and np.array_equal(a.finish_s, b.finish_s)


# -- kvcached


def test_a_step_waits_for_the_pages_that_it_needs() -> None:
    """A page holds 1,024 tokens: the prompt takes one, the 25th output token opens another."""
    slab = run([(0.0, 1000, 30)], "kv_slab")
    sync = run([(0.0, 1000, 30)], {"policy": "kvcached", "mode": "sync"})
    assert sync.first_token_s - slab.first_token_s == pytest.approx(GROWTH_S)
    assert sync.finish_s - slab.finish_s == pytest.approx(2 * GROWTH_S)
    short = run([(0.0, 1000, 24)], {"policy": "kvcached", "mode": "sync"})
    assert short.finish_s - run([(0.0, 1000, 24)], "kv_slab").finish_s == pytest.approx(GROWTH_S)
    batched = run([(0.0, 1000, 30)], {"policy": "kvcached", "mode": "contiguous"})
    assert batched.finish_s - slab.finish_s == pytest.approx(2 * driver_costs().batched_map_s.value)


def test_a_buffer_hides_the_driver() -> None:
    rows = [(0.1 * i, 700, 40) for i in range(20)]
    assert_equal(run(rows, {"policy": "kvcached", "mode": "buffered"}), run(rows, "kv_slab"))


def test_a_prompt_beyond_the_buffer_waits_for_the_rest() -> None:
    """Ten pages at once, five of them mapped ahead."""
    settings = EngineSettings(token_budget=16384)
    rows = [(0.0, 10 * 1024, 2)]
    buffered = run(rows, {"policy": "kvcached", "mode": "buffered"}, settings)
    slab = run(rows, "kv_slab", settings)
    assert buffered.first_token_s - slab.first_token_s == pytest.approx(5 * GROWTH_S)


def test_a_page_that_may_hold_no_block_is_an_error_for_people() -> None:
    with pytest.raises(ScenarioError, match="may hold no block of 32768"):
        run([(0.0, 10, 1)], {"policy": "kvcached", "page_bytes": 1024})
    with pytest.raises(ScenarioError, match="model m: vTensor: a token of 2048 bytes"):
        run([(0.0, 10, 1)], {"policy": "vtensor", "chunk_bytes": 1024})


# -- vTensor and contiguous memory


def test_vtensors_mapped_ahead_cost_no_time_and_whole_chunks() -> None:
    rows = [(0.05 * i, 900, 200) for i in range(10)]
    assert_equal(run(rows, "vtensor"), run(rows, "private"))
    late = run(rows[:1], {"policy": "vtensor", "extend": "late"})
    assert late.finish_s - run(rows[:1], "private").finish_s == pytest.approx(2 * GROWTH_S)
    sampled = simulate(solo(rows[:1], m=M, memory="vtensor", sample_s=0.5))
    assert set(sampled.timeline.kv_used_bytes[:, 0].tolist()) <= {0, 128 * 2**20, 256 * 2**20}


def test_contiguous_memory_holds_as_many_requests_as_maximum_lengths_fit() -> None:
    """Memory for 4,096 tokens: two requests of at most 2,048, however short they are."""
    settings = with_kv_blocks([M], 256)
    rows = [(0.0, 100, 10)] * 4
    native = run(rows, {"policy": "contiguous", "max_tokens": 2048}, settings)
    assert (native.first_token_s[2:] >= native.finish_s[:2].max()).all()
    paged = run(rows, "private", settings)
    assert (paged.first_token_s == paged.first_token_s[0]).all()
    rejected = simulate(solo([(0.0, 2048, 5)], settings, m=M, memory={"policy": "contiguous", "max_tokens": 2048}))
    assert rejected.fate.tolist() == [Fate.REJECTED]


# -- prefixes

BIG = EngineSettings(token_budget=16384)


@pytest.mark.parametrize(("prompt", "output"), [(2048, 2048), (256, 7937), (301, 877), (1, 1040), (5, 9)])
@pytest.mark.parametrize("memory", ["vtensor", {"policy": "private", "prefix_cache": True}])
def test_the_second_turn_computes_what_is_new(memory: object, prompt: int, output: int) -> None:
    """The second prompt is the first, its answer and as much again as the first. The last generated token has no KV, so of all
    that was said the blocks in front of the one that holds it are cached."""
    log: list[dict[str, Any]] = []
    scenario = solo([(0.0, prompt, output)], BIG, m=M, memory=memory, sample_s=0, check=True, log=log.append)
    scenario = replace(scenario, trace=conversations(scenario.trace, turns=2, gap_s=500.0))
    result = simulate(scenario)
    assert result.finish_s[0] < 500.0
    block = 1024 if memory == "vtensor" else 16
    cached = (prompt + output - 1) // block * block
    new = 2 * prompt + output - cached
    assert sum(line["prefill_tokens"] for line in log if line.get("span") == "EngineComputed") == prompt + new
    pairs = new * cached + new * (new + 1) // 2
    expected_s = step_model(M, BIG).step_s(0, 0, new, pairs, cached, 1)
    assert result.first_token_s[1] - 500.0 == pytest.approx(expected_s, rel=1e-9)


def test_a_prefix_that_all_share_is_computed_once() -> None:
    scenario = solo([(1.0 * i, 512, 4) for i in range(3)], BIG, m=M, memory="vtensor", sample_s=0, check=True)
    scenario = replace(scenario, trace=conversations(scenario.trace, shared_tokens=4096))
    ttft_s = simulate(scenario).first_token_s - scenario.trace.arrival_s
    assert ttft_s[1] == pytest.approx(ttft_s[2], rel=1e-9) and ttft_s[1] < ttft_s[0] / 2


@pytest.mark.parametrize(
    ("memory", "shared"), [("vtensor", False), ({"policy": "private", "prefix_cache": True}, True)]
)
def test_pools_share_what_running_requests_computed(memory: object, shared: bool) -> None:
    """The second request comes while the first decodes; vTensor records finished requests only."""
    scenario = solo([(0.0, 512, 2000), (5.0, 512, 4)], BIG, m=M, memory=memory, sample_s=0, check=True)
    scenario = replace(scenario, trace=conversations(scenario.trace, shared_tokens=4096))
    result = simulate(scenario)
    ttft_s = result.first_token_s - scenario.trace.arrival_s
    assert result.finish_s[0] > result.finish_s[1]
    assert (ttft_s[1] < ttft_s[0] / 2) == shared


def test_records_give_way_to_requests() -> None:
    """Ten conversations fill the memory with records; every later request still runs, as if there were none."""
    settings = with_kv_blocks([M], 100, EngineSettings(token_budget=4096))
    scenario = solo([(1.0 * i, 512, 40) for i in range(10)], settings, m=M, sample_s=0, check=True)
    scenario = replace(scenario, trace=conversations(scenario.trace))
    caching = solo([(0.0, 1, 1)], m=M, memory={"policy": "private", "prefix_cache": True}).system
    assert_equal(simulate(replace(scenario, system=caching)), simulate(scenario))


def test_without_prefixes_a_prefix_cache_changes_nothing() -> None:
    rows = [(0.02 * i, 300 + 40 * i, 60) for i in range(30)]
    settings = with_kv_blocks([M], 150)
    assert_equal(run(rows, {"policy": "private", "prefix_cache": True}, settings), run(rows, "private", settings))


def test_a_block_that_a_prompt_fills_in_part_says_nothing_of_the_answer() -> None:
    """Two equal prompts of 300 tokens, ids of 256 tokens with a partial second one: 288 tokens are shared, no answer is."""
    scenario = solo(
        [(0.0, 300, 300), (50.0, 300, 300)], BIG, m=M, memory={"policy": "private", "prefix_cache": True}, sample_s=0
    )
    trace = replace(scenario.trace, prefix_hashes=((1, 2), (1, 2)), prefix_block_tokens=256)
    result = simulate(replace(scenario, trace=trace))
    expected_s = step_model(M, BIG).step_s(0, 0, 12, 12 * 288 + 78, 288, 1)
    assert result.first_token_s[1] - 50.0 == pytest.approx(expected_s, rel=1e-9)


# -- kernels


def test_a_legacy_kernel_slows_its_system_alone() -> None:
    rows = [(0.0, 4000, 200)]
    paged = run(rows, {"policy": "private", "attention": "paged_attention_v0.4.2"}, BIG)
    today = run(rows, "private", BIG)
    step = profiling.step_model(M, H100, BIG, attention_variant("paged_attention_v0.4.2"))
    assert paged.first_token_s == today.first_token_s  # a prompt from nothing
    assert (paged.finish_s - paged.first_token_s)[0] == pytest.approx(step.decode_steps_s(1, 4000, 199).sum())
    assert paged.finish_s > today.finish_s
