"""Tools of a chat: what a request asks for, and the calls in the text of its answer.

A call that is forced (``tool_choice`` required, or a function's name) is made by a constraint: the answer is JSON with every
model. Calls that the model makes by itself have its own syntax, which vLLM's parser of that family knows (``ToolParser``).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from fineserve_runtime.server.errors import ApiError
from fineserve_runtime.server.schema import ChatRequest, FunctionChoice, Tool


class Call(NamedTuple):
    """A part of the call ``number``, from 0: the first part has its name, and is given an id; ``arguments`` add up."""

    number: int
    name: str | None
    arguments: str


class Said(NamedTuple):
    """A part of an answer: text for people, and calls."""

    text: str
    calls: tuple[Call, ...] = ()


class ToolParser(Protocol):
    """Reads one answer, part by part or whole."""

    def feed(self, text: str, token_ids: tuple[int, ...]) -> Said: ...

    def rest(self) -> Said:
        """What is left when no more text comes."""
        ...


MakeParser = Callable[[Sequence[Mapping[str, Any]], bool], ToolParser]
"""The parser of an answer to a request with these tools; the flag: it is read part by part."""


class OneCall:
    """The whole answer is the arguments of the function."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str, token_ids: tuple[int, ...]) -> Said:
        name, self._name = self._name, None
        return Said("", (Call(0, name, text),)) if name or text else Said("")

    def rest(self) -> Said:
        return Said("")


class CallList:
    """The answer is a list of names and arguments. It is read when it is whole; one that was cut off is text."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str, token_ids: tuple[int, ...]) -> Said:
        self._text += text
        return Said("")

    def rest(self) -> Said:
        try:
            found = json.loads(self._text)
        except ValueError:
            return Said(self._text)
        calls = (Call(n, each["name"], json.dumps(each["parameters"])) for n, each in enumerate(found))
        return Said("", tuple(calls))


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What the tools of a request mean: ``constraint`` for the engine, ``reader`` for each choice of the answer, ``template``
    for the prompt; ``reason`` is how an answer with calls ends."""

    template: list[dict[str, Any]]
    constraint: tuple[str, str] | None
    reader: Callable[[], ToolParser]
    reason: str


def tool_use(request: ChatRequest, make_parser: MakeParser | None) -> ToolUse | None:
    """None without tools. Raises ApiError for a choice that cannot be."""
    choice, tools = request.tool_choice, request.tools or []
    if not tools or choice == "none":
        if choice not in (None, "none", "auto"):
            raise ApiError(400, "tool_choice needs tools", param="tool_choice")
        return None
    if request.constraint() is not None:
        raise ApiError(400, "tools and a response format exclude each other", param="tools", code="unsupported")
    template = [tool.model_dump(exclude_none=True) for tool in tools]
    if isinstance(choice, FunctionChoice):
        named = next((tool for tool in tools if tool.function.name == choice.function.name), None)
        if named is None:
            raise ApiError(400, f"tool_choice: no tool is called {choice.function.name!r}", param="tool_choice")
        wanted = ("json", json.dumps(named.parameters))
        return ToolUse(template, wanted, lambda: OneCall(named.function.name), "stop")
    if choice == "required":
        wanted = ("json", json.dumps(_list_schema(tools, request.parallel_tool_calls)))
        return ToolUse(template, wanted, CallList, "tool_calls")
    if make_parser is None:
        problem = "this model has no tool_parser; only tool_choice required, none, or a function's name can be served"
        raise ApiError(400, problem, param="tools", code="unsupported")
    return ToolUse(template, None, lambda: make_parser(template, request.stream), "tool_calls")


def _list_schema(tools: Sequence[Tool], parallel: bool | None) -> dict[str, Any]:
    """One call or more; one without ``parallel``. Each tool's parameters are a definition of their own, so that what refers to
    their root is led there: two tools may have different schemas of one name."""
    places = [f"#/$defs/{number}" for number in range(len(tools))]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "parameters": {"$ref": place}},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for tool, place in zip(tools, places, strict=True)
    ]
    definitions = {
        str(number): _moved(tool.parameters, place)
        for number, (tool, place) in enumerate(zip(tools, places, strict=True))
    }
    most = {"maxItems": 1} if parallel is False else {}
    return {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **most, "$defs": definitions}


def _moved(schema: Any, place: str) -> Any:
    """The schema when its root is at ``place``."""
    if isinstance(schema, list):
        return [_moved(each, place) for each in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        moved["$ref"] = place + reference[1:]
    return moved


def call_bodies(calls: Sequence[Call], *, streamed: bool) -> list[dict[str, Any]]:
    """In OpenAI's shape; parts of a stream carry their index."""
    bodies = []
    for call in calls:
        head: dict[str, Any] = {"index": call.number} if streamed else {}
        function: dict[str, Any] = {"arguments": call.arguments}
        if call.name is not None:
            head |= {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function"}
            function = {"name": call.name, **function}
        bodies.append({**head, "function": function})
    return bodies
