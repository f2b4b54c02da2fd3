"""What a careless client gets wrong, and a hostile one tries: each is told what was wrong, and where."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest
from fineserve_runtime.server.schema import CompletionRequest
from pydantic import ValidationError
from serverkit import ByteTokenizer, Served, served

ASK: dict[str, Any] = {"model": "A", "prompt": "hello", "max_tokens": 4}
CHAT: dict[str, Any] = {"model": "A", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"


def deep_schema(levels: int) -> str:
    return '{"items":' * levels + "{}" + "}" * levels


DEEP = [
    {"json": deep_schema(900)},
    {"json": deep_schema(5_000)},
    {"json": "[" * 30_000},
    {"regex": "(" * 4_000 + "a" + ")" * 4_000},
    {"regex": "([)]" * 4_000 + "a" + ")" * 4_000},
    {"regex": "(\\)" * 4_000 + "a" + ")" * 4_000},
    {"json": {"type": "string", "pattern": "(" * 4_000 + "a" + ")" * 4_000}},
]


@pytest.mark.parametrize("constraint", DEEP, ids=range(len(DEEP)))
def test_a_constraint_that_would_hold_an_engine_up_is_400(constraint: dict[str, Any]) -> None:
    """The grammar library needed more than 30 s for each of them, on the engine's own thread."""
    with served() as here:
        answer = here.post(COMPLETIONS, ASK | {"structured_outputs": constraint})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"] == "a constraint may be nested 64 levels deep, this one is deeper"
        assert answer.json()["error"]["param"] == "structured_outputs"


def test_a_schema_that_counts_too_far_is_400(idle: Served) -> None:
    """The grammar library wrote its repetitions out for minutes, and no other request with a constraint began."""
    for schema in ({"type": "array", "minItems": 10**9}, {"properties": {"a": {"type": "string", "maxLength": 1e9}}}):
        answer = idle.post(COMPLETIONS, ASK | {"structured_outputs": {"json": schema}})
        assert answer.status_code == 400, answer.text
        assert "may count to 65536" in answer.json()["error"]["message"]
    usual = {"type": "array", "items": {"enum": [10**9]}, "maxItems": 1000}
    assert idle.post(COMPLETIONS, ASK | {"structured_outputs": {"json": usual}}).status_code == 200


