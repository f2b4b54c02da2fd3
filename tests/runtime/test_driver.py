"""The driver on fake engines: what clients see, in good times and bad ones."""

from __future__ import annotations

import pytest
from fake_engines import BLOCK_BYTES, continuation
from fineserve_runtime.bounds import Bounds
from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import Refused
from fineserve_runtime.step_times import MeasuredStep
from runtimekit import core_spec, eventually, runtime

from fineserve_sim.systems.spec import AdaptiveSpec, FcfsSpec, MooreHodgsonSpec, PrismResidencySpec, SchedulerSpec

SCHEDULERS: list[SchedulerSpec | None] = [None, FcfsSpec(), MooreHodgsonSpec(late="drop")]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_requests_of_two_models_end_with_their_tokens(scheduler: SchedulerSpec | None) -> None:
    with runtime(core_spec(scheduler=scheduler)) as here:
        prompts = [tuple(range(2, 5 + i)) for i in range(12)]
        asked = [here.ask("AB"[i % 2], prompt, tokens=3 + i)[1] for i, prompt in enumerate(prompts)]
        here.run()
        for i, heard in enumerate(asked):
            assert heard.tokens_ == continuation(prompts[i], 3 + i)
            assert heard.end is not None and heard.end[:2] == ("finished", "length") and heard.ends == 1
        assert here.driver.wait_empty(0)


def test_memory_pressure_preempts_and_all_finish_with_the_same_tokens() -> None:
    with runtime(core_spec(scheduler=FcfsSpec(), blocks=12)) as here:
        prompts = [tuple(range(2, 40 + i)) for i in range(6)]
        asked = [here.ask("AB"[i % 2], prompt, tokens=40)[1] for i, prompt in enumerate(prompts)]
        here.run()
        assert [heard.tokens_ for heard in asked] == [continuation(prompt, 40) for prompt in prompts]
        assert sum(engine.preemptions for engine in here.host.engines.values()) > 0


def test_a_request_that_cannot_be_on_time_is_refused_at_once() -> None:
    slow = (MeasuredStep(64, 0, 5.0), MeasuredStep(1, 0, 1.0))
    with runtime(core_spec(slo_s=2.0, measured=slow)) as here:
        _, late = here.ask("A", tuple(range(2, 60)), slo_s=2.0)
        assert late.end is not None and late.end[:2] == ("refused", "deadline")
        _, patient = here.ask("A", tuple(range(2, 60)), slo_s=60.0)
        here.run()
        assert patient.end is not None and patient.end.kind == "finished"
        assert here.driver.wait_empty(0)


@pytest.mark.parametrize(
    "scheduler", [AdaptiveSpec(), MooreHodgsonSpec(late="drop")], ids=["adaptive", "moore-hodgson"]
)
def test_a_tighter_limit_of_a_request_counts(scheduler: SchedulerSpec) -> None:
    slow = (MeasuredStep(64, 0, 0.5), MeasuredStep(1, 0, 0.4))
    with runtime(core_spec(slo_s=10.0, measured=slow, scheduler=scheduler)) as here:
        _, hurried = here.ask("A", slo_s=0.01)
        _, normal = here.ask("A", slo_s=10.0)
        here.run()
        assert hurried.end is not None and hurried.end.reason == "deadline"
        assert normal.end is not None and normal.end.kind == "finished"


def test_a_prompt_that_no_engine_takes_is_rejected() -> None:
    with runtime(core_spec(max_tokens=32)) as here:
        _, heard = here.ask("A", tuple(range(2, 50)))
        assert heard.end is not None and heard.end[:2] == ("refused", "rejected")
        assert "at most 31" in heard.end.message


@pytest.mark.parametrize("prompt_tokens", [100, 110, 127, 128, 200])
def test_a_prompt_around_the_limit_of_its_engine_blocks_nobody(prompt_tokens: int) -> None:
    """The engine may lease 8 blocks, 128 tokens, of a region of 64: 2 % of the region would be 20 tokens."""
    spec = core_spec(scheduler=MooreHodgsonSpec())
    with runtime(spec, kv_limit_bytes=8 * BLOCK_BYTES) as here:
        _, long = here.ask("A", tuple(range(2, 2 + prompt_tokens)), tokens=1)
        _, behind = here.ask("A", tokens=1)
        here.run()
        assert long.end is not None and long.end.kind == ("finished" if prompt_tokens < 128 else "refused")
        assert behind.end is not None and behind.end.kind == "finished"


def test_an_engine_holds_less_while_another_is_awake() -> None:
    """Weights of 16 blocks each: beside B, A holds 32 blocks of 64, alone 48."""
    prompt = tuple(2 + number % 200 for number in range(600))
    with runtime(core_spec(weight_bytes=16 * BLOCK_BYTES, max_tokens=4096), max_model_len=4096) as here:
        _, beside = here.ask("A", prompt, tokens=1)
        assert beside.end is not None and "at most 511" in beside.end.message
        here.driver.stop("B")
        eventually(lambda: any(entry.get("kv_tokens") == {"0": 768} for entry in here.log))
        _, alone = here.ask("A", prompt, tokens=1)
        here.run()
        assert alone.end is not None and alone.end.kind == "finished"


