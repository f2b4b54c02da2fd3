"""Engines that die, hang, crash and come back, on fakes: what clients are told, and when."""

from __future__ import annotations

import pytest
from fake_engines import REFUSED_TOKEN, FakeHost, continuation
from fineserve_runtime import lives, places
from fineserve_runtime.alarm import Alarm
from fineserve_runtime.backoff import FIRST_S, GOOD_S, MOST_S, Backoff
from fineserve_runtime.bounds import Bounds
from fineserve_runtime.driver import Driver
from fineserve_runtime.engines.api import HostConfig
from fineserve_runtime.jobs import Job, Refused
from fineserve_runtime.metrics import Metrics
from fineserve_runtime.step_times import MeasuredStep
from runtimekit import Runtime, core_spec, engine_config, eventually, runtime

from fineserve_sim.systems.spec import FcfsSpec, MooreHodgsonSpec, PrismResidencySpec

PROMPT = (5, 6, 7)


def test_back_off_doubles_up_to_its_bound_and_is_forgotten_after_good_behaviour() -> None:
    backoff, now, waits = Backoff(), 100.0, []
    for _ in range(10):
        backoff.down("A", now)
        waits.append(backoff.wait_s("A", now))
        now += waits[-1]
        assert backoff.wait_s("A", now) == 0.0
        backoff.up("A", now)
    assert waits[:4] == [0.0, FIRST_S, 2 * FIRST_S, 4 * FIRST_S] and waits[-1] == MOST_S
    now += GOOD_S
    backoff.down("A", now)
    assert backoff.wait_s("A", now) == 0.0
    assert backoff.wait_s("B", now) == 0.0


def test_a_start_that_fails_counts_as_a_death() -> None:
    backoff = Backoff()
    for now in (1000.0, 1100.0, 1200.0):  # long waits between attempts are no good behaviour
        backoff.down("A", now)
    assert backoff.wait_s("A", 1200.0) == 2 * FIRST_S


def test_an_engine_without_a_sign_of_life_is_ended_and_its_requests_go_on() -> None:
    with runtime(core_spec(), bounds=Bounds(silent_s=5.0), step_s=0.001) as here:
        here.host.engines[0].silent_s = 6.0
        eventually(lambda: here.host.killed == [0])
        eventually(lambda: here.host.restarts == [0])
        _, heard = here.ask("A", tokens=10)
        eventually(lambda: heard.end is not None)
        assert heard.tokens_ == continuation(PROMPT, 10)
        assert [what for what, _ in here.incidents][:2] == ["engine hung", "engine died"]
        assert "no sign of life for 6 s" in str(here.incidents[0][1]["reason"])


def test_of_two_silent_engines_the_most_silent_goes_first_and_the_other_gets_another_chance() -> None:
    with runtime(core_spec(), bounds=Bounds(silent_s=5.0)) as here:
        here.host.engines[0].silent_s, here.host.engines[1].silent_s = 6.0, 7.0
        eventually(lambda: here.host.restarts == [1])
        here.host.engines[0].silent_s = 0.0
        assert here.host.killed == [1]


def test_an_engine_that_stopped_with_its_regions_lock_is_ended_before_silent_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines of its device stood for ``silent_s``. One that is silent without the lock has that time."""
    monkeypatch.setattr(lives, "_LOCK_S", 0.0)
    with runtime(core_spec(), bounds=Bounds(silent_s=60.0), step_s=0.001) as here:
        here.host.engines[1].silent_s = 8.0
        here.host.lock_holders.add(0)
        _, heard = here.ask("A", tokens=10)
        eventually(lambda: heard.end is not None)
        assert here.host.killed == [], "it gives signs of life"
        here.host.engines[0].silent_s = 7.0
        eventually(lambda: here.host.restarts == [0])
        assert here.host.killed == [0]


def test_a_silent_engine_that_was_seen_with_the_lock_once_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its long step is over, and it takes the lock for the next one."""
    looks: list[int] = []

    def seldom(host: FakeHost, engine: int) -> bool:
        looks.append(engine)
        return len(looks) % 2 == 1

    monkeypatch.setattr(FakeHost, "holds_up", seldom)
    monkeypatch.setattr(lives, "_LOCK_S", 1e-9)
    with runtime(core_spec(), bounds=Bounds(silent_s=60.0), step_s=0.001) as here:
        here.host.engines[0].silent_s = 7.0
        eventually(lambda: len(looks) > 6)
        assert here.host.killed == []


def down(here: Runtime) -> None:
    """Model A dies, and does not come up the next two times."""
    here.host.failing_restarts = 2
    here.host.kill(0)
    eventually(lambda: here.driver.health("A").condition == "down")
    eventually(lambda: len(here.host.restarts) == 1)


