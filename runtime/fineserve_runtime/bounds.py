"""What bounds the time and number of requests in the driver."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from fineserve_runtime.jobs import End, Job

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
            problem = f"no engine got to the request in {self.queued_s:g} s"
            return End("failed" if job.generated else "refused", "queue_timeout", problem, 1.0)
        return None


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
