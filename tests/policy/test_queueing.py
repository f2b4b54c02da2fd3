"""The closed forms of late requests, against simulated queues and sums."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from fineserve_sim.policy.interfaces import Busy, ModelDemand, OperatingPoint
from fineserve_sim.policy.placement import queueing
from fineserve_sim.policy.placement.queueing import late_per_s, load_of

GIB = 2**30


def demand(rate_per_s: float = 2.0, tp: int = 1, **given: object) -> ModelDemand:
    """A model of 0.1 s a prompt and 0.01 s a decode step, 0.1 ms longer with each request, 100 tokens of output."""
    points = tuple(
        OperatingPoint(batch, batch / (1.0 + 0.01 * (batch - 1) + 0.1 * batch), 0.1 * batch, GIB, batch * GIB // 8)
        for batch in (1, 2, 4, 8, 16, 32)
    )
    facts: dict[str, object] = {"decode_tokens": 100.0, "prefill": Busy(0.8, 0.4), "decode": Busy(0.05, 0.8)} | given
    return ModelDemand("m", rate_per_s, 1.0, tp, 10 * GIB, 1, points, **facts)  # type: ignore[arg-type]


def simulated(rho: float, deadline: float, customers: int = 200_000) -> float:
    """The part of the customers of an M/M/1 queue of mean service 1 that leave, since they wait longer than the deadline."""
    draw, free_at, now, gone = random.Random(3), 0.0, 0.0, 0
    for _ in range(customers):
        now += draw.expovariate(rho)
        if free_at - now > deadline:
            gone += 1
        else:
            free_at = max(free_at, now) + draw.expovariate(1.0)
    return gone / customers


@pytest.mark.parametrize(("rho", "deadline"), [(0.5, 1.0), (0.8, 3.0), (1.0, 4.0), (1.5, 5.0)])
def test_late_prompts_are_those_of_a_queue_with_a_deadline(rho: float, deadline: float) -> None:
    assert queueing._too_late(deadline, rho, rho) == pytest.approx(simulated(rho, deadline), abs=0.006)


def test_the_law_of_prompts_is_smooth_at_full_load_and_tends_to_what_cannot_be_served() -> None:
    below, at, above = (queueing._too_late(3.0, rho, rho) for rho in (1 - 1e-5, 1.0, 1 + 1e-5))
    assert below < at < above < below + 1e-4
    assert queueing._too_late(1e9, 4.0, 4.0) == pytest.approx(0.75)
    assert queueing._too_late(0.0, 0.1, 0.1) == 1.0


def test_decodes_are_little_s_law_with_steps_that_grow() -> None:
    load = load_of(demand(), 1)
    running, stay_s = queueing._decoding(load, 2.0, 2.0, 0.15)
    step_s = 2.0 * (load.first_s + (running - 1) * load.more_s)
    assert running == pytest.approx(2.0 * stay_s)
    assert stay_s * (1 - 2.0 * 0.15) == pytest.approx(step_s * (100 - 2.0 * stay_s))


def test_bytes_beyond_what_is_left_are_the_expected_excess() -> None:
    mean, deviation, limit = 10.0, 2.0, 11.0
    width = deviation / 500
    beyond = sum(
        step * width * math.exp(-0.5 * ((limit - mean + step * width) / deviation) ** 2) * width
        for step in range(10_000)
    ) / (deviation * math.sqrt(2 * math.pi))
    assert queueing._excess(limit, mean, deviation**2) == pytest.approx(beyond / mean, rel=1e-3)
    assert queueing._excess(5.0, 10.0, 1e-9) == pytest.approx(0.5)


def test_more_rate_tighter_limits_less_memory_and_neighbours_make_more_requests_late() -> None:
    def share(model: ModelDemand, others: int = 0, memory_bytes: int = 40 * GIB) -> float:
        load = load_of(model, 1)
        return late_per_s([load] * (1 + others), memory_bytes) / (1 + others) / load.rate_per_s

    usual = share(demand(5.0))
    assert 0 < usual < share(demand(8.0)) < share(demand(12.0)) < 2
    assert usual < share(demand(5.0), others=1)
    assert usual < share(demand(5.0), memory_bytes=12 * GIB)
    assert usual < share(demand(5.0, tpot_slo_s=0.03)) < share(demand(5.0, tpot_slo_s=0.015))
    assert late_per_s([load_of(demand(), 1)], 10 * GIB) == math.inf


@pytest.mark.parametrize("variance", [0.0, 0.5, 3.0])
def test_rates_are_two_of_three_nodes_of_a_log_normal_rate(variance: float) -> None:
    """With the third one, as often as the second, mean and variance of the logarithm are exact, by Gauss and Hermite."""
    often, seldom = queueing.rates(replace(demand(), rate_variance=variance))
    spread = math.log(1 + variance + queueing.UNSEEN)
    least = often**2 / seldom
    nodes, parts = (often, seldom, least), (*queueing.PARTS, queueing.PARTS[1])
    assert sum(parts) == pytest.approx(1)
    logs = [math.log(each) for each in nodes]
    mean = sum(part * each for part, each in zip(parts, logs, strict=True))
    assert mean == pytest.approx(-spread / 2)
    assert sum(part * (each - mean) ** 2 for part, each in zip(parts, logs, strict=True)) == pytest.approx(spread)


def test_replicas_and_groups_share_what_is_late() -> None:
    whole, half = load_of(demand(4.0), 1), load_of(demand(4.0), 2)
    assert half.rate_per_s == whole.rate_per_s / 2
    assert load_of(demand(4.0, tp=2), 1).weight_per_s == whole.weight_per_s / 2


def test_a_model_without_a_profile_is_refused() -> None:
    with pytest.raises(ValueError, match="model m has no profile"):
        load_of(ModelDemand("m", 1.0, 1.0, 1, 1, 1), 1)
