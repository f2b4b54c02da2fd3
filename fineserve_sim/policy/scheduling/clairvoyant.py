"""How many requests anybody could serve in time, who knew everything in advance.

**Nothing here is a policy that a real system could run.** A ``Foreseen`` request is known before it arrives. So no controller
and no local scheduler takes this module's types; a driver asks it once for a whole run, and only where the system's
specification says ``scheduler: {policy: clairvoyant}``.

One machine prefills request after request; request j may start at its arrival r_j, takes p_j seconds, and is on time if it
ends by its deadline d_j (1 | r_j | sum U_j). Where deadlines come in the order of arrivals, as they do for the requests of
one model with one SLO, this is easy. Serving in that order is optimal for any set of requests that can be on time at
all, even if work could be interrupted: who came later is never more urgent. And the largest set comes from taking requests in
that order and, whenever the one just taken would end late, putting aside the one without which the rest ends soonest
(Kise, Ibaraki and Mine, Operations Research 26(1), 1978; with equal arrivals it is Moore and Hodgson's rule: the longest).

Without request i the end moves forward by its duration, or less where a later request cannot start so much sooner because it
arrives no sooner: by min(p_i, min over later k of start_k - r_k).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Foreseen(NamedTuple):
    """A request with its future: when it comes, by when its prefill must end, and the machine's seconds for that."""

    arrival_s: float
    deadline_s: float
    prefill_s: float


def most_on_time(requests: Iterable[Foreseen]) -> list[float | None]:
    """When each request ends in a schedule with as many on time as possible; None: it is put aside.

    To end at the deadline is on time. Needs arrivals and deadlines in ascending order, else raises ValueError. Quadratic in
    the requests between two moments at which nobody waits.
    """
    ends: list[float | None] = []
    kept: list[_Kept] = []
    previous = None
    for index, request in enumerate(requests):
        if previous and (request.arrival_s < previous.arrival_s or request.deadline_s < previous.deadline_s):
            raise ValueError(
                f"request {index} has an earlier arrival or deadline than the one before: sort them by both"
            )
        previous = request
        if kept and kept[-1].end_s <= request.arrival_s:  # nothing before this can delay anything from here on
            kept = []
        ends.append(_append(kept, index, request))
        if kept[-1].end_s > request.deadline_s:
            _put_one_aside(kept, ends)
    return ends


class _Kept(NamedTuple):
    number: int
    request: Foreseen
    start_s: float
    end_s: float


def _append(kept: list[_Kept], number: int, request: Foreseen) -> float:
    """Serve the request after those kept. Returns when it ends."""
    start_s = max(request.arrival_s, kept[-1].end_s) if kept else request.arrival_s
    kept.append(_Kept(number, request, start_s, start_s + request.prefill_s))
    return kept[-1].end_s


def _put_one_aside(kept: list[_Kept], ends: list[float | None]) -> None:
    """Remove the request without which the rest ends soonest (the last of equals), and let those behind it start sooner."""
    best = len(kept) - 1
    gain_s = kept[-1].end_s - (kept[-2].end_s if best else 0.0)
    movable_s = kept[-1].start_s - kept[-1].request.arrival_s
    for place in range(best - 1, -1, -1):
        if movable_s <= gain_s:
            break
        here = kept[place]
        if min(here.request.prefill_s, movable_s) > gain_s:
            gain_s, best = min(here.request.prefill_s, movable_s), place
        movable_s = min(movable_s, here.start_s - here.request.arrival_s)
    gone, *behind = kept[best:]
    del kept[best:]
    ends[gone.number] = None
    for later in behind:
        ends[later.number] = _append(kept, later.number, later.request)
