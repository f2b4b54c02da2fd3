"""What clients send by themselves, as it went over the wire: openai 3.54.0, anthropic 2.12.0 and guidellm 0.8.1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fineserve_runtime.server.service import Key
from serverkit import Served, served

USER = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "properties": {"x": {"title": "X", "type": "integer"}},
    "required": ["x"],
    "title": "P",
    "type": "object",
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "P", "strict": True}}
FUNCTION = {"type": "function", "function": {"name": "P", "strict": True, "parameters": SCHEMA}}
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALLED = [
    *USER,
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "wait"},
            {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "and now?"},
        ],
    },
]
GUIDELLM = {"model": "A", "stream": True, "ignore_eos": True}
COUNTED = GUIDELLM | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
PARTS = [{"role": "system", "content": "be"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]

OPENAI: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "A", "prompt": "hi", "max_tokens": 4}),
    ("/v1/chat/completions", {"model": "A", "messages": USER, "max_completion_tokens": 4}),
    (
        "/v1/chat/completions",
        {"model": "A", "stream": True, "messages": USER, "stream_options": {"include_usage": True}},
    ),
    ("/v1/chat/completions", {"model": "A", "stream": False, "messages": USER, "response_format": FORMAT}),
    ("/v1/chat/completions", {"model": "A", "messages": USER, "tool_choice": "required", "tools": [FUNCTION]}),
    ("/v1/responses", {"model": "A", "input": "hi", "max_output_tokens": 4}),
]
GUIDELLMS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COUNTED | {"prompt": "be hello", "max_tokens": 6}),
    ("/v1/chat/completions", COUNTED | {"messages": PARTS, "max_completion_tokens": 6}),
    (
        "/v1/responses",
        GUIDELLM
        | {
            "max_output_tokens": 6,
            "instructions": "be",
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        },
    ),
]
MESSAGE: dict[str, Any] = {"max_tokens": 8, "messages": USER, "model": "A"}
ANTHROPIC: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", MESSAGE),
    ("/v1/messages", MESSAGE | {"stream": True}),
    (
        "/v1/messages",
        MESSAGE
        | {
            "metadata": {"user_id": "u"},
            "stop_sequences": ["zz"],
            "system": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}],
        },
    ),
    (
        "/v1/messages",
        MESSAGE | {"messages": CALLED, "tool_choice": {"type": "tool", "name": "weather"}, "tools": [WEATHER]},
    ),
    ("/v1/messages", MESSAGE | {"tool_choice": {"type": "any"}, "tools": [WEATHER]}),
    ("/v1/messages/count_tokens", {"messages": USER, "model": "A", "system": "x"}),
]
ALL = OPENAI + GUIDELLMS + ANTHROPIC


@pytest.mark.parametrize(("path", "body"), ALL, ids=range(len(ALL)))
def test_what_clients_send_is_answered(idle: Served, path: str, body: dict[str, Any]) -> None:
    answer = idle.post(path, body, **{"anthropic-version": "2026-10-21", "x-stainless-retry-count": "0"})
    assert answer.status_code == 200, answer.text
    assert '"error": {' not in answer.text


def events(text: str) -> Iterator[dict[str, Any]]:
    for event in text.strip().split("\n\n"):
        head, data = event.split("\n")
        body = json.loads(data.removeprefix("data: "))
        assert head == f"event: {body['type']}"
        yield body


def test_a_message_whole_and_streamed(idle: Served) -> None:
    body = MESSAGE | {"system": "be brief"}
    whole = idle.post("/v1/messages", body).json()
    chat = [{"role": "system", "content": "be brief"}, *USER]
    same = idle.post("/v1/chat/completions", {"model": "A", "messages": chat, "max_tokens": 8}).json()
    (block,) = whole["content"]
    assert block == {"type": "text", "text": same["choices"][0]["message"]["content"]}
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    assert whole["usage"] == {"input_tokens": same["usage"]["prompt_tokens"], "output_tokens": 8}
    assert idle.post("/v1/messages/count_tokens", {k: v for k, v in body.items() if k != "max_tokens"}).json() == {
        "input_tokens": same["usage"]["prompt_tokens"]
    }

    told = list(events(idle.post("/v1/messages", body | {"stream": True}).text))
    kinds = list(dict.fromkeys(event["type"] for event in told))
    assert kinds == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert told[0]["message"] == whole | {
        "id": told[0]["message"]["id"],
        "content": [],
        "stop_reason": None,
        "usage": whole["usage"] | {"output_tokens": 0},
    }
    deltas = [event["delta"]["text"] for event in told if event["type"] == "content_block_delta"]
    assert "".join(deltas) == block["text"]
    assert told[-2]["delta"]["stop_reason"] == "max_tokens" and told[-2]["usage"] == whole["usage"]


def test_calls_of_a_message(idle: Served) -> None:
    """A stream tells a call's arguments as they come."""
    body = MESSAGE | {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}, "stream": True}
    started, *deltas, _, closing, _ = list(events(idle.post("/v1/messages", body).text))[1:]
    assert started["content_block"]["type"] == "tool_use" and started["content_block"]["name"] == "weather"
    assert {delta["delta"]["type"] for delta in deltas} == {"input_json_delta"}
    assert "".join(delta["delta"]["partial_json"] for delta in deltas) and closing["usage"]["output_tokens"] == 8


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages.0.content"),
        ({"tools": [WEATHER], "tool_choice": {"type": "some"}}, "tool_choice"),
        ({"tools": [{"type": "web_search", "name": "web_search"}]}, "tools.0.input_schema"),
        ({"container": "c"}, "container"),
    ],
)
def test_what_a_message_cannot_have_is_named(idle: Served, change: dict[str, Any], param: str) -> None:
    answer = idle.post("/v1/messages", MESSAGE | change)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_a_key_goes_in_the_header_of_either_protocol() -> None:
    """Anthropic's clients send ``x-api-key``, or a bearer as OpenAI's do."""
    with served(keys=(Key("me", "secret"),)) as here:
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert here.post("/v1/messages", MESSAGE, **headers).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Basic secret", "x-api-key": ""}):
            assert here.post("/v1/messages", MESSAGE, **headers).status_code == 401
