"""Steps that take a factor longer: everything is the factor times as long, and the parts of a step stay what they are."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepkit import batches

from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.latency import Batch, StepModel
from fineserve_sim.latency.accounting import time_shares
from fineserve_sim.latency.tables import shipped


def fresh(by: str) -> StepModel:
    """With CUDA graphs, or with a host that launches kernels one by one."""
    return StepModel(model("llama-3.1-8b"), precision("fp16"), 1, gpu("h100-sxm"), deployment(by), shipped())


@given(batch=batches(), factor=st.floats(0.3, 3.0), by=st.sampled_from(["vllm-cudagraph", "vllm-v1-eager"]))
def test_every_step_takes_the_factor(batch: Batch, factor: float, by: str) -> None:
    plain, slowed = fresh(by), fresh(by)
    slowed.slow_down(factor)
    assert math.isclose(slowed.step_s(*batch), factor * plain.step_s(*batch), rel_tol=1e-9)
    before, after = plain.demand(*batch), slowed.demand(*batch)
    assert after.compute == pytest.approx(before.compute) and after.bandwidth == pytest.approx(before.bandwidth)
    assert after.step_s == pytest.approx(factor * before.step_s)


@pytest.mark.parametrize("by", ["vllm-cudagraph", "vllm-v1-eager"])
def test_parts_stay_what_they_are_and_merged_steps_end_when_single_ones_do(by: str) -> None:
    plain, slowed = fresh(by), fresh(by)
    slowed.slow_down(1.3)
    batch = Batch(8, 8000, 256, 256 * 257 // 2, 0, 9)
    before, after = time_shares(plain, [batch]), time_shares(slowed, [batch])
    assert {name: pytest.approx(part) for name, part in before.items()} == after
    ends, now = slowed.decode_ends_s(1.0, 4, 4000, 40, 1.0), 1.0
    for number, end in enumerate(ends):
        now += slowed.step_s(4, 4000 + 4 * number, 0, 0, 0, 4)
        assert end == now


@given(batch=batches(), token_s=st.floats(0, 1e-4))
def test_copies_add_to_each_token(batch: Batch, token_s: float) -> None:
    plain, copying = fresh("vllm-cudagraph"), fresh("vllm-cudagraph")
    copying.copy_tokens(token_s)
    tokens = batch.decodes + batch.prefill_tokens
    assert copying.step_s(*batch) == pytest.approx(plain.step_s(*batch) + tokens * token_s, rel=1e-9)
    assert sum(sum(part.values()) for part in time_shares(copying, [batch]).values()) == pytest.approx(1)
