"""When an engine that died may start again: at once the first time, then ever later, until it behaves well."""

from __future__ import annotations

from collections.abc import Hashable

FIRST_S = 1.0
MOST_S = 60.0
GOOD_S = 60.0


class Backoff:
    """After the first death none, then ``FIRST_S``, twice that, four times that, ... at most ``MOST_S``. An engine that ran
    for ``GOOD_S`` starts afresh. Times are seconds of one clock. An engine that never started counts from 0."""

    def __init__(self) -> None:
        self._deaths: dict[Hashable, int] = {}
        self._up_s: dict[Hashable, float] = {}
        self._not_before_s: dict[Hashable, float] = {}

    def up(self, who: Hashable, now: float) -> None:
        self._up_s[who] = now

    def down(self, who: Hashable, now: float) -> None:
        """It died, or did not come up."""
        up_s = self._up_s.pop(who, now if who in self._deaths else 0.0)
        deaths = 1 if now - up_s >= GOOD_S else self._deaths.get(who, 0) + 1
        self._deaths[who] = deaths
        self._not_before_s[who] = now + (0.0 if deaths == 1 else min(MOST_S, FIRST_S * 2.0 ** (deaths - 2)))

    def wait_s(self, who: Hashable, now: float) -> float:
        """Seconds until it may start."""
        return max(0.0, self._not_before_s.get(who, now) - now)
