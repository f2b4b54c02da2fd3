"""The server as its clients see it: a real port, real clients, fake engines."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engines import continuation
from fineserve_runtime.bounds import Bounds
from fineserve_runtime.server.app import create_app
from fineserve_runtime.server.service import Key
from fineserve_runtime.server.serving import bind
from fineserve_runtime.server.unserved import unserved
from fineserve_runtime.step_times import MeasuredStep
from runtimekit import core_spec, eventually
from serverkit import ByteTokenizer, Served, served

from fineserve_sim.systems.spec import FcfsSpec

SLOW = (MeasuredStep(64, 0, 5.0), MeasuredStep(1, 0, 4.0))


def answer(text: str, count: int) -> str:
    tokenizer = ByteTokenizer()
    return tokenizer.decode(continuation(tokenizer.encode(text), count))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_completions_whole_and_streamed() -> None:
    with served() as here:
        body = {"model": "A", "prompt": "hello", "max_tokens": 20}
        whole = here.post("/v1/completions", body)
        assert whole.status_code == 200
        assert whole.json()["choices"][0]["text"] == answer("hello", 20)
        assert whole.json()["usage"] == {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}
        assert whole.json()["choices"][0]["finish_reason"] == "length"
        streamed = here.post("/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
        assert streamed.headers["content-type"].startswith("text/event-stream")
        *parts, usage = events(streamed)
        assert "".join(part["choices"][0]["text"] for part in parts) == answer("hello", 20)
        assert usage["usage"]["completion_tokens"] == 20


def test_several_prompts_and_choices() -> None:
    with served() as here:
        body = {"model": "B", "prompt": ["one", "two"], "n": 2, "max_tokens": 6}
        found = here.post("/v1/completions", body).json()["choices"]
        assert [each["text"] for each in found] == [answer("one", 6)] * 2 + [answer("two", 6)] * 2
        texts = ["", "", "", ""]
        for event in events(here.post("/v1/completions", body | {"stream": True})):
            (choice,) = event["choices"]
            texts[choice["index"]] += choice["text"]
        assert texts == [each["text"] for each in found]
        by_tokens = {"model": "B", "prompt": [[7, 8, 9]], "max_tokens": 6}
        assert here.post("/v1/completions", by_tokens).json()["usage"]["prompt_tokens"] == 3


def test_a_stop_string_ends_the_text_before_it_and_frees_the_engine() -> None:
    with served() as here:
        text = answer("hello", 60)
        stop = text[20:23]
        cut = text.index(stop)
        body = {"model": "A", "prompt": "hello", "max_tokens": 400, "stop": [stop, "never there"]}
        found = here.post("/v1/completions", body).json()["choices"][0]
        assert (found["text"], found["finish_reason"]) == (text[:cut], "stop")
        eventually(lambda: here.runtime.host.ledger().used_bytes == 0)


def test_the_openai_client_sync() -> None:
    openai = pytest.importorskip("openai")
    with served() as here, openai.OpenAI(base_url=f"{here.url}/v1", api_key="any") as client:
        assert [model.id for model in client.models.list()] == ["A", "B"]
        messages = [{"role": "user", "content": "hi"}]
        whole = client.chat.completions.create(model="A", messages=messages, max_tokens=12)
        expected = answer("[user] hi\n", 12)
        assert whole.choices[0].message.content == expected
        stream = client.chat.completions.create(model="A", messages=messages, max_completion_tokens=12, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
        with pytest.raises(openai.NotFoundError, match="served are A, B"):
            client.chat.completions.create(model="a ", messages=messages)


def test_the_openai_client_async_and_abort() -> None:
    openai = pytest.importorskip("openai")

    async def talk(url: str) -> str:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any") as client:
            asked = [client.completions.create(model="AB"[i % 2], prompt=f"p{i}", max_tokens=5) for i in range(8)]
            texts = [each.choices[0].text for each in await asyncio.gather(*asked)]
            assert texts == [answer(f"p{i}", 5) for i in range(8)]
            stream = await client.completions.create(model="A", prompt="long", max_tokens=400, stream=True)
            read = ""
            async for chunk in stream:
                read += chunk.choices[0].text
                if len(read) > 5:
                    await stream.close()
                    break
            return read

    with served(step_s=0.02) as here:  # all tokens would take 8 s
        read = asyncio.run(talk(here.url))
        assert answer("long", 400).startswith(read)
        eventually(lambda: here.runtime.host.ledger().used_bytes == 0)
        eventually(lambda: here.metric("fineserve:requests_unfinished_total", model_name="A", reason="abort") == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_frees_its_blocks(stream: bool) -> None:
    with served(step_s=0.05) as here:  # all tokens would take 20 s
        body = json.dumps({"model": "A", "prompt": "long", "max_tokens": 400, "stream": stream}).encode()
        host, port = here.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + body)
            eventually(lambda: here.runtime.host.ledger().used_bytes > 0)
        eventually(lambda: here.runtime.host.ledger().used_bytes == 0)
        assert here.runtime.driver.wait_empty(10)


def test_a_stream_with_a_backlog_writes_one_event_a_turn() -> None:
    """So others get their turns, and a client that is gone is heard before the rest is written to nobody."""
    turns, written = [0], list[int]()

    async def count() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    async def talk(here: Served) -> None:
        body = json.dumps({"model": "A", "prompt": "long", "max_tokens": 40, "stream": True}).encode()
        said = iter([{"type": "http.request", "body": body, "more_body": False}])
        stepping = asyncio.create_task(asyncio.to_thread(eventually, here.runtime.host.step_all))

        async def receive() -> Any:
            return next(said, None) or await asyncio.Event().wait()

        async def send(message: Any) -> None:
            if b"data:" in message.get("body", b""):
                if not written:
                    await stepping
                    while here.runtime.host.step_all():
                        pass
                written.append(turns[0])

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        counting = asyncio.create_task(count())
        await create_app(here.service)(scope, receive, send)
        counting.cancel()

    with served(step_s=None) as here:
        asyncio.run(talk(here))
    assert len(written) >= 40 and len(set(written[1:])) == len(written) - 1


def test_a_client_that_leaves_as_its_stream_begins_frees_its_blocks() -> None:
    """Its headers are on their way and no event was asked for yet. Somebody still holds the generators, as a traceback may:
    what ends the request is not that they are collected."""
    kept: list[object] = []

    async def talk(here: Served) -> None:
        sys.set_asyncgen_hooks(firstiter=kept.append)
        body = json.dumps({"model": "A", "prompt": "long", "max_tokens": 400, "stream": True}).encode()
        said = iter([{"type": "http.request", "body": body, "more_body": False}])
        began = asyncio.Event()

        async def receive() -> Any:
            if (message := next(said, None)) is not None:
                return message
            await began.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            began.set()
            await asyncio.Event().wait()

        scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b""}
        scope["headers"] = [(b"authorization", b"Bearer secret")]
        await create_app(here.service)(scope, receive, send)

    with served(step_s=0.05, keys=(Key("one", "secret", requests=1),)) as here:  # all tokens would take 20 s
        asyncio.run(talk(here))
        eventually(lambda: here.runtime.host.ledger().used_bytes == 0)
        body = {"model": "A", "prompt": "x", "max_tokens": 2}
        assert here.post("/v1/completions", body, authorization="Bearer secret").status_code == 200


def test_a_request_that_cannot_be_on_time_gets_503_with_its_reason() -> None:
    with served(core_spec(slo_s=60.0, measured=SLOW)) as here:
        body = {"model": "A", "prompt": "x" * 60, "max_tokens": 4}
        for stream in (False, True):
            late = here.post("/v1/completions", body | {"stream": stream}, **{"x-slo-ttft-ms": "20"})
            assert late.status_code == 503
            assert (late.headers["x-fineserve-reason"], late.headers["retry-after"]) == ("deadline", "1")
            assert late.json()["error"]["code"] == "deadline"
        assert here.metric("fineserve:requests_unfinished_total", model_name="A", reason="deadline") == 2
        assert here.metric("fineserve:ttft_slo_due_total", model_name="A") == 2
        assert here.post("/v1/completions", body).status_code == 200
        assert here.metric("fineserve:ttft_slo_met_total", model_name="A") == 1


def test_the_time_until_a_request_is_understood_counts_for_its_limit() -> None:
    """Its prompt is tokenised for longer than its first token may take."""

    class Slow(ByteTokenizer):
        def encode(self, text: str, *, special: bool = True) -> list[int]:
            here_s = time.monotonic()
            eventually(lambda: time.monotonic() > here_s + 0.05)
            return super().encode(text, special=special)

    with served() as here:
        here.service.models["A"] = replace(here.service.models["A"], tokenizer=Slow())
        late = here.post("/v1/completions", {"model": "A", "prompt": "x"}, **{"x-slo-ttft-ms": "50"})
        assert late.status_code == 503 and late.headers["x-fineserve-reason"] == "deadline"


def test_a_requests_own_limit_of_the_time_per_token_is_counted() -> None:
    with served(step_s=0.01) as here:
        for limit_ms, tokens in (("1", 4), ("10000", 4), ("1", 1)):
            body = {"model": "A", "prompt": "x", "max_tokens": tokens}
            assert here.post("/v1/completions", body, **{"x-slo-tpot-ms": limit_ms}).status_code == 200
        assert here.post("/v1/completions", {"model": "A", "prompt": "x", "max_tokens": 2}).status_code == 200
        assert here.metric("fineserve:tpot_slo_due_total", model_name="A") == 3, "the last one has no limit"
        assert here.metric("fineserve:tpot_slo_met_total", model_name="A") == 2
        assert here.metric("fineserve:ttft_slo_due_total", model_name="A") == 4
        wrong = here.post("/v1/completions", {"model": "A", "prompt": "x"}, **{"x-slo-tpot-ms": "-1"})
        assert wrong.status_code == 400 and "x-slo-tpot-ms is '-1'" in wrong.json()["error"]["message"]


@pytest.mark.slow
def test_a_thousand_requests_against_a_bound_of_a_hundred() -> None:
    """Engines stand still: a hundred wait, nine hundred are turned away at once; then the hundred are served."""
    bounds = Bounds(queued_requests=100)
    with served(core_spec(scheduler=FcfsSpec()), bounds=bounds, step_s=0.0002, max_sequences=0) as here:
        engine = here.runtime.host.engines[0]

        def release() -> None:
            engine.config = replace(engine.config, max_sequences=8)

        codes = asyncio.run(flood(here.url, release))
        assert (codes.count(200), codes.count(503)) == (100, 900)
        assert here.metric("fineserve:requests_unfinished_total", model_name="A", reason="queue_full") == 900


async def flood(url: str, release: Callable[[], None]) -> list[int]:
    """The statuses of a thousand requests at once; ``release`` is called when all but a hundred are answered."""
    host, port = url.removeprefix("http://").split(":")
    body = b'{"model": "A", "prompt": "hi", "max_tokens": 1}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"

    async def ask() -> int:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + b"\r\n\r\n" + body)
        status = int((await reader.readline()).split()[1])
        writer.close()
        await writer.wait_closed()
        return status

    tasks = [asyncio.create_task(ask()) for _ in range(1000)]
    while sum(task.done() for task in tasks) < 900:
        await asyncio.sleep(0.01)
    assert sum(not task.done() for task in tasks) == 100
    release()
    return await asyncio.gather(*tasks)


BAD_REQUESTS = [
    (b"{not json", 400, "no JSON", None),
    ({"model": "A"}, 400, "prompt", None),
    ({"model": "nobody", "prompt": "x"}, 404, "does not exist", "model_not_found"),
    ({"model": "A", "prompt": "x" * 600}, 400, "maximum context length is 512", "context_length_exceeded"),
    ({"model": "A", "prompt": "x" * 500, "max_tokens": 100}, 400, "100 more", "context_length_exceeded"),
    ({"model": "A", "prompt": ""}, 400, "empty", None),
    ({"model": "A", "prompt": [[-1]]}, 400, "no token id", None),
    ({"model": "A", "prompt": [[5, 258]]}, 400, "258 is no token id; the model has 0 to 257", None),
    ({"model": "A", "prompt": "x", "temperature": 9}, 400, "temperature", None),
    ({"model": "A", "prompt": "x", "max_tokens": 0}, 400, "max_tokens", None),
    ({"model": "A", "prompt": "x", "best_answer": 3}, 400, "best_answer is not supported", "unsupported"),
]


def test_bad_requests_are_told_what_is_wrong_in_openais_shape() -> None:
    with served() as here:
        for body, status, message, code in BAD_REQUESTS:
            response = here.post("/v1/completions", body)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (status, code), body
            assert message in error["message"] and error["type"] == "invalid_request_error"
        picture = [{"type": "image_url", "image_url": {"url": "x"}}]
        chat = {"model": "A", "messages": [{"role": "user", "content": picture}]}
        assert "image_url" in here.post("/v1/chat/completions", chat).json()["error"]["message"]
        untemplated = {"model": "A", "messages": [{"role": "untemplated", "content": "x"}]}
        assert "no chat template" in here.post("/v1/chat/completions", untemplated).json()["error"]["message"]
        wrong = here.post("/v1/completions", {"model": "A", "prompt": "x"}, **{"x-slo-ttft-ms": "soon"})
        assert wrong.status_code == 400 and "milliseconds" in wrong.json()["error"]["message"]
        assert "there is no /v1/nothing" in httpx.get(here.url + "/v1/nothing").json()["error"]["message"]
        assert here.runtime.driver.wait_empty(0)


def test_endpoints_that_are_not_here_say_so() -> None:
    openai = pytest.importorskip("openai")
    with served() as here, openai.OpenAI(base_url=f"{here.url}/v1", api_key="any", max_retries=0) as client:
        for ask, why in (
            (lambda: client.moderations.create(input="x"), "only those that embed"),
            (lambda: client.responses.retrieve("resp_1"), "nothing is stored"),
            (client.files.list, "one by one"),
        ):
            with pytest.raises(openai.NotFoundError, match=why) as raised:
                ask()
            assert raised.value.code == "unsupported"
        lora = here.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "y"})
        assert lora.status_code == 404 and "serve the merged model" in lora.json()["error"]["message"]
        assert "there is no /v1/nothing" in here.post("/v1/nothing", {}).json()["error"]["message"]
        wrong = httpx.get(here.url + "/v1/completions")
        assert wrong.status_code == 405 and wrong.json()["error"]["code"] == "bad_method"


OTHERS = (
    "/score /v1/score /rerank /v1/rerank /v2/rerank /pooling /classify /v2/embed /v1/audio/transcriptions "
    "/v1/messages/batches /v1/responses/resp_1/cancel /v1/completions/render /sleep /collective_rpc /invocations"
)
"""Endpoints of vLLM's front end."""


