"""A run whose requests stream in and whose outcomes stream out has the bits of one that holds them all."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
from fineserve_traces import Requests, Trace, TraceError, conversations, totals
from randomkit import scenario_of
from simkit import trace_of
from tracekit import Chunked

from fineserve_sim.cluster import Fate, RunResult, Scenario, ScenarioError, simulate, simulate_streamed
from fineserve_sim.cluster import arrivals as slices
from fineserve_sim.cluster import outcomes as rows
from fineserve_sim.cluster.components import why_whole
from fineserve_sim.cluster.engine.sequence import Prefix
from fineserve_sim.cluster.outcomes import Outcomes
from fineserve_sim.cluster.scenario import Ended, EndedRequests, Timeline
from fineserve_sim.cluster.simulation import simulate_whole

KINDS = ("static", pytest.param("prism", marks=pytest.mark.slow), "qlm", "llumnix", "kunserve")
SEEDS = 12
TRACE = ("model", "arrival_s", "prompt_tokens", "output_tokens")


def streamed(scenario: Scenario) -> tuple[RunResult, list[EndedRequests], list[Timeline]]:
    """The run with everything that it handed on."""
    ended: list[EndedRequests] = []
    samples: list[Timeline] = []
    result = simulate_streamed(scenario, ended.append, samples.append)
    return result, ended, samples


def in_order(ended: list[EndedRequests]) -> tuple[Ended, dict[str, np.ndarray]]:
    """Outcomes and trace columns in the order of arrival."""
    whole = [np.concatenate([getattr(one.ended, each.name) for one in ended]) for each in fields(Ended)[:-1]]
    order = np.argsort(whole[0])
    return Ended(*(column[order] for column in whole)), {
        name: np.concatenate([getattr(one, name) for one in ended])[order] for name in TRACE
    }


@pytest.mark.parametrize("kind", KINDS)
def test_random_clusters_have_the_same_bits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "ROWS", 5)
    compared = 0
    for seed in range(SEEDS):
        scenario = scenario_of(kind, seed)
        scenario = scenario if seed % 2 else replace(scenario, drain_s=0.0)
        try:
            whole = simulate_whole(scenario)
        except ScenarioError:
            continue
        result, ended, samples = streamed(replace(scenario, trace=Chunked(scenario.whole_trace, 1 + seed)))
        fates, trace = in_order(ended)
        assert fates.request.tolist() == list(range(len(scenario.whole_trace)))
        for name in ("first_token_s", "finish_s", "fate", "preemptions", "engine", "cause", "generated_tokens"):
            one, other = getattr(fates, name), getattr(whole, name)
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes(), name
        assert trace.pop("output_tokens").tolist() == scenario.whole_trace.output_tokens.tolist()
        for name, column in trace.items():
            assert column.tobytes() == getattr(scenario.whole_trace, name).tobytes()
        for name in ("time_s", "waiting", "running", "kv_used_bytes", "gpu_stranded_bytes", "gpu_free_bytes"):
            together = np.concatenate([getattr(one, name) for one in samples])
            assert together.tobytes() == getattr(whole.timeline, name).tobytes(), name
        for name in ("end_s", "iterations", "gpu_use", "counters", "step_samples", "kv_capacity_bytes", "placement"):
            assert getattr(result, name) == getattr(whole, name), name
        assert len(result.fate) == len(result.timeline.time_s) == 0
        compared += 1
    assert compared > SEEDS / 2


def test_the_shares_of_step_times_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from fineserve_sim.cluster import simulation

    monkeypatch.setattr(simulation, "MOST_NOTES", 7)
    scenario = scenario_of("static", 1)
    whole, (result, _, _) = simulate_whole(scenario), streamed(scenario)
    assert result.step_samples == whole.step_samples > 7
    assert result.step_times.keys() == whole.step_times.keys()
    for part, shares in whole.step_times.items():
        assert result.step_times[part] == pytest.approx(dict(shares))


def test_prefixes_come_with_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of three requests, whose prefixes must not get lost at the end of a slice."""
    trace = conversations(trace_of([(float(i), 600, 10) for i in range(8)]), shared_tokens=512)

    def prefixes(requests: Requests) -> list[Prefix | None]:
        arrivals, found = slices.Arrivals(requests, caches=True), []
        while arrivals.next_s < np.inf:
            found.append(arrivals.take())
        assert [request.id for request, _, _ in found] == list(range(8))
        return [prefix for _, _, prefix in found]

    at_once = prefixes(trace)
    assert trace.prefix_hashes is not None
    assert [prefix and tuple(prefix.ids) for prefix in at_once] == [tuple(ids) for ids in trace.prefix_hashes]
    monkeypatch.setattr(slices, "ROWS", 3)
    assert prefixes(Chunked(trace, 5)) == at_once


