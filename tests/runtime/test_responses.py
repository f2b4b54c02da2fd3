"""``/v1/responses`` as OpenAI's client sees it: a real port, fake engines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import pytest
from fake_engines import continuation
from fineserve_runtime.server.tools import Call, Said
from runtimekit import eventually
from serverkit import ByteTokenizer, Served, served

openai = pytest.importorskip("openai")

TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ASKED = {"role": "user", "content": "hello"}


def said(*messages: str, count: int) -> str:
    """What the fake model answers to these lines of its template."""
    tokenizer = ByteTokenizer()
    return tokenizer.decode(continuation(tokenizer.encode("".join(f"{each}\n" for each in messages)), count))


@contextmanager
def talking(**changes: Any) -> Iterator[tuple[Served, Any]]:
    """A server and OpenAI's client of it."""
    with served(**changes) as here, openai.OpenAI(base_url=f"{here.url}/v1", api_key="x", max_retries=0) as client:
        yield here, client


def post(here: Served, **body: object) -> httpx.Response:
    return here.post("/v1/responses", {"model": "A", "input": "hello", "max_output_tokens": 8} | body)


def test_a_text_whole_and_streamed() -> None:
    with talking() as (_, client):
        options = {"model": "A", "instructions": "be brief", "input": "hello", "max_output_tokens": 20}
        whole = client.responses.create(**options)
        expected = said("[system] be brief", "[user] hello", count=20)
        assert whole.output_text == expected
        assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
        assert (whole.usage.input_tokens, whole.usage.output_tokens) == (31, 20)
        with client.responses.stream(**options) as stream:
            events = list(stream)
        assert events[-1].response.output_text == expected and events[-1].response.usage.total_tokens == 51
        assert [event.sequence_number for event in events if event.type != "response.output_text.delta"][:2] == [0, 1]
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected
        kinds = list(dict.fromkeys(event.type for event in events))
        assert kinds == [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete",
        ]


def test_a_conversation_is_sent_whole() -> None:
    with served() as here:
        items = [
            {"role": "developer", "content": [{"type": "input_text", "text": "you are"}]},
            ASKED,
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "hm", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "rain"},
        ]
        answer = post(here, input=items).json()
        expected = said("[system] you are", "[user] hello", "[assistant] hm", "[tool] rain", count=8)
        assert answer["output"][0]["content"][0]["text"] == expected
        again = post(here, input=[ASKED, *answer["output"], ASKED])
        assert again.status_code == 200


class Reader:
    """Text, and two calls at its end, the first in parts where it is read by parts."""

    def __init__(self, tools: Sequence[Mapping[str, Any]], streamed: bool) -> None:
        assert tools[0]["function"]["name"] == "weather"
        self._streamed = streamed

    def feed(self, text: str, token_ids: tuple[int, ...]) -> Said:
        return Said(text)

    def rest(self) -> Said:
        first = (Call(0, "weather", '{"city":'), Call(0, None, ' "Rome"}'))
        whole = (Call(0, "weather", '{"city": "Rome"}'),)
        return Said("", (*(first if self._streamed else whole), Call(1, "weather", "{}")))


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_functions_are_items_of_their_own(stream: bool) -> None:
    with talking() as (here, client):
        here.service.models["A"] = replace(here.service.models["A"], tool_parser=Reader)
        options = {"model": "A", "input": "hello", "max_output_tokens": 30, "tools": [TOOL]}
        if stream:
            with client.responses.stream(**options) as told:
                events = list(told)
            answer = events[-1].response
            done = [event.item for event in events if event.type == "response.output_item.done"]
            assert [item.id for item in done] == [item.id for item in answer.output]
        else:
            answer = client.responses.create(**options)
        text, *calls = answer.output
        assert text.type == "message" and answer.output_text == said("[user] hello", count=30)
        assert [(call.name, call.status) for call in calls] == [("weather", "completed"), ("weather", "incomplete")]
        assert [json.loads(call.arguments) for call in calls] == [{"city": "Rome"}, {}]


def test_a_failure_in_a_stream_is_an_error_event() -> None:
    with talking(step_s=0.05) as (here, client):  # all tokens would take 20 s
        host = here.runtime.host
        with client.responses.stream(model="A", input="long", max_output_tokens=400) as stream:
            next(stream)
            host.kill(0)
            eventually(lambda: len(host.engines[0].submitted) == 2)
            host.kill(0)
            with pytest.raises(openai.APIError) as problem:
                list(stream)
            assert problem.value.code == "engine_died"


@pytest.mark.parametrize(
    "body, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": [{"type": "input_image"}]}, "input.0"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
        ({"input": [{"role": "user"}]}, "input.0"),
        ({"input": []}, "input"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"temperature": 9}, "temperature"),
        ({"suffix": "x"}, "suffix"),
    ],
)
def test_what_is_not_here_is_a_named_error(idle: Served, body: dict[str, Any], param: str) -> None:
    answer = post(idle, **body)
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).startswith(param)


def test_options_without_effect_and_of_vllms_are_taken() -> None:
    with served() as here:
        options = {
            "store": True,
            "metadata": {"a": "b"},
            "include": [],
            "truncation": "disabled",
            "top_k": 3,
            "seed": 1,
        }
        answer = post(here, **options, text={"format": {"type": "text"}})
        assert answer.status_code == 200, answer.text
        assert answer.json()["metadata"] == {"a": "b"} and answer.json()["store"] is False
        stored = httpx.get(f"{here.url}/v1/responses/{answer.json()['id']}")
        assert stored.status_code == 404 and "nothing is stored" in stored.json()["error"]["message"]
