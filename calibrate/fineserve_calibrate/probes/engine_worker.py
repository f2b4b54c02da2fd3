"""A vLLM engine in a process of its own, that times steps of a wanted composition.

``engines`` starts it with one JSON object as its argument. It answers a line of JSON for a line of JSON:

==============================================  ========================================================================
asked                                           answer
==============================================  ========================================================================
(nothing)                                       ``{"import_s"}`` when vLLM is imported
``{"start"}``                                   ``{"start_s"}`` when the engine takes requests
a composition, with ``count`` and ``hold_s``    ``{"steps": [[end, seconds], ...]}``
==============================================  ========================================================================

An answer with ``error`` says what failed. The libraries print to stderr.

A step's time runs from the end of the step before (or from the moment an idle engine got work) to the moment when the scheduler
gets its tokens. That is the step's period whether or not vLLM schedules ahead. vLLM's own scheduler output says what a step
computed. Only steps of the wanted composition count.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: no message passing in the times
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}
LONG = 1 << 20  # tokens: a decode that does not end by itself
ROUND = 100  # steps after which decodes begin anew, so that their context stays near the one that was asked for
PREFILL_STEPS = 64  # within which a prompt must have been computed
PATIENCE = 8  # steps of another composition, for each sample, before a composition counts as out of reach


class Work(NamedTuple):
    """The work of one step: sums over its sequences, as the simulator's step models take them."""

    decodes: int
    prefill_tokens: int
    cached_tokens: int


class Stopwatch:
    """A clock that notes the steps of an engine that have a wanted composition."""

    def __init__(self, scheduler: Any) -> None:
        self.last: Work | None = None
        self.found: list[tuple[float, float]] = []  # end, seconds
        self._wanted: Work | None = None
        self._prompts: dict[str, int] = {}
        self._last_s = 0.0
        self._original: Callable[..., Any] = scheduler.update_from_output
        scheduler.update_from_output = self._update

    def want(self, work: Work | None) -> None:
        """Collect the steps of this composition in ``found`` from now on."""
        self._wanted, self.found = work, []

    def expect(self, request: str, prompt_tokens: int) -> None:
        """Note how long the prompt of a new request is."""
        self._prompts[request] = prompt_tokens

    def idle(self) -> None:
        """Time the next step from now: the engine has nothing to do."""
        self._last_s = time.monotonic()

    def _update(self, scheduled: Any, output: Any) -> Any:
        now_s = time.monotonic()
        if scheduled.num_scheduled_tokens:
            self.last = self._work(scheduled)
            if self.last == self._wanted:
                self.found.append((now_s, now_s - self._last_s))
        self._last_s = now_s
        return self._original(scheduled, output)

    def _work(self, scheduled: Any) -> Work:
        computed = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        decodes = prefill = prefix = 0
        for request, tokens in scheduled.num_scheduled_tokens.items():
            if computed[request] >= self._prompts[request]:
                decodes += 1
            else:
                prefill += tokens
                prefix += computed[request]
        return Work(decodes, prefill, prefix)