def test_who_waits_for_a_model_that_does_not_come_back_is_told_at_once() -> None:
    with runtime(core_spec(scheduler=FcfsSpec()), max_sequences=1) as here:
        _, running = here.ask("A", tokens=50)
        _, other = here.ask("B", tokens=5)
        waiting = [here.ask("A")[1] for _ in range(3)]
        here.host.step(0)
        down(here)
        eventually(lambda: all(heard.end for heard in [running, *waiting]))
        assert running.end and running.end[:2] == ("failed", "model_down")
        for heard in waiting:
            assert heard.end and heard.end[:2] == ("refused", "model_down")
            assert heard.end.retry_after_s and 1 <= heard.end.retry_after_s <= 10
        with pytest.raises(Refused, match="model A is down") as raised:
            here.ask("A")
        assert raised.value.reason == "model_down" and raised.value.retry_after_s
        assert here.driver.health("B").condition == "ready"
        here.run()
        assert other.tokens_ == continuation(PROMPT, 5)


@pytest.mark.slow
def test_a_model_that_was_down_comes_back_and_the_time_is_counted() -> None:
    with runtime(core_spec(), step_s=0.001) as here:
        down(here)
        eventually(lambda: here.driver.health("A").condition == "ready")
        health = here.driver.health("A")
        assert len(here.host.restarts) == 3 and health.down_s >= FIRST_S and health.retry_after_s == 0
        assert here.driver.health("B").down_s == 0
        _, heard = here.ask("A", tokens=3)
        eventually(lambda: heard.end is not None)
        assert heard.tokens_ == continuation(PROMPT, 3)


def test_a_model_whose_weights_find_no_memory_is_tried_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough memory may be free, but in pieces. The core asked for the same device again at once, until the requests' time
    was over."""
    monkeypatch.setattr(places, "_WAKE_S", 0.0)
    monkeypatch.setattr(lives, "_PATIENCE_S", 0.5)
    residency = PrismResidencySpec(idle_s=1000.0, tick_s=0.01)
    with runtime(core_spec(weight_bytes=16 * 1024, resident=("A",), residency=residency), step_s=0.001) as here:
        here.host.engines[1].asleep, here.host.engines[1].fails_to_wake = True, 2
        _, heard = here.ask("B", tokens=3)
        eventually(lambda: heard.end is not None)
        failed = [facts for what, facts in here.incidents if what == "activation failed"]
        assert len(failed) == 2 and heard.end and heard.end[:2] == ("refused", "model_down")
        assert here.driver.health("B").condition == "down" and here.host.engines[1].alive
        eventually(lambda: here.driver.health("B").condition == "ready")
        _, heard = here.ask("B", tokens=3)
        eventually(lambda: heard.end is not None)
        assert heard.tokens_ == continuation(PROMPT, 3)


def test_a_request_that_may_have_crashed_its_engine_is_not_sent_again_and_proven_ones_are() -> None:
    with runtime(core_spec(scheduler=FcfsSpec())) as here:
        _, proven = here.ask("A", tokens=10)
        here.host.step(0)
        _, suspect = here.ask("A", (8, 9), tokens=10)
        here.host.kill(0, "IndexError: index out of range", crashed=True)
        assert suspect.end and suspect.end[:2] == ("failed", "engine_error") and "IndexError" in suspect.end.message
        eventually(lambda: len(here.host.engines[0].submitted) == 3)
        here.run()
        assert proven.tokens_ == continuation(PROMPT, 10)


def test_a_request_that_its_engine_refuses_ends_alone() -> None:
    with runtime(core_spec()) as here:
        _, other = here.ask("A", tokens=10)
        _, refused = here.ask("A", (REFUSED_TOKEN,))
        here.run()
        assert refused.end and refused.end[:2] == ("refused", "rejected") and "no such token" in refused.end.message
        assert other.tokens_ == continuation(PROMPT, 10)
        assert not here.incidents


def test_dispatched_requests_have_deadlines_too() -> None:
    """An engine that has them and does not go on."""
    with runtime(core_spec(), bounds=Bounds(queued_s=0.2)) as here:
        _, heard = here.ask("A")
        assert here.host.engines[0].submitted
        eventually(lambda: heard.end is not None)
        assert heard.end and heard.end[:2] == ("refused", "queue_timeout")
    with runtime(core_spec(), bounds=Bounds(request_s=0.2)) as here:
        _, heard = here.ask("A", tokens=50)
        here.host.step(0)
        eventually(lambda: heard.end is not None)
        assert heard.end and heard.end[:2] == ("failed", "request_timeout") and heard.tokens_


def test_deadlines_do_not_wait_for_a_tick_of_the_policy() -> None:
    """Whose next one is a minute away."""
    seldom = PrismResidencySpec(tick_s=60.0)
    spec = core_spec(scheduler=MooreHodgsonSpec(late="drop"), residency=seldom, weight_bytes=1024)
    with runtime(spec, bounds=Bounds(queued_s=0.1)) as here:
        _, heard = here.ask("A")
        assert here.host.engines[0].submitted
        eventually(lambda: heard.end is not None)
        assert heard.end and heard.end[:2] == ("refused", "queue_timeout")


def test_the_way_to_the_driver_is_part_of_the_wait() -> None:
    """A server that has much to read and to tokenise gives nobody more time for it."""
    with runtime(core_spec(), bounds=Bounds(queued_s=1000.0)) as here:
        _, heard = here.ask("A", waited_s=1001.0, slo_s=5000.0)
        assert here.host.engines[0].submitted
        eventually(lambda: heard.end is not None)
        assert heard.end and heard.end[:2] == ("refused", "queue_timeout")
        _, heard = here.ask("B", waited_s=11.0, slo_s=10.0)
        assert heard.end and heard.end[:2] == ("refused", "deadline")


def test_who_has_tokens_and_waits_too_long_for_an_engine_has_failed_and_was_not_refused() -> None:
    slow = tuple(MeasuredStep(tokens, 0, 100.0) for tokens in (16, 32, 64))
    with runtime(core_spec(measured=slow, slo_s=1000.0), bounds=Bounds(queued_s=5.0)) as here:
        _, heard = here.ask("A", tuple(range(5, 45)), tokens=10, slo_s=1000.0)
        here.host.step(0)
        here.host.kill(0)
        eventually(lambda: heard.end is not None)
        assert heard.end and heard.end[:2] == ("failed", "queue_timeout") and heard.tokens_


def test_who_waits_for_an_engine_that_starts_is_told_at_its_deadline() -> None:
    quick = (MeasuredStep(64, 0, 0.001), MeasuredStep(8, 4, 0.0002))
    spec = core_spec(slo_s=0.2, measured=quick, resident=("A",), weight_bytes=40 * 1024)  # no room to wake B
    with runtime(spec) as here:
        _, heard = here.ask("B", slo_s=0.2)
        eventually(lambda: heard.end is not None)
        assert heard.end and heard.end[:2] == ("refused", "deadline")


def test_requests_that_were_told_that_their_model_is_down_are_not_sent_to_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the engine that died are among them."""
    monkeypatch.setattr("fineserve_runtime.lives._PATIENCE_S", 0.5)  # the second death's back-off is a second
    with runtime(core_spec(("A",), slo_s=60.0)) as here:
        here.host.kill(0)
        eventually(lambda: here.driver.health("A").condition == "ready")
        asked = [here.ask("A", tokens=30, slo_s=60.0)[1] for _ in range(12)]
        here.host.step(0)
        here.host.step(0)
        given = len(here.host.engines[0].submitted)
        assert 1 < given < 12, "some wait for a slot"
        here.host.kill(0)
        assert [(heard.end and heard.end.reason, heard.ends) for heard in asked] == [("model_down", 1)] * 12
        eventually(lambda: here.driver.health("A").condition == "ready")
        _, heard = here.ask("A", tokens=3)
        here.run()
        assert heard.tokens_ == continuation(PROMPT, 3) and len(here.host.engines[0].submitted) == given + 1
        assert not [facts for what, facts in here.incidents if what == "internal error"]


