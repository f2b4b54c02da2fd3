"""One replica of the model on every TP group."""

from __future__ import annotations

import pytest

from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement.static import ReplicasPlacement

GIB = 2**30


def demand(id: str = "m", tp: int = 2, weight_gib: int = 30) -> ModelDemand:
    return ModelDemand(id, 8.0, 1.0, tp, weight_gib * GIB, 1000)


def test_every_group_that_holds_the_weights_gets_a_replica() -> None:
    gpus = [GpuSlot(i, i // 4, (20 if i == 5 else 70) * GIB) for i in range(8)]
    placement = ReplicasPlacement().place([demand()], gpus)
    assert [instance.gpus for instance in placement.instances] == [(0, 1), (2, 3), (6, 7)]
    assert sum(instance.rate_per_s for instance in placement.instances) == pytest.approx(8.0)
    assert placement.unplaced == ()


def test_a_model_that_fits_nowhere_is_unplaced_and_two_models_are_refused() -> None:
    gpus = [GpuSlot(0, 0, 20 * GIB)]
    assert ReplicasPlacement().place([demand(tp=1)], gpus).unplaced == ("m",)
    with pytest.raises(ValueError, match="replicas of one model"):
        ReplicasPlacement().place([demand("a"), demand("b")], gpus)
