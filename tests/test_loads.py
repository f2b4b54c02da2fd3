"""Loads that a rule sets: the search finds them, and every place in the experiments where one stands has the same number."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fineserve_sim.experiment import load_experiment
from fineserve_sim.experiment.run.rates import base_rates

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def loads() -> ModuleType:
    """The module of the folder benchmarks, which is no installed package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        from benchmarks import loads
    return loads


@pytest.mark.parametrize("start", [0.1, 3.0, 47.3, 1000.0])
@pytest.mark.parametrize("power", [0.5, 1, 6])
def test_the_highest_load_on_the_grid_is_found_from_both_sides(loads: ModuleType, start: float, power: float) -> None:
    asked: list[float] = []

    def quantity(load: float) -> float:
        asked.append(load)
        return float((44.3 / load) ** power) * 2.1

    assert loads.highest(quantity, start, 2.1, 0.5) == 44
    assert len(asked) == len(set(asked)), "a value was simulated twice"
    assert len(asked) < 40


def test_a_step_of_the_quantity_is_found_as_well(loads: ModuleType) -> None:
    assert loads.highest(lambda load: 3.0 if load <= 24 else 0.5, 80, 1.0, 8) == 24


def test_a_rule_that_allows_nothing_says_so(loads: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"allows no load: 0\.5 for 1 at 8"):
        loads.highest(lambda load: 0.5, 80, 1.0, 8)


def test_every_place_of_a_load_has_the_same_number(loads: ModuleType) -> None:
    for rule in loads.RULES:
        stands = {place: loads.stands_at(place) for place in rule.places}
        assert len(set(stands.values())) == 1, f"{rule.name} stands as {stands}"
        assert rule.in_file / rule.step == pytest.approx(round(rule.in_file / rule.step)), (
            f"{rule.name} is off its grid"
        )


def test_prisms_other_loads_follow_that_of_eight_models() -> None:
    """The most popular model has as many requests whatever the trace and the number of models."""
    arena = [("workload.arrivals.process", "arena")]
    others = [
        _popular_per_s("prism_fig07", *arena, ("workload.arrivals.scale", "780")),
        _popular_per_s("prism_fig07_gpus"),
        _popular_per_s("prism_fig07_gpus", *arena, ("workload.arrivals.scale", "532")),
        _popular_per_s("prism_fig12"),
    ]
    assert others == pytest.approx([_popular_per_s("prism_fig07")] * 4, rel=0.003)


def _popular_per_s(name: str, *overrides: tuple[str, str]) -> float:
    experiment = load_experiment(ROOT / "experiments" / f"{name}.yaml", overrides)
    return next(iter(base_rates(experiment.setup, None).values()))


def test_a_row_tells_the_load_in_the_files_and_the_one_by_the_rule(
    loads: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cell(lab: object, name: str, overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        rate = overrides["sweeps"][0]["at"]["rate_scale"]
        return {"metrics": {"kv_demand_mean": {"mean": 0.6 * rate / 50}}}

    monkeypatch.setattr(loads.Lab, "cell", cell)
    assert loads.main(["--only", "KunServe, BurstGPT"]) == 0
    in_file = next(rule for rule in loads.RULES if rule.name == "KunServe, BurstGPT").in_file
    assert f"KunServe, BurstGPT: {in_file:g} in the files" in (printed := capsys.readouterr().out)
    assert "by the rule 50 (1)" in printed
