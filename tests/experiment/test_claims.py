"""Verdicts on claims, on hand-made cells."""

from __future__ import annotations

from typing import Any

import pytest

from fineserve_sim.experiment.file.schema import Claim
from fineserve_sim.experiment.results.claims import evaluate_claims


def cell(system: str, scale: float, attainment: float, half_width: float = 0.01, sweep: str = "slo") -> dict[str, Any]:
    own = {"mean": attainment, "half_width": half_width}
    return {
        "sweep": sweep,
        "system": system,
        "axes": {"slo_scale": scale},
        "metrics": {"ttft_attainment": own | {"by_model": {"A": {"mean": attainment / 2, "half_width": None}}}},
    }


CELLS = [
    cell("f", 10, 0.9),
    cell("f", 20, 0.96),
    cell("p", 10, 0.5),
    cell("p", 20, 0.48),
    cell("f", 20, 0.96, sweep="rate"),
]


def judged(cells: list[dict[str, Any]] = CELLS, **claim: Any) -> dict[str, Any]:
    defaults = {"id": "x", "measure": "ratio", "metric": "ttft_attainment", "of": "f", "over": "p"}
    open_axes = ("order", "max_difference", "mean_ratio")
    at = {"sweep": "slo"} | ({} if claim.get("measure") in open_axes else {"slo_scale": 20})
    whole = Claim.model_validate(defaults | {"at": at} | claim)
    (entry,) = evaluate_claims([whole], cells, PLACEMENTS)
    return entry


PLACEMENTS = [
    {
        "system": "f",
        "slo_scale": 20,
        "instances": [{"model": m, "replica": 0, "gpus": [g]} for m, g in (("C", 0), ("A", 1))],
    }
]


@pytest.mark.parametrize(
    ("paper", "verdict"),
    [
        (2.2, "reproduced"),
        (4.0, "direction only"),
        (0.5, "not reproduced"),
        ("> 1", "reproduced"),
        ("<= 1.5", "not reproduced"),
    ],
)
def test_ratio(paper: float | str, verdict: str) -> None:
    entry = judged(paper=paper)
    assert entry["ours"] == pytest.approx(2.0)
    assert entry["verdict"] == verdict


@pytest.mark.parametrize(
    ("paper", "verdict"),
    [
        ("> 0.94", "reproduced"),
        ("> 0.955", "direction only"),
        ("> 0.965", "not reproduced"),
        (">= 0.965", "reproduced"),
        (">= 0.98", "not reproduced"),
        ("<= 0.955", "reproduced"),
        ("< 0.965", "direction only"),
    ],
)
def test_comparisons_respect_the_interval(paper: str, verdict: str) -> None:
    """The value is 0.96 with a half-width of 0.01."""
    assert judged(paper=paper, measure="value")["verdict"] == verdict


def test_value_of_a_model_and_difference() -> None:
    assert judged(paper=0.48, measure="value", model="A")["verdict"] == "reproduced"
    assert judged(paper=1, measure="value")["verdict"] == "reproduced"
    assert judged(paper=2, measure="value")["verdict"] == "not reproduced"
    assert judged(paper=0.1, measure="difference")["verdict"] == "direction only"
    assert judged(paper=-0.1, measure="difference")["verdict"] == "not reproduced"


def test_no_effect_is_not_a_small_one() -> None:
    """1.2 is claimed with a tolerance of 0.24, but a ratio of 1 shows nothing and one of 1.01 +- 0.015 hardly more."""
    same = [cell("f", 20, 0.96), cell("p", 20, 0.96)]
    assert judged(same, paper=1.2)["verdict"] == "not reproduced"
    barely = [cell("f", 20, 0.97), cell("p", 20, 0.96)]
    assert judged(barely, paper=1.2)["verdict"] == "direction only"
    clear = [cell("f", 20, 0.96), cell("p", 20, 0.86)]
    assert judged(clear, paper=1.2)["verdict"] == "reproduced"


def test_one_system_at_two_places() -> None:
    entry = judged(paper="> 1", over="f", over_at={"slo_scale": 10})
    assert entry["ours"] == pytest.approx(0.96 / 0.9)


def test_the_largest_difference_says_where() -> None:
    entry = judged(paper=0.5, measure="max_difference")
    assert entry["ours"] == pytest.approx(0.48)
    assert entry["verdict"] == "reproduced"
    assert "slo_scale 20" in entry["note"]


def test_order_holds_fails_and_ties() -> None:
    assert judged(paper="> 0", measure="order")["verdict"] == "reproduced"
    reversed_once = [*CELLS, cell("f", 30, 0.7), cell("p", 30, 0.8)]
    entry = judged(reversed_once, paper="> 0", measure="order")
    assert entry["verdict"] == "direction only"
    assert "Reversed at: slo_scale 30" in entry["note"]
    within_noise = [*CELLS, cell("f", 30, 0.795), cell("p", 30, 0.8)]
    assert judged(within_noise, paper="> 0", measure="order")["verdict"] == "reproduced"
    ties = [cell("f", 1, 1.0, 0.0), cell("p", 1, 1.0, 0.0)]
    assert judged(ties, paper="> 0", measure="order")["verdict"] == "not reproduced"
    assert judged(paper="> 0", measure="order", of="p", over="f")["verdict"] == "not reproduced"


def test_placement_and_its_order() -> None:
    of_placement = {"measure": "placement", "metric": None, "over": None}
    assert judged(paper=["C:0", "A:1"], **of_placement)["verdict"] == "reproduced"
    assert judged(paper=["A:1", "C:0"], **of_placement)["verdict"] == "direction only"
    assert judged(paper=["A:0", "C:1"], **of_placement)["verdict"] == "not reproduced"


def test_an_input_is_never_counted() -> None:
    assert judged(paper=2.0, calibration=True)["verdict"] == "input"


def test_a_mean_of_ratios_over_a_sweep() -> None:
    """0.9 / 0.5 and 0.96 / 0.48, with half the root of the sum of their squared intervals."""
    found = judged(measure="mean_ratio", paper=1.9)
    assert found["ours"] == pytest.approx((1.8 + 2.0) / 2) and found["verdict"] == "reproduced"
    assert found["half_width"] == pytest.approx(
        0.5
        * ((1.8 * (0.01 / 0.9)) ** 2 + (1.8 * 0.02) ** 2 + (2 * (0.01 / 0.96)) ** 2 + (2 * (0.01 / 0.48)) ** 2) ** 0.5
    )
    assert found["note"] == "Over 2 points."
    assert judged(measure="mean_ratio", paper=4)["verdict"] == "direction only"
    assert judged(measure="mean_ratio", paper=0.5)["verdict"] == "not reproduced"
