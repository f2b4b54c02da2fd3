"""Clients of the chaos campaign: real ones (OpenAI's library), whose every answer is checked, and hostile ones."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import openai

TIE_NATS = 0.25
"""Where an undisturbed server's two best tokens are this close, kernels may round to either (as in the tests of parity)."""

TRANSIENT = {"deadline", "queue_full", "queue_timeout", "model_down", "model_stopped", "engine_died", "engine_error"}
GONE = {"model_removed", "model_not_found", "model_stopped"}
"""Also with the model that comes and goes."""


class Prompt(NamedTuple):
    model: str
    text: str
    max_tokens: int


class Expected(NamedTuple):
    """What an undisturbed server says, and the first character of each token where its two best ones tie."""

    text: str
    ties: tuple[int, ...]


def draw_prompts(seed: int, models: tuple[str, ...], count: int) -> list[Prompt]:
    rng = random.Random(seed)
    words = ["slab", "lease", "queue", "token", "wake", "sleep", "step", "page", "drift", "bound"]
    return [
        Prompt(model, " ".join(rng.choices(words, k=rng.randrange(2, 20))), rng.randrange(4, 49))
        for model in models
        for _ in range(count)
    ]


def reference(url: str, prompts: list[Prompt], *, logprobs: bool) -> list[Expected]:
    """Asked one by one; ``logprobs``: the engines have them."""
    found = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for prompt in prompts:
            body = _options(prompt) | ({"logprobs": 2} if logprobs else {}) | {"ignore_eos": True}
            answer = client.post("/v1/completions", json=body)
            answer.raise_for_status()
            choice = answer.json()["choices"][0]
            found.append(Expected(choice["text"], _ties(choice["logprobs"]) if logprobs else ()))
    return found


def _ties(logprobs: dict[str, Any]) -> tuple[int, ...]:
    places = zip(logprobs["text_offset"], logprobs["top_logprobs"], strict=True)
    best = [(offset, sorted(top.values(), reverse=True)) for offset, top in places]
    return tuple(offset for offset, values in best if len(values) < 2 or values[0] - values[1] <= TIE_NATS)


