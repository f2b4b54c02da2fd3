"""Answers to completions and chat completions: bodies and server-sent events, from the pieces of choices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from fineserve_runtime.engines.api import Logprobs
from fineserve_runtime.server.asks import Ask
from fineserve_runtime.server.bodies import head, logprobs, prompt_ids, token_ids, usage
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.streams import Choice, Piece
from fineserve_runtime.server.tools import ToolParser, call_bodies


async def whole(ask: Ask, choices: Sequence[Choice]) -> dict[str, Any]:
    """The body of an answer. Raises ApiError as ``collect`` does."""
    parts = await collect(choices)
    body = head(ask, "chat.completion" if ask.chat else "text_completion") | {
        "choices": [_choice(ask, index, part) for index, part in enumerate(parts)],
        "usage": usage(ask.prompt_tokens, sum(part.tokens for part in parts)),
    }
    return body | (prompt_ids(ask, 0) if ask.chat else {})


async def collect(choices: Sequence[Choice]) -> list[Piece]:
    """Each choice as one piece. Raises ApiError when one is refused or fails; the others are given up then."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_collected(choice)) for choice in choices]
    except ExceptionGroup as problems:
        raise problems.exceptions[0] from None
    finally:
        for choice in choices:
            choice.abort()
    return [task.result() for task in tasks]


async def _collected(choice: Choice) -> Piece:
    texts: list[str] = []
    tokens, reason, found, token_ids, vector = 0, None, list[Logprobs](), list[int](), tuple[float, ...]()
    async for piece in choice.pieces():
        texts.append(piece.text)
        token_ids += piece.token_ids
        tokens, reason = tokens + piece.tokens, piece.finish_reason
        found += piece.logprobs
        vector = piece.vector
    return Piece("".join(texts), tokens, reason, tuple(found), tuple(token_ids), vector)


def _choice(ask: Ask, index: int, part: Piece) -> dict[str, Any]:
    content: dict[str, Any] = {"text": part.text}
    reason = part.finish_reason
    if ask.chat:
        message: dict[str, Any] = {"role": "assistant", "content": part.text}
        if ask.tools is not None:
            reader = ask.tools.reader()
            parts = [reader.feed(part.text, part.token_ids), reader.rest()]
            calls = [call for each in parts for call in each.calls]
            message["content"] = "".join(each.text for each in parts) or (None if calls else "")
            if calls:
                message["tool_calls"] = call_bodies(calls, streamed=False)
                reason = ask.tools.reason if reason == "stop" else reason
        content = {"message": message}
    beside = token_ids(ask, part) | ({} if ask.chat else prompt_ids(ask, index))
    return {"index": index, **content, "logprobs": logprobs(ask, part.logprobs), "finish_reason": reason} | beside


