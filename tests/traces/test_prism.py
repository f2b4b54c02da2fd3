"""Prism-like workloads: closed forms of on/off processes against samples, statistics by hand, the Arena sketch."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from fineserve_traces import ConstantLengths, Trace, TraceError
from fineserve_traces.model_stats import ModelStats, model_stats, tail_share
from fineserve_traces.onoff import OnOff
from fineserve_traces.prism import ARENA, PROVIDER, arena_27models, arena_trace, processes, provider_trace, tail_shares
from hypothesis import given
from hypothesis import strategies as st


class TestOnOff:
    @pytest.mark.parametrize(
        "process", [OnOff(0.5, 0.2, 60.0), OnOff(0.05, 0.5, 20.0), OnOff(0.3), OnOff(0.1, 0.9, 200.0)], ids=str
    )
    def test_samples_follow_the_closed_forms(self, process: OnOff) -> None:
        duration_s = 4e6
        times = process.arrivals(np.random.default_rng(1), duration_s)
        gaps = np.diff(times)
        assert times.size == pytest.approx(process.rate_per_s * duration_s, rel=0.02)
        for seconds in (1.0, 10.0, 60.0):
            assert (gaps > seconds).mean() == pytest.approx(process.gap_exceeds(seconds), rel=0.03, abs=1e-3)
        assert np.median(gaps[gaps > 10]) == pytest.approx(process.median_idle_s(), rel=0.03)
        counts = np.bincount((times // 60).astype(int))[:-1]
        assert counts.std() / counts.mean() == pytest.approx(process.cv_of_counts(), rel=0.03)

    def test_poisson_is_the_limit(self) -> None:
        """Always on: idle longer than 10 s has the median 10 + ln 2 / rate. A duty near one comes near to it."""
        process, near = OnOff(0.1), OnOff(0.1, 1 - 1e-9)
        assert process.median_idle_s() == pytest.approx(10 + math.log(2) / 0.1)
        assert process.idle_per_hour() == pytest.approx(360 * math.exp(-1))
        assert near.gap_exceeds(7.0) == pytest.approx(process.gap_exceeds(7.0), rel=1e-6)
        assert near.cv_of_counts() == pytest.approx(process.cv_of_counts(), rel=1e-6)

    def test_a_scale_multiplies_requests_within_the_same_times_on(self) -> None:
        process = OnOff(0.2, 0.1, 30.0)
        once = process.arrivals(np.random.default_rng(5), 20_000.0)
        ten = process.arrivals(np.random.default_rng(5), 20_000.0, scale=10.0)
        assert ten.size / once.size == pytest.approx(10, rel=0.1)
        after = np.searchsorted(ten, once).clip(1, ten.size - 1)
        apart = np.minimum(np.abs(ten[after] - once), np.abs(ten[after - 1] - once))
        assert apart.max() < 30  # where there was a request, there are ten near it

    @given(st.floats(0.01, 2), st.floats(0.05, 1), st.floats(1, 100), st.floats(0.5, 500), st.integers(0, 9))
    def test_times_are_sorted_and_inside(self, rate: float, duty: float, on_s: float, length: float, seed: int) -> None:
        times = OnOff(rate, duty, on_s).arrivals(np.random.default_rng(seed), length)
        assert (np.diff(times) >= 0).all() and ((times >= 0) & (times < length)).all()

    @pytest.mark.parametrize("wrong", [(0.0, 1.0, 1.0), (1.0, 0.0, 1.0), (1.0, 1.5, 1.0), (1.0, 0.5, 0.0)])
    def test_impossible_processes_are_refused(self, wrong: tuple[float, float, float]) -> None:
        with pytest.raises(ValueError, match="duty within"):
            OnOff(*wrong)


class TestStatistics:
    def one(self, times: list[float], duration_s: float) -> ModelStats:
        n = len(times)
        trace = Trace(np.array(times), np.zeros(n, np.int32), np.ones(n), np.ones(n), ("m",), "by hand")
        return model_stats(trace, duration_s)[0]

    def test_idle_intervals_are_gaps_over_ten_seconds(self) -> None:
        """Gaps 10, 20, 5, 30 within two hours: two are longer than 10 s."""
        stats = self.one([100.0, 110.0, 130.0, 135.0, 165.0], 7200.0)
        assert (stats.requests, stats.per_hour, stats.idle_per_hour, stats.median_idle_s) == (5, 2.5, 1.0, 25.0)

    def test_counts_of_whole_minutes(self) -> None:
        """3, 1, 0, 0 requests in four minutes: mean 1, variance 1.5. What comes in the fifth, partial one is left out."""
        stats = self.one([0.0, 1.0, 59.9, 60.0, 245.0], 250.0)
        assert stats.cv_per_minute == pytest.approx(math.sqrt(1.5))

    def test_swing_compares_bins_of_ten_seconds_within_a_minute(self) -> None:
        """Six requests in one bin beside empty ones, which count as one."""
        assert self.one([30.0 + i for i in range(6)], 120.0).swing == 6.0
        assert self.one([float(i) for i in range(120)], 120.0).swing == 1.0
        assert self.one([1.0], 50.0).swing is None

    def test_models_come_by_popularity(self) -> None:
        trace = Trace(np.arange(3.0), np.array([1, 0, 1], np.int32), np.ones(3), np.ones(3), ("a", "b"), "by hand")
        assert [stats.model for stats in model_stats(trace, 60.0)] == ["b", "a"]

    def test_tail_share(self) -> None:
        assert tail_share([50, 25, 15, 6, 4]) == pytest.approx(0.25)


class TestShares:
    @given(st.integers(5, 150))
    def test_the_tail_makes_its_part(self, models: int) -> None:
        shares = tail_shares(models)
        tail = round(0.6 * models)
        assert shares.sum() == pytest.approx(1) and (np.diff(shares) <= 0).all()
        assert shares[-tail:].sum() == pytest.approx(0.25, abs=1e-9)

    @pytest.mark.parametrize("wrong", [(10, 0.6, 0.7), (10, 0.0, 0.25), (1, 0.6, 0.25)])
    def test_no_law_for_a_heavy_tail(self, wrong: tuple[int, float, float]) -> None:
        with pytest.raises(ValueError, match="Zipf"):
            tail_shares(*wrong)


class TestWorkloads:
    models = tuple(f"m{rank}" for rank in range(8))

    def test_mean_rates_are_those_of_their_kind(self) -> None:
        for kind in (PROVIDER, ARENA):
            found = processes(kind, 24)
            assert sum(p.rate_per_s for p in found) * 3600 / 24 == pytest.approx(kind.per_hour)
            duties = sorted(p.duty for p in found)
            assert kind.duties[0] <= duties[0] and duties[-1] <= kind.duties[1]
            assert np.abs(np.diff(duties)).max() < 3 * (kind.duties[1] - kind.duties[0]) / 24  # no hole

    @pytest.mark.parametrize("make", [provider_trace, arena_trace])
    def test_same_seed_same_trace_and_the_first_model_is_the_most_popular(self, make: object) -> None:
        first, second = (make(np.random.default_rng(3), self.models, 36_000.0) for _ in range(2))  # type: ignore[operator]
        assert np.array_equal(first.arrival_s, second.arrival_s)
        assert np.array_equal(first.prompt_tokens, second.prompt_tokens)
        counts = dict(zip(first.models, np.bincount(first.model), strict=True))
        assert max(counts, key=lambda model: counts[model]) == "m0"

    def test_scale_and_lengths_are_taken(self) -> None:
        trace = provider_trace(np.random.default_rng(3), self.models, 3600.0, scale=4.0, lengths=ConstantLengths(7, 9))
        assert len(trace) == pytest.approx(4 * 130 * 8, rel=0.3)
        assert set(trace.prompt_tokens.tolist()) == {7} and set(trace.output_tokens.tolist()) == {9}

    def test_an_empty_trace_is_refused(self) -> None:
        with pytest.raises(TraceError, match="scale it up"):
            provider_trace(np.random.default_rng(0), self.models, 1.0, scale=1e-6)


class TestArena:
    def test_the_sketch_gives_back_counts_and_lengths(self) -> None:
        trace = arena_27models(np.random.default_rng(0))
        counts = sorted(np.bincount(trace.model).tolist(), reverse=True)
        assert len(trace) == 1500 and counts[:5] == [296, 262, 199, 120, 67]
        assert trace.arrival_s[-1] < 600
        assert trace.prompt_tokens.mean() == pytest.approx(136, rel=0.1)
        assert trace.output_tokens.mean() == pytest.approx(256, rel=0.1)

    def test_the_sketch_is_that_of_the_real_trace(self, shared_data: Path) -> None:
        real, redrawn = arena_27models(np.random.default_rng(0), shared_data), arena_27models(np.random.default_rng(0))
        assert len(real) == 1500 and sorted(redrawn.models) == sorted(real.models)
        for name in real.models:
            minutes = [
                np.bincount(np.minimum(t.arrival_s[t.model == t.models.index(name)] // 60, 9).astype(int), minlength=10)
                for t in (real, redrawn)
            ]
            assert np.array_equal(*minutes)

    def test_a_folder_without_the_trace_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="arena_27models"):
            arena_27models(np.random.default_rng(0), tmp_path)
