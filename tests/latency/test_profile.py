"""Profile tables: their formula at batch 1 by hand, and how they behave over batch sizes."""

from __future__ import annotations

import itertools

import pytest

from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency import StepModel, batch_prefill_s, profile

STEP = StepModel(model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("vllm-cudagraph"))


def test_batch_one_is_a_request_alone() -> None:
    point = profile(STEP, 600, 200, 512, 1)[0]
    prefill_s = STEP.step_s(0, 0, 512, 512 * 513 // 2, 0, 1) + STEP.step_s(0, 0, 88, 88 * 512 + 88 * 89 // 2, 512, 1)
    decode_s = STEP.step_s(1, 700, 0, 0, 0, 1)
    assert point.ttft_s == pytest.approx(prefill_s, rel=1e-12)
    assert point.throughput_per_s == pytest.approx(1 / (prefill_s + 199 * decode_s), rel=1e-12)
    assert point.kv_bytes == 700 * 128 * 1024


def test_batches_double_up_to_the_largest() -> None:
    assert [point.batch for point in profile(STEP, 600, 200, 512, 100)] == [1, 2, 4, 8, 16, 32, 64, 100]
    assert [point.batch for point in profile(STEP, 600, 200, 64, 100)] == [1, 2, 4, 8, 16, 32, 64]


def test_larger_batches_serve_more_wait_longer_and_take_more_memory() -> None:
    for small, large in itertools.pairwise(profile(STEP, 615, 245, 2048, 256)):
        assert large.throughput_per_s > small.throughput_per_s
        assert large.ttft_s > small.ttft_s
        assert large.kv_bytes > small.kv_bytes
        assert large.activation_bytes >= small.activation_bytes
        assert large.throughput_per_s / large.batch < small.throughput_per_s / small.batch  # each request is slower


def test_joint_prefill_packs_prompts_into_full_steps() -> None:
    # 3 prompts of 300 in steps of 512: (300 + 212), then (88 after 212 + 300)
    first = STEP.step_s(0, 0, 512, 300 * 301 // 2 + 212 * 213 // 2, 0, 2)
    second = STEP.step_s(0, 0, 388, 88 * 212 + 88 * 89 // 2 + 300 * 301 // 2, 212, 2)
    assert batch_prefill_s(STEP, 3, 300, 512) == pytest.approx(first + second, rel=1e-12)


@pytest.mark.pure_python
def test_joint_prefill_does_all_the_attention_of_the_prompts() -> None:
    """However the prompts are cut, the query-key pairs are those of whole prompts."""
    seen: list[int] = []

    class Recording(StepModel):
        def step_s(  # type: ignore[no-untyped-def]
            self, decodes, decode_context, prefill_tokens, prefill_pairs, prefill_context, sampled
        ) -> float:
            seen.append(prefill_pairs)
            return super().step_s(decodes, decode_context, prefill_tokens, prefill_pairs, prefill_context, sampled)

    recording = Recording(STEP.model, STEP.precision, 1, STEP.gpu, STEP.deployment)
    for budget in (1, 7, 64, 100, 1000):
        seen.clear()
        batch_prefill_s(recording, 5, 33, budget)
        assert sum(seen) == 5 * 33 * 34 // 2
