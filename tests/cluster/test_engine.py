"""One engine: hand-worked iterations, and equality with the plain reference engine on random loads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_engine import ReferenceEngine
from simkit import H100, assert_lawful, assert_memory_returned, logged, served, solo, step_model, with_kv_blocks

from fineserve_sim.catalog import GpuSpec, gpu
from fineserve_sim.cluster import Cause, EngineSettings, Fate, simulate
from fineserve_sim.cluster.compose import profiling
from fineserve_sim.cluster.compose.memory import geometry

M = served()
STEP = step_model(M)


def sums(values: list[float]) -> list[float]:
    return np.cumsum(values).tolist()


def test_prompts_are_chunked_into_the_budget_and_decodes_come_first() -> None:
    settings = EngineSettings(token_budget=32)
    run = simulate(solo([(0.0, 48, 3), (0.0, 20, 3)], settings, m=M, sample_s=0))
    ends = sums(
        [
            STEP.step_s(0, 0, 32, 32 * 33 // 2, 0, 0),  # 32 of the first prompt
            STEP.step_s(0, 0, 32, (16 * 32 + 136) + 136, 32, 1),  # its last 16 after 32; 16 of the second
            STEP.step_s(1, 48, 4, 4 * 16 + 10, 16, 2),  # first decodes; last 4 of the second after 16
            STEP.step_s(2, 49 + 20, 0, 0, 0, 2),
            STEP.step_s(1, 21, 0, 0, 0, 1),
        ]
    )
    assert run.first_token_s.tolist() == [ends[1], ends[2]]
    assert run.finish_s.tolist() == [ends[3], ends[4]]
    assert run.iterations == 5 and run.end_s == ends[4]


def test_a_long_prompt_shares_the_budget_with_running_decodes() -> None:
    """Three sequences decode beside a prompt of 10 in a budget of 8: chunks of 5 and 5, not of 8 and 2."""
    settings = EngineSettings(token_budget=8)
    run = simulate(solo([(0.0, 1, 9), (0.0, 1, 9), (0.0, 1, 9), (1e-4, 10, 1)], settings, m=M))
    ends = sums(
        [
            STEP.step_s(0, 0, 3, 3, 0, 3),
            STEP.step_s(3, 3, 5, 15, 0, 3),
            STEP.step_s(3, 6, 5, 5 * 5 + 15, 5, 4),
        ]
    )
    assert run.first_token_s[3] == ends[2]


def test_no_more_than_max_sequences_run() -> None:
    settings = EngineSettings(max_sequences=2)
    run = simulate(solo([(0.0, 10, 2), (0.0, 10, 4), (0.0, 10, 1)], settings, m=M, sample_s=1e-4))
    assert run.timeline.running.max() == 2
    ends = sums(
        [
            STEP.step_s(0, 0, 20, 110, 0, 2),
            STEP.step_s(2, 20, 0, 0, 0, 2),
            STEP.step_s(1, 11, 10, 55, 0, 2),
        ]
    )
    assert run.finish_s[0] == ends[1] and run.finish_s[2] == ends[2]


def test_the_latest_arrival_is_preempted_and_recomputes_its_generated_tokens() -> None:
    """Four blocks of 16 for two prompts of 31: both hold 2 blocks, and have two tokens, when both need a third block."""
    settings = with_kv_blocks([M], 4)
    run = logged(solo([(0.0, 31, 8), (0.0, 31, 8)], settings, m=M, check=True)).result
    ends = sums(
        [
            STEP.step_s(0, 0, 62, 2 * 31 * 32 // 2, 0, 2),  # token 1 of both
            STEP.step_s(2, 62, 0, 0, 0, 2),  # token 2, 32 cached each: the next one needs a block
            *[STEP.step_s(1, 32 + i, 0, 0, 0, 1) for i in range(6)],  # the first alone: tokens 3 to 8
            STEP.step_s(0, 0, 33, 33 * 34 // 2, 0, 1),  # the second again: 31 + 2 tokens at once, token 3
            *[STEP.step_s(1, 33 + i, 0, 0, 0, 1) for i in range(5)],
        ]
    )
    assert run.preemptions.tolist() == [0, 1]
    assert run.first_token_s.tolist() == [ends[0], ends[0]]  # its first token stays the first
    assert run.finish_s.tolist() == [ends[7], ends[13]]
    assert run.iterations == len(ends)


def test_a_request_without_memory_holds_back_those_behind_it() -> None:
    settings = with_kv_blocks([M], 8)  # 128 tokens
    run = simulate(solo([(0.0, 90, 6), (0.001, 60, 1), (0.002, 5, 1)], settings, m=M))
    assert run.first_token_s[1] > run.finish_s[0]
    assert run.first_token_s[2] == run.first_token_s[1]  # it would have fitted beside the first


def test_kv_is_taken_in_whole_blocks() -> None:
    settings = with_kv_blocks([M], 100)
    block_bytes = geometry(M, settings).block_bytes
    rows = [(0.0, 16, 40)]
    run = simulate(solo(rows, settings, m=M, sample_s=5e-4))
    reference = ReferenceEngine(rows, STEP, settings, 100)
    reference.run()
    for time_s, used in zip(run.timeline.time_s[1:], run.timeline.kv_used_bytes[1:, 0], strict=True):
        in_flight = int(np.searchsorted(reference.step_ends_s, time_s))  # iterations done before this moment
        cached = min(16 + in_flight, 55)  # with the slot of the iteration in flight; the last token is never cached
        expected = -(-cached // 16) if time_s < run.finish_s[0] else 0
        assert used == expected * block_bytes
    assert {used // block_bytes for used in run.timeline.kv_used_bytes[:, 0].tolist()} == {0, 1, 2, 3, 4}


def test_output_is_cut_at_the_longest_sequence() -> None:
    settings = with_kv_blocks([M], 4)  # 64 tokens of KV, far below the model's context
    run = simulate(solo([(0.0, 50, 1000)], settings, m=M))
    assert (run.fate.tolist(), run.cause.tolist()) == ([Fate.CUT], [Cause.MEMORY])
    assert run.iterations == 64 - 50 == run.generated_tokens[0]


def test_output_is_cut_at_the_context_of_the_model() -> None:
    short = served("s", "yi-6b")
    run = simulate(solo([(0.0, 4000, 1000)], m=short))
    assert (run.fate.tolist(), run.cause.tolist()) == ([Fate.CUT], [Cause.CONTEXT])
    assert run.generated_tokens.tolist() == [96]
    assert run.iterations == 2 + 95  # two chunks of at most 2048, the second yields token 1 of 96


@pytest.mark.parametrize("scheduler", ["fcfs", "adaptive", "moore_hodgson"])
def test_a_prompt_longer_than_the_engine_can_ever_hold_is_rejected(scheduler: str) -> None:
    scenario = solo([(0.0, 10_000_000, 5), (0.0, 10, 5)], m=M, scheduler=scheduler)
    run = logged(scenario)
    assert run.result.fate.tolist() == [Fate.REJECTED, Fate.FINISHED]
    assert "10000000" in run.commands[0]["reason"] and "\n" not in run.commands[0]["reason"]
    assert_lawful(scenario, run)


def test_the_longest_prompt_that_leaves_room_for_a_token_runs() -> None:
    settings = with_kv_blocks([M], 4)
    run = simulate(solo([(0.0, 63, 5), (1.0, 64, 5)], settings, m=M))
    assert run.fate.tolist() == [Fate.CUT, Fate.REJECTED]
    assert run.generated_tokens.tolist() == [1, 0] and run.cause.tolist() == [Cause.MEMORY] * 2


@pytest.mark.parametrize(("prompt", "output"), [(139, 21), (140, 20), (144, 16)])
def test_a_preempted_request_that_needs_all_memory_comes_back(prompt: int, output: int) -> None:
    """Its recomputation fills the last block of the pool, so that no spare block is left beside it."""
    settings = with_kv_blocks([M], 10)
    run = simulate(solo([(0.0, 1, 14), (0.0, prompt, output)], settings, m=M))
    assert run.preemptions.tolist() == [0, 1]
    assert run.fate.tolist() == [Fate.FINISHED, Fate.FINISHED]


def test_a_run_without_an_end_of_draining_ends_with_its_last_request() -> None:
    run = simulate(solo([(0.0, 10, 5)], m=M, drain_s=float("inf"), sample_s=0))
    assert run.fate.tolist() == [Fate.FINISHED] and run.end_s == run.finish_s[0]


def test_requests_that_do_not_end_in_time_are_unfinished() -> None:
    scenario = solo([(0.0, 10, 100_000), (0.1, 10, 2)], m=M, drain_s=0.5)
    run = logged(scenario)
    assert run.result.fate.tolist() == [Fate.UNFINISHED, Fate.FINISHED]
    assert np.isnan(run.result.finish_s[0]) and run.result.first_token_s[0] < 0.1
    assert run.result.end_s <= 0.6
    assert_lawful(scenario, run)


# --- against the reference engine --------------------------------------------------------------------------------------

seen: Counter[str] = Counter()

loads = st.lists(
    st.tuples(st.integers(0, 30).map(lambda n: n * 0.002), st.integers(1, 90), st.integers(1, 60)),
    min_size=5,
    max_size=30,
)


TILING = gpu("a100-80gb").model_copy(update={"memory_gib": H100.memory_gib, "tiling_sms": 12})
"""An A100 of so few SMs that the longest of three decodes ends last, and with an H100's memory."""


