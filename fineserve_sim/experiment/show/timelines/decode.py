"""Why a decode was slow: what its engine did between the first token of a request and its last.

The log says when engines computed, what their batches held, and how much slower neighbours on the GPU made them. So the time
splits into what neighbours took, steps that also computed prompts, steps of decodes alone, the waits after preemptions, and
what is left between steps. The slowdown of a span is that at its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fineserve_sim.cluster import Visit

NEIGHBOURS = "neighbours on its GPU"
PROMPTS = "steps that also computed prompts"
DECODES = "steps of decodes alone"
PREEMPTED = "memory, after a preemption"
BETWEEN = "nothing computed: between steps, or out of its engine"


class Decode:
    """Reads the log for one request, which decodes from ``first_s`` to ``finish_s`` at the engines of its ``visits``.
    ``spent_s`` tells what it spent that time for; ``batch`` is the mean number of sequences that decoded with it."""

    def __init__(self, request: int, visits: Sequence[Visit], first_s: float, finish_s: float) -> None:
        self._request, self._visits = request, visits
        self._first_s, self._finish_s = first_s, finish_s
        self._out_since_s = math.nan
        self._spent_s = dict.fromkeys((NEIGHBOURS, PROMPTS, DECODES, PREEMPTED), 0.0)
        self._sequence_s = 0.0
        self.prompt_tokens = 0

    @property
    def seconds(self) -> float:
        """From the first token to the last; NaN where one of them never came."""
        return self._finish_s - self._first_s

    def take(self, entry: Mapping[str, Any]) -> None:
        span = entry.get("span")
        if span == "EngineComputed":
            if math.isnan(self._out_since_s):
                for visit in self._visits:
                    if entry["engine"] == visit.stages[0]:
                        self._computed(entry, visit)
        elif span == "Preempted":
            if entry["request"] == self._request:
                self._out_since_s = max(self._first_s, entry["now_s"])
        elif span == "EngineLaunched" and self._request in entry["starts"] and not math.isnan(self._out_since_s):
            self._spent_s[PREEMPTED] += max(0.0, min(entry["now_s"], self._finish_s) - self._out_since_s)
            self._out_since_s = math.nan

    def _computed(self, entry: Mapping[str, Any], visit: Visit) -> None:
        """What the engine computed then, as far as the request was there and decoded."""
        start_s = entry["now_s"]
        seconds = min(start_s + entry["seconds"], self._finish_s, visit.to_s) - max(
            start_s, self._first_s, visit.from_s
        )
        if seconds <= 0:
            return
        own_s = seconds / entry["slowdown"]
        self._spent_s[NEIGHBOURS] += seconds - own_s
        self._spent_s[PROMPTS if entry["prefill_tokens"] else DECODES] += own_s
        self._sequence_s += seconds * entry["decodes"]
        self.prompt_tokens += entry["prefill_tokens"]

    @property
    def batch(self) -> float:
        """Sequences that decoded together, on average over the time that was computed."""
        computed_s = sum(self._spent_s[what] for what in (NEIGHBOURS, PROMPTS, DECODES))
        return self._sequence_s / computed_s if computed_s else 0.0

    @property
    def spent_s(self) -> dict[str, float]:
        """Seconds by what they were spent for, the most first; they add up to ``seconds``. Empty without a decode."""
        if math.isnan(self.seconds) or self.seconds <= 0:
            return {}
        between_s = self.seconds - sum(self._spent_s.values())
        found = {**self._spent_s, BETWEEN: max(0.0, between_s)}
        return dict(sorted(((what, s) for what, s in found.items() if s > 1e-9), key=lambda item: -item[1]))