class Engine:
    """One vLLM engine with random weights, fed with made-up token ids."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(settings["config"]), encoding="utf-8")
            self._llm = LLM(model=folder, load_format="dummy", skip_tokenizer_init=True, **settings["arguments"])
        self._engine: Any = self._llm.llm_engine
        self._core: Any = self._engine.engine_core
        self._watch = Stopwatch(self._core.engine_core.scheduler)
        self._vocabulary: int = settings["config"]["vocab_size"]
        self._fresh = 0
        self._number = 0

    def _add(self, tokens: list[int], output_tokens: int) -> str:
        from vllm import SamplingParams

        self._number += 1
        given = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
        internal: str = self._engine.add_request(str(self._number), {"prompt_token_ids": tokens}, given)
        self._watch.expect(internal, len(tokens))
        return internal

    def _stream(self, source: int, tokens: int) -> list[int]:
        """The first tokens of one of many endless texts; the same source gives the same prefix, which stays cached."""
        size = self._vocabulary - 10
        return [(source * 7919 + place * (source % 97 + 1)) % size + 10 for place in range(tokens)]

    def _prompt(self, cached_tokens: int, fresh_tokens: int) -> list[int]:
        self._fresh += 1
        return [*self._stream(1, cached_tokens), *self._stream(1_000_003 + self._fresh, fresh_tokens)]

    def _step(self) -> None:
        self._core.get_output()

    def _drain(self, requests: list[str]) -> None:
        """End these requests, and step until nothing is in flight."""
        self._engine.abort_request(requests, internal=True)
        while self._core.engine_core.scheduler.has_requests():
            self._step()

    def steps(self, wanted: Work, context: int, count: int, hold_s: float) -> list[tuple[float, float]]:
        """Run ``count`` steps of the wanted composition, and more until ``hold_s`` are over. Return (end, seconds) of each.

        The decodes' cached tokens are ``context`` each, in the mean over ``count`` steps, or over ``ROUND`` of them.

        Raises ValueError when the engine does not run such steps.
        """
        until_s, found = time.monotonic() + hold_s, list[tuple[float, float]]()
        while len(found) < count or time.monotonic() < until_s:
            missing = count - len(found)
            found += self._round(wanted, context, min(missing, ROUND) if missing > 0 else ROUND)
        return found

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Answer one question of the parent."""
        wanted = Work(asked["decodes"], asked["prefill_tokens"], asked["cached_tokens"])
        return {"steps": self.steps(wanted, asked["context"], asked["count"], asked["hold_s"])}

    def _round(self, wanted: Work, context: int, count: int) -> list[tuple[float, float]]:
        """``count`` steps around one context length."""
        before = max(1, context - count // 2)
        self._watch.last = None
        running = [self._add(self._stream(100 + slot, before), LONG) for slot in range(wanted.decodes)]
        if wanted.cached_tokens:  # the prefix gets into the cache
            self._prefill(Work(0, 1, 0), self._stream(1, wanted.cached_tokens + 1))
        self._settle(wanted.decodes)
        self._watch.want(wanted)
        tries = 0
        while len(self._watch.found) < count:
            tries += 1
            if tries > PATIENCE * count:
                raise ValueError(f"too few steps of {wanted}; the last one was {self._watch.last}")
            if wanted.prefill_tokens:
                self._prefill(wanted, self._prompt(wanted.cached_tokens, wanted.prefill_tokens))
            else:
                self._step()
        found = self._watch.found
        self._watch.want(None)
        self._drain(running)
        return found

    def _settle(self, decodes: int) -> None:
        """Step until every running request decodes."""
        while decodes and self._watch.last != Work(decodes, 0, 0):
            self._step()

    def _prefill(self, wanted: Work, prompt: list[int]) -> None:
        """One prompt that yields one token, beside what runs already; ends when it has been computed."""
        request = self._add(prompt, 1)
        if not wanted.decodes:
            self._watch.idle()
        scheduler = self._core.engine_core.scheduler
        for _ in range(PREFILL_STEPS):
            if request not in scheduler.requests:
                break
            self._step()
        else:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens beside {wanted.decodes} decodes is not finished in time"
            )
        if wanted.decodes:
            self._settle(wanted.decodes)
        self._engine.abort_request([request], internal=True)  # the front end forgets it, too


def serve(engine_class: type[Engine]) -> None:
    """Start the engine that the argument describes, and answer until stdin ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(answer: dict[str, Any]) -> None:
        channel.write(json.dumps(answer) + "\n")
        channel.flush()

    def reply_error(error: Exception) -> None:
        """The parent decides what becomes of the engine."""
        traceback.print_exc()
        reply({"error": f"{type(error).__name__}: {error}"})

    settings = json.loads(sys.argv[1])
    os.environ.update(ENVIRONMENT | settings["environment"])
    try:
        begun_s = time.monotonic()
        import vllm  # noqa: F401

        reply({"import_s": time.monotonic() - begun_s})
        if not sys.stdin.readline():
            return
        begun_s = time.monotonic()
        engine = engine_class(settings)
        reply({"start_s": time.monotonic() - begun_s})
    except Exception as error:
        reply_error(error)
        return
    for line in sys.stdin:
        try:
            reply(engine.answer(json.loads(line)))
        except Exception as error:
            reply_error(error)


def main(engine_class: type[Engine] = Engine) -> NoReturn:
    """Serve, and end at once: tidying up takes vLLM seconds of the device's time, and the memory is free without it."""
    serve(engine_class)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
