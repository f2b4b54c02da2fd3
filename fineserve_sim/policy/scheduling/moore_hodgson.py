"""Moore-Hodgson scheduling of one shared queue per GPU (Prism, Algorithm 2).

The GPU is seen as one machine that prefills request after request; each takes prompt tokens / prefill speed of its model.
Moore and Hodgson (1968) keep the largest number of jobs on time. Take jobs by deadline. Whenever the job just taken would end
late, put aside the longest taken so far. One removal is enough: all jobs before were on time, and the removed one is no
shorter than the new one. This model has no batching (FineServe's criticism of it).

Admission control: a request is dispatched only if its engine can start it now. So queues inside engines stay empty, and the
order can still change. Requests start in deadline order. An engine that cannot take its next request is blocked for the rest
of the call, so that short requests do not keep overtaking a long one. Other engines go on.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import heappop, heappush, heapreplace, merge
from operator import attrgetter
from typing import Literal, NamedTuple

from fineserve_sim.policy.interfaces import Admission, EngineFacts, EngineState, Request


class Plan(NamedTuple):
    """Indices of the jobs on time and late, each in deadline order.

    If the start moves by less than ``slack_s``, every comparison of the algorithm comes out the same.
    """

    on_time: list[int]
    late: list[int]
    slack_s: float


def moore_hodgson(jobs: Iterable[tuple[float, float]], start_s: float) -> Plan:
    """The largest set of (deadline_s, duration_s) jobs that one machine, free from ``start_s`` on, ends on time.

    Jobs must come sorted by deadline. A job that ends at its deadline is on time. Among equally long jobs the one with the
    latest deadline is put aside.
    """
    kept: list[tuple[float, int]] = []  # heap of (-duration, -index)
    work_s = 0.0
    slack_s = math.inf
    late = []
    index = -1
    for index, (deadline_s, duration_s) in enumerate(jobs):
        end_s = start_s + (work_s + duration_s)
        if end_s <= deadline_s:
            heappush(kept, (-duration_s, -index))
            work_s += duration_s
            slack_s = min(slack_s, deadline_s - end_s)
        elif kept and duration_s < -kept[0][0]:
            minus_longest_s, removed = heapreplace(kept, (-duration_s, -index))
            work_s += duration_s + minus_longest_s
            late.append(-removed)
        else:
            late.append(index)
    late.sort()
    aside = set(late)
    return Plan([i for i in range(index + 1) if i not in aside], late, slack_s)


class _Job(NamedTuple):
    """A waiting request as the plan sees it; sorts by (deadline, arrival, id), and ids are unique."""

    deadline_s: float
    arrival_s: float
    id: int
    duration_s: float
    engine: int
    request: Request


class MooreHodgson:
    """Prism's local scheduler: one queue for all engines of a GPU.

    * ``late``: the fate of requests that cannot be on time. "defer": they start, in deadline order, when ``late_start``
      says. "drop": the same, but a request that would be late even if started alone now is refused.
    * ``late_start``: "after_all" starts them when no waiting request can still be on time. "beside_blocked" also when none of
      these requests can start. Then short late requests do not starve behind a blocked one, but may take the memory that it
      waits for.
    * ``clock``: the machine is free "now", or after the prompts that are "dispatched" and not yet computed.
    * ``reserve``: KV tokens that an admission leaves free, so that running requests can grow. It is a "fraction" of the
      engine's capacity, or one "page" for each running request. An idle memory needs none: each prompt that fits its
      engine's capacity can start there.
    * ``shared_kv``: the engines draw from one KV memory, so memory promised to one is lost to the others.

    An engine missing from ``schedule``'s mapping is not ready and starts nothing. When no engine can start even the shortest
    of its requests, ``schedule`` answers nothing at once; drops wait too. Raises ValueError for unknown options, and for facts
    or fractions out of range.

    A request that would be late even if started alone now stays late. Such requests are set aside once, and a call walks the n
    others, O(n log n). Tens of thousands may be set aside, so only the request itself is kept.
    """

    def __init__(
        self,
        engines: Mapping[int, EngineFacts],
        *,
        late: Literal["defer", "drop"] = "defer",
        late_start: Literal["after_all", "beside_blocked"] = "after_all",
        clock: Literal["dispatched", "now"] = "dispatched",
        reserve: Literal["fraction", "page"] = "fraction",
        reserve_fraction: float = 0.02,
        shared_kv: bool = True,
    ) -> None:
        for name, value, choices in (
            ("late", late, ("defer", "drop")),
            ("late_start", late_start, ("after_all", "beside_blocked")),
            ("clock", clock, ("dispatched", "now")),
            ("reserve", reserve, ("fraction", "page")),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}: use one of {', '.join(choices)}")
        if not 0 <= reserve_fraction < 1:
            raise ValueError(f"reserve_fraction is {reserve_fraction}: it must be at least 0 and below 1")
        for id, facts in engines.items():
            if facts.prefill_tokens_per_s <= 0 or facts.slo_s <= 0 or facts.kv_capacity_tokens <= 0:
                raise ValueError(f"engine {id}: prefill speed, SLO and KV capacity must be positive, not {facts}")
        self._facts = dict(engines)
        self._drops_late = late == "drop"
        self._late_beside_blocked = late_start == "beside_blocked"
        self._counts_dispatched = clock == "dispatched"
        self._shared_kv = shared_kv
        fraction = reserve_fraction if reserve == "fraction" else 0.0
        self._reserve_tokens = {id: math.ceil(fraction * facts.kv_capacity_tokens) for id, facts in engines.items()}
        self._reserves_pages = reserve == "page"
        # A waiting request is in the queue while it may still be on time, else among the late ones; never in both.
        self._queue: list[_Job] = []  # in the order of deadlines
        self._late: dict[int, list[Request]] = {id: [] for id in engines}  # in the order of arrivals
        self._jobs: dict[int, _Job] = {}  # the queue by request id
        # A heap of the latest start of each job. It also has jobs that left the queue: ``_jobs`` tells which are there.
        self._last_starts: list[tuple[float, _Job]] = []
        self._lengths = {id: array("q") for id in engines}  # sorted prompt tokens of all waiting requests, by engine
        self._answered: tuple[float, dict[int, EngineState]] | None = None  # what the last call saw

    def __len__(self) -> int:
        return sum(map(len, self._lengths.values()))

    def add(self, request: Request, engine: int) -> None:
        """Let a request wait for an engine.

        Raises ValueError for an engine outside the scope, a prompt above its capacity (it would block the engine for ever),
        and a request that waits already.
        """
        if (facts := self._facts.get(engine)) is None:
            raise ValueError(
                f"request {request.id} is bound to engine {engine}; this queue serves {sorted(self._facts)}"
            )
        if request.prompt_tokens > facts.kv_capacity_tokens:
            raise ValueError(
                f"request {request.id} has a prompt of {request.prompt_tokens} tokens; engine {engine} holds "
                f"{facts.kv_capacity_tokens}"
            )
        if request.id in self._jobs or self._is_late(request):
            raise ValueError(f"request {request.id} is added twice: it waits already")
        self._answered = None
        job = self._job(request, engine)
        self._jobs[request.id] = job
        insort(self._queue, job)
        heappush(self._last_starts, (job.deadline_s - job.duration_s, job))
        insort(self._lengths[engine], request.prompt_tokens)

    def remove(self, request_id: int) -> bool:
        job = self._jobs.get(request_id) or next((job for job in self._late_jobs() if job.id == request_id), None)
        if job is None:
            return False
        self._answered = None
        self._take(job)
        return True

    def schedule(self, now: float, engines: Mapping[int, EngineState]) -> Admission:
        """Raises ValueError if ``engines`` shows an engine outside the scope."""
        if self._answered == (now, engines) or not self._can_start(engines):
            return Admission()
        plan = self._plan(now, engines)
        dropped = [self._take(job) for job in [*self._late_jobs()]] if self._drops_late else []
        admitted = [self._take(job) for job in self._startable(plan, engines)]
        self._answered = (now, dict(engines))
        return Admission(admitted, dropped)

    def unchanged_until(self, now: float, engines: Mapping[int, EngineState]) -> float:
        """The first moment at which the plan may differ, or a request becomes hopeless. Costs as much as ``schedule``."""
        if not self._can_start(engines):
            return math.inf
        soon = math.nextafter(now, math.inf)
        plan = self._plan(now, engines)
        if self._startable(plan, engines) or (self._drops_late and any(self._late.values())):
            return soon
        if not self._queue:
            return math.inf
        change_s = now + plan.slack_s
        if self._drops_late:
            change_s = min([change_s, *(job.deadline_s - job.duration_s for job in self._queue)])
        return max(soon, change_s - 8 * math.ulp(self._queue[-1].deadline_s))

    def _plan(self, now: float, engines: Mapping[int, EngineState]) -> Plan:
        """The plan of the requests that may still be on time; the others are set aside."""
        while self._last_starts and self._last_starts[0][0] < now:
            _, job = heappop(self._last_starts)
            if self._jobs.get(job.id) is job:
                self._leave_queue(job)
                insort(self._late[job.engine], job.request, key=_arrival)
        start_s = now
        if self._counts_dispatched:
            backlogs_s = [state.prefill_tokens / self._facts[id].prefill_tokens_per_s for id, state in engines.items()]
            start_s += sum(backlogs_s)
        return moore_hodgson(map(attrgetter("deadline_s", "duration_s"), self._queue), start_s)

    def _startable(self, plan: Plan, engines: Mapping[int, EngineState]) -> list[_Job]:
        """The requests that their engines can start now, in the order of the plan."""
        room = dict(engines)
        blocked = self._facts.keys() - engines.keys()
        started = self._fitting((self._queue[index] for index in plan.on_time), room, blocked)
        if not plan.on_time or (self._late_beside_blocked and not started):
            late = merge(self._late_jobs(blocked), (self._queue[index] for index in plan.late))
            started = self._fitting(late, room, blocked)
        return started

    def _fitting(self, jobs: Iterable[_Job], room: dict[int, EngineState], blocked: set[int]) -> list[_Job]:
        """The jobs for which there is room, which they take. An engine without room for its next request is ``blocked``."""
        started = []
        for job in jobs:
            if job.engine in blocked:
                continue
            state, tokens = room[job.engine], job.request.prompt_tokens
            if self._fits(room, job.engine, tokens):
                room[job.engine] = state._replace(
                    running=state.running + 1,
                    prefill_tokens=state.prefill_tokens + tokens,
                    free_slots=state.free_slots - 1,
                )
                started.append(job)
            else:
                blocked.add(job.engine)
                if len(blocked) == len(self._facts):
                    break
        return started

    def _can_start(self, engines: Mapping[int, EngineState]) -> bool:
        """Whether some engine has a slot and memory for the shortest of its requests."""
        if not engines.keys() <= self._facts.keys():
            raise ValueError(f"shown engines {sorted(engines)}, but this queue serves {sorted(self._facts)}")
        return any(self._lengths[id] and self._fits(engines, id, self._lengths[id][0]) for id in engines)

    def _fits(self, room: Mapping[int, EngineState], engine: int, tokens: int) -> bool:
        """Whether the engine has a slot and memory for a prompt. Prompts that were dispatched and are not yet computed hold no
        KV memory yet but will: they count as promised. In a shared memory a promise to one engine costs the others the same
        bytes; the ratio of the capacities converts its tokens, rounded up."""
        state, capacity = room[engine], self._facts[engine].kv_capacity_tokens
        needed = tokens + state.prefill_tokens
        busy = state.running > 0
        if self._shared_kv:
            busy = any(other.running for other in room.values())
            needed = tokens + sum(
                -(-other.prefill_tokens * capacity // self._facts[id].kv_capacity_tokens) for id, other in room.items()
            )
        if busy:
            needed += self._reserve_tokens[engine]
            needed += state.running * self._facts[engine].block_tokens if self._reserves_pages else 0
        return state.free_slots > 0 and needed <= state.free_kv_tokens

    def _take(self, job: _Job) -> Request:
        """The request of ``job``, which no longer waits."""
        if self._jobs.get(job.id) is job:
            self._leave_queue(job)
        else:
            late = self._late[job.engine]
            del late[bisect_left(late, _arrival(job.request), key=_arrival)]
        lengths = self._lengths[job.engine]
        del lengths[bisect_left(lengths, job.request.prompt_tokens)]
        return job.request

    def _leave_queue(self, job: _Job) -> None:
        del self._jobs[job.id]
        del self._queue[bisect_left(self._queue, job)]

    def _job(self, request: Request, engine: int) -> _Job:
        facts = self._facts[engine]
        duration_s = request.prompt_tokens / facts.prefill_tokens_per_s
        return _Job(request.arrival_s + facts.slo_s, request.arrival_s, request.id, duration_s, engine, request)

    def _late_jobs(self, blocked: Collection[int] = ()) -> Iterable[_Job]:
        """Late jobs in the order of deadlines; no further job of an engine that is ``blocked``."""
        return merge(*(self._late_of(engine, blocked) for engine, late in self._late.items() if late))

    def _late_of(self, engine: int, blocked: Collection[int]) -> Iterator[_Job]:
        for request in self._late[engine]:
            if engine in blocked:
                return
            yield self._job(request, engine)

    def _is_late(self, request: Request) -> bool:
        for late in self._late.values():
            place = bisect_left(late, _arrival(request), key=_arrival)
            if place < len(late) and late[place].id == request.id:
                return True
        return False


def _arrival(request: Request) -> tuple[float, int]:
    return request.arrival_s, request.id
