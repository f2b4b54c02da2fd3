"""GPUs of two kinds: a TP group has one kind, instances and stages of a pipeline run at the pace of their own GPUs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fleetkit import STAYS, fleet
from groupkit import cluster
from simkit import H100, served

from fineserve_sim.catalog import GpuSpec, gpu
from fineserve_sim.cluster import Gpu, ScenarioError, simulate

FAST, SLOW = H100, gpu("a100-80gb")
Types = tuple[GpuSpec, ...]
ORDERS = [(FAST, SLOW), (SLOW, FAST)]


@pytest.mark.parametrize("residency", [None, STAYS], ids=["static", "fleet"])
@pytest.mark.parametrize("mixed", ORDERS, ids=["fast first", "slow first"])
def test_a_tp_group_has_gpus_of_one_kind(mixed: Types, residency: dict[str, Any] | None) -> None:
    """Two of each kind in one node: groups form within a kind, and run at its pace; a pin across kinds is refused."""

    def finish_s(types: Types, group: list[int]) -> float:
        base = fleet([(0.0, 640, 50)], residency, placement={"policy": "pinned", "groups": {"m0": [group]}})
        cards = tuple(Gpu(number, 0, spec) for number, spec in enumerate(types))
        return float(simulate(replace(base, models=(served("m0", tp=2),), gpus=cards)).finish_s[0])

    four = (mixed[0], mixed[1], mixed[0], mixed[1])
    assert finish_s(four, [0, 2]) == finish_s((mixed[0], mixed[0]), [0, 1])
    assert finish_s(four, [1, 3]) == finish_s((mixed[1], mixed[1]), [0, 1]) != finish_s(four, [0, 2])
    with pytest.raises(ScenarioError, match=r"m0 is placed on GPUs \[0, 1\], which are of several kinds"):
        finish_s(four, [0, 1])


def finish_s(system: str, types: Types, at_s: tuple[float, ...]) -> list[float]:
    """Of requests that arrive then, at instances on GPUs of these types."""
    scenario = cluster(system, [(arrival_s, 640, 50) for arrival_s in at_s], instances=len(types))
    cards = tuple(replace(card, spec=spec) for card, spec in zip(scenario.gpus, types, strict=True))
    found: list[float] = simulate(replace(scenario, gpus=cards)).finish_s.tolist()
    return found


@pytest.mark.parametrize("mixed", ORDERS, ids=["fast first", "slow first"])
def test_an_instance_runs_at_the_pace_of_its_gpu(mixed: Types) -> None:
    """Two requests at once, one an instance."""
    alone = {spec: finish_s("vllm-dp", (spec,), (0.0,))[0] for spec in mixed}
    assert sorted(finish_s("vllm-dp", mixed, (0.0, 0.0))) == sorted(alone.values())


@pytest.mark.parametrize("mixed", ORDERS, ids=["fast first", "slow first"])
def test_each_stage_of_a_pipeline_runs_at_the_pace_of_its_gpu(mixed: Types) -> None:
    """One request alone passes half the layers on each: it takes the mean of both paces."""
    fast, slow = (finish_s("vllm-pp", (spec, spec), (0.0,))[0] for spec in (FAST, SLOW))
    assert fast < slow
    assert finish_s("vllm-pp", mixed, (0.0,))[0] == pytest.approx((fast + slow) / 2)
