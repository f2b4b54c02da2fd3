"""ServeGen's client model: rates and variations of renewal processes in equilibrium, hours by hand, the sketch."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from fineserve_traces import TraceError
from fineserve_traces.servegen import CLIENTS, FILE, Client, Family, Hour, read_clients, servegen_clients

DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.parametrize("family", ["Gamma", "Weibull"])
@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_requests_are_rate_times_time_whatever_the_variation(family: Family, cv: float) -> None:
    """Hours of five gaps on average, 2,000 runs: an ordinary renewal process at cv 4 would have 7.5 more an hour."""
    client = Client((Hour(0.5, cv), Hour(0.0, 1.0), Hour(1.5, cv)), family)
    rng = np.random.default_rng(1)
    counts = [client.arrivals(rng, 30.0, scale=1.0).size for _ in range(2000)]
    assert np.mean(counts) == pytest.approx(20.0, abs=4 * np.std(counts) / 2000**0.5)


@pytest.mark.parametrize("family", ["Gamma", "Weibull"])
def test_gaps_have_their_mean_and_variation(family: Family) -> None:
    times = Client((Hour(2.0, 3.0),), family).arrivals(np.random.default_rng(2), 100_000.0, scale=2.0)
    gaps = np.diff(times)
    assert gaps.min() >= 0 and times[0] >= 0 and times[-1] < 100_000.0
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(3.0, rel=0.06)


def test_a_day_passes_in_the_run_and_quiet_hours_are_quiet() -> None:
    client = Client((Hour(3.0, 1.0), Hour(0.0, 1.0), Hour(1.0, 1.0), Hour(0.0, 1.0)))
    assert client.rate_per_s == 1.0
    hours = np.bincount((client.arrivals(np.random.default_rng(3), 4000.0) // 1000).astype(int), minlength=4)
    assert (
        hours[1] == hours[3] == 0
        and hours[0] == pytest.approx(3000, rel=0.1)
        and hours[2] == pytest.approx(1000, rel=0.15)
    )
    assert Client((Hour(0.0, 1.0),)).arrivals(np.random.default_rng(4), 10.0).size == 0


def test_windows_become_hours(tmp_path: Path) -> None:
    """Client 7: two windows of ten minutes in hour 0 (rates 6 and 3, cv 1 and 4), one in hour 2; the second day is left out."""
    rows = ["client,t_s,rate,cv,pat,p1,p2", "7,0,6,1,Gamma,1,1", "7,600,3,4,Weibull,1,1", "7,7200,1.5,2,Gamma,1,1"]
    rows += ["7,86400,600,1,Gamma,1,1", "9,0,100,1,Weibull,1,1"]
    with gzip.open(tmp_path / FILE, "wt", encoding="utf-8") as file:
        file.write("\n".join(rows) + "\n")
    first, second = read_clients(tmp_path / FILE)
    assert second.hours[0] == Hour(1.5, 2.0) and second.hours[2] == Hour(0.25, 2.0) and second.family == "Gamma"
    assert sum(hour.rate_per_s for hour in second.hours) == 1.75
    assert first.family == "Weibull" and first.hours[0].rate_per_s == pytest.approx(16.7)
    assert servegen_clients(1, tmp_path) == [first]


def test_the_sketch_has_the_busiest_clients_first() -> None:
    clients = servegen_clients(CLIENTS)
    rates = [client.rate_per_s for client in clients]
    assert len(clients) == CLIENTS and rates == sorted(rates, reverse=True)
    assert sum(rates[:3]) > sum(rates[3:]) and any(hour.rate_per_s == 0 for client in clients for hour in client.hours)


@pytest.mark.skipif(not DATA.is_dir(), reason="the shared data set is not beside the checkout")
def test_the_sketch_is_what_the_published_windows_give() -> None:
    assert servegen_clients(CLIENTS, DATA) == servegen_clients(CLIENTS)


def test_too_many_models_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="32 clients"):
        servegen_clients(33)
    with pytest.raises(TraceError, match=r"neither .* nor .* is there"):
        servegen_clients(2, tmp_path)
