"""Moore-Hodgson against brute force, and admission control of the shared queue."""

import math
from itertools import combinations, pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fineserve_sim.policy.interfaces import EngineFacts, EngineState, LocalScheduler, Request
from fineserve_sim.policy.scheduling.moore_hodgson import MooreHodgson, moore_hodgson

SPEED = 1024.0  # tokens/s, a power of two: durations are exact
IDLE = EngineState(running=0, decoding=0, prefill_tokens=0, free_slots=8, free_kv_tokens=10_000, slowdown=1.0)
BUSY = IDLE._replace(running=1, decoding=1)  # its reserve is kept free: 2 % of 10,000 tokens are 200
FACTS = EngineFacts(prefill_tokens_per_s=SPEED, slo_s=4.0, kv_capacity_tokens=10_000, block_tokens=16)

starts = st.integers(0, 8).map(lambda n: n / 4)
deadlines = st.integers(0, 48).map(lambda n: n / 4)
durations = st.integers(1, 16).map(lambda n: n / 4)
jobs_by_deadline = st.lists(st.tuples(deadlines, durations), max_size=8).map(sorted)


def ends_on_time(jobs: list[tuple[float, float]], start_s: float) -> bool:
    clock = start_s
    for deadline_s, duration_s in jobs:
        clock += duration_s
        if clock > deadline_s:
            return False
    return True


@settings(max_examples=400)
@given(jobs=jobs_by_deadline, start_s=starts)
def test_keeps_as_many_jobs_on_time_as_any_choice_does(jobs: list[tuple[float, float]], start_s: float) -> None:
    plan = moore_hodgson(jobs, start_s)
    assert sorted(plan.on_time + plan.late) == list(range(len(jobs)))
    assert plan.on_time == sorted(plan.on_time)
    assert plan.late == sorted(plan.late)
    assert ends_on_time([jobs[i] for i in plan.on_time], start_s)
    larger = len(plan.on_time) + 1
    assert not any(ends_on_time(list(choice), start_s) for choice in combinations(jobs, larger))


@given(jobs=jobs_by_deadline, start_s=starts)
def test_each_job_puts_aside_at_most_one(jobs: list[tuple[float, float]], start_s: float) -> None:
    late = [len(moore_hodgson(jobs[:count], start_s).late) for count in range(len(jobs) + 1)]
    assert all(after - before in (0, 1) for before, after in pairwise(late))


@given(jobs=jobs_by_deadline, start_s=starts, share=st.floats(0, 1))
def test_the_plan_holds_while_the_start_moves_within_its_slack(
    jobs: list[tuple[float, float]], start_s: float, share: float
) -> None:
    plan = moore_hodgson(jobs, start_s)
    moved = moore_hodgson(jobs, start_s + share * min(plan.slack_s, 100.0))
    assert (moved.on_time, moved.late) == (plan.on_time, plan.late)


def test_worked_example() -> None:
    """After the second job the clock is 7. The third would end at 9 > 8: the first, of 4, goes; clock 5. The fourth
    would end at 10 > 9 and is itself the longest. The fifth ends at 11, just in time."""
    plan = moore_hodgson([(6, 4), (7, 3), (8, 2), (9, 5), (11, 6)], 0)
    assert (plan.on_time, plan.late) == ([1, 2, 4], [0, 3])
    assert plan.slack_s == 0.0


def test_a_job_that_took_the_place_of_a_longer_one_may_be_put_aside_for_a_shorter_one() -> None:
    plan = moore_hodgson([(4, 4), (5, 3), (6, 2), (6, 1.5)], 0)
    assert (plan.on_time, plan.late) == ([2, 3], [0, 1])


def test_among_equally_long_jobs_the_latest_deadline_is_put_aside() -> None:
    assert moore_hodgson([(2, 2), (3, 2)], 0).late == [1]
    assert moore_hodgson([(4, 2), (4.5, 2), (5, 2)], 0).late == [2]


