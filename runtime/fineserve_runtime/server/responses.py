"""OpenAI's ``/v1/responses`` without memory: a request is read as a chat, and the chat's answer is told in responses' shapes.

Nothing is stored: a client sends the whole conversation, its own function calls and their outputs among it. vLLM's front end
for responses (0.32.0) wants vLLM's engine client and renderer; what it would do for text and functions is little.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from fineserve_runtime.server.answers import EventStream, whole
from fineserve_runtime.server.asks import Ask
from fineserve_runtime.server.bodies import usage
from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.parsing import Given, Many, parse
from fineserve_runtime.server.schema import ChatRequest
from fineserve_runtime.server.streams import Choice

_CHATS_OWN = {"messages", "n", "best_of", "max_tokens", "max_completion_tokens", "response_format", "stream_options"}
_CHATS_OWN |= {
    "logprobs",
    "top_logprobs",
    "add_generation_prompt",
    "continue_final_message",
    "functions",
    "function_call",
}
"""Options of a chat that a response has in another place, or not at all."""

_OFF: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "reasoning": ({},),
    "max_tool_calls": (),
    "top_logprobs": (0,),
}
"""Options of responses that are not here, and values with which they change nothing."""

_TEXTS = ("input_text", "output_text", "text")


class Format(BaseModel):
    """How the text is to be: as ``response_format`` of a chat, with the schema's fields beside its type."""

    model_config = ConfigDict(extra="allow")

    type: str = "text"

    def of_chat(self) -> dict[str, Any]:
        return {"type": self.type} | ({"json_schema": self.model_extra} if self.type == "json_schema" else {})


class TextOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    format: Format | None = None


