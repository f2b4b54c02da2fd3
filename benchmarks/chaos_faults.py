"""What strikes the server under test of the chaos campaign."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import httpx

from benchmarks.chaos_clients import hostile
from benchmarks.chaos_server import MODELS, Server

_THIRD = "third"

_SHORT = ("slow", "hostile", "sleep")
_LONG = {
    "vllm": ("kill", "stop", "add"),
    "fake": ("kill", "stop", "add"),
    "ray": ("stop", "actor", "node"),
}
"""Kinds of faults by kind of engines. Models do not come and go on Ray."""


class Faults:
    """What strikes, and how often it did. Short faults come about every ``short_gap_s``. Long ones, of engines and of either
    log, come every ``long_gap_s``. There is one of each sort at a time, its kinds in turn."""

    def __init__(
        self, server: Server, third: dict[str, Any], rng: random.Random, short_gap_s: float, long_gap_s: float
    ) -> None:
        self._server, self._third, self._rng = server, third, rng
        self._short_gap_s, self._long_gap_s = short_gap_s, long_gap_s
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._kinds: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {
            "slow": self._slow,
            "hostile": self._hostile,
            "sleep": self._sleep,
            "kill": self._kill,
            "stop": self._stop,
            "add": self._add,
            "actor": self._actor,
            "node": self._node,
            "disk": self._disk,
            "stderr": self._stderr,
        }
        self._over = asyncio.Event()
        self._admin = httpx.AsyncClient(base_url=server.url, headers=dict(server.admin.headers), timeout=300)

    async def run(self) -> None:
        long = (_LONG[self._server.engines], ("disk",), ("stderr",))
        await asyncio.gather(
            self._strike(_SHORT, self._short_gap_s), *(self._strike(kinds, self._long_gap_s) for kinds in long)
        )
        await self._operate("DELETE", f"/admin/models/{_THIRD}", 200, 404)  # where its own removal did not get through
        await self._admin.aclose()

    def end(self) -> None:
        self._over.set()

    async def _strike(self, kinds: Sequence[str], gap_s: float) -> None:
        deck: list[str] = []
        while not self._over.is_set():
            deck = deck or self._rng.sample(kinds, len(kinds))
            kind = deck.pop()
            try:
                await self._kinds[kind]()
            except (httpx.HTTPError, OSError) as problem:
                self.problems.append(f"{kind}: {problem!r}")
            wait = asyncio.ensure_future(self._over.wait())
            await asyncio.wait([wait], timeout=self._rng.uniform(0.5, 1.5) * gap_s)
            wait.cancel()

    def _signal(self, which: signal.Signals) -> int | None:
        """An engine that was struck."""
        pids = self._server.engine_pids()
        if not pids:
            return None
        pid = self._rng.choice(pids)
        try:
            os.kill(pid, which)
        except ProcessLookupError:
            return None
        return pid

    async def _slow(self) -> None:
        pid = self._signal(signal.SIGSTOP)
        if pid is not None:
            self.counts["engine slowed (stopped for under a second)"] += 1
            await asyncio.sleep(self._rng.uniform(0.1, 0.9))
            try:
                os.kill(pid, signal.SIGCONT)
            except ProcessLookupError:
                return

    async def _hostile(self) -> None:
        self.counts["hostile client"] += 1
        problem = await hostile(self._server.url, self._rng)
        if problem is not None:
            self.problems.append(problem)

    async def _sleep(self) -> None:
        model = self._rng.choice(MODELS)
        await self._operate("POST", f"/admin/models/{model}/sleep", 200)
        await asyncio.sleep(self._rng.uniform(0.05, 0.5))
        await self._operate("POST", f"/admin/models/{model}/wake", 200)
        self.counts["model put to sleep and woken"] += 1

    async def _kill(self) -> None:
        if self._signal(signal.SIGKILL) is not None:
            self.counts["engine killed"] += 1

    async def _stop(self) -> None:
        """For good: the watch has to end it."""
        if self._signal(signal.SIGSTOP) is not None:
            self.counts["engine stopped for good"] += 1

    async def _actor(self) -> None:
        assert self._server.nodes is not None
        actors = self._server.nodes.actors()
        if actors:
            os.kill(self._rng.choice(actors), signal.SIGKILL)
            self.counts["actor lost"] += 1

    async def _node(self) -> None:
        """It comes back a little later."""
        assert self._server.nodes is not None
        if await asyncio.to_thread(self._server.nodes.lose, self._rng):
            self.counts["node lost"] += 1
            await asyncio.sleep(self._rng.uniform(0, 3))
            await asyncio.to_thread(self._server.nodes.add)

    async def _disk(self) -> None:
        """No file can be written any longer."""
        self._server.fill_disk()
        await asyncio.sleep(self._rng.uniform(0.5, 3))
        self._server.free_disk()
        self.counts["disk under the decision log full"] += 1

    async def _stderr(self) -> None:
        self._server.reads.clear()
        await asyncio.sleep(self._rng.uniform(0.5, 3))
        self._server.reads.set()
        self.counts["stderr unread"] += 1

    async def _add(self) -> None:
        status = await self._operate("POST", "/admin/models", 201, 409, 503, json={"model": _THIRD} | self._third)
        if status == 201:
            body = {"model": _THIRD, "prompt": "hello", "max_tokens": 8}
            answer = await self._admin.post("/v1/completions", json=body, headers={"authorization": ""})
            if answer.status_code not in (200, 500, 503):
                self.problems.append(f"the added model answered {answer.status_code}: {answer.text[:200]}")
            await self._operate("DELETE", f"/admin/models/{_THIRD}", 200)
            self.counts["model added and removed"] += 1

    async def _operate(self, method: str, path: str, *good: int, **options: Any) -> int:
        answer = await self._admin.request(method, path, **options)
        if answer.status_code not in good:
            self.problems.append(f"{method} {path} got {answer.status_code}: {answer.text[:200]}")
        return answer.status_code
