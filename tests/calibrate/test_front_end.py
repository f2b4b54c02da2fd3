"""The process between clients and engine: its queue by hand, and the closed loop that it slows."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_evidence.validate.engines import EngineRun, Instance, Requests, Times
from fineserve_evidence.validate.front_end import SGLANG, Desk, FrontEnd

from fineserve_sim.catalog import deployment, gpu, model, precision
from fineserve_sim.cluster.scenario import EngineSettings
from fineserve_sim.latency import StepModel

STEP = StepModel(model("llama-3.2-1b"), precision("fp16"), 1, gpu("h100-sxm"), deployment("sglang-0.5"))
PROMPT, OUTPUT, CLIENTS = 40, 50, 4


def run(front_end: FrontEnd | None, requests: int = 12) -> Times:
    lengths = Requests(np.zeros(requests, dtype=np.int64), np.full(requests, PROMPT), np.full(requests, OUTPUT))
    settings = EngineSettings(batching="sglang", token_budget=8192)
    engine = Instance(0, 0, STEP, 10**9, 16 * 32768)
    return EngineRun([engine], lengths, settings, front_end=front_end).closed_loop(CLIENTS)


def test_requests_and_tokens_queue_in_one_place() -> None:
    """By hand, 1 ms a prompt token, 10 ms a token out: 5 tokens take until 0.005, the next 3 wait for them; two tokens
    of a step are with their clients after 0.018 and 0.028."""
    desk = Desk(FrontEnd(0.001, 0.01))
    assert desk.take(0.0, 5) == pytest.approx(0.005)
    assert desk.take(0.002, 3) == pytest.approx(0.008)
    assert desk.hand_out(0.004, 2) == pytest.approx((0.008 + 0.028) / 2)
    assert desk.take(1.0, 1) == pytest.approx(1.001)
    seen_s = desk.seen(np.array([0.004, np.nan]))
    assert seen_s[0] == pytest.approx(0.018) and np.isnan(seen_s[1])


def test_a_front_end_that_takes_no_time_changes_nothing() -> None:
    free, none = run(FrontEnd(0.0, 0.0)), run(None)
    assert free.arrival_s.tolist() == none.arrival_s.tolist()
    assert free.first_token_s.tolist() == none.first_token_s.tolist()
    assert free.finish_s.tolist() == none.finish_s.tolist()


def test_the_slower_of_the_two_sets_the_pace_of_the_loop() -> None:
    """Little's law: the clients' tokens over their mean time from request to last token are what the front end hands out."""
    token_s = 0.01  # an engine step takes a few milliseconds for all four
    times = run(FrontEnd(0.0, token_s), 40)
    late = times.arrival_s > np.nanmax(times.finish_s) / 2
    cycle_s = (times.finish_s - times.arrival_s)[late].mean()
    assert CLIENTS * OUTPUT / cycle_s == pytest.approx(1 / token_s, rel=0.05)
    assert (times.ttft_s[CLIENTS:] > 10 * run(None, 40).ttft_s[CLIENTS:]).all()


def test_sglangs_constants_are_those_of_their_sources() -> None:
    assert SGLANG.token_s == 50e-6  # of 50 to 100
    assert SGLANG.prompt_token_s == pytest.approx(4.3 / (2.7 * 2**20), rel=0.02)
