"""The fleet controller against a small driver: engines load, drain, fail; requests are never lost, memory never oversold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fineserve_sim.policy.commands import Activate, Command, Dispatch, Drop, Evict, Reject, Survey
from fineserve_sim.policy.events import (
    EngineDrained,
    EngineFailed,
    EngineReady,
    EnginesResized,
    EngineStepped,
    Event,
    RequestAborted,
    RequestArrived,
    Tick,
)
from fineserve_sim.policy.fleet.controller import FleetController
from fineserve_sim.policy.fleet.prism import PrismResidency
from fineserve_sim.policy.fleet.roster import EngineBinding, FleetModel
from fineserve_sim.policy.fleet.views import FleetView, Start, Status, Stop, Suggestion, next_multiple
from fineserve_sim.policy.interfaces import (
    EngineFacts,
    EngineState,
    GpuSlot,
    Instance,
    LocalScheduler,
    ModelDemand,
    Request,
)
from fineserve_sim.policy.placement.kvpr import KvprPlacement
from fineserve_sim.policy.scheduling.moore_hodgson import MooreHodgson

GPUS = [GpuSlot(0, 0, 100), GpuSlot(1, 0, 100)]
MODELS = {
    id: FleetModel(ModelDemand(id, 1.0, slo_s, tp, weight_bytes, 1), 40)
    for id, weight_bytes, slo_s, tp in (("a", 20, 1.0, 1), ("b", 30, 2.0, 1), ("c", 40, 5.0, 1), ("d", 30, 4.0, 2))
}


@dataclass
class Script:
    """A residency policy that says what it is told to, once."""

    suggestions: list[Suggestion] = field(default_factory=list)
    seen: FleetView | None = None

    def suggest(self, now: float, view: FleetView) -> Sequence[Suggestion]:
        self.seen = view
        found, self.suggestions = self.suggestions, []
        return found


def shared_queues(engines: Sequence[EngineBinding]) -> dict[tuple[int, ...], LocalScheduler]:
    """One Moore-Hodgson queue for all engines of a GPU."""
    facts = {e.engine: EngineFacts(100.0, MODELS[e.model].demand.slo_s, e.kv_tokens) for e in engines}
    return {tuple(e.engine for e in engines): MooreHodgson(facts, reserve_fraction=0.0)}


def own_queues(engines: Sequence[EngineBinding]) -> dict[tuple[int, ...], LocalScheduler]:
    """A deadline queue an engine."""
    return {scope: scheduler for e in engines for scope, scheduler in shared_queues([e]).items()}


@dataclass
class Running:
    request: Request
    kv_bytes: int


class Driver:
    """Carries commands out as a cluster would, and checks that they make sense."""

    def __init__(self, controller: FleetController, instances: Sequence[Instance] = ()) -> None:
        self.controller = controller
        self.now = 0.0
        self.engines: dict[int, tuple[str, tuple[int, ...]]] = {e: (i.model, i.gpus) for e, i in enumerate(instances)}
        self.loading: set[int] = set()
        self.draining: set[int] = set()
        self.running: dict[int, dict[int, Running]] = {e: {} for e in self.engines}
        self.waiting: dict[int, Request] = {}
        self.ended: set[int] = set()
        self.log: list[Command] = []
        self.dialogue: list[tuple[float, Event, list[Command]]] = []
        self.told_tokens: dict[int, int] = {}
        self.resize()

    def resize(self) -> None:
        """Tell what engines hold beside the others of now, where that changed."""
        left = {gpu.id: gpu.memory_bytes for gpu in GPUS}
        for model, gpus in self.engines.values():
            for gpu in gpus:
                left[gpu] -= MODELS[model].demand.weight_bytes
        held = {engine: min(left[gpu] for gpu in gpus) for engine, (_, gpus) in self.engines.items()}
        changed = {engine: tokens for engine, tokens in held.items() if self.told_tokens.get(engine) != tokens}
        self.told_tokens = held
        if changed:
            self.tell(EnginesResized(changed))

    def tell(self, event: Event) -> list[Command]:
        commands = self.controller.handle(self.now, event)
        self.log += commands
        self.dialogue.append((self.now, event, commands))
        for command in commands:
            self.carry_out(command)
        return commands

    def carry_out(self, command: Command) -> None:
        if isinstance(command, Survey):
            self.tell(self.tick())
        elif isinstance(command, Dispatch):
            assert command.engine not in self.loading | self.draining
            request = self.waiting.pop(command.request_id)
            assert self.engines[command.engine][0] == request.model
            self.running[command.engine][request.id] = Running(request, request.prompt_tokens)
        elif isinstance(command, Activate):
            assert command.engine == max(self.running, default=-1) + 1
            self.engines[command.engine] = (command.model, command.gpus)
            self.running[command.engine] = {}
            self.loading.add(command.engine)
            self.resize()
        elif isinstance(command, Evict):
            self.evict(command.engine, drain=command.drain)
        elif isinstance(command, Drop | Reject):
            self.waiting.pop(command.request_id, None)
            self.ended.add(command.request_id)

    def evict(self, engine: int, *, drain: bool) -> None:
        assert engine in self.engines and engine not in self.draining
        if drain and self.running[engine]:
            self.draining.add(engine)
        elif drain:
            self.remove(engine)
            self.tell(EngineDrained(engine))
        else:
            self.lose(engine)

    def lose(self, engine: int) -> None:
        """The engine goes at once; what ran in it arrives again."""
        lost, self.running[engine] = self.running[engine], {}
        self.remove(engine)
        for id, running in lost.items():
            request = running.request
            self.waiting[id] = Request(id, request.model, request.arrival_s, request.prompt_tokens + 1)
            self.tell(RequestArrived(self.waiting[id]))

    def remove(self, engine: int) -> None:
        del self.engines[engine]
        self.loading.discard(engine)
        self.draining.discard(engine)
        self.resize()

    def free_bytes(self) -> dict[int, int]:
        free = {gpu.id: gpu.memory_bytes for gpu in GPUS}
        for engine, (model, gpus) in self.engines.items():
            for gpu in gpus:
                free[gpu] -= MODELS[model].demand.weight_bytes
                free[gpu] -= sum(running.kv_bytes for running in self.running[engine].values())
        return free

    def state(self, engine: int) -> EngineState:
        free = min(self.free_bytes()[gpu] for gpu in self.engines[engine][1])
        running = len(self.running[engine])
        return EngineState(running, running, 0, 4 - running, max(0, free), 1.0)

    def tick(self) -> Tick:
        running = {engine: len(here) for engine, here in self.running.items() if engine in self.engines and here}
        return Tick(running, self.free_bytes())

    def arrive(self, id: int, model: str, prompt_tokens: int = 5) -> list[Command]:
        self.waiting[id] = Request(id, model, self.now, prompt_tokens)
        return self.tell(RequestArrived(self.waiting[id]))

    def step(self, engine: int) -> list[Command]:
        scope = self.controller.scope_of(engine)
        return self.tell(EngineStepped(engine, {e: self.state(e) for e in scope}))

    def ready(self, engine: int) -> list[Command]:
        self.loading.discard(engine)
        return self.tell(EngineReady(engine))

    def finish(self, engine: int, request_id: int) -> None:
        del self.running[engine][request_id]
        self.ended.add(request_id)
        if engine in self.draining and not self.running[engine]:
            self.remove(engine)
            self.tell(EngineDrained(engine))


def fleet(*resident: tuple[str, tuple[int, ...]]) -> tuple[Driver, Script]:
    instances = [Instance(model, 0, gpus, 1.0, 0) for model, gpus in resident]
    script = Script()
    return Driver(FleetController(MODELS, GPUS, instances, script, own_queues), instances), script


class TestLife:
    def test_a_request_of_an_absent_model_asks_for_a_look_once(self) -> None:
        driver, script = fleet()
        assert driver.arrive(1, "a") == [Survey()]
        assert driver.arrive(2, "a") == []
        assert driver.controller.held("a") == 2
        assert script.seen is not None and [(p.model, p.requests) for p in script.seen.pending] == [("a", 1)]

    def test_activation_serves_what_was_held_in_order(self) -> None:
        driver, script = fleet()
        script.suggestions = [Start("a", (0,))]
        driver.arrive(1, "a")
        assert driver.log[-1] == Activate(0, "a", (0,))
        assert driver.arrive(2, "a") == []
        assert driver.controller.status(0) is Status.LOADING and driver.controller.scope_of(0) == ()
        driver.ready(0)
        assert driver.controller.held("a") == 0 and driver.controller.bound_to(0) == 2
        assert driver.step(0) == [Dispatch(1, 0), Dispatch(2, 0)]

    def test_a_held_prompt_that_the_engine_cannot_hold_is_refused(self) -> None:
        """As one that comes when the engine is there: else it would wait for as long as the engine stays."""
        driver, script = fleet()
        script.suggestions = [Start("a", (0,))]
        driver.arrive(1, "a", prompt_tokens=30)
        driver.arrive(2, "a")
        driver.tell(EnginesResized({0: 20}))
        assert driver.ready(0) == [Reject(1, "prompt of 30 tokens, at most 19")]
        assert driver.controller.held("a") == 0 and driver.step(0) == [Dispatch(2, 0)]

    def test_a_waiting_prompt_that_its_engine_cannot_hold_any_more_finds_another_or_is_rejected(self) -> None:
        driver, _ = fleet(("a", (0,)), ("a", (1,)), ("c", (0,)))
        for id in (1, 2):
            driver.arrive(id, "a", prompt_tokens=30)
        driver.arrive(3, "c", prompt_tokens=30)
        assert [driver.controller.engine_of(id) for id in (1, 2, 3)] == [0, 1, 2]
        rejected = Reject(3, "prompt of 30 tokens, at most 19")
        assert driver.tell(EnginesResized({0: 30, 2: 20})) == [rejected]
        assert [driver.controller.engine_of(id) for id in (1, 2, 3)] == [1, 1, None]

    def test_a_move_serves_at_the_source_until_the_target_is_ready(self) -> None:
        driver, script = fleet(("a", (0,)))
        script.suggestions = [Start("a", (1,), replaces=0)]
        driver.tell(driver.tick())
        driver.arrive(1, "a")
        driver.step(0)
        driver.arrive(2, "a")
        assert driver.controller.engine_of(2) == 0
        assert driver.ready(1) == [Evict(0, drain=True)]
        assert driver.controller.status(0) is Status.DRAINING
        assert driver.controller.engine_of(2) == 1  # what waited goes along, what runs stays
        driver.arrive(3, "a")
        assert driver.step(1) == [Dispatch(2, 1), Dispatch(3, 1)]
        driver.finish(0, 1)
        assert driver.controller.status(0) is None

    def test_an_idle_engine_goes_at_once_and_its_bytes_count_for_the_next(self) -> None:
        driver, script = fleet(("c", (0,)), ("b", (0,)))
        script.suggestions = [Stop(0), Start("a", (0,)), Start("d", (0, 1))]
        driver.arrive(1, "a")
        assert driver.log[1:] == [Evict(0, drain=False), Activate(2, "a", (0,)), Activate(3, "d", (0, 1))]

    def test_a_busy_engine_drains_unless_told_otherwise(self) -> None:
        driver, script = fleet(("a", (0,)))
        driver.arrive(1, "a")
        driver.step(0)
        script.suggestions = [Stop(0)]
        assert driver.tell(driver.tick()) == [Evict(0, drain=True)]
        driver.arrive(2, "a")
        assert driver.controller.held("a") == 1
        script.suggestions = [Start("a", (1,))]
        driver.finish(0, 1)
        assert driver.log[-2:] == [Survey(), Activate(1, "a", (1,))]

    def test_an_engine_cut_off_returns_its_requests(self) -> None:
        driver, script = fleet(("a", (0,)))
        driver.arrive(1, "a")
        driver.step(0)
        script.suggestions = [Stop(0, drain=False)]
        assert driver.tell(driver.tick()) == [Evict(0, drain=False), Survey()]
        assert driver.controller.held("a") == 1 and driver.waiting[1].prompt_tokens == 6

    def test_a_failed_engine_leaves_its_requests_to_the_next(self) -> None:
        driver, script = fleet(("a", (0,)))
        driver.arrive(1, "a")
        script.suggestions = [Start("a", (1,))]
        driver.remove(0)
        assert driver.tell(EngineFailed(0)) == [Survey()]
        assert driver.log[-1] == Activate(1, "a", (1,))
        driver.ready(1)
        assert driver.step(1) == [Dispatch(1, 1)]

    def test_a_load_that_fails_is_tried_again(self) -> None:
        driver, script = fleet()
        script.suggestions = [Start("a", (0,))]
        driver.arrive(1, "a")
        driver.remove(0)
        script.suggestions = [Start("a", (0,))]
        assert driver.tell(EngineFailed(0)) == [Survey()]
        assert driver.log[-1] == Activate(1, "a", (0,))

    @pytest.mark.parametrize(
        "start",
        [
            Start("c", (0,)),  # 40 bytes where 35 are free
            Start("d", (0, 0)),
            Start("d", (1,)),
            Start("a", (0, 1)),
        ],
    )
    def test_what_cannot_be_is_refused(self, start: Start) -> None:
        driver, script = fleet(("a", (0,)), ("c", (0,)))
        driver.arrive(1, "a")
        driver.step(0)
        script.suggestions = [start]
        assert driver.tell(driver.tick()) == []

    def test_a_model_is_loaded_once_at_a_time(self) -> None:
        driver, script = fleet()
        script.suggestions = [Start("a", (0,)), Start("a", (1,))]
        driver.arrive(1, "a")
        script.suggestions = [Start("a", (1,))]
        assert driver.tell(driver.tick()) == []
        assert len(driver.loading) == 1

    def test_the_books_count_what_was_started_in_the_same_breath(self) -> None:
        driver, script = fleet()
        script.suggestions = [Start(model, (0,)) for model in "cba"] + [Start("d", (0, 1))]
        driver.tell(driver.tick())
        assert [command.model for command in driver.log if isinstance(command, Activate)] == ["c", "b", "a"]

    def test_an_aborted_request_is_not_served_when_its_model_comes(self) -> None:
        driver, script = fleet()
        script.suggestions = [Start("a", (0,))]
        driver.arrive(1, "a")
        driver.tell(RequestAborted(1))
        driver.ready(0)
        assert driver.step(0) == []

    def test_a_prompt_that_fits_no_gpu_is_refused_at_the_door(self) -> None:
        driver, _ = fleet()
        (reject,) = driver.arrive(1, "a", prompt_tokens=40)
        assert isinstance(reject, Reject) and "at most 39" in reject.reason


def test_of_models_that_wait_since_one_moment_that_of_the_first_request_comes_first() -> None:
    driver, script = fleet()
    for id, model in enumerate(("c", "a", "b")):
        driver.arrive(id, model)
    driver.tell(driver.tick())
    assert script.seen and [pending.model for pending in script.seen.pending] == ["c", "a", "b"], "names decide nothing"


def test_without_a_scheduler_requests_go_on_to_the_engine() -> None:
    """First come, first served: the engine's own queue does the rest."""
    script = Script([Start("a", (0,))])
    driver = Driver(FleetController(MODELS, GPUS, [], script, lambda engines: {(e.engine,): None for e in engines}))
    driver.arrive(1, "a")
    assert driver.arrive(2, "a") == []
    assert driver.ready(0) == [Dispatch(1, 0), Dispatch(2, 0)]
    assert driver.arrive(3, "a") == [Dispatch(3, 0)]
    script.suggestions = [Start("a", (1,), replaces=0)]
    driver.tell(driver.tick())
    assert driver.ready(1) == [Evict(0, drain=True)]
    assert driver.arrive(4, "a") == [Dispatch(4, 1)]