@pytest.mark.parametrize("path", OTHERS.split())
def test_vllms_other_endpoints_are_named_errors(idle: Served, path: str) -> None:
    error = idle.post(path, {"model": "A"}).json()["error"]
    assert error["code"] == "unsupported" and error["type"] == "invalid_request_error" and path in error["message"]


def test_every_endpoint_of_vllm_is_here_or_a_named_error() -> None:
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    texts = [path.read_text() for path in (Path(found.origin).parent / "entrypoints").rglob("*.py")]
    paths = {path for text in texts for path in re.findall(r'\.(?:get|post|api_route)\(\s*"(/[^"]+)"', text)}
    assert len(paths) > 50, "vLLM declares its endpoints otherwise"
    with served() as here:
        ours = {getattr(route, "path", "") for route in here.server.config.app.routes} | {"/health"}
    assert not sorted(path for path in paths - ours if unserved(path) is None)


def test_an_api_key_guards_everything_but_the_status() -> None:
    with served(keys=(Key("team", "secret"),)) as here:
        body = {"model": "A", "prompt": "x"}
        assert here.post("/v1/completions", body).status_code == 401
        wrong = here.post("/v1/completions", body, authorization="Bearer wrong")
        assert wrong.json()["error"]["code"] == "invalid_api_key"
        assert here.post("/v1/completions", body, authorization="Bearer secret").status_code == 200
        assert httpx.get(here.url + "/v1/models").status_code == 401
        assert [httpx.get(here.url + path).status_code for path in ("/health", "/ready", "/version", "/metrics")] == [
            200
        ] * 4


