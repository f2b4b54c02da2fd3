"""Adaptive batching against a literal transcription of FineServe's Algorithm 2, and its promises one by one."""

import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fineserve_sim.policy.interfaces import EngineState, LocalScheduler, PrefillLatency, Request
from fineserve_sim.policy.scheduling.adaptive import AdaptiveBatching
from fineserve_sim.policy.scheduling.moore_hodgson import moore_hodgson

BUDGET_TOKENS = 64
SLO_S = 3.0
BLOCK_TOKENS = 16


def chunked(tokens: int, decoding: int, pairs: int = 0) -> float:
    """Iterations of 1/16 s: a staircase in tokens, exact in binary, so that ties with deadlines do occur."""
    return math.ceil(tokens / (BUDGET_TOKENS - decoding)) / 16 if decoding < BUDGET_TOKENS else math.inf


def linear(tokens: int, decoding: int, pairs: int = 0) -> float:
    """Not exact in binary: rounding matters."""
    return 0.003 + tokens * 0.0007 * (1 + 0.1 * decoding)


def attending(tokens: int, decoding: int, pairs: int) -> float:
    """A long prompt takes longer than short ones with as many tokens; exact in binary."""
    return chunked(tokens, decoding) + pairs / 2**22


IDLE = EngineState(running=0, decoding=0, prefill_tokens=0, free_slots=8, free_kv_tokens=10_000, slowdown=1.0)


@dataclass
class Algorithm2:
    """The listing, line by line, on plain lists. ``waiting`` is W; the guards for an empty S and a full budget are ours."""

    prefill: PrefillLatency
    slo_s: float = SLO_S
    union: bool = False
    waiting: list[Request] = field(default_factory=list)

    def schedule(self, t: float, state: EngineState) -> tuple[list[int], list[int]]:
        """Ids admitted, in order, and ids dropped."""
        if state.prefill_tokens > 0 and not self.union:
            return [], []
        if self.prefill(1, state.decoding, 1) == math.inf:
            state = state._replace(decoding=0, free_slots=0)

        def ttft(*prompts: int) -> float:
            pairs = sum(tokens * (tokens + 1) // 2 for tokens in prompts)
            return self.prefill(sum(prompts), state.decoding, pairs) * state.slowdown

        def d(r: Request) -> float:
            return r.arrival_s + self.slo_s

        dropped = [r for r in self.waiting if not t + ttft(r.prompt_tokens) < d(r)]
        self.waiting = [r for r in self.waiting if r not in dropped]
        s = sorted(self.waiting, key=lambda r: (d(r), r.arrival_s, r.id))
        while s and t + ttft(state.prefill_tokens, *(r.prompt_tokens for r in s)) >= d(s[0]):
            s.remove(max(s, key=lambda r: (r.prompt_tokens, d(r), r.arrival_s, r.id)))
        n_max, t_max = state.free_slots, state.free_kv_tokens - BLOCK_TOKENS * state.running
        while len(s) > max(n_max, 0) or sum(r.prompt_tokens for r in s) > t_max:
            if not s:
                break
            s.pop()
        self.waiting = [r for r in self.waiting if r not in s]
        return [r.id for r in s], sorted(r.id for r in dropped)


def scheduler_with(requests: list[Request], prefill: PrefillLatency = chunked, union: bool = False) -> AdaptiveBatching:
    scheduler = AdaptiveBatching(SLO_S, prefill, when_prefilling="union" if union else "skip")
    for request in requests:
        scheduler.add(request, engine=0)
    return scheduler


def admitted(scheduler: LocalScheduler, now: float, state: EngineState = IDLE) -> list[int]:
    return [request.id for request in scheduler.schedule(now, {0: state}).admitted]


states = st.builds(
    EngineState,
    running=st.integers(0, 6),
    decoding=st.sampled_from([0, 1, 2, 3, 6, BUDGET_TOKENS]),
    prefill_tokens=st.sampled_from([0, 0, 0, 1, 70, 400]),
    free_slots=st.sampled_from([0, 1, 2, 5, 50]),
    free_kv_tokens=st.sampled_from([0, 120, 400, 2000, 100_000]),
    slowdown=st.sampled_from([1.0, 1.5, 3.0]),
)
lengths = st.one_of(st.sampled_from([1, 64, 128, 640]), st.integers(1, 3000))
steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0625, 0.125, 0.3, 0.5, 1.0]),  # time since the step before
        st.lists(lengths, max_size=6),  # prompts that arrive
        st.one_of(st.none(), st.integers(0, 60)),  # client that leaves
        states,
    ),
    min_size=1,
    max_size=25,
)


