"""A vLLM engine in a process of its own, that times steps of a wanted composition.

Started by ``engines`` with one JSON object as its argument. It answers a line of JSON for a line of JSON: first
``{"import_s", "start_s"}``, then ``{"steps": [[end, seconds], ...]}`` for each composition asked. Whatever libraries print
goes to stderr.

Time of a step: from the end of the one before (or from the moment work was given to an idle engine) to the moment when the
scheduler gets its tokens. That is the step's period whether or not vLLM schedules ahead. What a step computed is read from
vLLM's own scheduler output, and only steps of the wanted composition count.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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
    """What one step computed: sums over its sequences, as the simulator's step models take them."""

    decodes: int
    prefill_tokens: int
    cached_tokens: int


class Stopwatch:
    """Notes the steps of an engine that have a wanted composition."""

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
        """Tell how long the prompt of a new request is."""
        self._prompts[request] = prompt_tokens

    def idle(self) -> None:
        """The engine has nothing to do; the next step is timed from now."""
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
        """(end, seconds) of ``count`` steps of the wanted composition, and of more until ``hold_s`` are over. The decodes'
        cached tokens are ``context`` each, in the mean over ``count`` steps, or ``ROUND`` of them.

        Raises ValueError when the engine does not run such steps.
        """
        until_s, found = time.monotonic() + hold_s, list[tuple[float, float]]()
        while len(found) < count or time.monotonic() < until_s:
            missing = count - len(found)
            found += self._round(wanted, context, min(missing, ROUND) if missing > 0 else ROUND)
        return found

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


def _reply(channel: Any, answer: dict[str, Any]) -> None:
    channel.write(json.dumps(answer) + "\n")
    channel.flush()


def _serve(engine: Engine, channel: Any) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        wanted = Work(asked["decodes"], asked["prefill_tokens"], asked["cached_tokens"])
        try:
            found = engine.steps(wanted, asked["context"], asked["count"], asked["hold_s"])
            _reply(channel, {"steps": found})
        except Exception as error:  # reported to the parent, which decides
            _reply(channel, {"error": f"{type(error).__name__}: {error}"})


def main() -> None:
    """Start the engine that the argument describes, and serve until stdin ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.argv[1])
    os.environ.update(ENVIRONMENT | settings["environment"])
    try:
        start_s = time.monotonic()
        import vllm  # noqa: F401

        imported_s = time.monotonic()
        engine = Engine(settings)
        _reply(channel, {"import_s": imported_s - start_s, "start_s": time.monotonic() - imported_s})
    except Exception as error:  # reported to the parent, which decides
        _reply(channel, {"error": f"{type(error).__name__}: {error}"})
        return
    _serve(engine, channel)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # what vLLM tidies up takes seconds that the device's time pays for; the memory is free without it