def test_the_queue_is_bounded_by_model_and_drains() -> None:
    with runtime(core_spec(scheduler=FcfsSpec()), bounds=Bounds(queued_requests=100)) as here:
        taken, refused = [], 0
        for _ in range(1000):
            try:
                taken.append(here.ask("A")[1])
            except Refused as problem:
                assert problem.reason == "queue_full"
                refused += 1
        assert (len(taken), refused) == (100, 900)
        assert here.ask("B")[1].end is None  # the other model has its own bound
        here.run()
        assert all(heard.end and heard.end.kind == "finished" for heard in taken)
        assert here.ask("A")[1].end is None


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_client_that_leaves_frees_its_blocks(scheduler: SchedulerSpec | None) -> None:
    with runtime(core_spec(scheduler=scheduler)) as here:
        job, heard = here.ask("A", tokens=100)
        for _ in range(5):
            here.host.step_all()
        assert len(heard.tokens_) == 5
        here.driver.abort(job.id)
        assert heard.end is not None and heard.end.kind == "aborted" and heard.ends == 1
        here.run()
        assert here.host.ledger().used_bytes == 0 and heard.ends == 1
        here.driver.abort(job.id)


def test_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    with runtime(core_spec(blocks=8)) as here:
        _, first = here.ask("A", tuple(range(2, 62)), tokens=60)
        job, second = here.ask("A", tuple(range(2, 100)))
        assert not first.end and not here.host.engines[0].submitted[1:]
        here.driver.abort(job.id)
        here.run()
        assert first.end and first.end.kind == "finished" and second.end and second.end.kind == "aborted"
        assert len(here.host.engines[0].submitted) == 1


def test_a_request_that_waits_for_the_neighbours_memory_starts_when_it_is_freed() -> None:
    with runtime(core_spec(blocks=8, slo_s=1e6)) as here:
        _, first = here.ask("A", tuple(range(2, 90)), tokens=20, slo_s=1e6)
        here.host.step(0)
        _, second = here.ask("B", tuple(range(2, 90)), tokens=2, slo_s=1e6)
        assert not here.host.engines[1].submitted
        here.run()
        assert first.end and second.end and second.tokens_ == continuation(tuple(range(2, 90)), 2)


def test_engines_that_take_turns_are_asked_at_each_step_of_one_of_them() -> None:
    """One thread steps both: when B's step ends, A stands before its next one."""
    with runtime(core_spec()) as here:
        for model in "AB":
            here.ask(model, tokens=20)
        here.host.step_all()
        here.ask("A")
        assert len(here.host.engines[0].submitted) == 1
        here.host.step(1)
        assert len(here.host.engines[0].submitted) == 2


def test_priority_reaches_the_engine() -> None:
    with runtime(core_spec(scheduler=FcfsSpec()), max_sequences=1) as here:
        _, first = here.ask("A", tokens=1)
        asked = [here.ask("A", tokens=1, priority=priority)[1] for priority in (2, 0, 1)]
        here.host.step(0)
        here.host.step(0)
        assert [heard.end is not None for heard in asked].count(True) == 1
        assert asked[1].end is not None
        here.run()
        assert first.end is not None


def test_requests_of_a_dead_engine_go_on_after_its_restart_and_the_other_model_is_not_disturbed() -> None:
    with runtime(core_spec()) as here:
        _, lost = here.ask("A", tokens=10)
        _, other = here.ask("B", tokens=10)
        for _ in range(4):
            here.host.step_all()
        here.host.kill(0)
        assert lost.end is None and here.host.engines[0].used_blocks == 0
        eventually(lambda: here.host.restarts == [0])
        eventually(lambda: bool(here.host.engines[0].submitted[1:]))
        here.run()
        assert lost.tokens_ == continuation((5, 6, 7), 10) == other.tokens_
        assert any(what == "engine died" for what, _ in here.incidents)


def test_who_has_tokens_out_is_not_dropped_for_its_first_deadline() -> None:
    with runtime(core_spec(slo_s=1.0)) as here:
        job, heard = here.ask("A", tokens=10, slo_s=1.0)
        here.host.step_all()
        eventually(lambda: here.driver.now() > job.arrival_s + job.slo_s)
        here.host.kill(0)
        eventually(lambda: bool(here.host.engines[0].submitted[1:]))
        here.run()
        assert heard.tokens_ == continuation((5, 6, 7), 10)