@given(steps=steps, prefill=st.sampled_from([chunked, linear, attending]), union=st.booleans())
def test_equals_the_listing_on_any_history(
    steps: list[tuple[float, list[int], int | None, EngineState]], prefill: PrefillLatency, union: bool
) -> None:
    oracle, scheduler = Algorithm2(prefill, union=union), scheduler_with([], prefill, union)
    now, next_id = 0.0, 0
    for gap_s, prompts, leaver, state in steps:
        now += gap_s
        for tokens in prompts:
            request = Request(next_id, "m", now, tokens)
            oracle.waiting.append(request)
            scheduler.add(request, engine=0)
            next_id += 1
        if leaver is not None:
            assert scheduler.remove(leaver) == (leaver in [r.id for r in oracle.waiting])
            oracle.waiting = [r for r in oracle.waiting if r.id != leaver]
        answer = scheduler.schedule(now, {0: state})
        expected_admitted, expected_dropped = oracle.schedule(now, state)
        assert [r.id for r in answer.admitted] == expected_admitted
        assert sorted(r.id for r in answer.dropped) == expected_dropped
        assert len(scheduler) == len(oracle.waiting)
        again = scheduler.schedule(now, {0: state})
        assert again.admitted == again.dropped == []
        now += 1 / 1024  # the listing, asked twice at one moment, would start the rest of its queue as a second batch


@pytest.mark.parametrize("seed", range(4))
def test_equals_the_listing_on_queues_of_many_blocks(seed: int) -> None:
    """Hundreds of requests: blocks split, empty and are searched."""
    rng = random.Random(seed)
    oracle, scheduler = Algorithm2(linear, slo_s=SLO_S), scheduler_with([], linear)
    now, next_id, history = 0.0, 0, 0
    for _ in range(12):
        for _ in range(rng.choice([10, 100, 300])):
            now += rng.choice([0.0, 0.002])
            request = Request(next_id, "m", now, rng.choice([7, 50, rng.randint(1, 3500)]))
            oracle.waiting.append(request)
            scheduler.add(request, engine=0)
            next_id += 1
        now += rng.choice([0.01, 0.4])
        state = EngineState(3, 3, 0, rng.choice([1, 20, 400]), rng.choice([900, 30_000]), rng.choice([1.0, 1.2]))
        answer = scheduler.schedule(now, {0: state})
        assert ([r.id for r in answer.admitted], sorted(r.id for r in answer.dropped)) == oracle.schedule(now, state)
        history += len(answer.admitted) + len(answer.dropped)
        full = state._replace(free_slots=0)
        expiry_s = min(r.arrival_s + SLO_S - linear(r.prompt_tokens, 3) * full.slowdown for r in oracle.waiting)
        assert scheduler.unchanged_until(now, {0: full}) == pytest.approx(expiry_s, abs=1e-12)
    assert history > 100


@st.composite
def waiting_queues(draw: st.DrawFn) -> tuple[AdaptiveBatching, float]:
    """A scheduler with requests, and the time of its first call."""
    now, requests = 0.0, []
    for id, gap_s in enumerate(draw(st.lists(st.sampled_from([0.0, 0.1, 0.5]), min_size=1, max_size=30))):
        now += gap_s
        requests.append(Request(id, "m", now, draw(lengths)))
    scheduler = scheduler_with(requests, draw(st.sampled_from([chunked, linear])), union=draw(st.booleans()))
    return scheduler, now + draw(st.sampled_from([0.0, 0.5, 2.0]))


@given(
    queue=waiting_queues(),
    state=states,
    fractions=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6),
    lost_tokens=st.integers(0, 200),
)
def test_nothing_happens_before_unchanged_until(
    queue: tuple[AdaptiveBatching, float], state: EngineState, fractions: list[float], lost_tokens: int
) -> None:
    scheduler, now = queue
    scheduler.schedule(now, {0: state})
    until = scheduler.unchanged_until(now, {0: state})
    assert until > now
    end = min(until, now + 10)
    shrunk = state._replace(free_kv_tokens=state.free_kv_tokens - lost_tokens)
    times = sorted(now + (end - now) * fraction for fraction in fractions)
    for t in [*times, math.nextafter(end, -math.inf)]:
        if now < t < until:
            answer = scheduler.schedule(t, {0: shrunk})
            assert answer.admitted == answer.dropped == []


def test_unchanged_until_is_the_next_expiry_when_slots_are_gone() -> None:
    full = IDLE._replace(free_slots=0)
    scheduler = scheduler_with([Request(0, "m", 0.0, 64), Request(1, "m", 0.0, 640)])
    assert scheduler.unchanged_until(0.0, {0: full}) == pytest.approx(SLO_S - 10 / 16, abs=1e-12)
    assert [r.id for r in scheduler.schedule(SLO_S - 10 / 16, {0: full}).dropped] == [1]


