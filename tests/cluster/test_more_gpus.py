"""More GPUs let Algorithm 1 ask for more replicas (docs/reproduction/fineserve.md, Fig. 11)."""

from __future__ import annotations

import pytest

from fineserve_sim.catalog import gpu, model, precision
from fineserve_sim.cluster import EngineSettings
from fineserve_sim.cluster.compose.facts import demand_of
from fineserve_sim.cluster.scenario import ServedModel
from fineserve_sim.policy.placement.fineserve import base_footprint

AZURE = {"rate_per_s": 55.3 / 12, "mean_prompt_tokens": 1155, "mean_output_tokens": 211}
"""A twelfth of Azure's conversations of 2023 at ten times their rate."""


@pytest.mark.parametrize(
    ("gpus", "replicas", "in_time"), [(8, 3, False), (10, 3, False), (12, 11, True), (16, 11, True)]
)
def test_a_70b_gets_as_many_replicas_as_bring_two_prompts_within_the_slo(
    gpus: int, replicas: int, in_time: bool
) -> None:
    served = ServedModel("70b", model("llama-3.1-70b"), precision("awq"), tp=1, ttft_slo_s=1.0, **AZURE)
    found = base_footprint(demand_of(served, gpu("h100-sxm"), EngineSettings(), slope=False), gpus)
    assert (found.replicas, found.feasible) == (replicas, in_time)
    if in_time:
        assert (found.point.batch, round(found.point.ttft_s, 2)) == (2, 0.98)