def test_tools_and_usual_constraints_are_taken_however_many_brackets_they_have() -> None:
    parameters = json.loads(deep_schema(50))
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    with served() as here:
        for constraint in ({"json": deep_schema(60)}, {"regex": "\\(" * 500 + "[(]" * 500}, {"regex": "(a)" * 500}):
            answer = here.post(COMPLETIONS, ASK | {"structured_outputs": constraint})
            assert answer.status_code == 200, answer.text
        answer = here.post(CHATS, CHAT | {"tools": [tool], "tool_choice": "required"})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": [1, "a"]}, "prompt.0"),
        (COMPLETIONS, {"stop": 5}, "stop"),
        (COMPLETIONS, {"stop": ["a", None]}, "stop.1"),
        (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias.x"),
        (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias.5"),
        (COMPLETIONS, {"stream_options": "x"}, "stream_options"),
        (CHATS, {"messages": [{"content": "x"}]}, "messages.0.role"),
        (CHATS, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        (CHATS, {"messages": 5}, "messages"),
        (CHATS, {"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        (CHATS, {"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
        (RESPONSES, {"input": [1]}, "input.0"),
        (RESPONSES, {"input": []}, "input"),
        ("/tokenize", {"messages": []}, "messages"),
    ],
)
def test_the_field_that_is_wrong_is_named_as_the_client_wrote_it(
    idle: Served, path: str, change: dict[str, Any], param: str
) -> None:
    """Without the kinds of value that were tried for it: it was prompt.str, or tool_choice.literal['none',...]."""
    body = {COMPLETIONS: ASK, CHATS: CHAT}.get(path, {"model": "A"}) | change
    answer = idle.post(path, body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_list_with_a_million_wrong_entries_costs_as_much_as_one() -> None:
    """2.8 MB of numbers and a text were refused after 9 s, with 2.7 GB of error reports."""
    raw = b'{"model":"A","prompt":[' + b"1," * 1_400_000 + b'"a"]}'
    with pytest.raises(ValidationError) as found:
        CompletionRequest.model_validate_json(raw)
    assert found.value.error_count() < 10


def test_arguments_of_calls_that_are_nested_without_end_are_400() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": "[" * 100_000}}
    with served() as here:
        answer = here.post(CHATS, CHAT | {"messages": [{"role": "assistant", "tool_calls": [call]}]})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages", answer.text


@pytest.mark.parametrize(
    ("path", "method", "allowed"),
    [(COMPLETIONS, "GET", {"POST"}), ("/health", "POST", {"GET", "HEAD"}), ("/metrics", "PUT", {"GET", "HEAD"})],
)
def test_a_wrong_method_is_405_with_the_right_ones(path: str, method: str, allowed: set[str]) -> None:
    with served() as here:
        answer = httpx.request(method, here.url + path)
        assert answer.status_code == 405 and answer.json()["error"]["code"] == "bad_method"
        assert set(answer.headers["allow"].split(", ")) == allowed


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"chat_template": "{% for i in range(100000) %}{% endfor %}"}, "--trust-request-chat-template is not set"),
        ({"chat_template": None}, "Found unexpected chat template kwargs from request: chat_template"),
        (
            {"tokenize": True, "truncation": True},
            "Found unexpected chat template kwargs from request: tokenize, truncation",
        ),
    ],
)
def test_a_template_of_the_clients_own_is_never_run(variables: dict[str, Any], message: str) -> None:
    """A template is a program: two requests with a long loop in theirs held up all models."""
    with served() as here:
        for path, body in ((CHATS, CHAT), (RESPONSES, {"model": "A", "input": "hello", "max_output_tokens": 4})):
            answer = here.post(path, body | {"chat_template_kwargs": variables})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert message in error["message"] and error["param"] == "chat_template_kwargs"
            assert here.post(path, body | {"chat_template_kwargs": {"enable_thinking": False}}).status_code == 200


def test_a_chat_too_long_to_fit_is_never_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever part of it is long: 4 MB of a role took 5 s and 350 MB."""
    encoded: list[int] = []
    encode = ByteTokenizer.encode

    def noting(self: ByteTokenizer, text: str, *, special: bool = True) -> list[int]:
        encoded.append(len(text))
        return encode(self, text, special=special)

    monkeypatch.setattr(ByteTokenizer, "encode", noting)
    with served() as here:
        for message in ({"role": "x" * 100_000, "content": "hi"}, {"role": "user", "content": "x" * 100_000}):
            for path in (CHATS, "/tokenize"):
                answer = here.post(path, {"model": "A", "messages": [message]})
                assert answer.status_code == 400
                assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert here.post(CHATS, CHAT).status_code == 200
    assert encoded == [len("[user] hello\n")]


def test_usage_in_each_chunk_where_a_client_wants_it_so() -> None:
    """guidellm counts tokens by it. Each chunk has the tokens of its own choice, as vLLM tells them; the last one all."""

    def usages(here: Served, path: str, body: dict[str, Any], **options: bool) -> list[dict[str, Any]]:
        asked = here.post(path, body | {"n": 2, "stream": True, "stream_options": options})
        assert asked.status_code == 200, asked.text
        chunks = [json.loads(line[6:]) for line in asked.text.splitlines() if line.startswith("data: {")]
        return [chunk.get("usage") for chunk in chunks]

    with served() as here:
        for path, body in ((COMPLETIONS, ASK), (CHATS, CHAT)):
            *each, last = usages(here, path, body, include_usage=True, continuous_usage_stats=True)
            counts = sorted(usage["completion_tokens"] for usage in each)
            assert counts == ([0, 0] if path == CHATS else []) + [1, 1, 2, 2, 3, 3, 4, 4]
            prompt = last["prompt_tokens"]
            assert all(usage["prompt_tokens"] == prompt for usage in each)
            assert all(usage["total_tokens"] == prompt + usage["completion_tokens"] for usage in each)
            assert last["completion_tokens"] == 8
            *each, _ = usages(here, path, body, include_usage=True)
            assert set(each) == {None}
            assert set(usages(here, path, body, continuous_usage_stats=True)) == {None}


def test_references_within_a_tool_lead_to_its_own_parameters() -> None:
    """Pydantic's nested models are such; the grammar library found no ``#/$defs/In`` at the root of the list of calls."""

    def tool(name: str, kind: str) -> dict[str, Any]:
        properties = {"in": {"$ref": "#/$defs/In"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}
        parameters = {"type": "object", "properties": properties, "$defs": {"In": {"type": kind}}}
        return {"type": "function", "function": {"name": name, "parameters": parameters}}

    with served() as here:
        tools = [tool("f", "string"), tool("g", "integer")]
        assert here.post(CHATS, CHAT | {"tools": tools, "tool_choice": "required"}).status_code == 200
        (submission,) = here.runtime.host.engines[0].submitted
    kind, text = submission.sampling.constraint or ("", "")
    schema = json.loads(text)

    def found(reference: str) -> Any:
        at = schema
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]
        return at

    assert kind == "json"
    for call, name, inner in zip(schema["items"]["anyOf"], ("f", "g"), ("string", "integer"), strict=True):
        assert call["properties"]["name"] == {"const": name}
        parameters = found(call["properties"]["parameters"]["$ref"])
        assert found(parameters["properties"]["in"]["$ref"]) == {"type": inner}
        assert found(parameters["properties"]["next"]["anyOf"][0]["$ref"]) == parameters


def test_a_request_with_two_lengths_is_refused_and_its_connection_closed() -> None:
    """A proxy that goes by the other length would take the second request for a body."""
    with served() as here:
        host, port = here.url.removeprefix("http://").split(":")
        for path in ("/v1/completions", "/health"):
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n"
            behind = "GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
            with socket.create_connection((host, int(port)), timeout=10) as connection:
                connection.sendall(f"{head}0\r\n\r\n{behind}".encode())
                told = b"".join(iter(lambda: connection.recv(65536), b""))
            assert told.count(b"HTTP/1.1") == 1 and told.startswith(b"HTTP/1.1 400"), told
            assert b"Transfer-Encoding and Content-Length" in told