def test_request_ids_and_the_log() -> None:
    with served() as here:
        mine = here.post("/v1/completions", {"model": "A", "prompt": "x"}, **{"x-request-id": "mine-1"})
        assert mine.headers["x-request-id"] == "mine-1" and mine.json()["id"] == "cmpl-mine-1"
        assert httpx.get(here.url + "/version").headers["x-request-id"]
        event, facts = here.logged[0]
        assert (event, facts["id"], facts["status"]) == ("request", "mine-1", 200)


def test_tokenize() -> None:
    with served() as here:
        assert here.post("/tokenize", {"model": "A", "prompt": "ab"}).json() == {
            "count": 2,
            "max_model_len": 512,
            "tokens": [99, 100],
            "token_strs": None,
        }
        chat = {"model": "A", "messages": [{"role": "user", "content": "ab"}]}
        assert here.post("/tokenize", chat).json()["count"] == len("[user] ab\n")
        assert here.post("/tokenize", {"model": "A"}).status_code == 400


def test_tokens_there_and_back() -> None:
    with served() as here:
        there = here.post("/tokenize", {"model": "A", "prompt": "ab", "return_token_strs": True}).json()
        assert there["token_strs"] == ["a", "b"]
        assert here.post("/detokenize", {"model": "A", "tokens": there["tokens"]}).json() == {"prompt": "ab"}
        for path, body, param in (
            ("/detokenize", {"model": "A", "tokens": [999]}, "tokens"),
            ("/detokenize", {"model": "A", "tokens": [99] * 513}, "tokens"),
            ("/detokenize", {"model": "A", "tokens": "ab"}, "tokens"),
            ("/tokenize", {"model": "A", "prompt": "x" * 5000}, "prompt"),
            ("/tokenize", {"model": "A", "prompt": "x", "chat_template": "y"}, "chat_template"),
        ):
            wrong = here.post(path, body)
            assert wrong.status_code == 400 and wrong.json()["error"]["param"] == param, body