def test_unchanged_until_is_when_a_front_without_memory_leaves_the_batch() -> None:
    """0 cannot start for lack of memory. With the shorter 1 it is on time until 1.6875; after that, 1 is the batch."""
    tight = IDLE._replace(free_kv_tokens=640)
    scheduler = scheduler_with([Request(0, "m", 0.0, 641), Request(1, "m", 1.0, 640)])
    assert admitted(scheduler, 1.0, tight) == []
    leaves_s = SLO_S - 21 / 16  # 1281 tokens are 21 chunks
    assert scheduler.unchanged_until(1.0, {0: tight}) == pytest.approx(leaves_s, abs=1e-12)
    assert admitted(scheduler, leaves_s - 1e-9, tight) == []
    assert admitted(scheduler, leaves_s, tight) == [1]


def test_unchanged_until_counts_prefill_in_flight() -> None:
    tight = IDLE._replace(prefill_tokens=319, free_kv_tokens=640)
    scheduler = scheduler_with([Request(0, "m", 0.0, 641), Request(1, "m", 1.0, 640)], union=True)
    assert scheduler.unchanged_until(1.0, {0: tight}) == pytest.approx(SLO_S - 25 / 16, abs=1e-12)


def test_unchanged_until_lies_ahead_even_within_rounding_of_the_expiry() -> None:
    scheduler = scheduler_with([Request(0, "m", 0.0, 64)])
    now, full = math.nextafter(SLO_S - 1 / 16, 0), {0: IDLE._replace(free_slots=0)}
    assert scheduler.schedule(now, full).dropped == []
    assert scheduler.unchanged_until(now, full) == SLO_S - 1 / 16


def test_when_a_client_leaves_the_same_moment_is_judged_anew() -> None:
    tight = IDLE._replace(free_kv_tokens=100)
    scheduler = scheduler_with([Request(0, "m", 0.0, 200), Request(1, "m", 0.0, 20)])
    assert admitted(scheduler, 0.0, tight) == []
    assert scheduler.remove(0)
    assert admitted(scheduler, 0.0, tight) == [1]


def test_unchanged_until_is_infinite_when_only_events_matter() -> None:
    assert scheduler_with([]).unchanged_until(0.0, {0: IDLE}) == math.inf
    busy = IDLE._replace(prefill_tokens=1)
    assert scheduler_with([Request(0, "m", 0.0, 1)]).unchanged_until(0.0, {0: busy}) == math.inf


def test_a_request_that_would_end_exactly_at_its_deadline_is_dropped() -> None:
    scheduler = scheduler_with([Request(0, "m", 0.0, 64)])
    answer = scheduler.schedule(SLO_S - 1 / 16, {0: IDLE})
    assert [r.id for r in answer.dropped] == [0]
    assert len(scheduler) == 0


def test_decodes_that_fill_the_budget_make_nobody_hopeless_who_could_be_on_time_without_them() -> None:
    """Every batch is full of decodes, so no prompt token is computed: nobody starts, whatever slots there are. Beside no
    decode, 1 takes 10 chunks."""
    full = IDLE._replace(running=BUDGET_TOKENS, decoding=BUDGET_TOKENS)
    scheduler = scheduler_with([Request(0, "m", 0.0, 64), Request(1, "m", 0.0, 640)])
    answer = scheduler.schedule(0.5, {0: full})
    assert answer.admitted == answer.dropped == []
    assert scheduler.unchanged_until(0.5, {0: full}) == pytest.approx(SLO_S - 10 / 16, abs=1e-12)
    assert [r.id for r in scheduler.schedule(SLO_S - 10 / 16, {0: full}).dropped] == [1]
    assert admitted(scheduler, SLO_S - 9 / 16, IDLE) == [0]


def test_the_longest_leaves_the_batch_and_waits_until_it_is_hopeless() -> None:
    """Less than 12 chunks are left before the anchor's deadline: 1 + 1 fit, 10 more do not."""
    scheduler = scheduler_with([Request(0, "m", 0.0, 64), Request(1, "m", 0.1, 640), Request(2, "m", 0.1, 64)])
    assert admitted(scheduler, SLO_S - 11.5 / 16) == [0, 2]
    assert len(scheduler) == 1
    answer = scheduler.schedule(SLO_S, {0: IDLE})
    assert [r.id for r in answer.dropped] == [1]
    assert scheduler.schedule(SLO_S + 1, {0: IDLE}).dropped == []


def test_the_anchor_itself_may_be_the_longest() -> None:
    """0 alone needs 2.5 s of 3; with 1 and 2 it needs 3.125. It leaves, and 1 is the new anchor."""
    scheduler = scheduler_with([Request(0, "m", 0.0, 2560), Request(1, "m", 0.0, 320), Request(2, "m", 0.0, 320)])
    assert admitted(scheduler, 0.0) == [1, 2]


