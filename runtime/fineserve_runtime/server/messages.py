"""Anthropic's ``/v1/messages``: a request is read as a chat, and the chat's answer is told in Anthropic's shapes.

Text and tools alone. The reason ``end_turn`` stands for a stop string, too: a chat does not tell them apart, nor does vLLM.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fineserve_runtime.server.answers import EventStream, whole
from fineserve_runtime.server.asks import Ask
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.parsing import Given, Many, parse
from fineserve_runtime.server.schema import ChatRequest
from fineserve_runtime.server.streams import Choice

_STOP_REASONS = {"length": "max_tokens"}
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ({"type": "disabled"}, None)

Blocks = Many[dict[str, Any]]


class AnthropicMessage(BaseModel):
    """``role`` is checked by the template of the model."""

    model_config = ConfigDict(extra="forbid")

    role: str
    content: str | Blocks


class AnthropicTool(BaseModel):
    """Without ``input_schema`` it is a tool that Anthropic runs itself, and is refused. Marks for caches have no effect."""

    model_config = ConfigDict(extra="allow")

    name: str
    description: str | None = None
    input_schema: dict[str, Any]

    def of_chat(self) -> dict[str, Any]:
        described = {"description": self.description} if self.description else {}
        return {"type": "function", "function": {"name": self.name, "parameters": self.input_schema, **described}}


class AnthropicToolChoice(BaseModel):
    model_config = ConfigDict(extra="forbid")

    type: str
    name: str | None = None
    disable_parallel_tool_use: Given[bool] = False

    def of_chat(self) -> str | dict[str, Any]:
        """Raises ApiError for a type that there is not."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        if self.type not in _TOOL_CHOICES:
            raise ApiError(
                400, f"tool_choice.type {self.type!r} is not one of auto, any, tool, none", param="tool_choice"
            )
        return _TOOL_CHOICES[self.type]


