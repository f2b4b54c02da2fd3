"""Attention kernels of the legacy table: the factors, and step times that grow by the attention's part alone."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepkit import part_s

from fineserve_sim.catalog import CatalogError, attention_variant, deployment, driver_costs, gpu, model, precision
from fineserve_sim.latency import StepModel

PAGED = attention_variant("paged_attention_v0.4.2")
YI = (model("yi-6b"), precision("fp16"), 1, gpu("a100-80gb"), deployment("vllm-cudagraph"))
PLAIN, SAME = StepModel(*YI), StepModel(*YI, kernel=attention_variant("contiguous"))
SLOW = StepModel(*YI, kernel=PAGED)


def test_factors_between_and_beyond_the_measured_head_groups() -> None:
    assert [PAGED.decode_factor(group) for group in (1, 8, 32)] == [1.03, 2.78, 8.0]
    assert PAGED.decode_factor(16) == pytest.approx(math.sqrt(2.78 * 8.0))
    assert PAGED.decode_factor(0.5) == 1.03 and PAGED.decode_factor(64) == 8.0
    assert 1.03 < PAGED.decode_factor(7) < 2.78
    assert attention_variant("fa_paged").decode_factor(1) == 1.43
    with pytest.raises(CatalogError, match="fa_paged"):
        attention_variant("fa-paged")


BATCH = st.tuples(
    st.integers(0, 64), st.integers(0, 500_000), st.integers(0, 4096), st.integers(0, 20_000), st.integers(1, 64)
).map(lambda b: (b[0], b[1] * (b[0] > 0), b[2], b[2] * b[3] + b[2] * (b[2] + 1) // 2, b[3] * (b[2] > 0), b[4]))


@given(batch=BATCH)
def test_only_attention_takes_longer(batch: tuple[int, int, int, int, int, int]) -> None:
    decodes, _, tokens, _, context, _ = batch
    if not decodes + tokens:
        return
    plain, slow = (part_s(step, *batch) for step in (PLAIN, SLOW))
    assert SAME.step_s(*batch) == pytest.approx(PLAIN.step_s(*batch), rel=1e-12)
    assert sum(slow.values()) == pytest.approx(SLOW.step_s(*batch))
    (plain_decode_s, plain_prefill_s), (decode_s, prefill_s) = (step.attention_s(*batch[:5]) for step in (PLAIN, SLOW))
    assert decode_s == slow["decode_attention"] == pytest.approx(2.78 * plain_decode_s)
    assert prefill_s == pytest.approx((3.4 if context else 1.0) * plain_prefill_s)
    for name in plain.keys() - {"decode_attention", "prefill_attention"}:
        assert slow[name] == plain[name]
    assert all(mine <= theirs for mine, theirs in zip(SLOW.demand(*batch)[:2], PLAIN.demand(*batch)[:2], strict=True))


def test_spans_of_decode_steps_are_the_steps_one_by_one() -> None:
    for steps in (3, 100):
        ends, now = SLOW.decode_ends_s(1.0, 16, 100_000, steps, 1.5), 1.0
        for step, end in enumerate(ends):
            now += SLOW.step_s(16, 100_000 + 16 * step, 0, 0, 0, 16) * 1.5
            assert end == now


def test_every_number_has_a_source() -> None:
    lines = {line.quantity: line for line in SLOW.provenance()}
    assert (
        lines["paged_attention_v0.4.2.decode"].value == 2.78
        and "Fig. 7" in lines["paged_attention_v0.4.2.decode"].source
    )
    costs = driver_costs()
    growth_s = 64 * (costs.create_s.value + costs.map_s.value)
    assert 0.001 <= growth_s <= 0.01  # FineServe C3: several milliseconds a growth of 32 layers
    assert 1e-5 <= growth_s / 64 <= 1e-4 and costs.batched_map_s.value < growth_s