class EventStream:
    """The server-sent events of an answer. ``begin`` waits for the first piece, so that a refusal is still an HTTP status."""

    def __init__(self, ask: Ask, choices: Sequence[Choice]) -> None:
        self._ask = ask
        self._choices = choices
        self._pieces = _merged(choices)
        self._tokens = [0] * len(choices)
        self._opened: set[int] = set()
        self._begun: set[int] = set()
        self._offsets = [0] * len(choices)  # characters of the tokens told
        self._readers: list[ToolParser] | None = None
        self._called: set[int] = set()

    async def begin(self) -> AsyncIterator[str]:
        """The events, once there is a first one. Raises ApiError as ``whole`` does."""
        try:
            if self._ask.tools is not None:
                self._readers = [self._ask.tools.reader() for _ in self._choices]
            first = await anext(self._pieces)
        except BaseException:
            self.give_up()
            raise
        return self._events(first)

    async def _events(self, first: tuple[int, Piece]) -> AsyncIterator[str]:
        try:
            for event in (*self._opening(), *self._of_piece(*first)):
                yield event
            async for index, piece in self._pieces:
                for event in self._of_piece(index, piece):
                    yield event
            for event in self._closing():
                yield event
        except ApiError as problem:
            for event in self._failure(problem):
                yield event
        except Exception:  # a parser's, or a tokenizer's
            for event in self._failure(ApiError(500, "internal error", kind="server_error")):
                yield event
            raise
        finally:
            self.give_up()
        for event in self._last_words():
            yield event

    # --- what other endpoints tell in another way; each is asked for once, in this order -------------------------------

    def _opening(self) -> Iterator[str]:
        yield from ()

    def _closing(self) -> Iterator[str]:
        if self._ask.usage != "none":
            yield _event(self._head() | {"choices": [], "usage": usage(self._ask.prompt_tokens, sum(self._tokens))})

    def _failure(self, problem: ApiError) -> Iterator[str]:
        yield _event(problem.body)

    def _last_words(self) -> Iterator[str]:
        yield "data: [DONE]\n\n"

    # --- pieces ------------------------------------------------------------------------------------------------------

    def _of_piece(self, index: int, piece: Piece) -> list[str]:
        deltas = []
        if self._ask.chat and index not in self._opened:
            self._opened.add(index)
            deltas.append(self._delta(index, {"role": "assistant", "content": ""}, {"logprobs": None}, None))
        self._tokens[index] += piece.tokens
        if self._readers is not None:
            deltas += self._of_calls(index, piece, self._readers[index])
        elif piece.text or piece.finish_reason or piece.tokens:
            content = {"content": piece.text} if self._ask.chat else {"text": piece.text}
            deltas.append(self._delta(index, content, self._beside(index, piece), piece.finish_reason))
        return deltas

    def _of_calls(self, index: int, piece: Piece, reader: ToolParser) -> list[str]:
        """Text and calls in a piece, as far as they can be told apart."""
        said = [reader.feed(piece.text, piece.token_ids)]
        reason = piece.finish_reason
        if reason is not None:
            said.append(reader.rest())
        text, calls = "".join(each.text for each in said), [call for each in said for call in each.calls]
        if calls:
            self._called.add(index)
        if reason == "stop" and index in self._called and self._ask.tools is not None:
            reason = self._ask.tools.reason
        if not (text or calls or reason):
            return []
        content: dict[str, Any] = {"content": text} if text else {}
        if calls:
            content["tool_calls"] = call_bodies(calls, streamed=True)
        return [self._delta(index, content, self._beside(index, piece), reason)]

    def _beside(self, index: int, piece: Piece) -> dict[str, Any]:
        """The parts of a choice beside its text. Offsets follow tokens, since text may wait for the rest of a stop string."""
        found = logprobs(self._ask, piece.logprobs, self._offsets[index]) if piece.tokens else None
        if found and found.get("tokens"):
            self._offsets[index] = found["text_offset"][-1] + len(found["tokens"][-1])
        return {"logprobs": found} | token_ids(self._ask, piece)

    def _delta(self, index: int, content: dict[str, Any], beside: dict[str, Any], reason: str | None) -> str:
        body = {"delta": content} if self._ask.chat else content
        choice = {"index": index, **body, **beside, "finish_reason": reason}
        event = self._head()
        if index not in self._begun:
            self._begun.add(index)
            (event if self._ask.chat else choice).update(prompt_ids(self._ask, index))
        if self._ask.usage == "each":
            event["usage"] = usage(len(self._ask.orders[index].prompt), self._tokens[index])
        return _event(event | {"choices": [choice]})

    def _head(self) -> dict[str, Any]:
        return head(self._ask, "chat.completion.chunk" if self._ask.chat else "text_completion")

    def give_up(self) -> None:
        for choice in self._choices:
            choice.abort()


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"


async def _merged(choices: Sequence[Choice]) -> AsyncIterator[tuple[int, Piece]]:
    """Pieces of all choices as they come."""
    if len(choices) == 1:
        async for piece in choices[0].pieces():
            yield 0, piece
        return
    news: asyncio.Queue[tuple[int, Piece] | Exception | None] = asyncio.Queue()

    async def pump(index: int, choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                news.put_nowait((index, piece))
            news.put_nowait(None)
        except Exception as problem:
            news.put_nowait(problem)

    tasks = [asyncio.create_task(pump(index, choice)) for index, choice in enumerate(choices)]
    try:
        left = len(choices)
        while left:
            item = await news.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