class TestView:
    def test_idle_time_counts_from_the_last_request(self) -> None:
        driver, script = fleet(("a", (0,)))
        driver.now = 5.0
        driver.arrive(1, "a")
        driver.step(0)
        driver.now = 7.0
        driver.tell(driver.tick())
        assert script.seen is not None
        assert (script.seen.engines[0].requests, script.seen.engines[0].idle_s) == (1, 0.0)
        driver.finish(0, 1)
        driver.now = 10.0
        driver.tell(driver.tick())
        assert (script.seen.engines[0].requests, script.seen.engines[0].idle_s) == (0, 3.0)

    def test_who_waits_for_memory_alone_marks_its_gpus(self) -> None:
        instances = [Instance("a", 0, (0,), 1.0, 0), Instance("c", 0, (0,), 1.0, 0)]
        script = Script()
        driver = Driver(FleetController(MODELS, GPUS, instances, script, shared_queues), instances)
        for id in (1, 2):
            driver.arrive(id, "a", prompt_tokens=30)
        driver.step(0)
        assert driver.controller.bound_to(0) == 1  # 10 bytes are left for its 30 tokens
        driver.step(0)
        driver.tell(driver.tick())
        assert script.seen is not None and script.seen.pressed == {0}
        driver.tell(driver.tick())
        assert script.seen.pressed == frozenset()

    def test_ticks_come_at_their_times(self) -> None:
        driver, _ = fleet()
        assert driver.controller.next_tick_s == 0.0
        for now, then in ((0.0, 1.0), (0.5, 1.0), (1.0, 2.0), (4.3, 5.0)):
            driver.now = now
            driver.tell(driver.tick())
            assert driver.controller.next_tick_s == then

    def test_rates_start_at_what_is_expected(self) -> None:
        driver, script = fleet(("a", (0,)))
        driver.now = 60.0
        driver.arrive(1, "a")
        driver.tell(driver.tick())
        assert script.seen is not None and script.seen.rates_per_s["a"] == pytest.approx(1 / 60)