def queue_of(*prompts: int, engines: int = 1, **options: object) -> MooreHodgson:
    """Requests 0, 1, ... that arrived at 0.0, bound to the engines in turn."""
    scheduler = MooreHodgson(dict.fromkeys(range(engines), FACTS), **options)  # type: ignore[arg-type]
    for id, tokens in enumerate(prompts):
        scheduler.add(Request(id, "m", 0.0, tokens), engine=id % engines)
    return scheduler


def admitted(scheduler: LocalScheduler, now: float, *states: EngineState) -> list[int]:
    return [request.id for request in scheduler.schedule(now, dict(enumerate(states))).admitted]


def test_ending_at_the_deadline_is_on_time() -> None:
    assert admitted(queue_of(2048, 2048), 0.0, IDLE) == [0, 1]
    scheduler = queue_of(2048, 2049)
    assert admitted(scheduler, 0.0, IDLE) == [0]
    assert len(scheduler) == 1


def test_the_late_wait_until_nobody_can_be_on_time_and_then_start() -> None:
    """0 and 1 make 4.25 s: 0, the longer, is put aside and starts alone later, though late."""
    scheduler = queue_of(3072, 1280)
    assert admitted(scheduler, 0.0, IDLE) == [1]
    assert admitted(scheduler, 1.25, IDLE) == [0]
    late = queue_of(3072, 1280)
    assert admitted(late, 3.5, IDLE) == [0, 1]


@pytest.mark.parametrize(
    ("options", "started"),
    [({"late_start": "after_all"}, []), ({"late_start": "beside_blocked"}, [1, 2]), ({}, [])],
    ids=["after_all", "beside_blocked", "default"],
)
def test_strict_short_requests_need_not_starve_beside_a_blocked_one(
    options: dict[str, Any], started: list[int]
) -> None:
    """Engine 1 has a slot from 2 s on, too late for its requests 1 and 2. Request 0 is on time for 100 s, but engine 0 is
    full: with ``beside_blocked`` the late ones start, by default nobody does until request 0 is late as well."""
    facts = {0: EngineFacts(SPEED, 100.0, 10_000), 1: EngineFacts(SPEED, 1.0, 10_000)}
    full = IDLE._replace(free_slots=0)
    scheduler = MooreHodgson(facts, **options)
    scheduler.add(Request(0, "long", 0.0, 4096), engine=0)
    for id in (1, 2):
        scheduler.add(Request(id, "short", 0.5, 64), engine=1)
    assert admitted(scheduler, 1.0, full, full) == []
    assert [id for now in range(2, 90) for id in admitted(scheduler, float(now), full, IDLE)] == started
    assert admitted(scheduler, 101.0, full, IDLE) == ([] if started else [1, 2])


def test_late_requests_do_not_start_with_others_or_pass_on_their_own_engine() -> None:
    """Beside a request that starts now, and on an engine whose next one is blocked, the late ones go on waiting."""
    strict, relaxed = EngineFacts(SPEED, 1.0, 10_000), EngineFacts(SPEED, 50.0, 10_000)
    scheduler = MooreHodgson({0: strict, 1: relaxed}, late_start="beside_blocked")
    for id, arrival_s, tokens, engine in ((0, 0.0, 64, 0), (1, 4.5, 256, 0), (2, 4.5, 512, 1)):
        scheduler.add(Request(id, "m", arrival_s, tokens), engine)
    tight = BUSY._replace(free_kv_tokens=300)
    assert admitted(scheduler, 5.0, tight, tight) == []
    assert admitted(scheduler, 5.0, tight, BUSY) == [2]


def test_drop_refuses_those_that_would_be_late_alone() -> None:
    scheduler = queue_of(3072, 1280, late="drop")
    answer = scheduler.schedule(1.5, {0: IDLE})
    assert ([r.id for r in answer.admitted], [r.id for r in answer.dropped]) == ([1], [0])
    assert len(scheduler) == 0
    on_the_dot = queue_of(3072, 1280, late="drop")
    assert [r.id for r in on_the_dot.schedule(1.0, {0: IDLE}).dropped] == []


def test_the_clock_starts_after_dispatched_prefill_or_now() -> None:
    busy = IDLE._replace(running=1, prefill_tokens=3072)
    requests = (512, 1024)
    assert admitted(queue_of(*requests), 0.0, busy) == [0]
    assert admitted(queue_of(*requests, clock="now"), 0.0, busy) == [0, 1]


