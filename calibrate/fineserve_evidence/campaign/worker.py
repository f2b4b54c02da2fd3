"""A vLLM engine in a process of its own that runs a load from one instant to another, beside other engines.

``crew`` starts it. It speaks as ``engine_worker`` does. A running engine answers other questions:

=========================================================  =============================================================
asked                                                      answer
=========================================================  =============================================================
``{"decodes", "context", "prefill_tokens"}``               ``{"ready"}`` when the load could run at once
``{"from", "until"}`` (seconds of the monotonic clock)     ``{"steps": [[end, seconds], ...]}`` of that composition
=========================================================  =============================================================

Decodes begin anew every ``ROUND`` steps, so that their context stays near the wanted one. A prefill load always has prompts
waiting, each as long as the engine's token budget. The device never waits for the host to send one.
"""

from __future__ import annotations

import time
from typing import Any

from fineserve_calibrate.probes.engine_worker import LONG, ROUND, Engine, Work, main

AHEAD = 3
"""Prompts that are in the engine at any time: one computed, one scheduled after it, one more."""


class LoadedEngine(Engine):
    """An engine under a load."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._load, self._context = Work(0, 0, 0), 0
        self._running: list[str] = []
        self._round_began = 0

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer one question of the parent: get a load ready, or run it."""
        if "from" in asked:
            return {"steps": self.run(asked["from"], asked["until"])}
        self.prepare(Work(asked["decodes"], asked["prefill_tokens"], 0), asked["context"])
        return {"ready": True}

    def prepare(self, load: Work, context: int) -> None:
        """Run decodes up to their first step, or compute a prompt once. Code that compiles at first use compiles now."""
        self._load, self._context = load, context
        if load.decodes:
            self._begin()
        else:
            self._prefill(load, self._prompt(0, load.prefill_tokens))

    def run(self, from_s: float, until_s: float) -> list[tuple[float, float]]:
        """Run the load between two instants. Return (end, seconds) of its steps. Nothing is left in the engine."""
        time.sleep(max(0.0, from_s - time.monotonic()))
        self._watch.idle()
        self._watch.want(self._load)
        self._round_began = 0
        while time.monotonic() < until_s:
            self._feed()
            self._step()
        found = self._watch.found
        self._watch.want(None)
        self._drain(self._running)
        self._running = []
        return found

    def _feed(self) -> None:
        if self._load.prefill_tokens:
            self._top_up()
        elif len(self._watch.found) - self._round_began >= ROUND:
            self._drain(self._running)
            self._begin()

    def _begin(self) -> None:
        """Decodes of a new round, with the context from which they grow to as much above the one asked for as below it."""
        self._watch.last = None
        before = max(1, self._context - ROUND // 2)
        self._running = [self._add(self._stream(100 + slot, before), LONG) for slot in range(self._load.decodes)]
        self._settle(self._load.decodes)
        self._round_began = len(self._watch.found)

    def _top_up(self) -> None:
        known = self._core.engine_core.scheduler.requests
        done = [request for request in self._running if request not in known]
        if done:
            self._engine.abort_request(done, internal=True)  # the front end forgets them, too
        self._running = [request for request in self._running if request in known]
        while len(self._running) < AHEAD:
            self._running.append(self._add(self._prompt(0, self._load.prefill_tokens), 1))


if __name__ == "__main__":
    main(LoadedEngine)
