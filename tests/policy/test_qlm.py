"""QLM: groups, estimates, order by deadline, swaps, idle workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.fleet.qlm import QlmSwapping, partition_workers
from fineserve_sim.policy.fleet.views import EngineView, FleetView, Pending, Start, Status, Stop
from fineserve_sim.policy.interfaces import GpuSlot, ModelDemand, OperatingPoint

LOADING, RESIDENT, DRAINING = Status.LOADING, Status.RESIDENT, Status.DRAINING
TWO_PER_S = (OperatingPoint(4, 2.0, 0.1, 0, 1), OperatingPoint(1, 1.0, 0.1, 0, 1))


def demand(id: str, slo_s: float = 1000.0, tp: int = 1, weight_bytes: int = 10) -> ModelDemand:
    return ModelDemand(id, 1.0, slo_s, tp, weight_bytes, 1, TWO_PER_S)


def gpus(count: int, node_size: int = 8) -> list[GpuSlot]:
    return [GpuSlot(id, id // node_size, 100) for id in range(count)]


def engine(id: int, model: str, *on: int, requests: int = 0, status: Status = RESIDENT) -> EngineView:
    return EngineView(id, model, on, status, 0.0, requests)


def view(*engines: EngineView, pending: tuple[Pending, ...] = ()) -> FleetView:
    return FleetView(engines, pending, {}, dict.fromkeys(range(16), 0), frozenset())


def group(model: str, requests: int = 1, oldest_s: float = 0.0) -> Pending:
    return Pending(model, requests, oldest_s, oldest_s)


def qlm(count: int = 1, *, slo_s: float = 1000.0, **options: object) -> QlmSwapping:
    models = {id: demand(id, slo_s) for id in "abcd"}
    return QlmSwapping(models, gpus(count), **options)  # type: ignore[arg-type]


def test_an_idle_worker_swaps_to_the_group_that_waits() -> None:
    assert qlm().suggest(0.0, view(engine(0, "a", 0), pending=(group("b"),))) == [Stop(0), Start("b", (0,))]
    assert qlm().suggest(0.0, view(pending=(group("b"),))) == [Start("b", (0,))]


@pytest.mark.parametrize("status", [LOADING, DRAINING])
def test_a_worker_does_one_thing_at_a_time(status: Status) -> None:
    assert qlm().suggest(0.0, view(engine(0, "a", 0, status=status), pending=(group("b"),))) == []


def test_a_group_in_service_is_not_disturbed_while_deadlines_hold() -> None:
    assert qlm().suggest(0.0, view(engine(0, "a", 0, requests=5), pending=(group("b"),))) == []


class TestDeadlines:
    """b waits since 0 with an SLO of 100 s; 20 requests of a take 10 s at 2 per second, the swap 30 s, b itself 1 s."""

    busy = view(engine(0, "a", 0, requests=20), pending=(group("b", 2),))

    @pytest.mark.parametrize(("now", "closes"), [(59.0, False), (59.1, True)])
    def test_the_group_in_service_closes_when_another_will_be_late(self, now: float, closes: bool) -> None:
        policy = qlm(slo_s=100.0, service="closes")
        assert policy.suggest(now, self.busy) == ([Stop(0, drain=True)] if closes else [])

    def test_it_goes_on_where_groups_are_reordered_and_no_more(self) -> None:
        assert qlm(slo_s=100.0).suggest(59.1, self.busy) == []
        with pytest.raises(ValueError, match="service is 'stops': use 'closes' or 'goes_on'"):
            qlm(service="stops")

    @pytest.mark.parametrize("service", ["closes", "goes_on"])
    def test_groups_are_reordered_either_way(self, service: str) -> None:
        """c entered first, b is older. At 180 s both will be late, and b goes first."""
        policy = qlm(slo_s=200.0, service=service)
        pending = (group("c", 1, 10.0), group("b", 1, 5.0))
        policy.suggest(10.0, view(engine(0, "a", 0, requests=1), pending=pending[:1]))
        policy.suggest(180.0, view(engine(0, "a", 0, requests=1), pending=pending))
        assert policy.suggest(181.0, view(engine(0, "a", 0), pending=pending))[-1] == Start("b", (0,))

    def test_groups_go_by_deadline_once_one_will_be_late(self) -> None:
        """c and b entered in this order; b is older. Nobody is late at first, so c is the head of the queue."""
        policy = qlm(slo_s=200.0)
        policy.suggest(10.0, view(engine(0, "a", 0, requests=1), pending=(group("c", 1, 10.0),)))
        pending = (group("c", 1, 10.0), group("b", 1, 5.0))
        policy.suggest(11.0, view(engine(0, "a", 0, requests=1), pending=pending))
        assert policy.suggest(12.0, view(engine(0, "a", 0), pending=pending))[-1] == Start("c", (0,))
        late = qlm(slo_s=200.0)
        late.suggest(10.0, view(engine(0, "a", 0, requests=1), pending=(group("c", 1, 10.0),)))
        late.suggest(11.0, view(engine(0, "a", 0, requests=1), pending=pending))
        assert late.suggest(180.0, view(engine(0, "a", 0), pending=pending))[-1] == Start("b", (0,))

    @pytest.mark.parametrize(("slo_s", "first"), [(60.4, "d"), (60.6, "c")])
    def test_what_is_left_of_a_load_counts(self, slo_s: float, first: str) -> None:
        """At 10 s, 20 s of b's load are left; with 30 s for a swap and half a second to serve it, c ends at 60.5 s. If that
        is late, d with the earlier deadline goes first."""
        policy = QlmSwapping({"b": demand("b"), "c": demand("c", slo_s), "d": demand("d", 20.0)}, gpus(1))
        policy.suggest(0.0, view(pending=(group("b"),)))
        loading = engine(0, "b", 0, status=LOADING)
        policy.suggest(10.0, view(loading, pending=(group("c"),)))
        assert policy._is_late(10.0, 0, [loading], {"c": group("c")}) is (first == "d")


class TestRequeue:
    def test_running_requests_are_cut_off_but_not_before_their_time(self) -> None:
        policy = qlm(slo_s=10.0, running="requeue")
        policy.suggest(0.0, view(pending=(group("a"),)))
        busy = view(engine(0, "a", 0, requests=4), pending=(group("b"),))
        assert policy.suggest(59.0, busy) == []  # it loaded for 30 s and served for 29 s
        assert policy.suggest(60.0, busy) == [Stop(0, drain=False)]


class TestWorkers:
    def test_an_idle_worker_takes_a_group_from_another_queue(self) -> None:
        """Whatever is resident there: what Prism criticises."""
        policy = qlm(2)
        pending = (group("b"), group("c"))
        found = policy.suggest(0.0, view(engine(0, "a", 0, requests=9), engine(1, "d", 1), pending=pending))
        assert len(found) == 2 and found[0] == Stop(1) and isinstance(found[1], Start) and found[1].gpus == (1,)

    def test_two_idle_workers_do_not_take_the_same_group(self) -> None:
        found = qlm(2).suggest(0.0, view(pending=(group("b"),)))
        assert len(found) == 1

    def test_new_groups_spread_over_the_workers(self) -> None:
        busy = [engine(e, "a", e, requests=1) for e in range(4)]
        policy, places = qlm(4), set()
        for _ in range(20):
            policy.suggest(0.0, view(*busy, pending=(group("b"),)))
            places.add(next(w for w, queue in enumerate(policy._queues) if queue))
            policy.suggest(0.0, view(*busy))  # the group is no more
        assert places == {0, 1, 2, 3}

    def test_a_group_that_left_is_forgotten(self) -> None:
        policy = qlm()
        policy.suggest(0.0, view(engine(0, "a", 0, requests=1), pending=(group("b"),)))
        assert policy.suggest(1.0, view(engine(0, "a", 0))) == []

    def test_each_degree_has_its_workers(self) -> None:
        """Weights 80 to 20: of 8 GPUs, one group of four (6.4 / 4 rounds to 2, but one GPU is reserved)."""
        models = [demand("big", tp=4, weight_bytes=20), *(demand(f"s{i}", weight_bytes=5) for i in range(4))]
        assert partition_workers(models, gpus(8)) == [(0, 1, 2, 3), (4,), (5,), (6,), (7,)]
        assert partition_workers(models[1:], gpus(3)) == [(0,), (1,), (2,)]
        with pytest.raises(ValueError, match="a worker of 4 GPUs"):
            partition_workers(models, gpus(4))

    def test_a_group_goes_to_a_worker_that_holds_its_model(self) -> None:
        """A worker that cannot hold the head of its queue would empty its GPU for it at every look, and serve nobody."""
        models = {"big": demand("big", weight_bytes=60), "small": demand("small")}
        for able in (0, 1):
            policy = QlmSwapping(models, [GpuSlot(gpu, 0, 100 if gpu == able else 50) for gpu in (0, 1)])
            busy, idle = engine(0, "small", able, requests=1), engine(1, "small", 1 - able)
            assert policy.suggest(0.0, view(busy, idle, pending=(group("big"),))) == []
            assert policy.suggest(1.0, view(idle, pending=(group("big"),))) == [Start("big", (able,))]
        policy = QlmSwapping(models, [GpuSlot(0, 0, 50)])
        assert policy.suggest(0.0, view(pending=(group("big"), group("small")))) == [Start("small", (0,))]

    def test_an_engine_of_another_size_makes_way(self) -> None:
        """The first placement knows no workers: two of them wait for the idle engine that lies across both."""
        models = {"big": demand("big", tp=2), "small": demand("small", weight_bytes=20), "other": demand("other")}
        policy = QlmSwapping(models, gpus(4))
        across = engine(0, "big", 2, 3)
        busy = view(replace(across, requests=1), pending=(group("small"),))
        assert policy.suggest(0.0, busy) == []
        first, second = (s for s in policy.suggest(1.0, view(across, pending=(group("small"),))))
        assert (
            first == Stop(0) and isinstance(second, Start) and second.model == "small" and second.gpus in ((2,), (3,))
        )

    def test_a_group_goes_to_a_worker_of_its_size(self) -> None:
        models = {"big": demand("big", tp=2), "small": demand("small")}
        policy = QlmSwapping(models, gpus(4))
        found = policy.suggest(0.0, view(pending=(group("small"), group("big"))))
        assert {(s.model, len(s.gpus)) for s in found if isinstance(s, Start)} == {("big", 2), ("small", 1)}


@pytest.mark.parametrize(("options", "named"), [({"running": "drop"}, "running is 'drop'"), ({"swap_s": -1}, "swap_s")])
def test_wrong_options_are_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        qlm(**options)


def test_a_model_without_a_profile_is_named() -> None:
    with pytest.raises(ValueError, match="model x has no profile"):
        QlmSwapping({"x": ModelDemand("x", 1.0, 1.0, 1, 10, 1)}, gpus(1))


@dataclass
class Loaded:
    model: str
    worker: int
    ready_at: int
    requests: int = 0
    draining: bool = False

    def view(self, id: int, tick: int) -> EngineView:
        status = DRAINING if self.draining else RESIDENT if tick >= self.ready_at else LOADING
        return engine(id, self.model, self.worker, requests=self.requests, status=status)


class World:
    """A load takes 3 ticks, an engine serves two requests a tick, and new groups arrive."""

    def __init__(self, policy: QlmSwapping) -> None:
        self.policy = policy
        self.waiting: dict[str, Pending] = {}
        self.engines: dict[int, Loaded] = {}
        self.started = 0

    def arrive(self, tick: int, model: str, requests: int) -> None:
        before = self.waiting.get(model, group(model, 0, float(tick)))
        self.waiting[model] = before._replace(requests=before.requests + requests)

    def tick(self, tick: int) -> None:
        for one in self.engines.values():
            one.requests = max(0, one.requests - 2)
            if tick >= one.ready_at and not one.draining and one.model in self.waiting:
                one.requests += self.waiting.pop(one.model).requests
        self.engines = {id: one for id, one in self.engines.items() if one.requests or not one.draining}
        coming = {one.model for one in self.engines.values() if not one.draining}
        pending = tuple(held for model, held in self.waiting.items() if model not in coming)
        seen = view(*(one.view(id, tick) for id, one in self.engines.items()), pending=pending)
        for suggestion in self.policy.suggest(float(tick), seen):
            if isinstance(suggestion, Start):
                assert all((one.worker,) != suggestion.gpus for one in self.engines.values())
                self.engines[self.started] = Loaded(suggestion.model, suggestion.gpus[0], tick + 3)
                self.started += 1
            elif self.engines[suggestion.engine].requests:
                self.engines[suggestion.engine].draining = True
            else:
                del self.engines[suggestion.engine]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abcd"), st.integers(1, 5)), max_size=12),
    st.integers(1, 3),
    st.floats(5, 200),
)
def test_a_worker_holds_one_model_and_every_group_is_served_in_the_end(
    load: list[tuple[int, str, int]], count: int, slo_s: float
) -> None:
    world = World(qlm(count, slo_s=slo_s, swap_s=3.0))
    for tick in range(250):
        for at, model, requests in load:
            if at == tick:
                world.arrive(tick, model, requests)
        world.tick(tick)
    assert not world.waiting and not any(one.requests for one in world.engines.values())
