"""SGLang's batching: hand-worked iterations, equality with its reference engine, and merged spans that change nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from reference_sglang import SglangReference
from simkit import (
    assert_lawful,
    assert_memory_returned,
    gpus,
    logged,
    pinned,
    served,
    solo,
    step_model,
    system,
    trace_of,
    with_kv_blocks,
)

from fineserve_sim.cluster import EngineSettings, Scenario, ScenarioError, simulate
from fineserve_sim.cluster.compose.memory import fixed_bytes, outside_bytes, static_fraction
from fineserve_sim.policy.memory import reserve
from fineserve_sim.systems import load_systems

M = served()
STEP = step_model(M)
FIRST = EngineSettings(batching="sglang", token_budget=64, static_part=True)
MIXED = replace(FIRST, batching="sglang_mixed")


def sums(values: list[float]) -> list[float]:
    return np.cumsum(values).tolist()


def prompts(*lengths: int) -> float:
    """Seconds of a batch of whole prompts."""
    return STEP.step_s(0, 0, sum(lengths), sum(n * (n + 1) // 2 for n in lengths), 0, len(lengths))


def test_prompts_go_first_and_decodes_wait_for_them() -> None:
    """The second prompt comes during the first decode step. The next batch is planned by then, so it follows that one."""
    rows = [(0.0, 20, 5), (prompts(20) * 1.001, 30, 2)]
    run = simulate(solo(rows, FIRST, m=M, sample_s=0))
    ends = sums(
        [
            prompts(20),
            STEP.step_s(1, 20, 0, 0, 0, 1),
            STEP.step_s(1, 21, 0, 0, 0, 1),
            prompts(30),  # the first request waits, with three tokens
            STEP.step_s(2, 22 + 30, 0, 0, 0, 2),
            STEP.step_s(1, 23, 0, 0, 0, 1),
        ]
    )
    assert run.first_token_s.tolist() == [ends[0], ends[3]]
    assert run.finish_s.tolist() == [ends[5], ends[4]]


def test_in_mixed_mode_decodes_join_the_prompts_within_one_budget() -> None:
    rows = [(0.0, 20, 5), (prompts(20) * 1.001, 70, 2)]
    run = simulate(solo(rows, MIXED, m=M, sample_s=0))
    ends = sums(
        [
            prompts(20),
            STEP.step_s(1, 20, 0, 0, 0, 1),
            STEP.step_s(1, 21, 0, 0, 0, 1),
            STEP.step_s(1, 22, 63, 63 * 64 // 2, 0, 1),
            STEP.step_s(1, 23, 7, 7 * 63 + 28, 63, 2),
            STEP.step_s(1, 70, 0, 0, 0, 1),
        ]
    )
    assert run.first_token_s.tolist() == [ends[0], ends[4]]
    assert run.finish_s.tolist() == [ends[4], ends[5]]


def test_a_prompt_that_the_chunk_cuts_goes_on_before_any_decode() -> None:
    run = simulate(solo([(0.0, 40, 3), (0.0, 60, 3)], FIRST, m=M, sample_s=0))
    cut = STEP.step_s(0, 0, 64, 40 * 41 // 2 + 24 * 25 // 2, 0, 1)
    rest = STEP.step_s(0, 0, 36, 36 * 24 + 36 * 37 // 2, 24, 1)
    assert run.first_token_s.tolist() == sums([cut, rest])
    assert run.finish_s[0] == run.finish_s[1]  # both then decode side by side


def test_admission_by_hand() -> None:
    """160 tokens of memory. Request 0 takes 30 and may generate 50. After its first decode step 0.699 of 48 tokens to come are
    kept: 33.6. It holds 2 blocks, so 94.4 tokens are there for request 1: one of 94 starts, one of 95 does not."""
    for asked, admitted in ((94, True), (95, False)):
        rows = [(0.0, 30, 50), (prompts(30) / 2, asked - 20, 20)]
        run = simulate(solo(rows, with_kv_blocks([M], 10, replace(FIRST, token_budget=128)), m=M, sample_s=0))
        assert bool(run.first_token_s[1] < run.finish_s[0]) is admitted


def test_after_a_refusal_none_is_tried_until_a_request_has_left() -> None:
    """Request 1 is refused while request 0 runs. Its ratio falls at each step, but request 1 waits for its end. So does
    request 2 behind it, which would fit."""
    rows = [(0.0, 30, 100), (0.001, 100, 28), (0.002, 5, 2)]
    run = simulate(solo(rows, with_kv_blocks([M], 10, replace(FIRST, token_budget=128)), m=M, sample_s=0))
    assert run.first_token_s[1] > run.finish_s[0]
    assert run.first_token_s[2] >= run.first_token_s[1]


def test_decay_and_retraction_by_hand() -> None:
    """48 blocks of 16. Request 0 may generate 700 tokens. After 611 decode steps it keeps 0.098 of 88 to come: 8.6 tokens, so
    request 1 starts, whose 116 find 128 free. 61 steps later both hold 48 blocks, and request 0 needs one more: request 1 has
    fewer tokens and gives way. 64 free tokens are too few for it until request 0 has ended."""
    alone = [prompts(16), *[STEP.step_s(1, 16 + i, 0, 0, 0, 1) for i in range(611)]]
    rows = [(0.0, 16, 700), (sum(alone[:610]) + alone[610] / 2, 16, 100)]
    run = logged(solo(rows, with_kv_blocks([M], 48, replace(FIRST, token_budget=128)), m=M, check=True)).result
    ends = sums(
        [
            *alone,
            prompts(16),
            *[STEP.step_s(2, 627 + i + 16 + i, 0, 0, 0, 2) for i in range(61)],
            *[STEP.step_s(1, 688 + i, 0, 0, 0, 1) for i in range(27)],
            prompts(16 + 62),
            *[STEP.step_s(1, 78 + i, 0, 0, 0, 1) for i in range(37)],
        ]
    )
    assert run.preemptions.tolist() == [0, 1]
    assert run.first_token_s.tolist() == [ends[0], ends[612]]
    assert run.finish_s.tolist() == [ends[612 + 61 + 27], ends[-1]]


def test_what_lies_outside_of_the_static_part() -> None:
    assert fixed_bytes(M, FIRST) + outside_bytes(M, FIRST) == fixed_bytes(M, EngineSettings(token_budget=64))
    h100, h200 = 81559 * 2**20, 143771 * 2**20
    assert static_fraction(h100, 8192, 1) == 0.835  # 13,440 MiB lie outside
    assert static_fraction(h200, 8192, 8) == 0.897  # 14,848 MiB
    assert static_fraction(h200, 8192, 8, ranks=8) == 0.769  # and 512 sequences of 4.5 MiB for each of eight ranks
    assert static_fraction(h100, 8192, 2, ranks=2) == 0.815  # 256 of 3 MiB: 15,104 MiB
    full = replace(FIRST, memory_utilization=0.999)
    with pytest.raises(ScenarioError, match=r"engine.memory_utilization 0.999 leaves 0.1 GiB of GPU 0 outside"):
        simulate(solo([(0.0, 16, 2)], full, m=M))


@pytest.mark.parametrize("name", ["kunserve", "vllm-pp", "infercept"])
def test_it_is_for_engines_on_one_instance(name: str) -> None:
    scenario = Scenario(load_systems()[name], (M,), gpus(4), trace_of([(0.0, 16, 2)], ["m"]), FIRST)
    with pytest.raises(ScenarioError, match=r"engine\.batching sglang is for engines on one instance each"):
        simulate(scenario)


# --- against the reference engine, and merged against plain ------------------------------------------------------------

seen: Counter[str] = Counter()
loads = st.lists(
    st.tuples(st.integers(0, 30).map(lambda n: n * 0.002), st.integers(1, 60), st.integers(1, 120)),
    min_size=5,
    max_size=30,
)
Kind = Literal["sglang", "sglang_mixed"]


@settings(phases=[Phase.generate], max_examples=25)  # shrinking takes minutes
@given(
    loads,
    st.sampled_from(["sglang", "sglang_mixed"]),
    st.sampled_from([33, 64, 128]),
    st.sampled_from([3, 30]),
    st.integers(10, 18),
    st.sampled_from([4, 16]),
)
def check_against_the_reference(
    load: list[tuple[float, int, int]], kind: Kind, budget: int, sequences: int, blocks: int, block: int
) -> None:
    chosen = EngineSettings(token_budget=budget, max_sequences=sequences, block_tokens=block, batching=kind)
    blocks *= 16 // block
    chosen = with_kv_blocks([M], blocks, chosen)
    rows = [(a, p, min(o, blocks * block - p)) for a, p, o in sorted(load, key=lambda row: row[0])]
    rows.append((10.0, 20, 2))  # when all others have long ended
    reference = SglangReference(rows, STEP, chosen, blocks, reserve.FIRST_RATIO)
    reference.run()
    scenario = solo(rows, chosen, m=M, check=True, sample_s=0.02)
    for run in (logged(scenario), logged(scenario, exact_steps=True)):
        assert run.result.first_token_s.tolist() == [r.first_token_s for r in reference.records]
        assert run.result.finish_s.tolist() == [r.finish_s for r in reference.records]
        assert run.result.preemptions.tolist() == [r.preemptions for r in reference.records]
        assert run.result.iterations == len(reference.step_ends_s)
        assert_lawful(scenario, run)
        assert_memory_returned(scenario, run.result)
    seen["retractions"] += reference.retractions
    seen["queued"] += int((run.result.timeline.waiting > 0).any())


@pytest.mark.pure_python
@pytest.mark.parametrize(("ratio", "retractions"), [(0.7, -1), (0.2, 3)])
def test_equals_the_reference_engine_bit_for_bit(
    ratio: float, retractions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lower ratio at first lets more in than memory holds."""
    monkeypatch.setattr(reserve, "FIRST_RATIO", ratio)
    seen.clear()
    check_against_the_reference()
    assert seen["retractions"] > retractions and seen["queued"] > 5


