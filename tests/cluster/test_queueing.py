"""An engine that serves one sequence at a time is a single-server queue: Lindley's recursion, and M/D/1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from fineserve_traces import Trace
from simkit import H100, served, solo, step_model, system

from fineserve_sim.cluster import EngineSettings, Gpu, Scenario, simulate

M = served(name="llama-3.1-8b")
STEP = step_model(M)


def service_s(prompt: int, budget: int) -> float:
    """Seconds to prefill one prompt alone, chunk by chunk."""
    total = 0.0
    for done in range(0, prompt, budget):
        chunk = min(budget, prompt - done)
        last = done + chunk == prompt
        total += STEP.step_s(0, 0, chunk, chunk * done + chunk * (chunk + 1) // 2, done, int(last))
    return total


def lindley(arrival_s: Sequence[float], services: Sequence[float]) -> list[float]:
    """Departures of a first-come-first-served single server."""
    departures, free_s = [], 0.0
    for arrival, service in zip(arrival_s, services, strict=True):
        free_s = max(free_s, arrival) + service
        departures.append(free_s)
    return departures


def single_server(trace: Trace, budget: int) -> Scenario:
    settings = EngineSettings(token_budget=budget, max_sequences=1)
    return Scenario(system("dedicated"), (M,), (Gpu(0, 0, H100),), trace, settings, sample_s=0)


@pytest.mark.parametrize("scheduler", ["fcfs", "moore_hodgson"])
def test_lindleys_recursion(scheduler: str) -> None:
    rng = np.random.default_rng(1)
    arrival_s = np.cumsum(rng.exponential(0.03, 500))
    prompts = rng.integers(1, 2000, 500)
    rows = [(float(a), int(p), 1) for a, p in zip(arrival_s, prompts, strict=True)]
    m = served(name="llama-3.1-8b", slo_s=1e4)  # so that nobody is ever late
    settings = EngineSettings(token_budget=512, max_sequences=1)
    run = simulate(solo(rows, settings, m=m, scheduler=scheduler, sample_s=0))
    expected = lindley(arrival_s.tolist(), [service_s(int(p), 512) for p in prompts])
    assert np.abs(run.finish_s - expected).max() <= 1e-9
    assert np.array_equal(run.first_token_s, run.finish_s)
    assert (run.finish_s - arrival_s).max() > 0.2  # there was a queue


@pytest.mark.slow
def test_mean_wait_of_m_d_1() -> None:
    """Pollaczek-Khinchine: at load r the mean wait is r / (2 (1 - r)) services."""
    load, requests = 0.5, 200_000
    service = service_s(256, 512)
    arrival_s = np.cumsum(np.random.default_rng(7).exponential(service / load, requests))
    ones = np.ones(requests, dtype=np.int64)
    trace = Trace(arrival_s, np.zeros(requests, dtype=np.int32), 256 * ones, ones, ("m",), source="M/D/1")
    run = simulate(single_server(trace, 512))
    wait_s = run.first_token_s - arrival_s - service
    assert wait_s.min() > -1e-9
    assert wait_s.mean() == pytest.approx(load / (2 * (1 - load)) * service, rel=0.03)
