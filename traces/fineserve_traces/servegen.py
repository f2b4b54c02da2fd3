"""Loads of many models after ServeGen's client model (arXiv 2505.09999), from a sketch of its published clients.

ServeGen describes a production load as a sum of clients. Each has a rate that changes over the day. Within a stretch of
time the gaps between its requests follow a Gamma or a Weibull distribution with a coefficient of variation of its own. A
few clients make most of the requests; many are there for some hours only. Here every model serves one client.

A run plays one day: hour after hour, each as long as a 24th of the run. Gaps start in equilibrium in every hour: the first is
what is left of a gap that holds the hour's start. So the expected requests are rate times time at any variation. An ordinary
renewal process would have about (cv^2 - 1) / 2 more of them.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator

from fineserve_traces.arrivals import weibull_shape
from fineserve_traces.schema import FloatArray, TraceError
from fineserve_traces.sketch import sketch_document

NAME = "servegen_clients"
FILE = "servegen_rates_m-large.csv.gz"
CLIENTS, HOURS, HOUR_S, WINDOW_S, FIRST_S = 32, 24, 3600.0, 600.0, 0.0
"""The clients with the most requests on the pool's first day, its busiest; the published windows last ten minutes."""

Family = Literal["Gamma", "Weibull"]
_Gaps = Callable[[int], FloatArray]


class Hour(NamedTuple):
    """Mean requests per second in one hour, and the coefficient of variation of the gaps between them."""

    rate_per_s: float
    cv: float


@dataclass(frozen=True, slots=True)
class Client:
    """Hours of a day, with one family of gaps."""

    hours: tuple[Hour, ...]
    family: Family = "Gamma"

    @property
    def rate_per_s(self) -> float:
        """Over the whole day."""
        return sum(hour.rate_per_s for hour in self.hours) / len(self.hours)

    def arrivals(self, rng: Generator, duration_s: float, scale: float = 1.0) -> FloatArray:
        """Sorted arrival times in [0, duration_s), in which the day passes; ``scale`` multiplies the requests of each hour."""
        return np.concatenate([np.empty(0), *self.pieces(rng, duration_s, scale)])

    def pieces(self, rng: Generator, duration_s: float, scale: float = 1.0) -> Iterator[FloatArray]:
        """As ``arrivals``, an hour at a time."""
        length_s = duration_s / len(self.hours)
        for index, hour in enumerate(self.hours):
            if hour.rate_per_s > 0:
                yield index * length_s + _renewals(rng, hour.rate_per_s * scale, hour.cv, length_s, self.family)


def _renewals(rng: Generator, rate_per_s: float, cv: float, length_s: float, family: Family) -> FloatArray:
    """Arrivals within [0, length_s) of a renewal process in equilibrium."""
    first, gaps = _gamma(rng, cv) if family == "Gamma" else _weibull(rng, cv)
    times = np.array([first / rate_per_s])
    while times[-1] < length_s:
        more = times[-1] + np.cumsum(gaps(256)) / rate_per_s
        times = np.concatenate([times, more])
    return times[times < length_s]


def _gamma(rng: Generator, cv: float) -> tuple[float, _Gaps]:
    """The first arrival and a source of gaps with mean 1. The gap that holds a moment is longer than others: Gamma with a shape
    larger by one; the moment lies anywhere in it."""
    shape = 1 / cv**2
    return rng.random() * rng.gamma(shape + 1) / shape, lambda n: rng.gamma(shape, 1 / shape, n)


def _weibull(rng: Generator, cv: float) -> tuple[float, _Gaps]:
    """As ``_gamma``: the k-th power of a Weibull gap is exponential, that of one which holds a moment Gamma(1 + 1/k)."""
    shape = weibull_shape(cv)
    mean = math.gamma(1 + 1 / shape)
    return rng.random() * rng.gamma(1 + 1 / shape) ** (1 / shape) / mean, lambda n: rng.weibull(shape, n) / mean


def servegen_clients(models: int, data_dir: str | Path | None = None) -> list[Client]:
    """The clients of so many models, the busiest first: from the sketch, or from the published windows in ``data_dir`` (or its
    ``traces/``). Raises TraceError for more models than clients, and when ``data_dir`` does not hold the file."""
    if not 1 <= models <= CLIENTS:
        raise TraceError(f"servegen has {CLIENTS} clients, one a model; {models} models are too many or none")
    if data_dir is None:
        document = sketch_document(NAME)
        return [
            Client(tuple(Hour(*hour) for hour in zip(entry["rates"], entry["cvs"], strict=True)), entry["family"])
            for entry in document["clients"][:models]
        ]
    places = [Path(data_dir) / "traces" / FILE, Path(data_dir) / FILE]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise TraceError(f"{NAME}: neither {places[0]} nor {places[1]} is there")
    return read_clients(found)[:models]


def read_clients(path: Path) -> list[Client]:
    """The busiest clients of one day of ServeGen's windows (columns client, t_s, rate, cv, pat)."""
    windows: defaultdict[str, list[tuple[int, float, float, str]]] = defaultdict(list)
    with gzip.open(path, "rt", encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            hour = int((float(row["t_s"]) - FIRST_S) // HOUR_S)
            if 0 <= hour < HOURS:
                windows[row["client"]].append((hour, float(row["rate"]), float(row["cv"]), row["pat"]))
    busiest = sorted(windows, key=lambda client: (-sum(rate for _, rate, _, _ in windows[client]), int(client)))
    return [_client(windows[client]) for client in busiest[:CLIENTS]]


def _client(windows: Sequence[tuple[int, float, float, str]]) -> Client:
    """Hours from windows: rates add up, variations and the family count by requests."""
    hours = []
    for hour in range(HOURS):
        here = [(rate, cv) for when, rate, cv, _ in windows if when == hour]
        total = sum(rate for rate, _ in here)
        cv = sum(rate * cv for rate, cv in here) / total if total else 1.0
        hours.append(Hour(_rounded(total * WINDOW_S / HOUR_S), _rounded(min(max(cv, 0.05), 20.0))))
    gamma = _requests(windows, "Gamma") >= _requests(windows, "Weibull")
    return Client(tuple(hours), "Gamma" if gamma else "Weibull")


def _requests(windows: Iterable[tuple[int, float, float, str]], family: str) -> float:
    return sum(rate for _, rate, _, pattern in windows if pattern == family)


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