@given(st.sampled_from([0.1, 0.3, 1.0, 2.0, 7.3]), st.integers(0, 1000), st.sampled_from([0.0, 0.03, 1e-9]))
def test_the_next_multiple_of_a_period_comes_later_and_none_before_it(period_s: float, count: int, rest: float) -> None:
    now = count * period_s + rest
    then = next_multiple(period_s, now)
    assert then > now >= (round(then / period_s) - 1) * period_s


class Fleet(RuleBasedStateMachine):
    """Prism's residency and GPU queues under random load, failures and aborts."""

    def __init__(self) -> None:
        super().__init__()
        demands = {id: model.demand for id, model in MODELS.items()}
        prism = PrismResidency(demands, GPUS, KvprPlacement(), idle_s=5.0, replace_s=2.0, min_stay_s=4.0)
        instances = [Instance("a", 0, (0,), 1.0, 0), Instance("b", 0, (1,), 1.0, 0)]
        self.driver = Driver(FleetController(MODELS, GPUS, instances, prism, shared_queues), instances)
        self.arrived = 0

    @rule(model=st.sampled_from("abcd"), prompt=st.integers(1, 30))
    def arrive(self, model: str, prompt: int) -> None:
        self.driver.arrive(self.arrived, model, prompt)
        self.arrived += 1

    @rule(gap=st.sampled_from([0.1, 1.0, 6.0]))
    def wait(self, gap: float) -> None:
        self.driver.now += gap
        if self.driver.now >= self.driver.controller.next_tick_s:
            self.driver.tell(self.driver.tick())
            assert self.driver.controller.next_tick_s > self.driver.now

    @precondition(lambda self: self.driver.engines)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        engine = data.draw(st.sampled_from(sorted(self.driver.engines)))
        if self.driver.controller.status(engine) is Status.RESIDENT:
            self.driver.step(engine)

    @precondition(lambda self: self.driver.loading)
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def end_of_loading(self, data: st.DataObject, fails: bool) -> None:
        engine = data.draw(st.sampled_from(sorted(self.driver.loading)))
        if fails:
            self.driver.remove(engine)
            self.driver.tell(EngineFailed(engine))
        else:
            self.driver.ready(engine)

    @precondition(lambda self: any(self.driver.running.values()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        busy = sorted((engine, id) for engine, running in self.driver.running.items() for id in running)
        self.driver.finish(*data.draw(st.sampled_from(busy)))

    @precondition(lambda self: self.driver.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.driver.waiting)))
        del self.driver.waiting[id]
        self.driver.ended.add(id)
        self.driver.tell(RequestAborted(id))

    @invariant()
    def nothing_is_lost(self) -> None:
        """A request that did not end runs, or waits for an engine, or is held."""
        driver, controller = self.driver, self.driver.controller
        running = {id for requests in driver.running.values() for id in requests}
        assert set(range(self.arrived)) == running | driver.waiting.keys() | driver.ended
        bound = {id for id in driver.waiting if controller.engine_of(id) is not None}
        held = sum(controller.held(model) for model in MODELS)
        assert len(driver.waiting) == len(bound) + held
        assert len(bound) == sum(controller.bound_to(engine) for engine in driver.engines)
        for id in bound:
            engine = controller.engine_of(id)
            assert engine is not None and controller.status(engine) is Status.RESIDENT
            assert driver.engines[engine][0] == driver.waiting[id].model
            assert driver.waiting[id].prompt_tokens < driver.told_tokens[engine], "it would wait for ever"

    @invariant()
    def both_agree_on_engines_and_memory_is_not_oversold(self) -> None:
        driver, controller = self.driver, self.driver.controller
        assert min(driver.free_bytes().values()) >= 0
        for engine in driver.engines:
            status = controller.status(engine)
            assert (status is Status.LOADING) == (engine in driver.loading)
            assert (status is Status.DRAINING) == (engine in driver.draining)

    @invariant()
    def nobody_is_held_while_an_engine_serves(self) -> None:
        serving = {
            model for engine, (model, _) in self.driver.engines.items() if self.driver.controller.scope_of(engine)
        }
        assert not any(self.driver.controller.held(model) for model in serving)

    def teardown(self) -> None:
        """The log replayed through a fresh controller gives the same commands."""
        demands = {id: model.demand for id, model in MODELS.items()}
        prism = PrismResidency(demands, GPUS, KvprPlacement(), idle_s=5.0, replace_s=2.0, min_stay_s=4.0)
        instances = [Instance("a", 0, (0,), 1.0, 0), Instance("b", 0, (1,), 1.0, 0)]
        fresh = FleetController(MODELS, GPUS, instances, prism, shared_queues)
        for now, event, commands in self.driver.dialogue:
            assert fresh.handle(now, event) == commands


TestFleet = Fleet.TestCase
