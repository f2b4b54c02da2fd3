"""Residency that follows a placement: ``toward``, timetables, and the balanced placement under drifting rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.fleet.drifting import DriftingHomes
from fineserve_sim.policy.fleet.timetable import Timetable
from fineserve_sim.policy.fleet.toward import Spot, toward
from fineserve_sim.policy.fleet.views import EngineView, FleetView, Pending, ResidencyPolicy, Start, Status, Stop
from fineserve_sim.policy.interfaces import Busy, GpuSlot, ModelDemand, OperatingPoint

GIB, MEMORY, KV = 2**30, 70 * 2**30, 2 * 2**30
SIZES = {"a": 30, "b": 16, "c": 16, "d": 30}
WEIGHTS = {id: size * GIB for id, size in SIZES.items()}


def demand(id: str, rate_per_s: float = 1.0) -> ModelDemand:
    prompt_s = SIZES[id] / 200
    points = tuple(
        OperatingPoint(b, b / (b * prompt_s + 20 * prompt_s), b * prompt_s, GIB, b * GIB // 8) for b in (1, 4, 16, 64)
    )
    return ModelDemand(
        id, rate_per_s, 1.0, 1, WEIGHTS[id], 100_000, points, decode_tokens=100, prefill=Busy(0.8, 0.4),
        decode=Busy(0.05, 0.7),
    )  # fmt: skip


class Fleet:
    """A controller in small: it does at once what it is told, if there is room; nothing has requests."""

    def __init__(self, gpus: int, engines: Sequence[Spot] = ()) -> None:
        self.engines = [EngineView(id, model, on, Status.RESIDENT, 0.0, 0) for id, (model, on) in enumerate(engines)]
        self._gpus, self._ids = gpus, count(len(engines))
        self.moves = 0

    def view(self, rates: Mapping[str, float], pending: tuple[Pending, ...] = ()) -> FleetView:
        return FleetView(tuple(self.engines), pending, rates, self.free_bytes, frozenset())

    @property
    def free_bytes(self) -> dict[int, int]:
        free = dict.fromkeys(range(self._gpus), MEMORY - KV)
        for engine in self.engines:
            for gpu in engine.gpus:
                free[gpu] -= WEIGHTS[engine.model]
        return free

    @property
    def spots(self) -> list[Spot]:
        return sorted((engine.model, engine.gpus) for engine in self.engines)

    def look(self, policy: ResidencyPolicy, now: float, view: FleetView) -> None:
        for each in policy.suggest(now, view):
            if isinstance(each, Stop):
                self.engines = [engine for engine in self.engines if engine.engine != each.engine]
                continue
            self.moves += 1
            assert all(self.free_bytes[gpu] >= WEIGHTS[each.model] for gpu in each.gpus)
            self.engines.append(EngineView(next(self._ids), each.model, each.gpus, Status.RESIDENT, 0.0, 0))
            self.engines = [engine for engine in self.engines if engine.engine != each.replaces]


RATES = dict.fromkeys(SIZES, 1.0)


def test_a_move_starts_before_the_old_engine_goes() -> None:
    fleet = Fleet(2, [("a", (0,))])
    assert list(toward([("a", (1,))], fleet.view(RATES), WEIGHTS)) == [Start("a", (1,), 0)]


def test_without_room_what_is_not_wanted_leaves_first() -> None:
    fleet = Fleet(1, [("a", (0,)), ("d", (0,))])
    assert list(toward([("a", (0,)), ("b", (0,))], fleet.view(RATES), WEIGHTS)) == [Stop(1)]


def test_a_model_that_comes_elsewhere_serves_until_then() -> None:
    full = Fleet(2, [("a", (0,)), ("d", (0,)), ("b", (1,)), ("c", (1,))])
    wanted = [("a", (1,)), ("d", (0,)), ("b", (1,)), ("c", (1,))]
    assert list(toward(wanted, full.view(RATES), WEIGHTS)) == [Start("a", (1,), 0)]
    crowded = [("a", (1,)), ("d", (1,)), ("b", (0,)), ("c", (0,))]
    assert {type(each) for each in toward(crowded, full.view(RATES), WEIGHTS)} <= {Start, Stop}


SPOTS = st.lists(st.tuples(st.sampled_from(sorted(SIZES)), st.tuples(st.integers(0, 2))), max_size=6, unique=True)


def fits(spots: Sequence[Spot]) -> bool:
    return min(Fleet(3, spots).free_bytes.values()) >= 0


@given(SPOTS.filter(fits), SPOTS.filter(fits))
def test_any_placement_leads_to_any_other_and_stays(first: list[Spot], then: list[Spot]) -> None:
    fleet = Fleet(3, first)
    table = Timetable({id: demand(id) for id in SIZES}, [(0.0, then)])
    for now in range(12):
        fleet.look(table, float(now), fleet.view(RATES))
    assert fleet.spots == sorted(then)
    assert fleet.moves <= len(then)
    assert table.suggest(20.0, fleet.view(RATES)) == []


def test_entries_have_their_times() -> None:
    table = Timetable({id: demand(id) for id in SIZES}, [(0.0, [("a", (0,))]), (5.0, [("a", (1,))])])
    fleet = Fleet(2, [("a", (0,))])
    for now in (0.0, 4.9):
        assert table.suggest(now, fleet.view(RATES)) == []
    fleet.look(table, 5.0, fleet.view(RATES))
    assert fleet.spots == [("a", (1,))]


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], "no time"),
        ([(1.0, [])], "1 s: use 0 first"),
        ([(0.0, []), (0.0, [])], "0, 0 s"),
        ([(0.0, [("z", (0,))])], "name z; models are a, b"),
    ],
)
def test_timetables_that_cannot_be(entries: list[tuple[float, list[Spot]]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Timetable({id: demand(id) for id in SIZES}, entries)


def drifting(gpus: int, **options: float) -> DriftingHomes:
    slots = [GpuSlot(id, 0, MEMORY) for id in range(gpus)]
    return DriftingHomes({id: demand(id) for id in SIZES}, slots, **options)


CROWD: list[Spot] = [("a", (0,)), ("b", (0,)), ("c", (1,)), ("d", (1,))]


def test_nothing_moves_for_long_under_a_constant_load() -> None:
    fleet, policy = Fleet(2, CROWD), drifting(2, replace_s=1.0)
    for now in range(50):
        fleet.look(policy, float(now), fleet.view(RATES))
    moved = fleet.moves
    for now in range(50, 200):
        fleet.look(policy, float(now), fleet.view(RATES))
    assert fleet.moves == moved <= 8


def test_a_model_whose_rate_rises_gets_room() -> None:
    fleet, policy = Fleet(3, CROWD), drifting(3, replace_s=1.0)
    busy = RATES | {"a": 12.0}
    for now in range(60):
        fleet.look(policy, float(now), fleet.view(busy))
    own = [gpus for model, gpus in fleet.spots if model == "a"]
    assert len(own) > 1 or not any(gpus in own for model, gpus in fleet.spots if model != "a")


def test_what_does_not_pay_does_not_move() -> None:
    fleet, policy = Fleet(3, CROWD), drifting(3, replace_s=1.0, horizon_s=1e-3)
    for now in range(60):
        fleet.look(policy, float(now), fleet.view(RATES | {"a": 12.0}))
    assert fleet.moves == 0


def test_one_that_waits_takes_room_or_the_place_of_the_idle() -> None:
    policy, pending = drifting(1), (Pending("b", 1, 0.0, 0.0),)
    fleet = Fleet(1, [("a", (0,))])
    fleet.look(policy, 0.0, fleet.view(RATES, pending))
    assert fleet.spots == [("a", (0,)), ("b", (0,))]
    full, policy = Fleet(1, [("a", (0,)), ("d", (0,))]), drifting(1)
    full.look(policy, 0.0, full.view(RATES, pending))
    assert full.spots == [("a", (0,)), ("d", (0,))]
    full.engines = [replace(engine, idle_s=50.0) for engine in full.engines]
    for now in (1.0, 2.0):
        full.look(policy, now, full.view(RATES | {"d": 0.1}, pending))
    assert ("b", (0,)) in full.spots


def test_room_that_one_was_promised_is_not_given_to_others() -> None:
    """All idle models make room for d; when they have gone, they wait, too, and would fill the GPU."""
    policy, d = drifting(1, idle_s=0.0), Pending("d", 1, 0.0, 0.0)
    fleet = Fleet(1, [("a", (0,)), ("b", (0,)), ("c", (0,))])
    fleet.look(policy, 0.0, fleet.view(RATES, (d,)))
    assert fleet.spots == []
    fleet.look(policy, 1.0, fleet.view(RATES, tuple(d._replace(model=id) for id in "abcd")))
    assert ("d", (0,)) in fleet.spots


def test_lost_gpus_are_wanted_no_more() -> None:
    fleet, policy = Fleet(2, CROWD), drifting(2, replace_s=1.0)
    fleet.look(policy, 0.0, fleet.view(RATES))
    fleet.engines = [engine for engine in fleet.engines if engine.gpus == (0,)]
    view = fleet.view(RATES, (Pending("c", 1, 1.0, 1.0),))
    left = replace(view, free_bytes={0: view.free_bytes[0]})
    assert policy.suggest(1.0, left) == [Start("c", (0,))]


def test_times_must_be_positive() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        drifting(1, horizon_s=0.0)