def test_what_streams_in_stays_whole() -> None:
    scenario = scenario_of("static", 0)
    chunked = replace(scenario, trace=Chunked(scenario.whole_trace, 4))
    assert "stream in" in str(why_whole(chunked))
    with pytest.raises(ScenarioError, match="read them first"):
        simulate(chunked)


@pytest.mark.pure_python  # the size of a batch is a constant of the compiled module
def test_chunks_are_kept_while_their_requests_are_open_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "BATCH", 1)
    there: list[weakref.ref[np.ndarray]] = []

    class Watched(Chunked):
        def chunks(self) -> Iterator[Trace]:
            for chunk in super().chunks():
                there.append(weakref.ref(chunk.arrival_s))
                yield chunk

    scenario, most = scenario_of("static", 1), 0
    trace = trace_of([(2.0 * number, 64, 16, 0) for number in range(200)], scenario.whole_trace.models)

    def ended(_: EndedRequests) -> None:
        nonlocal most
        most = max(most, sum(chunk() is not None for chunk in there))

    simulate_streamed(replace(scenario, trace=Watched(trace, 10)), ended, lambda _: None)
    assert 0 < most <= 3


def test_a_request_that_waits_keeps_no_others() -> None:
    """One of a hundred waits for ever: what is kept of the others is less than of those that wait, and a chunk."""
    trace, told = trace_of([(float(number), 64 + number, 16) for number in range(1000)]), list[EndedRequests]()
    joined = slices.Joined(Chunked(trace, 100), told.append)
    for waiting, chunk in enumerate(joined.chunks(), start=1):
        first = int(chunk.arrival_s[0])
        ended = np.arange(first + 1, first + 100)[::-1]
        nothing, zeros = np.full(99, np.nan), np.zeros(99, dtype=np.int64)
        joined(
            Ended(
                ended,
                nothing,
                nothing,
                zeros.astype(np.int8),
                zeros,
                zeros.astype(np.int32),
                zeros.astype(np.int8),
                zeros,
            )
        )
        assert sum(map(len, joined._chunks.values())) <= 2 * waiting
    for each in told:
        assert each.prompt_tokens.tolist() == trace.prompt_tokens[each.ended.request].tolist()
        assert each.arrival_s.tolist() == each.ended.request.tolist()


def test_requests_must_come_in_order_and_at_all() -> None:
    @dataclass(frozen=True)
    class Backwards(Chunked):
        def chunks(self) -> Iterator[Trace]:
            yield from reversed([*super().chunks()])

    @dataclass(frozen=True)
    class Nothing(Chunked):
        def chunks(self) -> Iterator[Trace]:
            yield from ()

    trace = trace_of([(0.0, 10, 1), (1.0, 10, 1)])
    with pytest.raises(TraceError, match="the one before ends later"):
        totals(Backwards(trace, 1))
    with pytest.raises(TraceError, match="no request comes"):
        totals(Nothing(trace, 1))


def test_a_request_ends_once() -> None:
    outcomes = Outcomes()
    outcomes.begin(2, lambda ended: None)
    outcomes.arrive(0)
    outcomes.end(0, 1.0, Fate.FINISHED)
    for number in (0, 1):
        with pytest.raises(AssertionError, match=f"request {number} is not there, or ends twice"):
            outcomes.end(number, 2.0, Fate.DROPPED)
    assert outcomes.open == 1
