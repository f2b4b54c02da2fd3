"""Samples stand for all moments: what is read from them is the mean over time, whatever the rhythm of the trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from randomkit import KINDS, scenario_of
from simkit import assert_same, gpus, pinned, served, solo, system, trace_of

from fineserve_sim.cluster import EngineSettings, RunResult, Scenario, simulate
from fineserve_sim.cluster.samples import sample_time_s
from fineserve_sim.cluster.simulation import simulate_whole

Floats = NDArray[np.float64]
SPAN_S = 1000


def in_rhythm(every_s: float, *, together: int = 1, output: int = 60) -> Scenario:
    """So many requests every ``every_s``, and an engine that serves them one after the other."""
    moments = [every_s * i for i in range(int(SPAN_S / every_s) + 1)]
    rows = [(at_s, 100, output) for at_s in moments for _ in range(together)]
    return solo(rows, EngineSettings(max_sequences=1))


def begins_s(scenario: Scenario, run: RunResult) -> Floats:
    """When the service of each request began: as it arrived, or when the one before it was done."""
    return np.maximum(scenario.whole_trace.arrival_s, np.concatenate([[0.0], run.finish_s[:-1]]))


def share(begin_s: Floats, end_s: Floats) -> float:
    """Of the time until the last arrival in intervals none of which overlap: exact, from the requests alone."""
    return float(np.sum(np.minimum(end_s, SPAN_S) - np.minimum(begin_s, SPAN_S)) / SPAN_S)


@pytest.mark.parametrize("every_s", [0.5, 1.0, 2.0, 2.5, 5.0])
@pytest.mark.parametrize("output", [40, 120, 240])
def test_the_busy_share_is_that_of_time(every_s: float, output: int) -> None:
    scenario = in_rhythm(every_s, output=output)
    run = simulate(scenario)
    exact = share(begins_s(scenario, run), run.finish_s)
    assert 0.01 < exact < 0.99
    assert run.gpu_use[0].busy == pytest.approx(exact, abs=0.01)


def test_waiting_and_memory_are_those_of_time() -> None:
    """Of two requests a second one waits while the other is served."""
    scenario = in_rhythm(1.0, together=2)
    run = simulate(scenario)
    waits = begins_s(scenario, run), scenario.whole_trace.arrival_s
    exact_waiting, exact_serving = share(waits[1], waits[0]), share(waits[0], run.finish_s)
    before = run.timeline.time_s <= SPAN_S
    assert 0.05 < exact_waiting < exact_serving
    assert run.gpu_use[0].waiting == pytest.approx(exact_waiting, abs=0.01)
    assert run.timeline.waiting[before].mean() == pytest.approx(exact_waiting, abs=0.01)
    assert (run.timeline.kv_used_bytes[before] > 0).mean() == pytest.approx(exact_serving, abs=0.01)


def test_a_sample_lies_in_its_own_interval_after_the_one_before() -> None:
    times_s = np.array([sample_time_s(number, 0.5) for number in range(100_000)])
    assert (times_s // 0.5 == np.arange(100_000)).all() and times_s[0] == 0.0
    assert np.diff(times_s).min() > 0.5 * 0.6


@pytest.mark.parametrize("every_s", [0.25, 1.0, 1.5, 60.0])
def test_the_phases_of_a_rhythm_are_met_alike(every_s: float) -> None:
    """The largest distance of their distribution from the even one falls as log n / n."""
    for number in (600, 6_000):
        phases = np.sort([sample_time_s(each, 1.0) % every_s / every_s for each in range(number)])
        apart = np.abs(phases - (np.arange(number) + 0.5) / number).max()
        assert apart < max(1.0, every_s / 2) * np.log(number) / number


def test_samples_disturb_nothing() -> None:
    scenario = in_rhythm(1.0, together=3)
    bare, watched = (simulate(replace(scenario, sample_s=every_s)) for every_s in (0.0, 0.05))
    for name in ("first_token_s", "finish_s", "fate", "preemptions", "engine"):
        assert getattr(bare, name).tobytes() == getattr(watched, name).tobytes(), name


def test_components_are_looked_at_when_the_whole_is() -> None:
    spec = system(pinned({"a": [(0,)], "b": [(1,)]}))
    rows: list[Any] = [(float(i // 2), 100, 20 + 40 * (i % 2), i % 2) for i in range(60)]
    scenario = Scenario(spec, (served("a"), served("b")), gpus(2), trace_of(rows, ["a", "b"]))
    whole, apart = simulate_whole(scenario), simulate(scenario)
    expected = [sample_time_s(number, 1.0) for number in range(len(whole.timeline.time_s))]
    assert whole.timeline.time_s.tolist() == apart.timeline.time_s.tolist() == expected
    assert whole.gpu_use == apart.gpu_use and whole.step_times == apart.step_times


@pytest.mark.parametrize("kind", KINDS)
def test_idle_time_is_sampled_at_once_and_the_same(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as when every sample is taken by itself, in random clusters whose requests pause for two minutes."""
    drawn = scenario_of(kind, 3)
    arrival_s = drawn.whole_trace.arrival_s
    late = arrival_s > np.median(arrival_s)
    paused = replace(drawn, trace=replace(drawn.whole_trace, arrival_s=arrival_s + 120.0 * late))
    at_once = simulate(paused)
    monkeypatch.setattr("fineserve_sim.cluster.run.MOST_ALIKE", 0)
    one_by_one = simulate(paused)
    assert_same(at_once, one_by_one)
    assert at_once.events == one_by_one.events
