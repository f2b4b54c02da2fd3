"""What clients of ``vllm serve`` send beyond OpenAI's protocol."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serverkit import ByteTokenizer, Served, served

ASK: dict[str, Any] = {"model": "A", "prompt": "hello", "max_tokens": 3}
CHAT: dict[str, Any] = {"model": "A", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
HELLO = ByteTokenizer().encode("hello")


@pytest.fixture(scope="module")
def here() -> Iterator[Served]:
    with served() as here:
        yield here


def choice(here: Served, **options: Any) -> dict[str, Any]:
    answer = here.post(COMPLETIONS, ASK | options)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def events(here: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = here.post(path, body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def refused(here: Served, param: str, **options: Any) -> str:
    answer = here.post(COMPLETIONS, ASK | options)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize("prompt", ["hello", HELLO])
def test_echo_with_logprobs_has_those_of_the_prompt(here: Served, prompt: object) -> None:
    told = choice(here, prompt=prompt, echo=True, logprobs=1)
    found = told["logprobs"]
    assert told["text"].startswith("hello") and "".join(found["tokens"][:5]) == "hello"
    assert found["token_logprobs"] == [None] + [-1.0] * 7 and found["top_logprobs"][0] is None
    assert found["top_logprobs"][1] == {"f": -2.0} and found["text_offset"][:6] == [0, 1, 2, 3, 4, 5]


def test_a_stream_has_them_in_its_first_event(here: Served) -> None:
    parts = [each["choices"][0] for each in events(here, COMPLETIONS, ASK | {"echo": True, "logprobs": 1})]
    tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["tokens"]]
    whole = choice(here, echo=True, logprobs=1)
    assert tokens == whole["logprobs"]["tokens"] and "".join(part["text"] for part in parts) == whole["text"]
    offsets = [offset for part in parts if part["logprobs"] for offset in part["logprobs"]["text_offset"]]
    assert offsets == whole["logprobs"]["text_offset"]


def test_no_more_tokens_than_the_echo(here: Served) -> None:
    for options, places in (({}, None), ({"logprobs": 0}, 5)):
        told = choice(here, echo=True, max_tokens=0, **options)
        assert told["text"] == "hello" and told["finish_reason"] == "length"
        assert places is None or len(told["logprobs"]["tokens"]) == places
    assert "at least 1" in refused(here, "max_tokens", max_tokens=0)
    assert here.post(CHATS, CHAT | {"max_tokens": 0}).status_code == 400


def test_log_probabilities_of_a_prompt_are_not_without_end(here: Served) -> None:
    many = {"prompt": "x" * 400, "echo": True, "logprobs": 20, "n": 8}
    assert "log probabilities" in refused(here, "logprobs", **many)


def test_an_echo_of_what_is_no_token_is_400(here: Served) -> None:
    """It was decoded before it was checked, and decoders raise: 500."""
    assert "is no token id" in refused(here, "prompt", prompt=[5, 2**40], echo=True)


def test_prompts_are_truncated(here: Served) -> None:
    two = {"truncate_prompt_tokens": 2, "return_token_ids": True}
    assert choice(here, **two)["prompt_token_ids"] == ByteTokenizer().encode("lo")
    assert choice(here, **two, truncation_side="right")["prompt_token_ids"] == ByteTokenizer().encode("he")
    assert choice(here, prompt="x" * 600, truncate_prompt_tokens=-1)["finish_reason"] == "length"
    assert "empty" in refused(here, "prompt", truncate_prompt_tokens=0)
    refused(here, "truncate_prompt_tokens", truncate_prompt_tokens=5000)
    refused(here, "truncate_prompt_tokens", truncate_prompt_tokens=-2)


def test_token_ids_are_told(here: Served) -> None:
    whole = choice(here, return_token_ids=True)
    assert whole["prompt_token_ids"] == HELLO and len(whole["token_ids"]) == 3
    parts = [each["choices"][0] for each in events(here, COMPLETIONS, ASK | {"return_token_ids": True})]
    assert parts[0]["prompt_token_ids"] == HELLO and not any("prompt_token_ids" in part for part in parts[1:])
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    chat = here.post(CHATS, CHAT | {"return_token_ids": True}).json()
    parts = events(here, CHATS, CHAT | {"return_token_ids": True})
    assert chat["prompt_token_ids"] == parts[0]["prompt_token_ids"] == ByteTokenizer().encode("[user] hello\n")
    told = [part["choices"][0].get("token_ids", []) for part in parts]
    assert [token for ids in told for token in ids] == chat["choices"][0]["token_ids"]
    assert "token_ids" not in choice(here)


def test_a_salt_goes_to_the_engine(here: Served) -> None:
    choice(here, cache_salt="s")
    assert here.runtime.host.engines[0].submitted[-1].sampling.cache_salt == "s"
    for salt in ("", "a/b", "x" * 129):
        refused(here, "cache_salt", cache_salt=salt)


def test_templates_are_told_the_effort(here: Served) -> None:
    plain = here.post("/v1/chat/completions", CHAT).json()["usage"]["prompt_tokens"]
    more = here.post("/v1/chat/completions", CHAT | {"reasoning_effort": "low"}).json()["usage"]["prompt_tokens"]
    assert more - plain == len("[effort] low\n")
    assert here.post("/v1/chat/completions", CHAT | {"reasoning_effort": "much"}).status_code == 400


def test_what_changes_nothing_is_taken(here: Served) -> None:
    plain = choice(here)
    for options in (
        {"repetition_penalty": 3.5},
        {"vllm_xargs": {"a": 1}},
        {"session_id": "s"},
        {"spaces_between_special_tokens": True},
    ):
        assert choice(here, **options) == plain
    refused(here, "repetition_penalty", repetition_penalty=0)
    refused(here, "spaces_between_special_tokens", spaces_between_special_tokens=False)
    assert here.post(COMPLETIONS, ASK).json()["system_fingerprint"].startswith("fineserve-")
