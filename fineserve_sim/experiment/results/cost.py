"""Dollars: the price of a GPU-hour, and the costs of a cell that follow from it.

The price is the file's (``usd_per_gpu_hour``), or the catalog's list price of the GPU, which is dated and a default.
All GPUs of the cluster are paid for, busy or not, and whole, however MIG divides them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fineserve_sim.catalog import list_prices
from fineserve_sim.experiment.file.gpus import Bought
from fineserve_sim.experiment.file.resolve import Setup


class Price(NamedTuple):
    """Dollars of a GPU-hour, None where the price is not known; ``default``: by the catalog, read off ``source`` on a day."""

    usd_per_gpu_hour: float | None
    default: bool
    source: str
    read_on: str


def price_of(setup: Setup) -> Price:
    """The price of the GPUs of a setup: the mean of several kinds, and a default where one of them is a default."""
    each = [_price(kind) for kind in setup.kinds]
    told = next((price for price in each if price.default), each[0])
    if len(each) == 1:
        return told
    hourly = [kind["usd_per_hour"] for kind in by_kind(setup)]
    return told._replace(usd_per_gpu_hour=None if None in hourly else sum(hourly) / setup.bought)


def _price(kind: Bought) -> Price:
    if kind.usd_per_gpu_hour is not None:
        return Price(kind.usd_per_gpu_hour, False, "given", "")
    listed = list_prices()
    return Price(listed.usd_per_gpu_hour.get(kind.gpu), True, f"list price of {listed.provider}", listed.read_on)


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


def by_kind(setup: Setup) -> list[dict[str, Any]]:
    """How many GPUs there are of each kind, and dollars an hour of one and of all."""
    return [_told(kind) for kind in setup.kinds]


def _told(kind: Bought) -> dict[str, Any]:
    usd = _price(kind).usd_per_gpu_hour
    hourly = None if usd is None else usd * kind.count
    return {"gpu": kind.gpu, "count": kind.count, "usd_per_gpu_hour": usd, "usd_per_hour": hourly}