def _options(prompt: Prompt) -> dict[str, Any]:
    return {"model": prompt.model, "prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0}


@dataclass
class Tally:
    """What came of the requests. ``problems``: what must never be, in words."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_wait_s: float = 0.0
    longest_s: float = 0.0

    @property
    def requests(self) -> int:
        return self.outcomes.total()

    def note(self, prompt: Prompt, expected: Expected, said: str, end: str, waited_s: float, took_s: float) -> None:
        self.outcomes[end] += 1
        self.longest_wait_s = max(self.longest_wait_s, waited_s)
        self.longest_s = max(self.longest_s, took_s)
        if end not in TRANSIENT | GONE | {"finished", "left"}:
            self.problems.append(f"{prompt.model}: a request ended with {end} after {took_s:.1f} s")
        right = said == expected.text if end == "finished" else expected.text.startswith(said)
        if not right:
            self._compare(prompt, expected, said)

    def _compare(self, prompt: Prompt, expected: Expected, said: str) -> None:
        pairs = zip(said, expected.text, strict=False)
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(said), len(expected.text)))
        if any(first - 8 <= tie <= first for tie in expected.ties):
            self.outcomes["(differs at a tie)"] += 1
        else:
            self.problems.append(f"wrong text for {prompt}: {said!r}, not {expected.text!r}")


class Load:
    """``workers`` clients, one request each at a time, until ``requests`` were answered."""

    def __init__(self, url: str, prompts: list[Prompt], expected: list[Expected], tally: Tally, seed: int) -> None:
        self._prompts, self._expected, self._tally = prompts, expected, tally
        self._seed = seed
        self._client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=90)

    async def run(self, requests: int, workers: int) -> None:
        counter = iter(range(requests))
        try:
            await asyncio.gather(*(self._work(counter, number) for number in range(workers)))
        finally:
            await self._client.close()

    async def _work(self, counter: Any, number: int) -> None:
        rng = random.Random(f"{self._seed}-{number}")
        for _ in counter:
            index = rng.randrange(len(self._prompts))
            if await self._ask(index, stream=rng.random() < 0.5, leaves=rng.random() < 0.1) not in ("finished", "left"):
                await asyncio.sleep(rng.uniform(0.05, 0.5))

    async def _ask(self, index: int, *, stream: bool, leaves: bool) -> str:
        """How it ended."""
        prompt, begun_s = self._prompts[index], time.monotonic()
        said, first_s, end = "", None, "finished"
        try:
            options: Any = _options(prompt) | {"extra_body": {"ignore_eos": True}}
            if stream:
                async with await self._client.completions.create(**options, stream=True) as events:
                    async for event in events:
                        first_s = first_s or time.monotonic()
                        said += event.choices[0].text
                        if leaves and said:
                            end = "left"
                            break
            else:
                said = (await self._client.completions.create(**options)).choices[0].text
        except openai.APIStatusError as problem:
            end = str(problem.code or problem.status_code)
        except openai.APIError as problem:
            end = str(problem.code or type(problem).__name__)
        now_s = time.monotonic()
        waited_s = waited_for_token_s(begun_s, first_s, now_s, stream=stream)
        self._tally.note(prompt, self._expected[index], said, end, waited_s, now_s - begun_s)
        return end


def waited_for_token_s(begun_s: float, first_s: float | None, now_s: float, *, stream: bool) -> float:
    """A whole answer does not say when its first token came, nor does the error in its place: it may have had tokens, lost its
    engine, and waited again for another."""
    return (first_s or now_s) - begun_s if stream else 0.0


# --- hostile ones ------------------------------------------------------------------------------------------------------

_BAD: list[tuple[Any, int]] = [
    ({"stop_token_ids": [99999], "min_tokens": 4}, 400),
    ({"prompt": []}, 400),
    ({"prompt": "x" * 3_000_000}, 400),
    ({"prompt": ["x"] * 200}, 400),
    ({"stop": ["x"] * 10_000}, 400),
    ({"n": 10**9}, 400),
    ({"guided_json": {}}, 400),
    ({"logit_bias": {"99999": 1}}, 400),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, 400),
    ({"model": "nobody"}, 404),
    (b'{"model":"tiny-bf16","prompt":"\\ud800"}', 400),
    (b"[" * 100_000, 400),
]


async def hostile(url: str, rng: random.Random) -> str | None:
    """One hostile request; what was wrong about its answer."""
    kind = rng.randrange(len(_BAD) + 3)
    host = urlsplit(url)
    if kind < len(_BAD):
        body, status = _BAD[kind]
        content = body if isinstance(body, bytes) else json.dumps({"model": "tiny-bf16", "prompt": "x"} | body).encode()
        async with httpx.AsyncClient(timeout=60) as client:
            got = (await client.post(f"{url}/v1/completions", content=content)).status_code
        return None if got == status else f"hostile body {kind} got {got}, not {status}"
    _, writer = await asyncio.open_connection(host.hostname, host.port)
    if kind == len(_BAD):
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 1_000_000)
    else:  # half a head, or half a body, and then silence or an abrupt end
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + b"Content-Length: 100\r\n\r\n{" * (kind % 2))
        await asyncio.sleep(rng.uniform(0, 1))
    writer.transport.abort()
    return None


async def burst(url: str, prompt: Prompt, requests: int = 1500) -> Counter[str]:
    """So many requests at once, and a prompt of 20 MB among them. Their statuses."""
    big = json.dumps(_options(prompt) | {"prompt": "x" * 20_000_000}).encode()
    bodies = [json.dumps(_options(prompt)).encode()] * requests + [big]
    async with httpx.AsyncClient(timeout=90, limits=httpx.Limits(max_connections=None)) as client:
        answers = await asyncio.gather(
            *(client.post(f"{url}/v1/completions", content=body) for body in bodies), return_exceptions=True
        )
    return Counter(
        type(each).__name__ if isinstance(each, BaseException) else str(each.status_code) for each in answers
    )


class Health(NamedTuple):
    """An answer of ``/health``. ``asked_s``: on the machine's monotonic clock. ``cpu_s``: processor time that the whole server
    took meanwhile; the rest of ``took_s`` was waiting for a core."""

    asked_s: float
    took_s: float
    cpu_s: float
    status: int


def watch_health(url: str, pid: int, pipe: Connection) -> None:
    """A process: ask ``/health`` of the server ``pid`` ten times a second, on a new connection each, until told to stop; send
    what was answered."""
    host, found = urlsplit(url), []
    clock = ~pid << 3 | 2  # the kernel's clock of a process's processor time, as clock_getcpuclockid makes it
    while not pipe.poll(0.1):
        asked_s, cpu_s = time.monotonic(), time.clock_gettime(clock)
        try:
            connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=30)
            connection.request("GET", "/health")
            status = connection.getresponse().status
            connection.close()
        except OSError:
            status = 0
        found.append(Health(asked_s, time.monotonic() - asked_s, time.clock_gettime(clock) - cpu_s, status))
    pipe.send(found)