def test_dispatched_prefill_of_other_engines_counts_at_their_speed() -> None:
    scheduler = MooreHodgson({0: FACTS, 1: EngineFacts(2 * SPEED, 4.0, 10_000)})
    scheduler.add(Request(0, "m", 0.0, 1025), engine=0)
    scheduler.add(Request(1, "m", 0.0, 1023), engine=0)
    assert admitted(scheduler, 0.0, IDLE, IDLE._replace(prefill_tokens=6144)) == [1]


def test_order_is_by_deadline_over_models_with_different_slos() -> None:
    scheduler = MooreHodgson({0: EngineFacts(SPEED, 4.0, 10_000), 1: EngineFacts(SPEED, 2.0, 10_000)})
    scheduler.add(Request(0, "m", 0.0, 128), engine=0)
    scheduler.add(Request(1, "n", 1.0, 128), engine=1)
    assert admitted(scheduler, 1.0, IDLE, IDLE) == [1, 0]


def test_slots_are_counted_down_within_one_call() -> None:
    scheduler = queue_of(64, 64, 64)
    state = IDLE._replace(free_slots=2)
    assert admitted(scheduler, 0.0, state) == [0, 1]
    assert admitted(scheduler, 0.0, state) == []
    assert admitted(scheduler, 0.0, state._replace(free_slots=1)) == [2]


def test_a_blocked_engine_keeps_its_order_and_others_go_on() -> None:
    scheduler = queue_of(600, 64, 64, 64, 64, engines=2)
    assert admitted(scheduler, 0.0, BUSY._replace(free_kv_tokens=700), BUSY) == [1, 3]
    assert len(scheduler) == 3
    assert admitted(scheduler, 0.1, IDLE, IDLE) == [0, 2, 4]


def test_memory_keeps_a_fraction_of_the_capacity_free() -> None:
    assert admitted(queue_of(300), 0.0, BUSY._replace(free_kv_tokens=500)) == [0]
    assert admitted(queue_of(301), 0.0, BUSY._replace(free_kv_tokens=500)) == []


def test_an_idle_memory_needs_no_reserve() -> None:
    """A prompt may fill it. Beside an engine that runs something in the same memory the reserve is kept."""
    for reserve in ("fraction", "page"):
        assert admitted(queue_of(10_000, reserve=reserve), 0.0, IDLE) == [0]
    assert admitted(queue_of(9_801), 0.0, BUSY) == []
    assert admitted(queue_of(9_801, engines=2), 0.0, IDLE, BUSY) == []
    assert admitted(queue_of(9_801, engines=2, shared_kv=False), 0.0, IDLE, BUSY) == [0]


def test_memory_keeps_one_page_for_each_running_request() -> None:
    """After the first of two prompts of 50 tokens, three requests run: the second needs 50 + 50 + 3 x 16 = 148."""
    state = IDLE._replace(running=2, decoding=2, free_kv_tokens=147)
    assert admitted(queue_of(50, 50, reserve="page"), 0.0, state) == [0]
    assert admitted(queue_of(50, 50, reserve="page"), 0.0, state._replace(free_kv_tokens=148)) == [0, 1]


def test_prompts_not_yet_computed_have_a_claim_on_memory() -> None:
    state = IDLE._replace(running=1, prefill_tokens=400, free_kv_tokens=800)
    assert admitted(queue_of(200), 0.0, state) == [0]
    assert admitted(queue_of(201), 0.0, state) == []


def test_in_a_shared_memory_a_promise_to_one_engine_costs_the_others() -> None:
    """Engine 1's tokens are half as large: its capacity is twice that of engine 0, and 100 tokens there cost it 200."""
    facts = {0: EngineFacts(SPEED, 4.0, 1000), 1: EngineFacts(SPEED, 4.0, 2000)}
    states = (IDLE._replace(free_kv_tokens=1000), IDLE._replace(free_kv_tokens=2000))
    for second, shared, expected in [(1760, True, [0, 1]), (1761, True, [0]), (1761, False, [0, 1])]:  # 40 are reserved
        scheduler = MooreHodgson(facts, shared_kv=shared)
        scheduler.add(Request(0, "m", 0.0, 100), engine=0)
        scheduler.add(Request(1, "n", 0.0, second), engine=1)
        assert admitted(scheduler, 0.0, *states) == expected


