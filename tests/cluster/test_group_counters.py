"""Counters of single-model clusters: throttled intervals by hand, and demand on a run."""

from __future__ import annotations

import numpy as np
import pytest
from groupkit import burst, cluster, lawful

from fineserve_sim.cluster.samples import throttlings
from fineserve_sim.cluster.scenario import COUNTERS


@pytest.mark.parametrize(
    ("above", "expected"), [([], 0), ([3, 4, 5], 1), ([3, 22], 1), ([3, 23], 2), ([1, 2, 40, 41, 100], 3)]
)
def test_throttled_intervals_less_than_20_s_apart_are_one(above: list[int], expected: int) -> None:
    time_s = np.arange(120.0)
    mask = np.isin(np.arange(120), above)
    assert throttlings(time_s, mask) == expected


def test_a_calm_run_drops_nothing_and_a_spike_is_counted() -> None:
    calm = lawful(cluster("kunserve", [(0.0, 100, 50), (1.0, 100, 50)])).result.counters
    assert calm["drops"] == calm["exchange_bytes"] == calm["throttlings"] == 0
    assert "exchange_mean_s" not in calm and 0 < calm["kv_demand_peak"] < 0.1
    spike = lawful(cluster("kunserve", burst(120, 180, 150))).result.counters
    assert spike["drops"] >= 1 and spike["exchange_bytes"] > 0 and spike["kv_demand_peak"] > 0.9
    assert 0 <= spike["bubble_fraction"] < 1
    assert set(spike) | set(calm) <= set(COUNTERS)