class ResponsesRequest(BaseModel):
    """What is not named here goes on to the chat, which has it or refuses it."""

    model_config = ConfigDict(extra="allow")

    model: str
    input: str | Annotated[Many[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    stream: Given[bool] = False
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: TextOptions | None = None
    tools: Given[Many[dict[str, Any]]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None

    def as_chat(self) -> ChatRequest:
        """Raises ApiError for what this server does not have."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name, value in extra.items():
            if (name in _CHATS_OWN or name in _OFF) and value not in _OFF.get(name, ()):
                hint = "; nothing is stored, send the whole conversation as input" if name in _STORED else ""
                raise ApiError(400, f"{name} is not supported by this server{hint}", param=name, code="unsupported")
        given: dict[str, Any] = {
            **{name: value for name, value in extra.items() if name not in _OFF},
            "model": self.model,
            "stream": self.stream,
            "messages": list(_messages(self)),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [_tool(tool, number) for number, tool in enumerate(self.tools)] or None,
            "tool_choice": _tool_choice(self.tool_choice),
            "response_format": self.text.format.of_chat() if self.text and self.text.format else None,
        }
        for name in ("temperature", "top_p", "parallel_tool_calls"):
            given[name] = getattr(self, name)
        return parse(ChatRequest, json.dumps(given).encode())


_STORED = ("previous_response_id", "conversation", "background")


# --- from responses to a chat ------------------------------------------------------------------------------------------


def _messages(request: ResponsesRequest) -> Iterator[dict[str, Any]]:
    """Calls that follow one another, or a text of the assistant's, are one message."""
    if request.instructions:
        yield {"role": "system", "content": request.instructions}
    items = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else request.input
    speaking: dict[str, Any] | None = None
    for number, item in enumerate(items):
        message = _message(item, f"input.{number}")
        if speaking is not None and "tool_calls" in message:
            speaking.setdefault("tool_calls", []).extend(message["tool_calls"])
            continue
        if speaking is not None:
            yield speaking
        speaking = message if message["role"] == "assistant" else None
        if speaking is None:
            yield message
    if speaking is not None:
        yield speaking


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    try:
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]  # the name that templates know
            return {"role": role, "content": _text(item["content"], where)}
        if kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        if kind == "function_call_output":
            return {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"], where)}
    except KeyError as missing:
        raise ApiError(400, f"{where}: {kind} needs {missing}", param=where) from None
    problem = (
        f"{where}: items of type {kind!r} are not supported; send messages, function_call and function_call_output"
    )
    raise ApiError(400, problem, param=where, code="unsupported")


def _text(content: Any, where: str) -> str:
    """Of a text, or of a list of parts. Raises ApiError for content that is no text."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in _TEXTS or not isinstance(part.get("text"), str):
            raise ApiError(400, f"{where}: content is a text, or parts of type input_text", param=where)
    return "".join(part["text"] for part in parts)


def _tool(tool: dict[str, Any], number: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        problem = f"tools of type {tool.get('type')!r} are not supported; only functions are"
        raise ApiError(400, problem, param=f"tools.{number}.type", code="unsupported")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _tool_choice(choice: str | dict[str, Any] | None) -> Any:
    """A function is named beside its type, not one level below."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


# --- from a chat to responses ------------------------------------------------------------------------------------------


async def whole_response(request: ResponsesRequest, ask: Ask, choices: Sequence[Choice]) -> dict[str, Any]:
    """The body of an answer. Raises ApiError as ``whole`` does."""
    chat = await whole(ask, choices)
    (choice,) = chat["choices"]
    output = [_message_item(choice["message"]["content"])] if choice["message"]["content"] else []
    calls = [call["function"] for call in choice["message"].get("tool_calls", ())]
    output += [_call_item(call["name"], call["arguments"]) for call in calls]
    if output:
        output[-1]["status"] = _status(choice["finish_reason"])
    return _response(request, ask, output, choice["finish_reason"], chat["usage"]["completion_tokens"])


def _response(
    request: ResponsesRequest, ask: Ask, output: list[dict[str, Any]], reason: str | None, tokens: int | None
) -> dict[str, Any]:
    """``reason``: how it ended; None: it has begun. ``tokens``: of the answer, once they are known."""
    status = _status(reason)
    given = request.model_dump(include={"instructions", "max_output_tokens", "tools"})
    return given | {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "id": ask.id,
        "object": "response",
        "created_at": ask.created,
        "model": ask.model.id,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "output": output,
        "usage": None if tokens is None else _usage(ask, tokens),
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": request.tool_choice or "auto",
        "text": request.text.model_dump(exclude_none=True) if request.text else {"format": {"type": "text"}},
        "previous_response_id": None,
        "store": False,
        "background": False,
        "truncation": "disabled",
    }


def _status(reason: str | None) -> str:
    return {None: "in_progress", "length": "incomplete"}.get(reason, "completed")


def _usage(ask: Ask, tokens: int) -> dict[str, Any]:
    """Cached tokens are not told apart by request."""
    chat = usage(ask.prompt_tokens, tokens)
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
    }


def _message_item(text: str | None) -> dict[str, Any]:
    """None: it begins."""
    state = (
        {"status": "in_progress", "content": []} if text is None else {"status": "completed", "content": [_part(text)]}
    )
    return {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", **state}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _call_item(name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    call_id, function = f"call_{uuid.uuid4().hex[:24]}", {"name": name, "arguments": arguments, "status": status}
    return {"id": f"fc_{uuid.uuid4().hex}", "type": "function_call", "call_id": call_id, **function}


class ResponseStream(EventStream):
    """The events of a response, from the deltas of its chat. ``output`` has the items so far; the last one may be open."""

    def __init__(self, request: ResponsesRequest, ask: Ask, choices: Sequence[Choice]) -> None:
        super().__init__(ask, choices)
        self._request = request
        self._output: list[dict[str, Any]] = []
        self._open = False
        self._reason: str | None = None
        self._number = 0

    def _opening(self) -> Iterator[str]:
        for kind in ("created", "in_progress"):
            yield self._event(f"response.{kind}", response=_response(self._request, self._ask, [], None, None))

    def _closing(self) -> Iterator[str]:
        yield from self._end_item(_status(self._reason))
        body = _response(self._request, self._ask, self._output, self._reason, sum(self._tokens))
        yield self._event(f"response.{body['status']}", response=body)

    def _failure(self, problem: ApiError) -> Iterator[str]:
        error = problem.body["error"]
        yield self._event("error", **{name: error[name] for name in ("code", "message", "param")}, error=error)

    def _last_words(self) -> Iterator[str]:
        yield from ()

    def _delta(self, index: int, content: dict[str, Any], beside: dict[str, Any], reason: str | None) -> str:
        events = list(self._of_text(content["content"])) if content.get("content") else []
        for call in content.get("tool_calls", ()):
            events += self._of_call(call["function"])
        self._reason = reason or self._reason
        return "".join(events)

    def _of_text(self, text: str) -> Iterator[str]:
        if not (self._open and self._output[-1]["type"] == "message"):
            yield from self._begin_item(_message_item(None))
            self._output[-1]["content"].append(_part(""))
            yield self._of_item("response.content_part.added", content_index=0, part=_part(""))
        self._output[-1]["content"][0]["text"] += text
        yield self._of_item("response.output_text.delta", content_index=0, delta=text, logprobs=[])

    def _of_call(self, function: dict[str, Any]) -> Iterator[str]:
        if "name" in function:
            yield from self._begin_item(_call_item(function["name"], "", "in_progress"))
        if function["arguments"]:
            self._output[-1]["arguments"] += function["arguments"]
            yield self._of_item("response.function_call_arguments.delta", delta=function["arguments"])

    def _begin_item(self, item: dict[str, Any]) -> Iterator[str]:
        yield from self._end_item()
        self._output.append(item)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)

    def _end_item(self, status: str = "completed") -> Iterator[str]:
        if not self._open:
            return
        self._open = False
        item = self._output[-1]
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._of_item("response.output_text.done", content_index=0, text=part["text"], logprobs=[])
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        else:
            named = {"name": item["name"], "arguments": item["arguments"]}
            yield self._of_item("response.function_call_arguments.done", **named)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)

    def _of_item(self, kind: str, **facts: Any) -> str:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **facts)

    def _event(self, kind: str, **facts: Any) -> str:
        body = {"type": kind, "sequence_number": self._number, **facts}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(body, ensure_ascii=False)}\n\n"