def test_a_prompt_that_no_idle_engine_could_take_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt of 10001 tokens; engine 0 holds 10000"):
        queue_of(10_001)


def test_an_engine_that_is_not_ready_starts_nothing() -> None:
    scheduler = queue_of(64, 64, engines=2)
    assert [r.id for r in scheduler.schedule(0.0, {1: IDLE}).admitted] == [1]
    assert len(scheduler) == 1


states = st.builds(
    EngineState,
    running=st.integers(0, 4),
    decoding=st.just(0),
    prefill_tokens=st.sampled_from([0, 0, 300, 2000]),
    free_slots=st.integers(0, 3),
    free_kv_tokens=st.sampled_from([0, 400, 900, 3000, 10_000]),
    slowdown=st.just(1.0),
)


@given(
    prompts=st.lists(st.integers(1, 4000), min_size=1, max_size=12),
    shown=st.tuples(states, states),
    late=st.sampled_from(["defer", "drop"]),
    late_start=st.sampled_from(["after_all", "beside_blocked"]),
    now=st.sampled_from([0.0, 1.0, 3.0]),
    fractions=st.lists(st.floats(0, 1), min_size=1, max_size=6),
)
def test_nothing_happens_before_unchanged_until(
    prompts: list[int],
    shown: tuple[EngineState, EngineState],
    late: str,
    late_start: str,
    now: float,
    fractions: list[float],
) -> None:
    scheduler = queue_of(*prompts, engines=2, late=late, late_start=late_start)
    engines = dict(enumerate(shown))
    scheduler.schedule(now, engines)
    until = scheduler.unchanged_until(now, engines)
    assert until > now
    end = min(until, now + 8)
    for t in [*sorted(now + (end - now) * fraction for fraction in fractions), math.nextafter(end, 0)]:
        if now < t < until:
            answer = scheduler.schedule(t, engines)
            assert answer.admitted == answer.dropped == []


def starts_of_the_whole_queue(
    waiting: list[Request], engine_of: dict[int, int], slo_s: tuple[float, ...], now: float, slots: list[int], late: str
) -> list[int]:
    """Ids that start where memory is plenty, all that wait planned anew: as Algorithm 2 has it."""
    jobs = sorted((r.arrival_s + slo_s[engine_of[r.id]], r.arrival_s, r.id, r.prompt_tokens / SPEED) for r in waiting)
    plan = moore_hodgson([(job[0], job[3]) for job in jobs], now)
    left = list(slots)

    def started(indices: list[int]) -> list[int]:
        found = []
        for id in (jobs[index][2] for index in indices):
            if left[engine_of[id]]:
                left[engine_of[id]] -= 1
                found.append(id)
        return found

    first = started(plan.on_time)
    return started(plan.late) if not plan.on_time or (late == "beside_blocked" and not first) else first


@given(
    gaps=st.lists(st.integers(0, 6).map(lambda n: n / 4), min_size=1, max_size=40),
    prompts=st.lists(st.integers(1, 24).map(lambda n: 256 * n), min_size=40, max_size=40),
    slots=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=40, max_size=40),
    late_start=st.sampled_from(["after_all", "beside_blocked"]),
)
def test_who_is_late_for_good_need_not_be_planned(
    gaps: list[float], prompts: list[int], slots: list[tuple[int, int]], late_start: str
) -> None:
    """Two engines with limits of 4 and 1 s: what starts is what starts when every call plans all that wait."""
    facts = {engine: EngineFacts(SPEED, slo_s, 1_000_000) for engine, slo_s in enumerate((4.0, 1.0))}
    scheduler = MooreHodgson(facts, late_start=late_start)  # type: ignore[arg-type]
    plenty = IDLE._replace(free_kv_tokens=1_000_000)
    waiting: dict[int, Request] = {}
    engine_of: dict[int, int] = {}
    now = 0.0
    for id, (gap_s, tokens, free) in enumerate(zip(gaps, prompts, slots, strict=False)):
        now += gap_s
        waiting[id], engine_of[id] = Request(id, "m", now, tokens), id % 3 % 2
        scheduler.add(waiting[id], engine_of[id])
        asked = now + 0.125
        found = admitted(scheduler, asked, *(plenty._replace(free_slots=count) for count in free))
        wanted = [*waiting.values()]
        assert found == starts_of_the_whole_queue(wanted, engine_of, (4.0, 1.0), asked, list(free), late_start)
        for started in found:
            del waiting[started]
        assert len(scheduler) == len(waiting)