@given(
    loads, st.sampled_from(["sglang", "sglang_mixed"]), st.sampled_from(["private", "kv_slab", "kvcached"]), st.data()
)
def test_merged_equals_plain_where_engines_share_a_gpu(
    load: list[tuple[float, int, int]], kind: Kind, memory: str, data: st.DataObject
) -> None:
    """Two engines of one GPU, whose pace and memory depend on each other."""
    models = (served("a"), served("b", "llama-3.2-1b", "fp8"))
    owners = data.draw(st.lists(st.integers(0, 1), min_size=len(load), max_size=len(load)))
    rows = sorted((a, p, o, owner) for (a, p, o), owner in zip(load, owners, strict=True))
    chosen = EngineSettings(token_budget=64, max_sequences=8, batching=kind)
    chosen = with_kv_blocks(models, data.draw(st.sampled_from([30, 60])), chosen)
    spec = system(pinned({"a": [[0]], "b": [[0]]}), "fcfs", {"policy": memory})
    scenario = Scenario(spec, models, gpus(1), trace_of(rows, "ab"), chosen, sample_s=0.01, check=True)
    merged, plain = logged(scenario).result, logged(scenario, exact_steps=True).result
    for field in ("first_token_s", "finish_s", "preemptions", "fate"):
        np.testing.assert_array_equal(getattr(merged, field), getattr(plain, field), err_msg=field)
    np.testing.assert_array_equal(merged.timeline.kv_used_bytes, plain.timeline.kv_used_bytes)
