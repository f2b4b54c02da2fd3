"""One choice of an answer as an asynchronous stream of text, from submission to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from fineserve_runtime.driver import Driver
from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.jobs import End, Job, Limits
from fineserve_runtime.server.errors import unfinished
from fineserve_runtime.server.text import Detokenizer, StopStrings, Tokenizer


class Piece(NamedTuple):
    """New text and tokens; ``finish_reason`` with the last piece."""

    text: str
    tokens: int
    finish_reason: str | None


class Order(NamedTuple):
    """One choice that is asked for."""

    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    priority: int
    stops: tuple[str, ...]


class _Mailbox:
    """A sink that hands over to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.news: asyncio.Queue[tuple[int, ...] | End] = asyncio.Queue()

    def tokens(self, token_ids: tuple[int, ...]) -> None:
        self._put(token_ids)

    def ended(self, end: End) -> None:
        self._put(end)

    def _put(self, item: tuple[int, ...] | End) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.news.put_nowait, item)


class Choice:
    """A submitted order. ``pieces`` may be read once; leaving it early aborts the request.

    Raises Refused on construction as ``Driver.submit`` does.
    """

    def __init__(self, driver: Driver, tokenizer: Tokenizer, order: Order) -> None:
        self._driver = driver
        self._order = order
        self._mailbox = _Mailbox(asyncio.get_running_loop())
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(order.stops)
        self.job = driver.submit(self._job)

    def _job(self, id: int) -> Job:
        order = self._order
        limits = order.limits
        return Job(
            id, order.model, order.prompt, order.sampling, self._mailbox, limits.ttft_s, order.priority, limits.tpot_s
        )

    def abort(self) -> None:
        """Give the request up. Does nothing once it ended."""
        self._driver.abort(self.job.id)

    async def pieces(self) -> AsyncIterator[Piece]:
        """Raises ApiError when the request is refused or fails."""
        try:
            while True:
                item = await self._mailbox.news.get()
                if isinstance(item, End):
                    if item.kind != "finished":
                        raise unfinished(item)
                    text = self._stops.feed(self._detokenizer.rest())
                    yield Piece(text + self._stops.rest(), 0, "stop" if self._stops.hit else item.reason)
                    return
                text = self._stops.feed(self._detokenizer.feed(item))
                if self._stops.hit:
                    yield Piece(text, len(item), "stop")
                    return
                yield Piece(text, len(item), None)
        finally:
            self.abort()
