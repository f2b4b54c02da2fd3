"""A vLLM engine in a process of its own that runs a load from one instant to another, beside others.

Started by ``crew`` with one JSON object as its argument. It answers a line of JSON for a line of JSON:

=========================================================  =============================================================
it is told                                                 it answers
=========================================================  =============================================================
(nothing)                                                  ``{"import_s"}`` when vLLM is imported
``{"start"}``                                              ``{"start_s"}`` when the engine takes requests
``{"decodes", "context", "prefill_tokens"}``               ``{"ready"}`` when the load could run at once
``{"from", "until"}`` (seconds of the monotonic clock)     ``{"steps": [[end, seconds], ...]}`` of that composition
=========================================================  =============================================================

Decodes begin anew every ``ROUND`` steps, so that their context stays near the one asked for. A prefill load always has
prompts waiting, each as long as the engine's token budget: the device never waits for the host to send one.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

from fineserve_calibrate.probes.engine_worker import ENVIRONMENT, LONG, ROUND, Engine, Work, _reply

AHEAD = 3
"""Prompts that are in the engine at any time: one computed, one scheduled behind it, one more."""


class LoadedEngine(Engine):
    """An engine under a load."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._load, self._context = Work(0, 0, 0), 0
        self._running: list[str] = []
        self._round_began = 0

    def prepare(self, load: Work, context: int) -> None:
        """Decodes run up to their first step, a prompt is computed once: what is compiled at first use is compiled now."""
        self._load, self._context = load, context
        if load.decodes:
            self._begin()
        else:
            self._prefill(load, self._prompt(0, load.prefill_tokens))

    def run(self, from_s: float, until_s: float) -> list[tuple[float, float]]:
        """(end, seconds) of the load's steps between two instants; afterwards nothing is left in the engine."""
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


def _answer(engine: LoadedEngine, asked: dict[str, Any]) -> dict[str, Any]:
    if "from" in asked:
        return {"steps": engine.run(asked["from"], asked["until"])}
    engine.prepare(Work(asked["decodes"], asked["prefill_tokens"], 0), asked["context"])
    return {"ready": True}


def main() -> None:
    """Import, start, and answer until stdin ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    os.environ.update(ENVIRONMENT | settings["environment"])
    try:
        begun_s = time.monotonic()
        import vllm  # noqa: F401

        _reply(channel, {"import_s": time.monotonic() - begun_s})
        if not sys.stdin.readline():
            return
        begun_s = time.monotonic()
        engine = LoadedEngine(settings)
        _reply(channel, {"start_s": time.monotonic() - begun_s})
        for line in sys.stdin:
            _reply(channel, _answer(engine, json.loads(line)))
    except (
        Exception
    ) as error:  # reported to the parent, which ends this process: an engine that failed is not used again
        traceback.print_exc()
        _reply(channel, {"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # what vLLM tidies up takes seconds that the device's time pays for; the memory is free without it
