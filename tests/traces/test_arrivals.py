"""Arrival processes against their laws, and scaling against the counts that it promises."""

import math
from dataclasses import replace

import numpy as np
import pytest
from fineserve_traces import (
    ConstantLengths,
    TraceError,
    describe,
    gamma,
    generate,
    piecewise,
    poisson,
    replay,
    scale_rate,
    upscale,
    weibull,
    weibull_shape,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats


def gaps_of(arrival_s):
    return np.diff(arrival_s, prepend=0)


@pytest.mark.parametrize("rate_per_s", [0.02, 3.0, 500.0])
def test_poisson_rate_and_law(rng, rate_per_s):
    arrivals = poisson(rng, rate_per_s, 200_000)
    assert len(arrivals) / arrivals[-1] == pytest.approx(rate_per_s, rel=0.01)
    assert stats.kstest(gaps_of(arrivals)[:20_000] * rate_per_s, "expon").pvalue > 0.01


@pytest.mark.parametrize("process", [gamma, weibull])
@pytest.mark.parametrize("cv", [0.2, 1.0, 2.0, 5.0])
def test_renewal_rate_and_cv(rng, process, cv):
    gaps = gaps_of(process(rng, 4.0, cv, 2_000_000))
    assert 1 / gaps.mean() == pytest.approx(4.0, rel=0.01)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03)


@pytest.mark.parametrize("process", [gamma, weibull])
def test_cv_one_is_poisson(rng, process):
    assert stats.kstest(gaps_of(process(rng, 1.0, 1.0, 20_000)), "expon").pvalue > 0.01


def test_weibull_shape_known_values():
    assert weibull_shape(1.0) == pytest.approx(1.0, abs=1e-9)
    assert weibull_shape(math.sqrt(5)) == pytest.approx(0.5, abs=1e-9)  # k = 1/2: 4!/(2!)^2 - 1 = 5
    assert weibull_shape(math.sqrt(4 / math.pi - 1)) == pytest.approx(2.0, abs=1e-9)  # Rayleigh


@given(st.floats(0.01, 100))
def test_weibull_shape_inverts_cv(cv):
    shape = weibull_shape(cv)
    log_moment_ratio = math.lgamma(1 + 2 / shape) - 2 * math.lgamma(1 + 1 / shape)
    assert math.expm1(log_moment_ratio) == pytest.approx(cv**2, rel=1e-6)


def test_piecewise_is_an_exact_inhomogeneous_poisson_process(rng):
    segments = [(10.0, 2.0), (5.0, 0.0), (20.0, 0.5), (1.0, 40.0)]
    runs = [piecewise(rng, segments) for _ in range(4000)]
    edges = np.array([0, 10, 15, 35, 36])
    counts = np.array([np.histogram(run, edges)[0] for run in runs])
    expected = np.array([20, 0, 10, 40])
    assert counts.mean(axis=0) == pytest.approx(expected, rel=0.02)
    assert counts.var(axis=0) == pytest.approx(expected, rel=0.1)  # Poisson: variance equals mean
    assert all(np.all(np.diff(run) >= 0) for run in runs)
    inside = np.concatenate([run[run < 10] for run in runs]) / 10
    assert stats.kstest(inside[:20_000], "uniform").pvalue > 0.01


def test_piecewise_of_nothing(rng):
    assert piecewise(rng, []).size == 0
    assert piecewise(rng, [(60.0, 0.0)]).size == 0


def test_replay_and_scale_rate(rng):
    arrivals = poisson(rng, 2.0, 1000)
    assert replay(arrivals).tolist() == arrivals.tolist()
    fast = scale_rate(arrivals, 2.5)
    assert fast[-1] == pytest.approx(arrivals[-1] / 2.5)
    assert gaps_of(fast) == pytest.approx(gaps_of(arrivals) / 2.5)
    with pytest.raises(TraceError, match="row 2"):
        replay([3.0, 2.0])


