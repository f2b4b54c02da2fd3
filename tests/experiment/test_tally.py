"""Metrics without rows: the same counts and intervals as from all requests, percentiles within their bound."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fineserve_traces import Trace
from hypothesis import given, settings
from hypothesis import strategies as st
from tracekit import Chunked

from fineserve_sim.cluster import Cause, Fate
from fineserve_sim.cluster.scenario import Ended, EndedRequests
from fineserve_sim.experiment.file.metric_names import PERCENTILES
from fineserve_sim.experiment.results.histogram import RELATIVE_ERROR, Histograms
from fineserve_sim.experiment.results.hits import Batches
from fineserve_sim.experiment.results.metrics import Measures, measure
from fineserve_sim.experiment.results.tally import ALL, Tally
from fineserve_sim.experiment.run.run_data import Limits, RunData

MODELS = ("A", "B", "C")
TTFT_S, TPOT_S, E2E_S = {"A": 0.5, "B": 1.0, "C": 0.1}, {"A": 0.02, "B": 0.03}, {"A": 9.0, "B": 9.0, "C": 9.0}


def random_run(seed: int, requests: int, warmup: int) -> tuple[Trace, RunData]:
    """Requests of three models, the last without any, in random states."""
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(0.1, requests))
    trace = Trace(
        arrival_s,
        rng.integers(0, 2, requests).astype(np.int32),
        rng.integers(1, 900, requests),
        rng.integers(1, 50, requests),
        MODELS,
        "test",
    )
    first_s = arrival_s + rng.lognormal(-1, 1, requests)
    finish_s = first_s + rng.lognormal(-4, 0.5, requests) * (trace.output_tokens - 1)
    fate = rng.choice([*Fate], requests, p=[0.05, 0.75, 0.1, 0.05, 0.05]).astype(np.int8)
    ended = np.isin(fate, (Fate.FINISHED, Fate.CUT))
    cause = np.where(fate == Fate.CUT, rng.integers(1, 3, requests), Cause.NONE).astype(np.int8)
    generated_tokens = np.where(fate == Fate.CUT, 1 + trace.output_tokens // 2, trace.output_tokens) * ended
    run = RunData(
        MODELS,
        trace.model,
        trace.arrival_s,
        trace.prompt_tokens,
        trace.output_tokens,
        np.where(ended | (fate == Fate.UNFINISHED), first_s, np.nan),
        np.where(ended, finish_s, np.nan),
        fate,
        rng.integers(0, 3, requests),
        trace.model.copy(),
        cause,
        generated_tokens,
        warmup=warmup,
        engine_models=MODELS,
        sample_s=np.empty(0),
        waiting=np.empty((0, 3), dtype=np.int64),
        kv_used_bytes=np.empty((0, 3), dtype=np.int64),
        kv_capacity_bytes=1,
        gpus=1,
    )
    return trace, run


def tallied(trace: Trace, run: RunData, rows: int, seed: int) -> Tally:
    """The run's requests as they ended, some at a time, in another order."""
    tally = Tally(Batches(Chunked(trace, rows), run.warmup), Limits(TTFT_S, TPOT_S, E2E_S))
    order = np.random.default_rng(seed).permutation(len(trace))
    for part in np.array_split(order, 3):
        ended = Ended(
            part,
            *(getattr(run, name)[part] for name in ("first_token_s", "finish_s", "fate")),
            *(getattr(run, name)[part] for name in ("preemptions", "engine", "cause", "generated_tokens")),
        )
        columns = (run.model, run.arrival_s, run.prompt_tokens, run.output_tokens)
        tally.add(EndedRequests(ended, *(column[part] for column in columns)))
    return tally


def assert_close(tally: Tally, whole: Measures, name: str, row: int) -> None:
    for metric in whole.hits:
        of, hits = whole.hits[metric][name], tally.hits(metric, row)
        assert of.met.tolist() == hits.met.tolist() and of.of.tolist() == hits.of.tolist()
    assert tally.missed(row) == whole.misses[name]
    assert tally.tokens(row) == whole.tokens[name]
    for metric, value in tally.values(row).items():
        bound = RELATIVE_ERROR if "_p" in metric else 1e-12
        expected = whole.values[metric][name]
        assert value == pytest.approx(expected, rel=bound * (1 + 1e-9), nan_ok=True), metric


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 130), st.integers(0, 20), st.integers(1, 60))
def test_counts_and_intervals_are_those_of_the_rows(seed: int, requests: int, warmup: int, rows: int) -> None:
    trace, run = random_run(seed, requests + warmup, warmup)
    tally, whole = tallied(trace, run, rows, seed), measure(run, TTFT_S, TPOT_S, E2E_S)
    assert tally.counts() == whole.counts
    assert set(tally.metrics) == set(whole.hits)
    for row, name in [*enumerate(MODELS), (ALL, "")]:
        assert_close(tally, whole, name, row)


def test_many_requests_have_twenty_batches_a_model() -> None:
    trace, run = random_run(0, 20_000, 100)
    tally, whole = tallied(trace, run, 7_000, 1), measure(run, TTFT_S, TPOT_S, E2E_S)
    assert len(tally.hits("slo_attainment", 0).met) == len(tally.hits("slo_attainment", ALL).met) == 20
    for row, name in [*enumerate(MODELS), (ALL, "")]:
        assert_close(tally, whole, name, row)


@given(st.lists(st.floats(1e-6, 1e8) | st.just(math.nan), min_size=1, max_size=60))
def test_percentiles_are_within_their_bound(values: list[float]) -> None:
    """Of any values from a microsecond to three years; one that never came is infinite."""
    histograms = Histograms(2)
    histograms.add(np.ones(len(values), dtype=np.int32), np.array(values))
    ordered = np.sort(np.nan_to_num(np.array(values), nan=np.inf))
    for row in (1, None):
        for percent, found in zip(PERCENTILES, histograms.percentiles(row, PERCENTILES), strict=True):
            rank = (len(values) - 1) * percent / 100
            low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
            expected = math.inf if math.isinf(high) else low + (high - low) * (rank - math.floor(rank))
            assert found == pytest.approx(expected, rel=RELATIVE_ERROR * (1 + 1e-9))
    assert all(map(math.isnan, histograms.percentiles(0, PERCENTILES)))
