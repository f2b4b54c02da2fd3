"""What cannot have happened is refused by a controller, whatever kind it is; what is late, for its engine is gone, is not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fineserve_sim.policy import events
from fineserve_sim.policy.commands import DropLayers, RestoreLayers
from fineserve_sim.policy.controller import Controller, Route
from fineserve_sim.policy.events import Event
from fineserve_sim.policy.fleet.controller import FleetController
from fineserve_sim.policy.fleet.prism import PrismResidency
from fineserve_sim.policy.fleet.roster import EngineBinding, FleetModel
from fineserve_sim.policy.groups.controller import GroupController, GroupModel
from fineserve_sim.policy.groups.dispatch import dispatcher
from fineserve_sim.policy.groups.drop_plan import KunServeDrop
from fineserve_sim.policy.interfaces import (
    EngineFacts,
    EngineLoad,
    GpuSlot,
    Instance,
    LocalScheduler,
    ModelDemand,
    Request,
)
from fineserve_sim.policy.placement.kvpr import KvprPlacement
from fineserve_sim.policy.scheduling.moore_hodgson import MooreHodgson


def queue_for(engines: Sequence[int]) -> dict[tuple[int, ...], LocalScheduler | None]:
    return {tuple(engines): MooreHodgson({id: EngineFacts(100.0, 1.0, 40) for id in engines}, reserve_fraction=0.0)}


def static() -> Controller:
    return Controller({"a": [Route(0, 1.0, 40)]}, queue_for([0]))


def fleet() -> FleetController:
    """Model a on GPU 0 as engine 0, which is evicted: engine 0 is gone. Then it comes back as engine 1, and serves."""
    models = {"a": FleetModel(ModelDemand("a", 1.0, 1.0, 1, 20, 1), 40)}
    gpus = [GpuSlot(0, 0, 100), GpuSlot(1, 0, 100)]
    prism = PrismResidency({id: model.demand for id, model in models.items()}, gpus, KvprPlacement())

    def schedulers(engines: Sequence[EngineBinding]) -> dict[tuple[int, ...], LocalScheduler | None]:
        return queue_for([engine.engine for engine in engines])

    controller = FleetController(models, gpus, [Instance("a", 0, (0,), 1.0, 0)], prism, schedulers)
    controller.handle(1.0, events.EngineFailed(0, (0,)))
    controller.handle(1.0, events.RequestArrived(Request(1, "a", 1.0, 5)))
    controller.handle(1.0, events.Tick({}, {1: 100}))
    controller.handle(2.0, events.EngineReady(1))
    return controller


def groups() -> GroupController:
    """Engines 0 and 1 merge into 3; 2 was lost with its GPU and comes back as 4, which loads."""
    model = GroupModel("a", 60, 1000, 1, lambda instances: 1000 * len(instances))
    controller = GroupController(
        model,
        [(0,), (1,), (2,)],
        dispatcher("least_loaded"),
        drop=KunServeDrop(copy_bytes=50, block_bytes=1, base_bytes={0: 100, 1: 100, 2: 100, 3: 100}, node_of={}),
        migration=None,
        scale_out=None,
        stages=1,
        spares=0,
    )
    controller.handle(0.0, events.EngineFailed(2, (2,)))
    full = EngineLoad(96, 100, 60)
    (merge,) = controller.handle(0.1, events.Tick({}, {}, {0: full, 1: full}))
    assert isinstance(merge, DropLayers) and merge.engine == 3
    controller.handle(0.2, events.GpusRepaired((2,)))
    return controller


IMPOSSIBLE: dict[str, list[Event]] = {
    "static": [
        events.EngineReady(0),
        events.EngineStepped(9, {}),
        events.RequestArrived(Request(2, "b", 1.0, 5)),
        events.LayersDropped(0),
        events.PrefillEnded(0, 0, 5),
    ],
    "fleet": [
        events.EngineReady(9),
        events.EngineReady(1),
        events.EngineDrained(9),
        events.EngineDrained(1),
        events.EngineFailed(9),
        events.EngineFailed(-1),
        events.EnginesResized({9: 5}),
        events.EngineStepped(9, {}),
        events.GpusRepaired((7,)),
        events.RequestArrived(Request(2, "b", 1.0, 5)),
        events.LayersDropped(0),
        events.MigrationEnded(1),
    ],
    "groups": [
        events.PrefillEnded(0, 0, 5),
        events.EngineReady(9),
        events.EngineReady(0),
        events.EngineDrained(9),
        events.EngineDrained(0),
        events.EngineFailed(9),
        events.Loads({9: EngineLoad(0, 0)}),
        events.Tick({}, {}, {9: EngineLoad(0, 0)}),
        events.RequestArrived(Request(2, "b", 1.0, 5)),
        events.LayersDropped(9),
        events.LayersDropped(0),
        events.LayersKept(9),
        events.LayersKept(0),
        events.LayersKept(4),
        events.LayersRestored(9),
        events.LayersRestored(0),
        events.MigrationEnded(5),
        events.GpusRepaired((9,)),
        events.GpusRepaired((1,)),
        events.EngineStepped(0, {}),
    ],
}
MAKE = {"static": static, "fleet": fleet, "groups": groups}


@pytest.mark.parametrize(("kind", "event"), [(kind, event) for kind, found in IMPOSSIBLE.items() for event in found])
def test_an_event_that_cannot_be_raises(kind: str, event: Event) -> None:
    said = "that cannot be|no scheduler|not there|repaired|to be merged|to migrate|engines (of|that come)"
    with pytest.raises(ValueError, match=said):
        MAKE[kind]().handle(3.0, event)


def test_a_request_does_not_come_twice() -> None:
    controller = static()
    controller.handle(1.0, events.RequestArrived(Request(1, "a", 1.0, 5)))
    with pytest.raises(ValueError, match="request 1"):
        controller.handle(1.0, events.RequestArrived(Request(1, "a", 1.0, 5)))


@pytest.mark.parametrize(
    "event",
    [
        events.EngineReady(0),
        events.EngineDrained(0),
        events.EngineFailed(0),
        events.EnginesResized({0: 5}),
        events.RequestAborted(99),
    ],
)
def test_what_a_fleet_hears_too_late_changes_nothing(event: Event) -> None:
    assert fleet().handle(3.0, event) == []


@pytest.mark.parametrize(
    "event",
    [
        events.EngineReady(2),
        events.EngineDrained(2),
        events.EngineFailed(2),
        events.LayersDropped(2),
        events.LayersKept(2),
        events.LayersRestored(2),
        events.Loads({2: EngineLoad(0, 0)}),
    ],
)
def test_what_groups_hear_too_late_changes_nothing(event: Event) -> None:
    assert groups().handle(3.0, event) == []


def test_what_can_be_is_heard() -> None:
    """The same groups: the merge ends, the instance serves, the pipeline splits and drains."""
    controller = groups()
    controller.handle(1.0, events.LayersDropped(3))
    controller.handle(1.0, events.EngineReady(4))
    empty = EngineLoad(1, 100)
    (split,) = controller.handle(5.0, events.Tick({}, {}, {3: empty, 4: empty}))
    assert isinstance(split, RestoreLayers) and split.engine == 3
    controller.handle(6.0, events.LayersRestored(3))
    assert controller.handle(7.0, events.EngineDrained(3)) == []
