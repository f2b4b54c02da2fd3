"""What bounds the time and number of requests in the driver."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from fineserve_runtime.jobs import End, Job
from fineserve_sim.systems.spec import AdaptiveSpec, FcfsSpec, SchedulerSpec

_PACE_TOKENS = 64
_MOST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """``queued_requests`` a model may wait for their first token; none waits longer than ``queued_s`` for it, and none is here
    for longer than ``request_s``. An engine that gives no sign of life for ``silent_s`` is ended."""

    queued_requests: int = 100
    queued_s: float = 300.0
    request_s: float = 1800.0
    silent_s: float = 60.0

    def overdue(self, job: Job, now: float) -> End | None:
        """How the request ends because of the time it took, if it does."""
        if now - job.arrival_s > self.request_s:
            return End("failed", "request_timeout", f"the request was not done in {self.request_s:g} s")
        if (job.engine is None or job.first_token_s is None) and now - job.queued_s > self.queued_s:
            return self.unserved(job)
        return None

    def unserved(self, job: Job) -> End:
        problem = f"no engine got to the request in {self.queued_s:g} s"
        return End("failed" if job.generated else "refused", "queue_timeout", problem, 1.0)


class Deadlines:
    """Which deadlines hold under ``scheduler``, and which requests missed theirs. ``slo_s``: the TTFT limit by model, read as
    it is then."""

    def __init__(self, scheduler: SchedulerSpec, bounds: Bounds, slo_s: Mapping[str, float]) -> None:
        self._by_deadline = not isinstance(scheduler, FcfsSpec)
        self._drops_late = isinstance(scheduler, AdaptiveSpec) or getattr(scheduler, "late", "") == "drop"
        self._bounds = bounds
        self._slo_s = slo_s

    def core_arrival_s(self, job: Job) -> float:
        """The arrival that gives the request its deadline. A request on its way again that has tokens out has met its TTFT
        limit or missed it: it only must not wait for longer than anybody may."""
        if not self._by_deadline:
            return job.arrival_s
        begin_s, limit_s = (job.queued_s, self._bounds.queued_s) if job.generated else (job.due_from_s, job.slo_s)
        return begin_s + limit_s - self._slo_s[job.model]

    def missed(self, job: Job, reason: str) -> End:
        """How a request ends that its local scheduler drops. A request that has tokens out keeps the deadline of a request
        that waits."""
        return self._bounds.unserved(job) if job.generated else End("refused", "deadline", reason)

    def overdue(self, job: Job, now: float, *, unled: bool) -> End | None:
        """How a late request ends, if it does. Local schedulers watch deadlines, except of requests without an engine
        (``unled``)."""
        if unled and self._drops_late and job.first_token_s is None and now - job.due_from_s > job.slo_s:
            return End("refused", "deadline", f"no engine served model {job.model} in time", 1.0)
        return self._bounds.overdue(job, now)


class Pace:
    """How fast a model's requests get their first tokens, from the last 64 of them."""

    def __init__(self) -> None:
        self._seen_s: deque[float] = deque(maxlen=_PACE_TOKENS)

    def note(self, now: float) -> None:
        self._seen_s.append(now)

    def drained_in_s(self, waiting: int, now: float) -> float:
        """Seconds until so many got theirs, from 1 to 60."""
        if len(self._seen_s) < 2:
            return 1.0
        gap_s = (now - self._seen_s[0]) / len(self._seen_s)
        return min(_MOST_RETRY_S, max(1.0, math.ceil(waiting * gap_s)))
