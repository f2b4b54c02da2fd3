"""Where the seconds of steps come from: parts that make up the step, their sources, and their shares of an engine's time."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from stepkit import batches, chunk, engine, engines

from fineserve_sim.latency import Batch, StepModel
from fineserve_sim.latency.accounting import parts, time_shares
from fineserve_sim.latency.cost import SOURCES

DECODE = Batch(32, 32_000, 0, 0, 0, 32)


def by_source(step: StepModel, batch: Batch) -> dict[str, float]:
    """Fractions of one step by source."""
    found: dict[str, float] = defaultdict(float)
    for shares in time_shares(step, [batch]).values():
        for source, share in shares.items():
            found[source] += share
    return found


def source(step: StepModel, part: str, *batch: float) -> str:
    return SOURCES[parts(step, [Batch(*batch)])[part].source[0]]  # type: ignore[arg-type]


@given(engines, batches())
def test_parts_sum_to_the_step(step: StepModel, batch: Batch) -> None:
    found = parts(step, [batch])
    assert sum(part.seconds[0] for part in found.values()) == pytest.approx(step.step_s(*batch), rel=1e-9)
    assert all(part.seconds[0] >= 0 for part in found.values())


@given(engines, batches(), batches())
def test_shares_are_a_whole_and_every_step_weighs_the_same(step: StepModel, one: Batch, other: Batch) -> None:
    alone, both = [by_source(step, batch) for batch in (one, other)], time_shares(step, [one, other])
    assert sum(sum(shares.values()) for shares in both.values()) == pytest.approx(1.0, rel=1e-9)
    for name in SOURCES:
        together = sum(shares.get(name, 0.0) for shares in both.values())
        assert together == pytest.approx((alone[0][name] + alone[1][name]) / 2, rel=1e-9, abs=1e-12)


def test_tables_are_measured_within_their_range_only() -> None:
    step = engine(latency="tables")
    shares = by_source(step, DECODE)
    assert shares["measured"] > 0.75 and 0 < shares["extrapolated"] < 0.1  # lm_head is wider than any measured product
    assert source(step, "decode_attention", 4, 4 * 200_000, 0, 0, 0, 4) == "extrapolated"
    assert source(step, "qkv", 0, 0, *chunk(40_000), 1) == "extrapolated"
    assert source(step, "prefill_attention", 0, 0, *chunk(512), 1) == "measured"
    assert source(step, "prefill_attention", 0, 0, *chunk(40_000), 1) == "extrapolated"
    assert source(step, "prefill_attention", 0, 0, *chunk(512, 512), 1) == "assumed"
    assert source(step, "norm", *DECODE) == "roofline"


def test_rooflines_and_other_gpus_measure_nothing() -> None:
    for step in (engine(), engine(latency="tables", on="h200-sxm")):
        shares = by_source(step, DECODE)
        assert shares["measured"] == shares["extrapolated"] == 0 and shares["roofline"] > 0.9


def test_stand_ins_are_assumed_and_rates_from_end_to_end_times_fitted() -> None:
    awq, qoq = (engine(fmt=fmt, latency="tables") for fmt in ("awq", "qoq"))
    assert source(awq, "down", *DECODE) == source(qoq, "down", *DECODE) == "assumed"
    assert source(awq, "down", 0, 0, *chunk(8192), 1) == source(qoq, "down", 0, 0, *chunk(2048), 1) == "fitted"


def test_what_the_host_adds_has_the_sources_of_the_deployment() -> None:
    bound = engine(by="vllm-0.9.1-authors", latency="tables")
    step = Batch(1, 0, 0, 0, 0, 1)
    assert by_source(bound, step)["measured"] > 0.6
    assert parts(bound, [step])["host_floor"].seconds[0] > 0
    assert time_shares(engine(), [step])["host_overhead"]["assumed"] == pytest.approx(5e-4 / engine().step_s(*step))
