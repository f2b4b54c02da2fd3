"""Ticks of a fleet come at multiples of their distance, whatever it is: no rounding stops the clock or makes it race."""

from __future__ import annotations

from typing import Any

import pytest
from fleetkit import PRISM, QLM, fleet
from lawkit import bounded

from fineserve_sim.cluster import Fate


@pytest.mark.parametrize("tick_s", [0.1, 0.2, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("residency", [PRISM, QLM], ids=["prism", "qlm"])
def test_ticks_are_evenly_apart(residency: dict[str, Any], tick_s: float) -> None:
    run = bounded(fleet([(0.0, 64, 8), (3.0, 64, 8)], residency | {"tick_s": tick_s}))
    assert run.result.fate.tolist() == [Fate.FINISHED] * 2
    times = [line["now_s"] for line in run.log if line.get("event") == "Tick"]
    assert times == pytest.approx([number * tick_s for number in range(len(times))])
    assert 3.0 - tick_s <= times[-1] <= run.result.end_s