def test_among_equally_long_requests_the_latest_deadline_leaves() -> None:
    scheduler = scheduler_with([Request(7, "m", 0.0, 640), Request(8, "m", 0.0, 640), Request(9, "m", 0.1, 640)])
    assert admitted(scheduler, SLO_S - 20.5 / 16) == [7, 8]


def test_slots_cut_the_batch_from_the_back() -> None:
    scheduler = scheduler_with([Request(id, "m", 0.01 * id, 64) for id in range(5)])
    assert admitted(scheduler, 0.1, IDLE._replace(free_slots=2)) == [0, 1]


def test_memory_leaves_one_block_to_each_running_request() -> None:
    state = IDLE._replace(running=2, decoding=2, free_kv_tokens=100 + 2 * BLOCK_TOKENS)
    assert admitted(scheduler_with([Request(0, "m", 0.0, 60), Request(1, "m", 0.0, 41)]), 0.0, state) == [0]
    assert admitted(scheduler_with([Request(0, "m", 0.0, 60), Request(1, "m", 0.0, 40)]), 0.0, state) == [0, 1]


def test_a_first_request_without_memory_holds_back_the_rest() -> None:
    scheduler = scheduler_with([Request(0, "m", 0.0, 200), Request(1, "m", 0.0, 20)])
    assert admitted(scheduler, 0.0, IDLE._replace(free_kv_tokens=100)) == []
    assert len(scheduler) == 2


def test_prefill_in_flight_holds_the_queue_or_joins_the_batch() -> None:
    requests = [Request(0, "m", 0.0, 64)]
    busy = IDLE._replace(running=1, prefill_tokens=64 * 40)
    held = scheduler_with(requests)
    assert admitted(held, 0.0, busy) == []
    assert held.schedule(SLO_S + 1, {0: busy}).dropped == []
    joined = scheduler_with(requests, union=True)
    assert admitted(joined, 0.0, busy) == [0]
    late = scheduler_with(requests, union=True)
    answer = late.schedule(1.0, {0: busy})  # 41 chunks from 1.0 end at 3.5625; alone it would end at 1.0625
    assert answer.admitted == answer.dropped == []


@given(
    prompts=st.lists(st.integers(1, 3000), min_size=1, max_size=60),
    now=st.floats(0, 3),
    slowdown=st.floats(1, 4),
)
def test_the_whole_batch_ends_before_its_earliest_deadline(prompts: list[int], now: float, slowdown: float) -> None:
    """Claim FS-alg2-anchor."""
    scheduler = scheduler_with([Request(id, "m", id * 0.01, tokens) for id, tokens in enumerate(prompts)], linear)
    state = IDLE._replace(free_slots=30, slowdown=slowdown)
    batch = scheduler.schedule(now, {0: state}).admitted
    if batch:
        total = sum(r.prompt_tokens for r in batch)
        assert now + linear(total, 0) * slowdown < min(r.arrival_s for r in batch) + SLO_S


def test_moore_hodgson_misses_deadlines_that_adaptive_batching_keeps() -> None:
    """Claim FS-alg2-vs-mh: both selections run as one chunked batch, all its requests end together."""
    rng = random.Random(1)
    misses = {"adaptive": 0, "moore-hodgson": 0}
    for _ in range(100):
        arrivals = sorted(rng.uniform(0, 2) for _ in range(40))
        requests = [Request(id, "m", at, rng.randint(16, 1024)) for id, at in enumerate(arrivals)]
        roomy = IDLE._replace(free_slots=100, free_kv_tokens=10**6)
        batches = {"adaptive": scheduler_with(requests).schedule(2.0, {0: roomy}).admitted}
        jobs = [(r.arrival_s + SLO_S, chunked(r.prompt_tokens, 0)) for r in requests]
        batches["moore-hodgson"] = [requests[i] for i in moore_hodgson(jobs, 2.0).on_time]
        for name, batch in batches.items():
            end_s = 2.0 + chunked(sum(r.prompt_tokens for r in batch), 0)
            misses[name] += sum(end_s >= r.arrival_s + SLO_S for r in batch)
    assert misses["adaptive"] == 0
    assert misses["moore-hodgson"] > 100


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="slo_s is 0"):
        AdaptiveBatching(0.0, chunked)
    with pytest.raises(ValueError, match="block_tokens is 0"):
        AdaptiveBatching(1.0, chunked, block_tokens=0)
    with pytest.raises(ValueError, match="'skip' or 'union'"):
        AdaptiveBatching(1.0, chunked, when_prefilling="wait")  # type: ignore[arg-type]
    scheduler = scheduler_with([Request(1, "m", 0.0, 1)])
    with pytest.raises(ValueError, match="request 1 is added twice"):
        scheduler.add(Request(1, "m", 0.0, 1), engine=0)
    with pytest.raises(ValueError, match="one engine, but was shown 2"):
        scheduler.schedule(0.0, {0: IDLE, 1: IDLE})
