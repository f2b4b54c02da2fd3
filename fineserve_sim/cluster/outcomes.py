"""What became of every request."""

from __future__ import annotations

from fineserve_traces import Trace

from fineserve_sim.cluster.scenario import Fate

NEVER = float("nan")


class Outcomes:
    """Per-request moments and fates, by index in the trace. A request ends once: ``end`` raises on a second time."""

    def __init__(self, trace: Trace) -> None:
        requests = len(trace.arrival_s)
        self.first_token_s = [NEVER] * requests
        self.finish_s = [NEVER] * requests
        self.fate = [int(Fate.UNFINISHED)] * requests
        self.preemptions = [0] * requests
        self.engine = [-1] * requests
        self.open = requests
        self.last_end_s = 0.0

    def first_token(self, index: int, now: float) -> None:
        """Only the first time counts: a recomputed prefill yields a later token."""
        if self.first_token_s[index] != self.first_token_s[index]:
            self.first_token_s[index] = now

    def end(self, index: int, now: float, fate: Fate) -> None:
        if self.fate[index] != Fate.UNFINISHED:
            raise AssertionError(f"request {index} ends twice: {Fate(self.fate[index]).name}, then {fate.name}")
        self.fate[index] = int(fate)
        self.open -= 1
        self.last_end_s = max(self.last_end_s, now)
        if fate is Fate.FINISHED:
            self.finish_s[index] = now
