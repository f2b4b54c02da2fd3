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
    """One choice that is asked for. ``echo`` is put before its text; ``only_echo``: nothing else is told of it.
    ``keep_stop``: the stop string belongs to the text; ``special``: so do special tokens. ``trace``: the client's
    ``traceparent``; ``came_s``: when the request was here, on the monotonic clock; ``held_s``: so long its model moved
    meanwhile."""

    model: str
    prompt: tuple[int, ...]
    sampling: Sampling
    limits: Limits
    priority: int = 0
    stops: tuple[str, ...] = ()
    keep_stop: bool = False
    special: bool = False
    echo: str = ""
    only_echo: bool = False
    trace: str | None = None
    came_s: float = math.inf
    held_s: float = 0.0


class _News(NamedTuple):
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    last: bool = False


class _Mailbox:
    """A sink that hands over to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.news: asyncio.Queue[_News | End] = asyncio.Queue()

    def tokens(self, token_ids: tuple[int, ...], logprobs: tuple[Logprobs, ...], last: bool) -> None:
        self._put(_News(token_ids, logprobs, last))

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
        first = True
        try:
            while True:
                news, end = await self._next()
                text = self._stops.feed(self._detokenizer.feed(news.token_ids))
                piece = Piece(text, len(news.token_ids), None, news.logprobs, news.token_ids)
                if self._stops.hit:
                    self._leave(self._driver.complete)
                    piece = piece._replace(finish_reason="stop")
                elif end is not None:
                    piece = self._finished(piece, end)
                yield self._with_prompt(piece, first)
                if end is not None or self._stops.hit:
                    return
                first = False
        finally:
            self.abort()

    async def _next(self) -> tuple[_News, End | None]:
        """The next tokens, and the end with the last ones, as vLLM's server tells it."""
        item = await self._mailbox.news.get()
        news = item if isinstance(item, _News) else _News()
        end = await self._mailbox.news.get() if news.last else item
        if not isinstance(end, End):
            return news, None
        self._over = True
        if end.kind != "finished":
            raise unfinished(end)
        return news, end

    def _finished(self, piece: Piece, end: End) -> Piece:
        """The last piece, with the text that was held back."""
        text = piece.text + self._stops.feed(self._detokenizer.rest()) + self._stops.rest()
        reason = "stop" if self._stops.hit else end.reason
        return piece._replace(text=text, finish_reason=reason, vector=end.vector)

    def _with_prompt(self, piece: Piece, first: bool) -> Piece:
        """The piece as it is told: the prompt before the first one, where it is echoed. A prompt's first token has no
        probability, and an engine that goes on for another tells the prompt's again."""
        order, places = self._order, piece.logprobs
        if order.sampling.prompt_logprobs is not None and piece.tokens:
            prompt, own = places[: -piece.tokens], places[-piece.tokens :]
            places = (((order.prompt[0], math.nan),), *prompt, *own) if first else own
        if order.only_echo:
            piece = piece._replace(text="", token_ids=())
            places = places[: len(order.prompt)] if first else ()
        return piece._replace(text=order.echo + piece.text if first else piece.text, logprobs=places)
