"""Prism's residency policy: whom it evicts, where it activates, what it moves; rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.fleet.prism import PrismResidency
from fineserve_sim.policy.fleet.roster import MovingRate
from fineserve_sim.policy.fleet.views import EngineView, FleetView, Pending, Start, Status, Stop
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand
from fineserve_sim.policy.placement.kvpr import KvprPlacement

LOADING, RESIDENT, DRAINING = Status.LOADING, Status.RESIDENT, Status.DRAINING


def demand(id: str, weight_bytes: int, slo_s: float = 1.0, tp: int = 1) -> ModelDemand:
    return ModelDemand(id, 1.0, slo_s, tp, weight_bytes, 1)


def gpus(*memory_bytes: int, node_size: int = 8) -> list[GpuSlot]:
    return [GpuSlot(id, id // node_size, memory) for id, memory in enumerate(memory_bytes)]


def engine(
    id: int, model: str, *on: int, idle_s: float = 0.0, status: Status = RESIDENT, requests: int | None = None
) -> EngineView:
    return EngineView(id, model, on, status, idle_s, requests if requests is not None else int(idle_s == 0))


def waiting(*models: str) -> tuple[Pending, ...]:
    return tuple(Pending(model, 1, float(turn), float(turn)) for turn, model in enumerate(models))


def view(
    engines: list[EngineView],
    free: dict[int, int],
    pending: tuple[Pending, ...] = (),
    rates: Mapping[str, float] | None = None,
    pressed: frozenset[int] = frozenset(),
) -> FleetView:
    known = {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0, **(rates or {})}
    return FleetView(tuple(engines), pending, known, free, pressed)


def policy(models: list[ModelDemand], slots: list[GpuSlot], **options: object) -> PrismResidency:
    return PrismResidency({model.id: model for model in models}, slots, KvprPlacement(), **options)  # type: ignore[arg-type]


MODELS = [demand("a", 20), demand("b", 20, slo_s=2.0), demand("c", 20, slo_s=5.0), demand("d", 30)]


class TestEviction:
    def crowd(self, idle_s: float = 50.0) -> list[EngineView]:
        """60 of 100 bytes are weights, so the 40 bytes of KV are scarce below 4 free."""
        return [engine(0, "a", 0, idle_s=idle_s), engine(1, "b", 0, idle_s=idle_s), engine(2, "c", 0)]

    def test_nothing_happens_without_pressure(self) -> None:
        assert policy(MODELS, gpus(100)).suggest(0.0, view(self.crowd(), {0: 4})) == []

    def test_the_larger_slo_goes_first_and_only_as_many_as_needed(self) -> None:
        assert policy(MODELS, gpus(100)).suggest(0.0, view(self.crowd(), {0: 3})) == [Stop(1)]

    def test_among_equal_slos_the_longest_idle_goes(self) -> None:
        models = [demand("a", 20), demand("b", 20), demand("c", 20)]
        crowd = [engine(0, "a", 0, idle_s=46), engine(1, "b", 0, idle_s=60), engine(2, "c", 0)]
        assert policy(models, gpus(100)).suggest(0.0, view(crowd, {0: 0})) == [Stop(1)]

    @pytest.mark.parametrize("idle_s", [45.0, 10.0])
    def test_who_is_not_idle_long_enough_stays(self, idle_s: float) -> None:
        assert policy(MODELS, gpus(100)).suggest(0.0, view(self.crowd(idle_s), {0: 0})) == []

    def test_a_request_that_waits_for_memory_is_pressure(self) -> None:
        seen = view(self.crowd(), {0: 30}, pressed=frozenset({0}))
        assert policy(MODELS, gpus(100)).suggest(0.0, seen) == [Stop(1)]

    def test_eviction_can_be_disabled(self) -> None:
        seen = view(self.crowd(), {0: 0}, waiting("d"), pressed=frozenset({0}))
        assert policy(MODELS, gpus(100), evict=False).suggest(0.0, seen) == []

    def test_a_busy_draining_or_loading_engine_is_not_evicted(self) -> None:
        crowd = [
            engine(0, "a", 0, idle_s=99, status=DRAINING),
            engine(1, "b", 0, idle_s=99, status=LOADING),
            engine(2, "c", 0, idle_s=99, requests=1),
        ]
        assert policy(MODELS, gpus(100), move=False).suggest(0.0, view(crowd, {0: 0})) == []


class TestActivation:
    def test_the_lowest_pressure_takes_the_model(self) -> None:
        """KVPR of GPU 0: 3 / 80, of GPU 1: 1 / 80."""
        seen = view([engine(0, "a", 0), engine(1, "b", 1)], {0: 80, 1: 80}, waiting("d"), {"a": 3.0, "b": 2.0})
        assert policy(MODELS, gpus(100, 100)).suggest(0.0, seen) == [Start("d", (1,))]

    def test_idle_models_make_room(self) -> None:
        """d needs 30 and a tenth of the KV memory beside it: GPU 0 has it without b (70 - 7)."""
        crowd = [engine(0, "a", 0), engine(1, "b", 0, idle_s=50), engine(2, "c", 0, idle_s=50)]
        seen = view(crowd, {0: 30}, waiting("d"))
        assert policy(MODELS, gpus(100)).suggest(0.0, seen) == [Stop(2), Start("d", (0,))]

    def test_who_fits_nowhere_waits_and_lets_nobody_pass(self) -> None:
        models = [*MODELS[:3], demand("d", 80)]
        seen = view([engine(0, "a", 0)], {0: 75}, waiting("d", "b"))
        assert policy(models, gpus(100)).suggest(0.0, seen) == []
        seen = view([engine(0, "a", 0)], {0: 75}, waiting("b", "d"))
        assert policy(models, gpus(100)).suggest(0.0, seen) == [Start("b", (0,))]

    def test_who_would_not_even_fit_on_empty_gpus_lets_others_pass(self) -> None:
        """The other GPU of the node is lost."""
        models = [*MODELS, demand("big", 50, tp=2)]
        seen = view([], {0: 100}, waiting("big", "a"), {"big": 1.0})
        assert policy(models, gpus(100, 100)).suggest(0.0, seen) == [Start("a", (0,))]

    def test_two_activations_count_each_other(self) -> None:
        seen = view([], {0: 100, 1: 100}, waiting("a", "b"))
        assert policy(MODELS, gpus(100, 100)).suggest(0.0, seen) == [Start("a", (0,)), Start("b", (1,))]
        seen = view([], {0: 50}, waiting("d", "a"))
        assert policy(MODELS, gpus(100)).suggest(0.0, seen) == [Start("d", (0,))]

    def test_parts_go_to_one_node(self) -> None:
        models = [*MODELS, demand("big", 50, tp=2)]
        slots = gpus(100, 100, 100, 100, node_size=2)
        seen = view([engine(0, "a", 1)], {0: 100, 1: 40, 2: 100, 3: 100}, waiting("big"), {"big": 1.0})
        assert policy(models, slots).suggest(0.0, seen) == [Start("big", (2, 3))]


def test_token_weights_follow_the_slo_of_the_time_per_token() -> None:
    """a asks for 10 tokens/s at 0.1 s each, b for 20 at 1 s; both have a TTFT SLO of 1 s. So c goes beside b."""
    facts = {"tokens_per_request": 10.0, "tpot_slo_s": 0.1}
    a, b = replace(MODELS[0], **facts), replace(MODELS[0], id="b", tokens_per_request=20.0, tpot_slo_s=1.0)  # type: ignore[arg-type]
    models = {model.id: model for model in (a, b, replace(MODELS[2], **facts))}  # type: ignore[arg-type]
    seen = view([engine(0, "a", 0), engine(1, "b", 1)], {0: 80, 1: 80}, waiting("c"))
    prism = PrismResidency(models, gpus(100, 100), KvprPlacement(weight="token_rate"), move=False)
    assert prism.suggest(0.0, seen) == [Start("c", (1,))]


class TestMoves:
    slots = gpus(100, 100)

    def imbalance(self, **changed: EngineView) -> FleetView:
        """Three models on GPU 0, none on GPU 1. By falling rate: a stays (all ratios are 0), b and c see pressure."""
        engines = {"a": engine(0, "a", 0), "b": engine(1, "b", 0), "c": engine(2, "c", 0), **changed}
        return view(list(engines.values()), {0: 40, 1: 100}, rates={"a": 9.0, "b": 8.0, "c": 1.0})

    def test_models_move_to_balance_pressure(self) -> None:
        """b: 0 on GPU 1 against 9/80. c: GPU 1 has 4/80 (SLO 2 s) against 9/80, below 0.8 of it."""
        found = policy(MODELS, self.slots).suggest(10.0, self.imbalance())
        assert found == [Start("b", (1,), replaces=1), Start("c", (1,), replaces=2)]

    def test_moves_come_at_their_times(self) -> None:
        prism = policy(MODELS, self.slots)
        assert prism.suggest(9.9, self.imbalance()) == []
        assert prism.suggest(10.0, self.imbalance()) != []
        assert prism.suggest(15.0, self.imbalance()) == []
        assert prism.suggest(20.0, self.imbalance()) == []  # they moved 10 s ago
        assert prism.suggest(40.0, self.imbalance()) != []

    def test_an_activation_asks_for_moves(self) -> None:
        seen = self.imbalance()
        seen = FleetView(seen.engines, waiting("d"), seen.rates_per_s, seen.free_bytes, seen.pressed)
        found = policy(MODELS, self.slots).suggest(1.0, seen)
        assert found[0] == Start("d", (1,)) and Start("b", (1,), replaces=1) in found

    def test_moves_can_be_disabled(self) -> None:
        assert policy(MODELS, self.slots, move=False).suggest(10.0, self.imbalance()) == []

    def test_an_engine_that_is_on_its_way_is_not_moved_again(self) -> None:
        """b is on GPU 1 already as far as placement is concerned."""
        coming = engine(3, "b", 1, status=LOADING)
        seen = self.imbalance(coming=coming)
        assert policy(MODELS, self.slots).suggest(10.0, seen) == [Start("c", (1,), replaces=2)]

    def test_an_idle_model_is_not_evicted_to_make_room_for_itself(self) -> None:
        """p would leave GPUs 0, 1 for 1, 2, but its new part does not fit beside the old one on GPU 1."""
        models = [demand("x", 10), demand("y", 10), demand("z", 10), demand("p", 60, tp=2)]
        crowd = [engine(0, "p", 0, 1, idle_s=50), *(engine(id, model, 0) for id, model in enumerate("xy", start=1))]
        seen = view(crowd, {0: 20, 1: 40, 2: 100}, rates={"x": 9.0, "y": 1.0, "z": 1.0, "p": 1.0})
        found = policy(models, gpus(100, 100, 100)).suggest(10.0, seen)
        assert not any(isinstance(s, Stop) for s in found)
        assert [s.model for s in found if isinstance(s, Start)] == ["y"]  # to an empty GPU

    def test_what_does_not_fit_stays(self) -> None:
        seen = self.imbalance()
        full = FleetView(seen.engines, (), seen.rates_per_s, {0: 40, 1: 25}, frozenset())
        assert policy(MODELS, self.slots).suggest(10.0, full) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"idle_s": -1.0}, "idle_s"),
        ({"replace_s": 0.0}, "replace_s"),
        ({"pressure_fraction": 1.0}, "pressure_fraction"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        policy(MODELS, gpus(100), **options)


engines_strategy = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(0, 1), st.sampled_from([0.0, 46.0, 90.0]), st.sampled_from(Status)),
    max_size=4,
    unique_by=lambda engine: engine[0],
)


@given(
    crowd=engines_strategy,
    kv=st.tuples(st.integers(0, 100), st.integers(0, 100)),
    pending=st.lists(st.sampled_from("abcd"), unique=True),
    rates=st.tuples(*[st.floats(0, 20)] * 4),
)
def test_suggestions_never_take_more_than_is_there(
    crowd: list[tuple[str, int, float, Status]],
    kv: tuple[int, int],
    pending: list[str],
    rates: tuple[float, float, float, float],
) -> None:
    """In the order given, every start fits what is free then; only idle resident engines are stopped; nobody is started
    twice."""
    sizes = {model.id: model.weight_bytes for model in MODELS}
    views = [engine(id, model, gpu, idle_s=idle, status=status) for id, (model, gpu, idle, status) in enumerate(crowd)]
    free = {gpu: 100 - kv[gpu] - sum(sizes[v.model] for v in views if gpu in v.gpus) for gpu in (0, 1)}
    here = {v.model for v in views if v.status is not DRAINING}
    seen = view(
        views, free, waiting(*[model for model in pending if model not in here]), dict(zip("abcd", rates, strict=True))
    )
    found = policy(MODELS, gpus(100, 100)).suggest(10.0, seen)
    for suggestion in found:
        if isinstance(suggestion, Stop):
            stopped = views[suggestion.engine]
            assert stopped.status is RESIDENT and stopped.idle_s > 45 and not stopped.requests
            free[stopped.gpus[0]] += sizes[stopped.model]
        else:
            free[suggestion.gpus[0]] -= sizes[suggestion.model]
            assert free[suggestion.gpus[0]] >= 0
    starts = [suggestion.model for suggestion in found if isinstance(suggestion, Start)]
    stops = [suggestion.engine for suggestion in found if isinstance(suggestion, Stop)]
    assert len(starts) == len(set(starts)) and len(stops) == len(set(stops))


class TestMovingRate:
    def test_the_window_slides(self) -> None:
        rate = MovingRate(60.0)
        for time_s in (0.0, 30.0, 59.0):
            rate.note(time_s)
        assert rate.per_s(59.0) == pytest.approx(3 / 60)
        assert rate.per_s(60.0) == pytest.approx(2 / 60)
        assert rate.per_s(119.0) == 0.0

    def test_a_young_average_starts_at_what_is_expected(self) -> None:
        rate = MovingRate(60.0, expected_per_s=2.0)
        assert rate.per_s(0.0) == 2.0
        rate.note(15.0)
        assert rate.per_s(30.0) == pytest.approx((1 + 2.0 * 30) / 60)
        assert rate.per_s(74.9) == pytest.approx(1 / 60)

    def test_a_window_is_positive(self) -> None:
        with pytest.raises(ValueError, match="window_s is 0"):
            MovingRate(0.0)
