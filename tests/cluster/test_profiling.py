"""What placement is told of a model before it runs."""

from __future__ import annotations

import pytest
from simkit import H100, gpus, served, trace_of

from fineserve_sim.cluster import EngineSettings, Scenario
from fineserve_sim.cluster.clock import Clock
from fineserve_sim.cluster.compose import facts
from fineserve_sim.cluster.compose.facts import demand_of, demands_of
from fineserve_sim.cluster.compose.place import place
from fineserve_sim.systems import load_systems


@pytest.mark.parametrize(("token_budget", "limited"), [(512, True), (1, False)])
def test_memory_has_a_slope_only_where_it_limits_an_engine(token_budget: int, limited: bool) -> None:
    """At a token a step an engine computes too little to fill the larger of two pools."""
    settings = EngineSettings(token_budget=token_budget)
    demand = demand_of(served(prompt=512, output=16), H100, settings, slope=True)
    assert (demand.mme_tokens_per_byte is not None) == limited


def test_the_slope_hardly_depends_on_how_often_the_sweep_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """These requests last 40 ms: few samples see them, and one before the first step would count for much."""
    slopes = []
    for samples in (2, 40):
        monkeypatch.setattr(facts, "SAMPLES_A_REQUEST", samples)
        facts._measured_mme.cache_clear()
        demand = demand_of(served(prompt=64, output=8), H100, EngineSettings(), slope=True)
        slopes.append(demand.mme_tokens_per_byte)
    facts._measured_mme.cache_clear()
    assert slopes[0] == pytest.approx(slopes[1], rel=0.05)


@pytest.mark.pure_python  # a compiled class does not take a method of another
def test_a_placement_simulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that it asks for is there before, FineServe's marginal efficiency too, and no cache has a part in that."""
    scenario = Scenario(load_systems()["fineserve"], (served(prompt=512),), gpus(2), trace_of([(0.0, 64, 16)]))
    demands = demands_of(scenario)
    assert demands["m"].mme_tokens_per_byte is not None
    facts._measured_mme.cache_clear()

    def step(clock: Clock) -> None:
        raise AssertionError("a placement simulates")

    monkeypatch.setattr(Clock, "step", step)
    placement, _ = place(scenario, demands)
    assert placement.instances
    with pytest.raises(AssertionError, match="simulates"):
        demands_of(scenario)  # the guard works
