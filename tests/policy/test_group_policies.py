"""Dispatch, Llumnix migration, and KunServe's trigger, restore and scale-out decisions on hand-made views."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.commands import Activate, Dispatch, DropLayers, Migrate
from fineserve_sim.policy.events import (
    EngineFailed,
    EngineReady,
    GpusRepaired,
    Loads,
    MigrationEnded,
    PrefillEnded,
    RequestArrived,
    RequestReturned,
    Tick,
)
from fineserve_sim.policy.groups.controller import GroupController, GroupModel
from fineserve_sim.policy.groups.dispatch import (
    DispatchPolicy,
    GroupEngine,
    LlumnixMigration,
    Phase,
    dispatcher,
    freeness,
)
from fineserve_sim.policy.groups.drop_plan import DropPlan, KunServeDrop, ScaleOut
from fineserve_sim.policy.groups.roles import Roles, split_of
from fineserve_sim.policy.interfaces import EngineLoad, Request

BLOCK = 1000


def view(
    engine: int,
    used: int = 0,
    queued: int = 0,
    *,
    instances: tuple[int, ...] | None = None,
    phase: Phase = Phase.SERVING,
    **load: Any,
) -> GroupEngine:
    defaults = {"capacity_blocks": 100, "head_blocks": min(queued, 5), "running": max(1, used // 10)}
    here = EngineLoad(used_blocks=used, queued_blocks=queued, **(defaults | load))
    return GroupEngine(engine, instances or (engine,), phase, here, 0)


def chosen(policy: DispatchPolicy, views: Sequence[GroupEngine]) -> int | None:
    """The choice among these alone, told one after the other."""
    for one in views:
        policy.offer(one)
    engine = policy.choose()
    for one in views:
        policy.withdraw(one.id)
    return engine


def test_round_robin_goes_around_the_engines_that_there_are() -> None:
    policy = dispatcher("round_robin")
    three = [view(0), view(1), view(2)]
    assert [chosen(policy, three) for _ in range(4)] == [0, 1, 2, 0]
    assert [chosen(policy, [view(7), view(0)]) for _ in range(3)] == [7, 0, 7]
    assert policy.choose() is None


def test_least_loaded_compares_demand_with_capacity() -> None:
    large = view(1, used=120, capacity_blocks=400)
    assert chosen(dispatcher("least_loaded", per="capacity"), [view(0, used=40), large]) == 1
    assert chosen(dispatcher("least_loaded"), [view(1, used=40), view(0, used=40)]) == 0
    queues = [view(0, used=50, queued=20), view(1, used=60)]
    assert chosen(dispatcher("least_loaded", queued="all"), queues) == 1
    assert chosen(dispatcher("least_loaded", queued="head"), queues) == 0


def test_by_instance_a_pair_that_has_just_dropped_draws_no_more_than_its_share() -> None:
    """Two instances at 95 % of 100 blocks drop and have 266 together: 71 % of their memory, and 95 blocks each as before."""
    pair = view(1, used=190, instances=(1, 2), capacity_blocks=266)
    assert chosen(dispatcher("least_loaded", per="capacity"), [view(0, used=90), pair]) == 1
    assert chosen(dispatcher("least_loaded", per="instance"), [view(0, used=90), pair]) == 0
    assert chosen(dispatcher("least_loaded", per="instance"), [view(0, used=96), pair]) == 1
    queued = view(1, used=170, queued=30, instances=(1, 2), capacity_blocks=266)
    assert chosen(dispatcher("least_loaded", queued="all", per="instance"), [view(0, used=90), queued]) == 0
    assert chosen(dispatcher("least_loaded", queued="head", per="instance"), [view(0, used=90), queued]) == 1


def test_least_queued_looks_at_the_prefills_that_wait_if_there_is_room() -> None:
    pair = view(1, used=100, queued=30, instances=(1, 2), capacity_blocks=266)
    assert chosen(dispatcher("least_queued"), [view(0, used=10, queued=20), pair]) == 1
    assert chosen(dispatcher("least_queued"), [view(0, used=90, queued=10), pair]) == 1  # the first has no room
    assert chosen(dispatcher("least_queued"), [view(0, used=90, queued=10), view(3, used=99, queued=9)]) == 3
    assert chosen(dispatcher("least_queued"), [view(0, used=20), view(3, used=10)]) == 3


def test_freeness_is_free_blocks_a_running_request() -> None:
    assert freeness(view(0, used=40, running=4).load) == 15
    assert freeness(view(0, used=40, queued=70, running=4).load, "all") == -2.5
    assert freeness(view(0, used=0, running=0).load) == 100
    assert (
        chosen(dispatcher("freeness", queued="head"), [view(0, used=40, running=4), view(1, used=40, running=3)]) == 1
    )


loads = st.builds(
    EngineLoad,
    used_blocks=st.integers(0, 60),
    capacity_blocks=st.sampled_from([60, 100]),
    queued_blocks=st.integers(0, 60),
    head_blocks=st.integers(0, 5),
    running=st.integers(0, 4),
)
told = st.lists(st.tuples(st.integers(0, 4), st.none() | loads), max_size=30)


@given(told, st.sampled_from(["least_loaded", "least_queued", "freeness"]), st.sampled_from(["all", "head"]))
def test_a_choice_is_the_lowest_rank_of_all_that_was_told(
    told: list[tuple[int, EngineLoad | None]], kind: str, queued: Literal["all", "head"]
) -> None:
    """However loads change, come and go: the heap answers as one that is told what there is now, and nothing before."""
    policy, known = dispatcher(kind, queued=queued), dict[int, GroupEngine]()
    for engine, load in told:
        if load is None:
            policy.withdraw(engine)
            known.pop(engine, None)
        else:
            known[engine] = GroupEngine(engine, (engine,), Phase.SERVING, load, 0)
            policy.offer(known[engine])
        assert policy.choose() == chosen(dispatcher(kind, queued=queued), list(known.values()))


def _movable(group: int, used: int, running: int, blocks: int = 4) -> GroupEngine:
    return view(group, used=used, running=running, shortest=10 + group, shortest_blocks=blocks)


def test_the_fullest_gives_its_shortest_to_the_freest() -> None:
    groups = [_movable(0, 95, 10), _movable(1, 20, 4), _movable(2, 90, 10), _movable(3, 40, 4)]
    moves = LlumnixMigration(out_blocks=3, in_blocks=10).tick(groups)
    assert moves == [Migrate(10, 0, 1), Migrate(12, 2, 3)]


def test_in_a_cluster_wide_spike_nothing_moves() -> None:
    assert LlumnixMigration().tick([_movable(0, 95, 10), _movable(1, 96, 10)]) == []


def test_a_request_that_does_not_fit_stays() -> None:
    groups = [_movable(0, 100, 10, blocks=40), _movable(1, 70, 4)]
    assert LlumnixMigration().tick(groups) == []
    with pytest.raises(ValueError, match="in circles"):
        LlumnixMigration(out_blocks=5, in_blocks=3)


def drop(**options: Any) -> KunServeDrop:
    return KunServeDrop(
        copy_bytes=50 * BLOCK,
        block_bytes=BLOCK,
        base_bytes=dict.fromkeys(range(100), 100 * BLOCK),
        node_of={},
        **options,
    )


def merges(groups: Sequence[GroupEngine], **options: Any) -> tuple[tuple[tuple[int, ...], ...], int, bool]:
    """What is to merge, the bytes that it frees, and whether they are enough."""
    plan = drop(**options).tick(groups)
    assert isinstance(plan, DropPlan)
    return plan.merged, plan.freed_bytes, plan.sufficient


@pytest.mark.parametrize(
    ("used", "queued", "expected"), [(95, 5, True), (94, 50, False), (95, 4, False), (100, 0, False), (100, 1, True)]
)
def test_throttled_is_nearly_full_with_a_queue_that_wants_what_is_left(used: int, queued: int, expected: bool) -> None:
    assert isinstance(drop().tick([view(0, used, queued)]), DropPlan) is expected


def test_the_plan_covers_the_queue() -> None:
    groups = [view(0, 96, 60), view(1, 96, 60), view(2, 96, 0), view(3, 96, 0)]
    assert merges(groups) == (((0, 1, 2, 3),), 150 * BLOCK, True)  # 120 blocks need three merges of 50
    groups[0] = view(0, 96, 20)
    assert merges(groups) == (((0, 1), (2, 3)), 100 * BLOCK, True)


def test_free_memory_elsewhere_counts_where_net_is_asked_for() -> None:
    groups = [view(0, 96, 10), view(1, 10), view(2, 10), view(3, 10)]
    assert merges(groups) == (((0, 1),), 50 * BLOCK, True)
    assert merges(groups, required="net") == ((), 0, True)


def test_nothing_happens_while_a_group_changes() -> None:
    groups = [view(0, 100, 500), view(1, 50, phase=Phase.CHANGING)]
    assert drop().tick(groups) == []


def test_pairs_merge_into_fours_and_draining_groups_stay_out() -> None:
    pairs = [view(0, 100, 70, instances=(0, 1)), view(1, 100, 0, instances=(2, 3))]
    old = view(2, 100, 0, instances=(4, 5), phase=Phase.DRAINING)
    assert merges([*pairs, old]) == (((0, 1, 2, 3),), 50 * BLOCK, False)


def _pair(used: int, queued: int = 0) -> GroupEngine:
    return view(4, used, queued, instances=(0, 1), capacity_blocks=300)


def test_restore_under_half_of_the_base_memory() -> None:
    assert drop().tick([_pair(99)]) == [4]
    assert drop().tick([_pair(100)]) == []
    assert drop().tick([_pair(99, queued=1)]) == []
    assert drop(restore=False).tick([_pair(99)]) == []
    fullest = view(4, 60, instances=(0, 1), capacity_blocks=300, fullest_bytes=101 * BLOCK)
    assert drop().tick([fullest]) == []  # one instance could not hold all weights beside its KV
    assert drop().tick([view(0, 10)]) == []  # an instance alone has nothing to restore


def test_restore_under_half_of_what_the_cluster_has() -> None:
    """A pipeline is split under pressure of its own while the others are idle, and kept when they are not."""
    idle, busy = view(0, 10), view(0, 95)
    cluster = drop()
    assert cluster.tick([_pair(120), idle]) == [4]  # 130 of 300 blocks
    assert cluster.tick([_pair(140), idle]) == []  # 150
    assert cluster.tick([_pair(90), busy]) == []
    assert drop(restore_usage="group").tick([_pair(90), busy]) == [4]
    assert cluster.tick([_pair(10, queued=1), idle]) == []


def test_a_pipeline_that_drains_has_no_memory_beside_its_successors() -> None:
    """Four instances have 400 blocks without drop: those of the pipeline that drains are counted at its successors."""
    draining = view(5, 60, instances=(2, 3), phase=Phase.DRAINING)
    successors = [view(6, 10), view(7, 10)]
    assert drop().tick([_pair(119), draining, *successors]) == [4]
    assert drop().tick([_pair(120), draining, *successors]) == []


def test_thresholds_must_leave_a_gap() -> None:
    with pytest.raises(ValueError, match=r"layers come back below 0\.5"):
        drop(trigger=0.5)


@dataclass
class _Scale:
    policy: ScaleOut

    def asks(self, demand: Sequence[int], start_s: float = 0.0, pipelined: bool = True) -> list[bool]:
        instances = (0, 1) if pipelined else (0,)
        return [
            self.policy.tick(start_s + i / 10, [view(0, used, instances=instances)]) for i, used in enumerate(demand)
        ]


def test_scale_out_needs_growth_after_a_drop_and_asks_once_in_a_while() -> None:
    assert _Scale(ScaleOut(3, 30.0)).asks([10, 20, 30, 40, 50]) == [False, False, True, False, False]
    assert not any(_Scale(ScaleOut(3, 30.0)).asks([10, 20, 30], pipelined=False))
    assert not any(_Scale(ScaleOut(3, 30.0)).asks([30, 30, 30, 20]))
    twice = _Scale(ScaleOut(3, 30.0))
    assert any(twice.asks([1, 2, 3])) and any(twice.asks([4, 5, 6], start_s=40.0))


def test_a_pipeline_that_is_lost_before_it_serves_takes_the_engines_that_it_was_made_of_with_it() -> None:
    """Its instances that are left serve alone again, and may merge again."""
    controller = GroupController(
        GroupModel("m", 3, 1000, 16, lambda instances: 1000),
        [(0,), (1,), (2,)],
        dispatcher("least_loaded"),
        drop=drop(),
        migration=None,
        scale_out=None,
        stages=1,
        spares=0,
    )
    full = EngineLoad(96, 100, 60)
    assert controller.handle(0.0, Tick({}, {}, dict.fromkeys(range(3), full))) == [
        DropLayers(3, (0, 1, 2), 100_000, False)
    ]
    alone = [Activate(4, "m", (1,)), Activate(5, "m", (2,))]
    assert controller.handle(0.1, EngineFailed(3, (0,))) == alone
    for command in alone:
        controller.handle(0.2, EngineReady(command.engine))
    assert controller.handle(0.3, Tick({}, {}, {4: full, 5: full})) == [DropLayers(6, (4, 5), 50_000, False)]


# --- prefill and decode apart ------------------------------------------------------------------------------------------


def apart(prefill: int, instances: int) -> GroupController:
    return GroupController(
        GroupModel("m", 3, 1000, 16, lambda instances: 1000),
        [(number,) for number in range(instances)],
        dispatcher("least_queued"),
        drop=None,
        migration=None,
        scale_out=None,
        stages=1,
        spares=0,
        roles=Roles(prefill),
    )


@pytest.mark.parametrize(
    ("instances", "prefill", "decode", "expected"),
    [
        (2, 1, 1, 1),
        (4, 1, 1, 2),
        (4, 1, 3, 1),
        (8, 1, 3, 2),
        (5, 1, 1, 3),
        (3, 100, 1, 2),
        (3, 1, 100, 1),
        (6, 2, 4, 2),
    ],
)
def test_instances_are_split_in_parts_and_each_role_has_one(
    instances: int, prefill: int, decode: int, expected: int
) -> None:
    assert split_of(instances, prefill, decode) == expected


def test_one_instance_has_no_two_roles() -> None:
    with pytest.raises(ValueError, match="an instance each; there is 1"):
        split_of(1, 1, 1)


def test_prompts_and_prefilled_requests_have_routers_of_their_own() -> None:
    controller = apart(2, 5)
    assert controller.needs_loads
    controller.handle(0.0, Loads({id: EngineLoad(0, 60) for id in range(5)}))
    new = [RequestArrived(Request(number, "m", 0.0, tokens)) for number, tokens in enumerate([400, 16, 16, 16])]
    assert [controller.handle(0.0, event) for event in new] == [
        [Dispatch(0, 0)],
        *([Dispatch(n, 1)] for n in (1, 2, 3)),
    ]
    controller.handle(0.1, Loads({3: EngineLoad(40, 60), 4: EngineLoad(10, 60)}))
    moves = [controller.handle(0.1, PrefillEnded(number, number > 0, tokens)) for number, tokens in ((0, 400), (1, 16))]
    assert moves == [[Migrate(0, 0, 2)], [Migrate(1, 1, 4)]], "26 blocks were promised to engine 2"
    assert controller.handle(0.2, MigrationEnded(0)) == []
    for wrong in (PrefillEnded(1, 1, 16), PrefillEnded(2, 3, 16), PrefillEnded(2, 9, 16), MigrationEnded(0)):
        with pytest.raises(ValueError):
            controller.handle(0.3, wrong)


def test_prefilled_requests_wait_for_an_engine_that_decodes() -> None:
    controller = apart(1, 2)
    controller.handle(0.0, RequestArrived(Request(0, "m", 0.0, 100)))
    assert controller.handle(0.1, EngineFailed(1, (1,))) == []
    assert controller.handle(0.2, PrefillEnded(0, 0, 100)) == []
    (again,) = controller.handle(0.3, GpusRepaired((1,)))
    assert controller.handle(0.4, EngineReady(again.engine)) == [Migrate(0, 0, again.engine)]


def test_what_waited_at_an_engine_that_is_lost_is_forgotten() -> None:
    controller = apart(1, 2)
    controller.handle(0.1, EngineFailed(1, (1,)))
    controller.handle(0.2, PrefillEnded(0, 0, 100))
    controller.handle(0.3, EngineFailed(0, (0,)))
    assert controller.handle(0.3, PrefillEnded(1, 0, 100)) == [], "it comes late"
    (again,) = controller.handle(0.4, GpusRepaired((1,)))
    assert controller.handle(0.5, EngineReady(again.engine)) == []
    assert controller.handle(0.5, RequestReturned(Request(0, "m", 0.0, 101))) == [], "nobody prefills now"
    (again,) = controller.handle(0.6, GpusRepaired((0,)))
    assert controller.handle(0.7, EngineReady(again.engine)) == [Dispatch(0, again.engine)]