def test_an_engine_that_dies_before_its_driver_starts_is_started_again() -> None:
    """While the server starts other engines, nobody hears of it."""
    spec = core_spec()
    driver = Driver(spec)
    engines = tuple(engine_config(model.id) for model in spec.models)
    host = FakeHost(HostConfig(engines, spec.gpus[0].memory_bytes), driver.listener(0))
    host.kill(0)
    driver.start({0: host})
    try:
        eventually(lambda: host.restarts == [0] and driver.health("A").condition == "ready")
    finally:
        host.close()
        driver.close()


class Clumsy(Metrics):
    """An observer that stumbles over the first dispatch."""

    stumbled = False

    def dispatched(self, job: Job, now: float) -> None:
        if not self.stumbled:
            self.stumbled = True
            raise OSError("no room to count")


def test_what_goes_wrong_when_an_engine_came_up_is_told() -> None:
    spec = core_spec(weight_bytes=16 * 1024, resident=("A",), residency=PrismResidencySpec(tick_s=0.05))
    with runtime(spec, observers=[Clumsy("AB")]) as here:
        here.ask("B")
        eventually(lambda: any(what == "internal error" for what, _ in here.incidents))
        (facts,) = [facts for what, facts in here.incidents if what == "internal error"]
        assert facts == {"where": "device", "reason": "OSError('no room to count')"}


def test_the_clock_outlives_what_goes_wrong_at_a_tick() -> None:
    rung, troubles = [], []

    def ring() -> None:
        rung.append(1)
        if len(rung) == 1:
            alarm.set(0.0)
            raise OSError("disk full")

    alarm = Alarm(ring, troubles.append)
    alarm.set(0.0)
    eventually(lambda: len(rung) == 2)
    assert alarm.alive and [str(each) for each in troubles] == ["disk full"]
    alarm.close()
