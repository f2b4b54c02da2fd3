"""The process between clients and engine: its queue by hand, and the closed loop that it slows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.optimize import nnls

pytest.importorskip("fineserve_calibrate", reason="calibrate/ is not on the import path")

from fineserve_evidence.validate.engines import EngineRun, Instance, Requests, Times
from fineserve_evidence.validate.front_end import SGLANG, TOKENISE_S, Desk, FrontEnd

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


def test_tokens_wait_for_all_work_and_requests_for_requests() -> None:
    """By hand, 1 ms a prompt token, 10 ms a token out: 5 tokens take until 0.005, the next 3 wait for them. Two tokens of a
    step are with their clients after 0.018 and 0.028. A request that comes meanwhile is read at once, and delays tokens."""
    desk = Desk(FrontEnd(0.001, 0.01))
    assert desk.take(0.0, 5) == pytest.approx(0.005)
    assert desk.take(0.002, 3) == pytest.approx(0.008)
    assert desk.hand_out(0.004, 2) == pytest.approx((0.008 + 0.028) / 2)
    assert desk.take(0.010, 4) == pytest.approx(0.014)
    assert desk.hand_out(0.020, 1) == pytest.approx((0.032 + 0.042) / 2)
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
    """Of 50 to 100 us a token; our own measurement: least squares of relative errors, nothing below zero."""
    assert SGLANG == (TOKENISE_S, 50e-6)
    runs = pd.read_csv(Path(__file__).parents[2] / "docs/data/sglang_front_end.csv")
    earlier = runs.requests * runs.output_tokens * (runs.output_tokens - 1) / 2
    work = np.c_[runs.requests, runs.requests * runs.prompt_tokens, runs.tokens, earlier]
    seconds, _ = nnls(work / runs.server_s.to_numpy()[:, None], np.ones(len(runs)))
    np.testing.assert_allclose(seconds, [2.63e-3, 4.38e-6, 52.8e-6, 36.4e-9], rtol=0.005)  # docs/fidelity.md
    off = np.abs(work @ seconds / runs.server_s - 1)
    assert off.max() < 0.30 and off[runs.output_tokens >= 250].max() < 0.04
