"""What placement is told of a model before it runs."""

from __future__ import annotations

import pytest
from simkit import H100, served

from fineserve_sim.cluster import EngineSettings
from fineserve_sim.cluster.compose.place import demand_of


@pytest.mark.parametrize(("token_budget", "limited"), [(512, True), (1, False)])
def test_memory_has_a_slope_only_where_it_limits_an_engine(token_budget: int, limited: bool) -> None:
    """At a token a step an engine computes too little to fill the larger of two pools."""
    settings = EngineSettings(token_budget=token_budget)
    demand = demand_of(served(prompt=512, output=16), H100, settings, slope=True)
    assert (demand.mme_tokens_per_byte is not None) == limited