def test_metrics_carry_vllms_names_and_the_slab() -> None:
    with served(step_s=0.05) as here:  # all tokens would take 20 s
        with httpx.stream(
            "POST",
            here.url + "/v1/completions",
            json={"model": "A", "prompt": "x" * 40, "max_tokens": 400, "stream": True},
        ) as stream:
            lines = stream.iter_lines()
            for _ in range(5):  # three tokens: there is a time between two
                next(lines)
            text = httpx.get(here.url + "/metrics").text
            assert 'vllm:num_requests_running{model_name="A"} 1.0' in text
            assert 'vllm:num_requests_waiting{model_name="B"} 0.0' in text
            used = here.metric("fineserve:kv_used_bytes", model_name="A")
            assert used >= 3 * 1024
            assert here.metric("fineserve:region_bytes", device="0", part="used") >= used
        for name in (
            "vllm:kv_cache_usage_perc",
            "vllm:num_preemptions_total",
            "vllm:time_to_first_token_seconds_bucket",
            "vllm:inter_token_latency_seconds_sum",
            "vllm:request_queue_time_seconds_count",
            "vllm:prompt_tokens_total",
            "vllm:generation_tokens_total",
            "fineserve:kv_leased_bytes",
            "fineserve:kv_stranded_bytes",
        ):
            assert f"{name}{{" in text and 'model_name="A"' in text, name