def test_unchanged_until_is_when_the_plan_changes() -> None:
    """0 cannot get memory and blocks 1. Together they take 1.5 s of 4; from 2.5 on the longer 0 is put aside."""
    tight = {0: IDLE._replace(free_kv_tokens=900)}
    scheduler = queue_of(1024, 512)
    assert scheduler.schedule(0.0, tight).admitted == []
    assert scheduler.unchanged_until(0.0, tight) == pytest.approx(2.5, abs=1e-12)
    assert scheduler.schedule(2.5, tight).admitted == []
    assert [r.id for r in scheduler.schedule(2.5 + 1e-6, tight).admitted] == [1]


def test_unchanged_until_is_when_a_request_put_aside_becomes_hopeless() -> None:
    """The plan of 0 and 1 holds until 2.5, but 2, put aside at once, takes 3 s of 4."""
    tight = {0: IDLE._replace(free_kv_tokens=900)}
    for late, until_s, dropped in [("drop", 1.0, [2]), ("defer", 2.5, [])]:
        scheduler = queue_of(1024, 512, 3072, late=late)
        assert scheduler.schedule(0.0, tight).admitted == []
        assert scheduler.unchanged_until(0.0, tight) == pytest.approx(until_s, abs=1e-12)
        assert [r.id for r in scheduler.schedule(1.0 + 1e-6, tight).dropped] == dropped


def test_when_a_client_leaves_the_same_moment_is_judged_anew() -> None:
    scheduler = queue_of(1024, 512)
    tight = IDLE._replace(free_kv_tokens=900)
    assert admitted(scheduler, 0.0, tight) == []
    assert scheduler.remove(0)
    assert admitted(scheduler, 0.0, tight) == [1]


def test_unchanged_until_is_infinite_when_only_events_matter() -> None:
    assert queue_of().unchanged_until(0.0, {0: IDLE}) == math.inf
    assert queue_of(64).unchanged_until(0.0, {0: IDLE._replace(free_slots=0)}) == math.inf
    assert queue_of(64, late="drop").unchanged_until(0.0, {0: IDLE._replace(free_kv_tokens=63)}) == math.inf


def test_a_removed_request_does_not_start() -> None:
    scheduler = queue_of(64, 64)
    assert scheduler.remove(0)
    assert not scheduler.remove(0)
    answer = scheduler.schedule(0.0, {0: IDLE})
    assert ([r.id for r in answer.admitted], answer.dropped) == ([1], [])


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="late is 'never'"):
        queue_of(late="never")
    with pytest.raises(ValueError, match="late_start is 'soon'"):
        queue_of(late_start="soon")
    with pytest.raises(ValueError, match="reserve_fraction is 1"):
        queue_of(reserve_fraction=1.0)
    with pytest.raises(ValueError, match="engine 3: prefill speed"):
        MooreHodgson({3: EngineFacts(0.0, 4.0, 100)})
    scheduler = queue_of(64)
    with pytest.raises(ValueError, match="bound to engine 5"):
        scheduler.add(Request(9, "m", 0.0, 64), engine=5)
    with pytest.raises(ValueError, match="request 0 is added twice"):
        scheduler.add(Request(0, "m", 0.0, 64), engine=0)
    with pytest.raises(ValueError, match=r"shown engines \[7\]"):
        scheduler.schedule(0.0, {7: IDLE})
