"""Clients of the fuzzer: one that sends its requests, a neighbour whose tokens are timed, and the control."""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.fuzz_grammar import ENDPOINTS, Shot

REASON = "x-fineserve-reason"
SLOW_S = 30.0
"""No request of the fuzzer may take longer: none asks for more than a few hundred tokens."""

_WORKERS = 8
_EXCERPT = 400
_STREAMED = "text/event-stream"


@dataclass
class Tally:
    """What the server said. ``problems``: what it must not; ``refused``: reasons of 503s; ``surprises``: refusals of what the
    grammar made and nothing was done to."""

    statuses: Counter[tuple[str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    surprises: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    longest_s: float = 0.0

    def note(self, number: int, shot: Shot, status: str, problem: str | None, took_s: float) -> None:
        known = shot.path if shot.path in ENDPOINTS else "other"
        self.statuses[known, status] += 1
        self.longest_s = max(self.longest_s, took_s)
        if took_s > SLOW_S:
            problem = f"took {took_s:.1f} s"
        if problem is not None:
            self.problems.append(f"request {number}, {shot.method} {shot.path}: {status} {problem}")


async def shoot(url: str, shots: Iterable[tuple[int, Shot]], tally: Tally) -> None:
    """Send all of them, eight at a time."""
    left = deque(shots)

    async def work(client: httpx.AsyncClient) -> None:
        while left:
            number, shot = left.popleft()
            begun_s = time.monotonic()
            try:
                status, problem = await _send(client, shot, tally)
            except httpx.HTTPError as broken:
                status, problem = type(broken).__name__, str(broken)
            tally.note(number, shot, status, problem, time.monotonic() - begun_s)

    async with httpx.AsyncClient(base_url=url, timeout=2 * SLOW_S) as client:
        await asyncio.gather(*(work(client) for _ in range(_WORKERS)))


async def _send(client: httpx.AsyncClient, shot: Shot, tally: Tally) -> tuple[str, str | None]:
    """The status of the answer, and what is wrong with it."""
    request = client.build_request(shot.method, shot.path, content=shot.content, headers=shot.headers)
    answer = await client.send(request, stream=True)
    try:
        if answer.headers.get("content-type", "").startswith(_STREAMED):
            return await _read_events(answer, shot)
        if shot.hang_up is not None and shot.hang_up % 2:
            return "left", None
        await answer.aread()
    finally:
        await answer.aclose()
    status = answer.status_code
    if status == 503 and REASON in answer.headers:
        tally.refused[answer.headers[REASON]] += 1
    elif status >= 500:
        return str(status), answer.text[:_EXCERPT]
    if shot.valid and status >= 400:
        tally.surprises[f"{shot.path}: {_message(answer)}"] += 1
    return str(status), None if status < 400 or _message(answer) or shot.method == "HEAD" else "an error without words"


def _message(answer: httpx.Response) -> str:
    """The words of an error. Empty: it has another shape than OpenAI's and the one of ``/ready`` and ``/health``."""
    try:
        body = answer.json()
        return str(body["error"]["message"])[:_EXCERPT] if "error" in body else "ready" * ("ready" in body)
    except (ValueError, KeyError, TypeError):
        return ""


async def _read_events(answer: httpx.Response, shot: Shot) -> tuple[str, str | None]:
    """An error in a stream counts as an answer of its status would: the reason is its code."""
    seen, last = 0, ""
    async for line in answer.aiter_lines():
        if not line.startswith("data: "):
            continue
        seen, last = seen + 1, line.removeprefix("data: ")
        if last.startswith('{"error"') or '"type": "error"' in last[:40]:
            code = _code(json.loads(last))
            return f"stream, {code}", last[:_EXCERPT] if code in ("500", "engine_error", "engine_died") else None
        if shot.hang_up is not None and seen > shot.hang_up:
            return "left", None
    whole = last == "[DONE]" or '"message_stop"' in last or '"response.' in last
    return "200", None if whole else f"the stream ends with {last[:_EXCERPT]!r}"


def _code(event: dict[str, Any]) -> str:
    error = event["error"]
    return str(error.get("code") or ("500" if error.get("type") in ("server_error", "api_error") else "400"))


# --- others ------------------------------------------------------------------------------------------------------------


def control(url: str, models: Iterable[str]) -> list[str]:
    """What greedy requests say, of which every server says the same as before."""
    prompts = ("The lease of a slab", "Queues are", "1 2 3 4")
    said = []
    with httpx.Client(base_url=url, timeout=60) as client:
        for model in models:
            for prompt in prompts:
                body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
                answer = client.post("/v1/completions", json=body)
                said.append(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)
    return said


def neighbour(url: str, model: str, pipe: Connection) -> None:
    """A process: read one stream of the model after the other until told to stop; send the seconds between tokens, the last
    streams' included, and what went wrong."""
    host = urlsplit(url)
    gaps: list[float] = []
    problems: list[str] = []
    body = {"model": model, "prompt": "A neighbour", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    content = json.dumps(body | {"stream": True}).encode()
    while not pipe.poll():
        connection = http.client.HTTPConnection(str(host.hostname), host.port, timeout=60)
        try:
            connection.request("POST", "/v1/completions", content, {"content-type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                problems.append(f"the neighbour got {answer.status} {answer.read()[:_EXCERPT]!r}")
            last_s = None
            while line := answer.readline():
                now_s = time.monotonic()
                if line.startswith(b"data: {"):
                    gaps += [now_s - last_s] if last_s is not None else []
                    last_s = now_s
        except OSError as problem:
            problems.append(f"the neighbour: {problem}")
        finally:
            connection.close()
    pipe.send((gaps, problems))