def test_a_dead_engine_is_restarted_and_the_answer_is_whole() -> None:
    with served(step_s=0.002) as here:
        with httpx.stream(
            "POST", here.url + "/v1/completions", json={"model": "A", "prompt": "hi", "max_tokens": 100, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            here.runtime.host.kill(0)
            rest = [line.removeprefix("data: ") for line in lines if line]
        assert rest[-1] == "[DONE]" and json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
        here.runtime.host.restarts.clear()
        assert here.post("/v1/completions", {"model": "B", "prompt": "x"}).status_code == 200


def test_a_second_death_ends_the_stream_with_an_error() -> None:
    with served(step_s=0.05) as here:  # all tokens would take 20 s
        with httpx.stream(
            "POST", here.url + "/v1/completions", json={"model": "A", "prompt": "hi", "max_tokens": 400, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            here.runtime.host.kill(0)
            eventually(lambda: len(here.runtime.host.engines[0].submitted) == 2)
            here.runtime.host.kill(0)
            rest = [json.loads(line.removeprefix("data: ")) for line in lines if line and "[DONE]" not in line]
        assert rest[-1]["error"]["code"] == "engine_died"


@pytest.mark.parametrize("n", [1, 2])
def test_what_breaks_in_the_text_of_a_stream_ends_it_with_an_error(n: int) -> None:
    """With several choices it waited for ever for the one that broke."""

    class Brittle(ByteTokenizer):
        def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
            if len(told) > 8:
                raise OverflowError("no such token")
            told.append(0)
            return super().decode(token_ids, special=special)

    told: list[int] = []
    with served() as here:
        here.service.models["A"] = replace(here.service.models["A"], tokenizer=Brittle())
        body = {"model": "A", "prompt": "hi", "max_tokens": 60, "n": n, "stream": True}
        with httpx.stream("POST", here.url + "/v1/completions", json=body) as stream:
            lines: list[str] = []
            with suppress(httpx.RemoteProtocolError):  # it is cut then
                for line in stream.iter_lines():
                    lines += [line] if line else []
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["message"] == "internal error"
        assert here.runtime.driver.wait_empty(5)
        eventually(lambda: any(event == "internal error" for event, _ in here.logged))
        assert here.metric("fineserve:internal_errors_total") == 1


def test_a_parser_that_cannot_be_made_leaves_no_request_behind() -> None:
    def broken(tools: object, streamed: bool) -> Any:
        raise RuntimeError("no such tool")

    tool = {"type": "function", "function": {"name": "f"}}
    with served(step_s=0.05) as here:  # all tokens would take 20 s
        here.service.models["A"] = replace(here.service.models["A"], tool_parser=broken)
        body = {"model": "A", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 400, "stream": True}
        told = here.post("/v1/chat/completions", body | {"tools": [tool]})
        assert told.status_code == 500 and told.json()["error"]["message"] == "internal error"
        assert here.runtime.driver.wait_empty(5)


def test_sigterm_under_load_lets_the_running_finish() -> None:
    import signal

    with served(step_s=0.003) as here:
        with httpx.stream(
            "POST", here.url + "/v1/completions", json={"model": "A", "prompt": "hi", "max_tokens": 60, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            here.server.handle_exit(signal.SIGTERM, None)
            assert here.runtime.driver.draining
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason": "length"' in rest[-2]
        eventually(lambda: not listens(here.url))


def listens(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=1).status_code == 200
    except httpx.TransportError:
        return False


def test_a_second_server_on_the_port_refuses() -> None:
    first = bind("127.0.0.1", 0)
    try:
        with pytest.raises(OSError, match="is another server running"):
            bind("127.0.0.1", first.getsockname()[1])
    finally:
        first.close()