@pytest.mark.parametrize(
    "call",
    [
        lambda rng: poisson(rng, 0.0, 5),
        lambda rng: poisson(rng, math.nan, 5),
        lambda rng: poisson(rng, 1.0, 0),
        lambda rng: gamma(rng, 1.0, 0.0, 5),
        lambda rng: weibull(rng, 1.0, 1000.0, 5),
        lambda rng: piecewise(rng, [(0.0, 1.0)]),
        lambda rng: piecewise(rng, [(1.0, -1.0)]),
        lambda rng: scale_rate([1.0], -1.0),
    ],
)
def test_impossible_processes_are_refused(rng, call):
    with pytest.raises(ValueError, match=r"give|needs"):
        call(rng)


def on_off(rng):
    """Bursts of a minute at 5 requests per second, minutes of silence between them."""
    arrivals = piecewise(rng, [(60.0, 5.0), (60.0, 0.0)] * 10)
    return generate(arrivals, ConstantLengths(10, 5), rng)


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.7, 2.0, 10.0])
def test_upscale_multiplies_the_counts_of_every_window(rng, factor):
    trace = on_off(rng)
    scaled = upscale(trace, factor, rng)
    assert abs(len(scaled) - factor * len(trace)) <= 1
    edges = np.arange(0, 1201, 60)
    before, after = (np.histogram(each.arrival_s, edges)[0] for each in (trace, scaled))
    # Within one by systematic rounding, and a copy of the first and the last request of a burst may cross the edge.
    assert np.all(np.abs(after - factor * before) <= 1 + 2 * factor)
    phase_s = scaled.arrival_s % 120
    assert not np.any((phase_s > 61) & (phase_s < 119))  # the silences stay silent
    assert scaled.arrival_s[0] >= trace.arrival_s[0]
    assert scaled.arrival_s[-1] <= trace.arrival_s[-1]


def test_upscale_by_one_changes_nothing(rng, small):
    same = upscale(small, 1.0, rng)
    assert same.arrival_s.tolist() == small.arrival_s.tolist()
    assert same.prefix_hashes == small.prefix_hashes


def test_upscale_keeps_originals_and_spreads_copies(rng):
    trace = generate(poisson(rng, 5.0, 3000), ConstantLengths(10, 5), rng)
    scaled = upscale(trace, 3.0, rng)
    assert np.isin(trace.arrival_s, scaled.arrival_s).all()
    assert len(np.unique(scaled.arrival_s)) == len(scaled)


def test_upscale_keeps_models_lengths_and_prefix_reuse(rng, small):
    small = replace(small, prefix_hashes=((1,), (2, 3), (2, 4), (5,)), prefix_tokens=small.prompt_tokens % 7)
    scaled = upscale(small, 4.0, rng)
    assert scaled.prefix_tokens.tolist() == (scaled.prompt_tokens % 7).tolist()
    assert describe(scaled).model_shares == describe(small).model_shares
    assert sorted(scaled.output_tokens.tolist()) == sorted(small.output_tokens.tolist() * 4)
    assert describe(scaled).prefix_hit_ratio == pytest.approx(describe(small).prefix_hit_ratio)


@given(
    st.lists(st.floats(0, 1e4), min_size=1, max_size=60).map(sorted),
    st.floats(0.05, 8),
    st.integers(0, 2**32 - 1),
)
def test_upscale_laws(arrivals, factor, seed):
    rng = np.random.default_rng(seed)
    trace = generate(np.array(arrivals), ConstantLengths(10, 5), rng)
    try:
        scaled = upscale(trace, factor, rng)
    except TraceError:
        assert factor * len(trace) < 1
        return
    assert abs(len(scaled) - factor * len(trace)) < 1
    assert trace.arrival_s[0] <= scaled.arrival_s[0] <= scaled.arrival_s[-1] <= trace.arrival_s[-1]


def test_upscale_refuses_no_factor(rng, small):
    with pytest.raises(ValueError, match="factor is 0"):
        upscale(small, 0, rng)