@given(
    loads,
    st.sampled_from([8, 33, 128]),
    st.sampled_from([1, 3, 30]),
    st.integers(10, 18),
    st.sampled_from([4, 16]),
    st.sampled_from([H100, TILING]),
)
def check_against_the_reference(
    load: list[tuple[float, int, int]], budget: int, sequences: int, blocks: int, block_tokens: int, spec: GpuSpec
) -> None:
    settings = EngineSettings(token_budget=budget, max_sequences=min(sequences, budget - 1), block_tokens=block_tokens)
    settings = replace(settings, deployment="vllm-0.16" if spec is TILING else "vllm-cudagraph")
    blocks *= 16 // block_tokens
    settings = with_kv_blocks([M], blocks, settings)
    rows = [(a, p, min(o, blocks * block_tokens - p)) for a, p, o in sorted(load, key=lambda row: row[0])]
    rows.append((10.0, 20, 2))  # when all others have long ended
    reference = ReferenceEngine(rows, profiling.step_model(M, spec, settings), settings, blocks)
    reference.run()
    scenario = solo(rows, settings, m=M, check=True, sample_s=0.02)
    scenario = replace(scenario, gpus=(replace(scenario.gpus[0], spec=spec),))
    run = logged(scenario)
    assert run.result.first_token_s.tolist() == [r.first_token_s for r in reference.records]
    assert run.result.finish_s.tolist() == [r.finish_s for r in reference.records]
    assert run.result.preemptions.tolist() == [r.preemptions for r in reference.records]
    assert run.result.iterations == len(reference.step_ends_s)
    assert_lawful(scenario, run)
    assert_memory_returned(scenario, run.result)
    seen["preemptions"] += int(run.result.preemptions.sum())
    seen["queued"] += int((run.result.timeline.waiting > 0).any())


def test_equals_the_reference_engine_bit_for_bit() -> None:
    seen.clear()
    check_against_the_reference()
    assert seen["preemptions"] > 50 and seen["queued"] > 30