class CountRequest(BaseModel):
    """What the prompt is made of."""

    model_config = ConfigDict(extra="forbid")

    model: str
    messages: Annotated[Many[AnthropicMessage], Field(min_length=1)]
    system: str | Blocks | None = None
    tools: Given[Many[AnthropicTool]] = []
    tool_choice: AnthropicToolChoice | None = None
    thinking: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """Raises ApiError for what this server does not have."""
        if self.thinking not in _THINKING:
            raise ApiError(400, "thinking is not supported by this server", param="thinking", code="unsupported")
        return parse(ChatRequest, json.dumps(self._given()).encode())

    def _given(self) -> dict[str, Any]:
        choice = self.tool_choice
        given = {"model": self.model, "messages": list(self._messages())}
        return given | {
            "tools": [tool.of_chat() for tool in self.tools] or None,
            "tool_choice": choice.of_chat() if choice else None,
            "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        }

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": _text(self.system, "system")}
        for number, message in enumerate(self.messages):
            where = f"messages.{number}.content"
            if isinstance(message.content, str):
                yield {"role": message.role, "content": message.content}
            else:
                yield from _of_blocks(message.role, message.content, where)


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    stream: Given[bool] = False
    stop_sequences: Many[str] | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None

    def _given(self) -> dict[str, Any]:
        same = ("max_tokens", "stream", "temperature", "top_p", "top_k")
        return super()._given() | {name: getattr(self, name) for name in same} | {"stop": self.stop_sequences}


# --- from messages to a chat -------------------------------------------------------------------------------------------


def _of_blocks(role: str, blocks: Sequence[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Results of tools are messages of their own in a chat, before the text that came with them. Calls are part of their
    message. Raises ApiError for other blocks."""
    texts, calls = [], []
    for block in blocks:
        try:
            match block.get("type"):
                case "text":
                    texts.append(block)
                case "tool_use":
                    function = {"name": block["name"], "arguments": json.dumps(block["input"])}
                    calls.append({"id": block["id"], "type": "function", "function": function})
                case "tool_result":
                    content = _text(block.get("content", ""), where)
                    yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content}
                case kind:
                    problem = f"{where}: blocks of type {kind!r} are not supported; send text, tool_use and tool_result"
                    raise ApiError(400, problem, param=where, code="unsupported")
        except KeyError as missing:
            raise ApiError(400, f"{where}: {block['type']} needs {missing}", param=where) from None
    if texts or calls:
        yield {"role": role, "content": _text(texts, where)} | ({"tool_calls": calls} if calls else {})


def _text(content: Any, where: str) -> str:
    """Of a text, or of blocks of text. Raises ApiError for others."""
    if isinstance(content, str):
        return content
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise ApiError(400, f"{where}: content is a text, or blocks of type text", param=where)
    return "".join(block["text"] for block in content)


# --- from a chat to messages -------------------------------------------------------------------------------------------


async def whole_message(ask: Ask, choices: Sequence[Choice]) -> dict[str, Any]:
    """The body of an answer. Raises ApiError as ``whole`` does."""
    chat = await whole(ask, choices)
    (choice,) = chat["choices"]
    message = choice["message"]
    content = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        content.append(_tool_block(function["name"], _arguments(function["arguments"])))
    reason = _stop_reason(choice["finish_reason"], called="tool_calls" in message)
    return _message(ask, content, reason, chat["usage"]["completion_tokens"])


def _arguments(text: str) -> Any:
    """A call that was cut off by its limit has no whole JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return {}


def _message(ask: Ask, content: list[dict[str, Any]], reason: str | None, tokens: int) -> dict[str, Any]:
    return {
        "id": ask.id,
        "type": "message",
        "role": "assistant",
        "model": ask.model.id,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": _usage(ask, tokens),
    }


def _usage(ask: Ask, tokens: int) -> dict[str, int]:
    return {"input_tokens": ask.prompt_tokens, "output_tokens": tokens}


def _stop_reason(reason: str | None, *, called: bool) -> str:
    return _STOP_REASONS.get(reason or "", "tool_use" if called else "end_turn")


def _tool_block(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex[:24]}", "name": name, "input": arguments}


class MessageStream(EventStream):
    """The events of a message, from the deltas of its chat. The last block may be open."""

    def __init__(self, ask: Ask, choices: Sequence[Choice]) -> None:
        super().__init__(ask, choices)
        self._blocks = 0
        self._kind: str | None = None
        self._any_call = False
        self._reason: str | None = None

    def _opening(self) -> Iterator[str]:
        yield _event("message_start", message=_message(self._ask, [], None, 0))

    def _closing(self) -> Iterator[str]:
        yield from self._end_block()
        reason = _stop_reason(self._reason, called=self._any_call)
        delta = {"stop_reason": reason, "stop_sequence": None}
        yield _event("message_delta", delta=delta, usage=_usage(self._ask, sum(self._tokens)))
        yield _event("message_stop")

    def _failure(self, problem: ApiError) -> Iterator[str]:
        yield _event("error", error={name: problem.body["error"][name] for name in ("type", "message")})

    def _last_words(self) -> Iterator[str]:
        yield from ()

    def _delta(self, index: int, content: dict[str, Any], beside: dict[str, Any], reason: str | None) -> str:
        events: list[str] = []
        if content.get("content"):
            if self._kind != "text":
                events += self._begin_block({"type": "text", "text": ""})
            events.append(self._of_block({"type": "text_delta", "text": content["content"]}))
        for call in content.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                self._any_call = True
                events += self._begin_block(_tool_block(function["name"], {}))
            if function["arguments"]:
                events.append(self._of_block({"type": "input_json_delta", "partial_json": function["arguments"]}))
        self._reason = reason or self._reason
        return "".join(events)

    def _begin_block(self, block: dict[str, Any]) -> Iterator[str]:
        yield from self._end_block()
        self._kind = block["type"]
        yield _event("content_block_start", index=self._blocks, content_block=block)

    def _of_block(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _end_block(self) -> Iterator[str]:
        if self._kind is not None:
            yield _event("content_block_stop", index=self._blocks)
            self._blocks += 1
            self._kind = None


def _event(kind: str, **facts: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **facts}, ensure_ascii=False)}\n\n"
