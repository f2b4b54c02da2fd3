"""Completions and chat completions: from a request to orders, and from pieces to bodies and server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fineserve_runtime.jobs import Limits
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.schema import ChatRequest, CompletionRequest, GenerationRequest
from fineserve_runtime.server.service import ServedName
from fineserve_runtime.server.streams import Choice, Order, Piece

COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions; a chat may fill the context."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A request understood: its orders, in the order of the choices, and what its answer looks like."""

    id: str
    model: str
    orders: list[Order]
    prompt_tokens: int
    chat: bool
    stream: bool
    include_usage: bool
    created: int


def chat_ask(request: ChatRequest, model: ServedName, request_id: str, limits: Limits) -> Ask:
    """Raises ApiError for what cannot be answered."""
    try:
        prompt = model.tokenizer.chat([message.plain() for message in request.messages])
    except ValueError as problem:
        raise ApiError(400, str(problem), param="messages") from None
    return _ask(request, model, [prompt], f"chatcmpl-{request_id}", limits, chat=True)


def completion_ask(request: CompletionRequest, model: ServedName, request_id: str, limits: Limits) -> Ask:
    """Raises ApiError for what cannot be answered."""
    prompts = [model.tokenizer.encode(each) if isinstance(each, str) else each for each in request.prompts()]
    return _ask(request, model, prompts, f"cmpl-{request_id}", limits, chat=False)


def _ask(
    request: GenerationRequest, model: ServedName, prompts: Sequence[list[int]], id: str, limits: Limits, *, chat: bool
) -> Ask:
    request.check_supported()
    orders = []
    for prompt in prompts:
        max_tokens = _max_tokens(request, model, prompt, chat=chat)
        orders += [
            Order(
                model.id,
                tuple(prompt),
                request.sampling(max_tokens, choice),
                limits,
                request.priority,
                request.stops,
            )
            for choice in range(request.n)
        ]
    usage = request.stream_options is not None and request.stream_options.include_usage
    tokens = sum(map(len, prompts))
    return Ask(id, model.id, orders, tokens, chat, request.stream, usage, int(time.time()))


def _max_tokens(request: GenerationRequest, model: ServedName, prompt: list[int], *, chat: bool) -> int:
    where = "messages" if chat else "prompt"
    if not prompt:
        raise ApiError(400, "the prompt is empty", param=where)
    for token in (min(prompt), max(prompt)):
        if not 0 <= token < model.vocab_tokens:  # an engine would die of it
            raise ApiError(400, f"{token} is no token id; the model has 0 to {model.vocab_tokens - 1}", param=where)
    room = model.max_model_len - len(prompt)
    if room < 1:
        raise ApiError(
            400,
            f"this model's maximum context length is {model.max_model_len} tokens; the prompt has {len(prompt)}",
            param=where,
            code="context_length_exceeded",
        )
    wanted = request.limit or (room if chat else min(room, COMPLETION_TOKENS))
    if wanted > room:
        raise ApiError(
            400,
            f"this model's maximum context length is {model.max_model_len} tokens; the prompt has {len(prompt)} and "
            f"{wanted} more were asked for",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return wanted


# --- whole answers -----------------------------------------------------------------------------------------------------


async def whole(ask: Ask, choices: Sequence[Choice]) -> dict[str, Any]:
    """The body of an answer. Raises ApiError when a choice is refused or fails; the others are given up then."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_collect(choice)) for choice in choices]
    except ExceptionGroup as problems:
        raise problems.exceptions[0] from None
    finally:
        for choice in choices:
            choice.abort()
    parts = [task.result() for task in tasks]
    return _head(ask, "chat.completion" if ask.chat else "text_completion") | {
        "choices": [_choice(ask, index, text, reason) for index, (text, _, reason) in enumerate(parts)],
        "usage": _usage(ask, sum(tokens for _, tokens, _ in parts)),
    }


async def _collect(choice: Choice) -> Piece:
    text, tokens, reason = "", 0, None
    async for piece in choice.pieces():
        text, tokens, reason = text + piece.text, tokens + piece.tokens, piece.finish_reason
    return Piece(text, tokens, reason)


def _choice(ask: Ask, index: int, text: str, reason: str | None) -> dict[str, Any]:
    content: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if ask.chat else {"text": text}
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def _head(ask: Ask, kind: str) -> dict[str, Any]:
    return {"id": ask.id, "object": kind, "created": ask.created, "model": ask.model}


def _usage(ask: Ask, completion_tokens: int) -> dict[str, int]:
    total = ask.prompt_tokens + completion_tokens
    return {"prompt_tokens": ask.prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


# --- streams -----------------------------------------------------------------------------------------------------------


class EventStream:
    """The server-sent events of an answer. ``begin`` waits for the first piece, so that a refusal is still an HTTP status."""

    def __init__(self, ask: Ask, choices: Sequence[Choice]) -> None:
        self._ask = ask
        self._choices = choices
        self._pieces = _merged(choices)
        self._tokens = 0
        self._opened: set[int] = set()

    async def begin(self) -> AsyncIterator[str]:
        """The events, once there is a first one. Raises ApiError as ``whole`` does."""
        try:
            first = await anext(self._pieces)
        except BaseException:
            self._give_up()
            raise
        return self._events(first)

    async def _events(self, first: tuple[int, Piece]) -> AsyncIterator[str]:
        try:
            for event in self._of_piece(*first):
                yield event
            async for index, piece in self._pieces:
                for event in self._of_piece(index, piece):
                    yield event
            if self._ask.include_usage:
                yield _event(self._head() | {"choices": [], "usage": _usage(self._ask, self._tokens)})
        except ApiError as problem:
            yield _event(problem.body)
        finally:
            self._give_up()
        yield "data: [DONE]\n\n"

    def _of_piece(self, index: int, piece: Piece) -> list[str]:
        self._tokens += piece.tokens
        deltas = []
        if self._ask.chat and index not in self._opened:
            self._opened.add(index)
            deltas.append(self._delta(index, {"role": "assistant", "content": ""}, None))
        if piece.text or piece.finish_reason or piece.tokens:
            content = {"content": piece.text} if self._ask.chat else {"text": piece.text}
            deltas.append(self._delta(index, content, piece.finish_reason))
        return deltas

    def _delta(self, index: int, content: dict[str, Any], reason: str | None) -> str:
        body = {"delta": content} if self._ask.chat else content
        return _event(self._head() | {"choices": [{"index": index, **body, "logprobs": None, "finish_reason": reason}]})

    def _head(self) -> dict[str, Any]:
        return _head(self._ask, "chat.completion.chunk" if self._ask.chat else "text_completion")

    def _give_up(self) -> None:
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
    news: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, choice: Choice) -> None:
        try:
            async for piece in choice.pieces():
                news.put_nowait((index, piece))
            news.put_nowait(None)
        except ApiError as problem:
            news.put_nowait(problem)

    tasks = [asyncio.create_task(pump(index, choice)) for index, choice in enumerate(choices)]
    try:
        left = len(choices)
        while left:
            item = await news.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