def test_an_engines_death_gives_nobody_more_time_for_his_first_token() -> None:
    with runtime(core_spec(("A",), scheduler=FcfsSpec(), slo_s=60)) as here:
        first, with_token = here.ask("A", tokens=50)
        eventually(lambda: here.host.step(0) and bool(with_token.tokens_))
        second, without = here.ask("A", tokens=50)
        came_s = second.arrival_s
        here.host.kill(0)
        assert first.retried and second.retried and second.queued_s == came_s
        assert first.queued_s > second.queued_s and without.end is None


def test_a_second_death_fails_the_request_clearly() -> None:
    with runtime(core_spec()) as here:
        _, heard = here.ask("A", tokens=10)
        here.host.step_all()
        here.host.kill(0)
        eventually(lambda: bool(here.host.engines[0].submitted[1:]))
        here.host.kill(0)
        assert heard.end is not None and heard.end[:2] == ("failed", "engine_died") and "killed" in heard.end.message


def test_a_seeded_request_with_tokens_out_is_not_begun_anew_in_silence() -> None:
    with runtime(core_spec()) as here:
        _, heard = here.ask("A", sampling=Sampling(max_tokens=10, temperature=1.0, seed=3))
        here.host.step_all()
        here.host.kill(0)
        assert heard.end is not None and heard.end.reason == "engine_died"


def test_who_waits_too_long_for_an_engine_is_told() -> None:
    """The other model is not idle for long enough to be evicted."""
    spec = core_spec(weight_bytes=16 * 1024, blocks=24, resident=("A",), residency=PrismResidencySpec(tick_s=0.05))
    with runtime(spec, bounds=Bounds(queued_s=0.1)) as here:
        _, heard = here.ask("B")
        assert heard.end is None
        eventually(lambda: heard.end is not None)
        assert heard.end is not None and heard.end[:2] == ("refused", "queue_timeout")
        assert here.driver.wait_empty(0)


def test_the_first_request_of_a_sleeping_model_is_held_while_it_wakes_and_evicts_an_idle_one() -> None:
    spec = core_spec(
        weight_bytes=16 * 1024, blocks=24, resident=("A",), residency=PrismResidencySpec(idle_s=0.0, move=False)
    )
    with runtime(spec) as here:
        assert here.host.engines[1].asleep
        _, first = here.ask("A")
        here.run()
        assert first.end and first.end.kind == "finished"
        here.host.engines[1].fails_to_wake = 3
        _, second = here.ask("B", tokens=6)
        eventually(lambda: bool(here.host.engines[1].submitted))
        here.run()
        assert second.tokens_ == continuation((5, 6, 7), 6)
        assert here.host.engines[0].asleep and not here.host.engines[1].asleep
        assert here.commands("Evict") and here.commands("Activate")
        _, third = here.ask("A")
        eventually(lambda: len(here.host.engines[0].submitted) == 2)
        here.run()
        assert third.tokens_ == first.tokens_


def test_models_that_wake_at_the_same_time_are_not_promised_the_same_memory() -> None:
    spec = core_spec(
        ("A", "B", "C"),
        weight_bytes=16 * 1024,
        blocks=42,
        resident=("A",),
        residency=PrismResidencySpec(idle_s=0.0, move=False, tick_s=0.05),
    )
    with runtime(spec) as here:
        asked = [here.ask(model, tokens=3)[1] for model in "ABCBC"]
        eventually(lambda: here.run() and all(heard.end for heard in asked))
        assert all(heard.end and heard.end.kind == "finished" for heard in asked)
        assert not [what for what, _ in here.incidents if what == "activation failed"]
        assert here.host.free_bytes() >= 0
        ticks = [entry["free_bytes"]["0"] for entry in here.log if entry.get("event") == "Tick"]
        assert min(ticks) >= 0 and max(ticks) <= 42 * 1024


def test_draining_refuses_the_new_and_ends_the_old() -> None:
    with runtime(core_spec(), step_s=0.001) as here:
        _, heard = here.ask("A", tokens=30)
        here.driver.begin_drain()
        with pytest.raises(Refused, match="shutting down"):
            here.ask("A")
        assert here.driver.wait_empty(5)
        assert heard.end and heard.end.kind == "finished" and len(heard.tokens_) == 30


def test_closing_ends_what_is_left() -> None:
    with runtime(core_spec()) as here:
        _, heard = here.ask("A", tokens=30)
    assert heard.end is not None and heard.end[:2] == ("failed", "shutdown")


def test_two_devices_share_the_load_of_their_models_and_one_may_die() -> None:
    with runtime(core_spec(("A",), gpus=2)) as here:
        asked = [here.ask("A", tokens=6)[1] for _ in range(8)]
        here.hosts[0].step_all()
        here.hosts[1].step_all()
        assert [len(host.engines[0].submitted) for host in here.hosts.values()] == [4, 4]
        here.hosts[0].kill(0)
        assert len(here.hosts[1].engines[0].submitted) >= 4
        eventually(lambda: here.run() and all(heard.end for heard in asked))
        assert all(heard.tokens_ == continuation((5, 6, 7), 6) for heard in asked)
