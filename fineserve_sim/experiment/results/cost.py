"""Dollars: what an hour of a GPU costs, and what follows for a cell.

The price is the file's (``cluster.usd_per_gpu_hour``), or the catalog's list price of the GPU, which is dated and a default.
All GPUs of the cluster are paid for, busy or not, and whole, however MIG divides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fineserve_sim.catalog import list_prices
from fineserve_sim.experiment.file.resolve import Setup


class Price(NamedTuple):
    """Dollars of a GPU-hour, None where nobody knows them; ``default``: by the catalog, read off ``source`` on a day."""

    usd_per_gpu_hour: float | None
    default: bool
    source: str
    read_on: str


def price_of(setup: Setup) -> Price:
    """The price of the GPUs of a setup."""
    name = setup.gpu_name
    if setup.usd_per_gpu_hour is not None:
        return Price(setup.usd_per_gpu_hour, False, "given", "")
    listed = list_prices()
    return Price(listed.usd_per_gpu_hour.get(name), True, f"list price of {listed.provider}", listed.read_on)


def costs(setup: Setup, metrics: Mapping[str, Any]) -> dict[str, float | None]:
    """Dollars an hour, a million output tokens and a thousand requests within all their limits; None where there is none."""
    usd = price_of(setup).usd_per_gpu_hour

    def of(metric: str) -> float | None:
        hours = metrics[metric]["mean"]
        return None if usd is None or hours is None else float(usd * hours)

    return {
        "usd_per_hour": None if usd is None else usd * setup.bought,
        "usd_per_mtoken": of("gpu_hours_per_mtoken"),
        "usd_per_1000_within": of("gpu_hours_per_1000_within"),
    }
