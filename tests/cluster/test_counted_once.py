"""What controllers count: a request that comes again is one request, and demand grows when it grows look by look."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fineserve_sim.policy.events import EngineFailed, RequestArrived, RequestReturned, Tick
from fineserve_sim.policy.fleet.controller import RATE_WINDOW_S, FleetController
from fineserve_sim.policy.fleet.roster import EngineBinding, FleetModel
from fineserve_sim.policy.fleet.views import FleetView, Suggestion
from fineserve_sim.policy.groups.dispatch import GroupEngine, Phase
from fineserve_sim.policy.groups.drop_plan import ScaleOut
from fineserve_sim.policy.interfaces import EngineLoad, GpuSlot, Instance, LocalScheduler, ModelDemand, Request


class Watch:
    """A residency policy that does nothing and remembers the rates that it was shown."""

    def suggest(self, now: float, view: FleetView) -> Sequence[Suggestion]:
        self.rates_per_s = dict(view.rates_per_s)
        return []


def unscheduled(engines: Sequence[EngineBinding]) -> dict[tuple[int, ...], LocalScheduler | None]:
    return {(binding.engine,): None for binding in engines}


def test_a_request_that_lost_its_engine_is_no_new_demand() -> None:
    watch = Watch()
    models = {"a": FleetModel(ModelDemand("a", 1.0, 1.0, 1, 10, 1), 40)}
    controller = FleetController(models, [GpuSlot(0, 0, 100)], [Instance("a", 0, (0,), 1.0, 0)], watch, unscheduled)
    controller.handle(80.0, RequestArrived(Request(7, "a", 80.0, 5)))
    controller.handle(81.0, EngineFailed(0))
    controller.handle(81.0, RequestReturned(Request(7, "a", 80.0, 9)))  # what it generated is part of its prompt now
    controller.handle(82.0, Tick({}, {0: 90}))
    assert watch.rates_per_s["a"] == 1 / RATE_WINDOW_S


def views(demand_blocks: int) -> list[GroupEngine]:
    """A pipeline of two, whose layers were dropped, with so much KV in use."""
    load = EngineLoad(used_blocks=demand_blocks, capacity_blocks=100, running=1)
    return [GroupEngine(0, (0, 1), Phase.SERVING, load, 0)]


def asks(samples: int, demands: list[int]) -> list[int]:
    """The looks at which a new instance is asked for."""
    policy = ScaleOut(samples, pause_s=0.0)
    return [number for number, blocks in enumerate(demands) if policy.tick(number * 0.1, views(blocks))]


@pytest.mark.parametrize("demands", [[10, 90, 80, 70, 60], [90, 80, 70, 60, 50, 95, 40, 45, 44]])
def test_demand_that_fell_in_between_does_not_scale_out(demands: list[int]) -> None:
    assert not asks(5, demands)


def test_demand_that_goes_on_growing_scales_out() -> None:
    assert asks(5, [10, 20, 30, 40, 50, 60, 70])
    assert not asks(5, [10, 20, 30])


def test_a_single_look_may_be_enough() -> None:
    assert asks(1, [10, 20, 30])
    assert not asks(1, [30, 20, 10])
