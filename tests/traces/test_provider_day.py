"""A provider's requests, window by window: the same each time, as many as the rates say, the popular models first."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from fineserve_traces import ConstantLengths, ProviderDay, totals

DAY = ProviderDay(
    tuple(f"m{rank}" for rank in range(64)),
    rate_per_s=40.0,
    day_s=4800.0,
    duration_s=4800.0,
    window_s=100.0,
    lengths=ConstantLengths(100, 10),
    seed=1,
)


def test_chunks_can_be_made_anew_and_do_not_depend_on_what_follows() -> None:
    first, again = [*DAY.chunks()], [*replace(DAY, duration_s=1000.0).chunks()]
    assert len(first) == 48 and len(again) == 10
    for one, other in zip(first, again, strict=False):
        for column in ("arrival_s", "model", "prompt_tokens", "output_tokens"):
            assert getattr(one, column).tobytes() == getattr(other, column).tobytes()
    other = [*replace(DAY, seed=2).chunks()]
    assert other[0].arrival_s.tobytes() != first[0].arrival_s.tobytes()


def test_windows_follow_one_another() -> None:
    for number, chunk in enumerate(DAY.chunks()):
        assert number * 100 <= chunk.arrival_s[0] and chunk.arrival_s[-1] < (number + 1) * 100
        assert (np.diff(chunk.arrival_s) >= 0).all()


def test_requests_are_as_many_as_the_rates_say() -> None:
    """Over many days: bursts make single ones differ."""
    counts = np.mean([totals(replace(DAY, seed=seed)).requests for seed in range(8)], axis=0)
    assert counts.sum() == pytest.approx(40.0 * 4800, rel=0.05)
    assert sum(DAY.rates_per_s) == pytest.approx(40.0)
    expected = np.array(DAY.rates_per_s) * 4800
    assert np.corrcoef(counts, expected)[0, 1] > 0.9
    assert counts[:8].mean() > counts[-8:].mean()


def test_bursts_are_burstier_than_poisson() -> None:
    seconds = np.concatenate([chunk.arrival_s for chunk in DAY.chunks()])
    per_minute = np.bincount((seconds // 60).astype(int))
    assert per_minute.var() > 3 * per_minute.mean()


def test_totals_are_those_of_all_chunks() -> None:
    found = totals(DAY)
    assert found.requests.sum() == sum(map(len, DAY.chunks()))
    assert found.prompt_tokens.tolist() == (100 * found.requests).tolist()
    assert 0 <= found.first_s < found.last_s < 4800
    assert DAY.mean_tokens == (100.0, 10.0)
