"""One choice of an answer as an asynchronous stream of text, from submission to its end."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from fineserve_runtime.driver import Driver
from fineserve_runtime.engines.api import Logprobs, Sampling
from fineserve_runtime.jobs import End, Job, Limits
from fineserve_runtime.server.errors import unfinished
from fineserve_runtime.server.text import Detokenizer, StopStrings, Tokenizer


class Piece(NamedTuple):
    """New text and tokens; ``finish_reason`` with the last piece. ``logprobs``: one entry a token, where they were wanted;
    ``vector``, with the last piece: what a model that embeds answers instead."""

    text: str
    tokens: int
    finish_reason: str | None
    logprobs: tuple[Logprobs, ...] = ()
    token_ids: tuple[int, ...] = ()
    vector: tuple[float, ...] = ()


class Order(NamedTuple):
    """One choice that is asked for. ``echo`` is put before its text; ``keep_stop``: the stop string belongs to the text;
    ``special``: so do special tokens. ``trace``: the client's ``traceparent``; ``came_s``: when the request was here, on the
    monotonic clock; ``held_s``: so long its model moved meanwhile."""

    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    priority: int = 0
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    special: bool = False
    echo: str = ""
    trace: str | None = None
    came_s: float = math.inf
    held_s: float = 0.0


class _News(NamedTuple):
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]


class _Mailbox:
    """A sink that hands over to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.news: asyncio.Queue[_News | End] = asyncio.Queue()

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...]) -> None:
        self._put(_News(token_ids, logprobs))

    def ended(self, end: End) -> None:
        self._put(end)

    def _put(self, item: _News | End) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.news.put_nowait, item)


class Choice:
    """A submitted order. ``pieces`` may be read once, on ``loop``; leaving it early aborts the request. ``later`` runs what
    takes the driver's lock: the event loop never waits for it.

    Raises Refused on construction as ``Driver.submit`` does.
    """

    def __init__(
        self,
        driver: Driver,
        tokenizer: Tokenizer,
        order: Order,
        loop: asyncio.AbstractEventLoop,
        later: Callable[[Callable[[int], None], int], object],
    ) -> None:
        self._driver = driver
        self._order = order
        self._later = later
        self._over = False
        self._mailbox = _Mailbox(loop)
        self._detokenizer = Detokenizer(tokenizer, special=order.special)
        self._stops = StopStrings(order.stops, keep=order.keep_stop)
        self.job = driver.submit(self._job)

    def _job(self, id: int) -> Job:
        order = self._order
        limits = order.limits
        return Job(
            id,
            order.model,
            order.prompt,
            order.sampling,
            self._mailbox,
            limits.ttft_s,
            order.priority,
            limits.tpot_s,
            order.trace,
            max(0.0, time.monotonic() - order.came_s),
            order.held_s,
        )

    def abort(self) -> None:
        """Give the request up. Does nothing once it ended."""
        self._leave(self._driver.abort)

    def _leave(self, how: Callable[[int], None]) -> None:
        if not self._over:
            self._over = True
            self._later(how, self.job.id)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises ApiError when the request is refused or fails."""
        echo = self._order.echo
        try:
            while True:
                item = await self._mailbox.news.get()
                if isinstance(item, End):
                    self._over = True
                    if item.kind != "finished":
                        raise unfinished(item)
                    text = self._stops.feed(self._detokenizer.rest()) + self._stops.rest()
                    yield Piece(echo + text, 0, "stop" if self._stops.hit else item.reason, vector=item.vector)
                    return
                text = echo + self._stops.feed(self._detokenizer.feed(item.token_ids))
                echo = ""
                if self._stops.hit:
                    self._leave(self._driver.complete)
                    yield Piece(text, len(item.token_ids), "stop", item.logprobs, item.token_ids)
                    return
                yield Piece(text, len(item.token_ids), None, item.logprobs, item.token_ids)
        finally:
            self.abort()
