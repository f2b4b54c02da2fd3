"""LangChain's client, which sends what OpenAI's own does not: it talks to the server whole, streamed, in batches and with
tools. The engines are fakes; OpenAI's client and vLLM's benchmark talk to real ones in test_real_clients.py."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engines import continuation
from runtimekit import core_spec, eventually
from serverkit import ByteTokenizer, Served, served

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


def chat(here: Served, **options: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{here.url}/v1", api_key="any", model="A", max_retries=0, **({"max_tokens": 12} | options)
    )


def answer(prompt: str, tokens: int = 12) -> str:
    tokenizer = ByteTokenizer()
    return tokenizer.decode(continuation(tokenizer.encode(prompt), tokens))


def test_a_chat_whole_and_streamed_in_turns_and_at_once() -> None:
    with served() as here:
        model = chat(here)
        assert model.invoke("hi").content == answer("[user] hi\n")
        assert "".join(each.content for each in model.stream("hi")) == answer("[user] hi\n")
        several = [f"number {n}" for n in range(8)]
        expected = [answer(f"[user] {each}\n") for each in several]
        assert [each.content for each in model.batch(several)] == expected
        assert [each.content for each in asyncio.run(model.abatch(several))] == expected
        usage = model.invoke("hi").usage_metadata
        assert (usage["input_tokens"], usage["output_tokens"]) == (len("[user] hi\n"), 12)


def test_a_chat_through_responses() -> None:
    with served() as here:
        model = chat(here, use_responses_api=True)
        assert model.invoke("hi").text == answer("[user] hi\n")
        assert "".join(each.text for each in model.stream("hi")) == answer("[user] hi\n")
        turns = [("human", "one"), ("ai", "two"), ("human", "three")]
        assert model.invoke(turns).text == answer("[user] one\n[assistant] two\n[user] three\n")


def test_a_stream_that_is_left_frees_its_memory() -> None:
    with served(step_s=0.002) as here:
        stream = chat(here, max_tokens=400).stream("long")
        next(stream)
        stream.close()
        eventually(lambda: here.runtime.driver.wait_empty(0))
        eventually(lambda: here.runtime.host.ledger().used_bytes == 0)


def test_plain_completions_and_what_is_refused() -> None:
    with served(core_spec(("A",))) as here:
        plain = langchain_openai.OpenAI(
            base_url=f"{here.url}/v1", api_key="any", model="A", max_tokens=12, max_retries=0
        )
        assert plain.invoke("hello") == answer("hello")
        with pytest.raises(Exception, match=r"maximum context length is 512 tokens"):
            chat(here).invoke("x" * 600)
        with pytest.raises(Exception, match=r"tool_choice|tool_parser"):
            chat(here).bind_tools([{"name": "look", "description": "d", "input_schema": {"type": "object"}}]).invoke(
                "hi"
            )
