"""Request rates as a controller may know them: a moving average over the last minute."""

from __future__ import annotations

from collections import deque


class MovingRate:
    """Events per second over the last ``window_s`` seconds.

    The part of the window that lies before time 0 counts at ``expected_per_s``, the rate that an operator told in advance: a
    young average then starts there instead of jumping with the first events. Times must not decrease. Raises ValueError
    for a window that is not positive.
    """

    def __init__(self, window_s: float, expected_per_s: float = 0.0) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s is {window_s}: a moving average needs a positive window")
        self._window_s = window_s
        self._expected_per_s = expected_per_s
        self._times: deque[float] = deque()

    def note(self, now: float) -> None:
        """An event happens at ``now`` (seconds)."""
        self._times.append(now)

    def per_s(self, now: float) -> float:
        """The average at ``now``. An event counts for ``window_s`` seconds, its own moment included."""
        times = self._times
        while times and times[0] <= now - self._window_s:
            times.popleft()
        unseen_s = max(0.0, self._window_s - now)
        return (len(times) + self._expected_per_s * unseen_s) / self._window_s
