"""Clients that send too much, too slowly or nonsense: each is told so, and harms nobody else."""

from __future__ import annotations

import gc
import gzip
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engines import REFUSED_TOKEN
from fineserve_runtime.engines.api import Sampling
from fineserve_runtime.server.limits import HttpLimits
from fineserve_runtime.server.responses import ResponsesRequest
from fineserve_runtime.server.schema import ChatRequest, CompletionRequest
from fineserve_runtime.server.service import Key
from fineserve_runtime.server.serving import Tls
from runtimekit import HANGS_S, core_spec, eventually
from serverkit import Served, served

from fineserve_sim.systems.spec import FcfsSpec

ASK: dict[str, Any] = {"model": "A", "prompt": "hello", "max_tokens": 4}

REFUSED = [
    ({"stop_token_ids": [99999], "min_tokens": 4}, "99999 is no token id"),
    ({"stop_token_ids": [-1]}, "greater than or equal to 0"),
    ({"logit_bias": {"99999": 1}}, "99999 is no token id"),
    ({"allowed_token_ids": [258]}, "258 is no token id"),
    ({"prompt": []}, "the prompt is empty"),
    ({"prompt": ["x"] * 65}, "65 prompts or choices are more than 64"),
    ({"prompt": ["x"] * 33, "n": 2}, "66 prompts or choices are more than 64"),
    ({"n": 10**9}, "1000000000 prompts or choices"),
    ({"stop": ["x"] * 257}, "stop has more than 256 entries"),
    ({"stop": ["x" * 1025]}, "stop has an entry of more than 1024 characters"),
    ({"prompt": "x" * 100_000}, "maximum context length is 512 tokens; the text has 100000 characters"),
    ({"guided_json": {"type": "object"}}, "guided_json is not supported"),
    ({"guided_regex": "a+"}, "guided_regex is not supported"),
    ({"tool_choice": "required"}, "tool_choice is not supported"),
    ({"chat_template": "{{ messages }}"}, "chat_template is not supported"),
    ({"max_completion_tokens": 5}, "max_completion_tokens is not supported"),
    ({"suffix": "x"}, "suffix is not supported"),
    ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "regex and choice"),
    ({"structured_outputs": {"guide": "a"}}, "structured_outputs.guide"),
    ({"priority": 10**9}, "priority"),
    ({"stream_options": {"include_usage": True}}, "stream_options needs stream"),
]


def test_what_can_never_be_served_is_400_with_its_name() -> None:
    with served() as here:
        for options, message in REFUSED:
            response = here.post("/v1/completions", ASK | options)
            assert response.status_code == 400, (options, response.text)
            assert message in response.json()["error"]["message"], (options, response.text)
        assert here.post("/v1/completions", ASK).status_code == 200
        assert not here.runtime.host.killed and here.runtime.driver.wait_empty(0)


def test_options_without_effect_here_are_taken() -> None:
    with served() as here:
        harmless = {"user": "me", "store": True, "metadata": {"a": "b"}, "suffix": "", "logit_bias": {}, "best_of": 1}
        assert here.post("/v1/completions", ASK | harmless | {"stop_token_ids": None}).status_code == 200


NULLS = {
    "/v1/completions": (ASK, CompletionRequest),
    "/v1/chat/completions": ({"model": "A", "messages": [{"role": "user", "content": "hi"}]}, ChatRequest),
    "/v1/responses": ({"model": "A", "input": "hi"}, ResponsesRequest),
}


@pytest.mark.parametrize("path", NULLS)
def test_null_is_the_same_as_leaving_an_option_out(path: str) -> None:
    """OpenAI's reference calls most of its options nullable, and some clients send all that they know."""
    body, kind = NULLS[path]
    options = [name for name in kind.model_fields if name not in body]
    with served() as here:
        answer = here.post(path, body | dict.fromkeys(options))
        assert answer.status_code == 200, answer.text
        if path != "/v1/responses":
            streamed = here.post(path, body | {"stream": True, "stream_options": {"include_usage": None}})
            assert streamed.status_code == 200 and "usage" not in streamed.text


def test_a_compressed_body_is_named_as_such() -> None:
    with served() as here:
        packed = gzip.compress(json.dumps(ASK).encode())
        told = here.post("/v1/completions", packed, **{"content-encoding": "gzip"})
        assert told.status_code == 415 and "gzip" in told.json()["error"]["message"]
        assert here.post("/v1/completions", ASK, **{"content-encoding": "identity"}).status_code == 200


def test_a_path_with_a_slash_too_many_is_no_redirect() -> None:
    """To an address that the client's Host header makes."""
    with served() as here:
        told = here.post("/v1/completions/", ASK)
        assert told.status_code == 404 and told.json()["error"]["message"].startswith("there is no /v1/completions/")


def test_options_reach_the_engine_under_vllms_names() -> None:
    options = {
        "temperature": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": -3.0},
        "allowed_token_ids": [5, 6, 7],
        "bad_words": ["no"],
        "logprobs": 2,
        "structured_outputs": {"json": {"type": "object"}},
    }
    with served() as here:
        here.post("/v1/completions", ASK | options)
        here.post("/v1/completions", ASK | {"response_format": {"type": "json_object"}})
        first, second = (each.sampling for each in here.runtime.host.engines[0].submitted)
    assert first == Sampling(
        max_tokens=4,
        temperature=0.5,
        min_p=0.1,
        repetition_penalty=1.5,
        logit_bias=((7, -3.0),),
        allowed_token_ids=(5, 6, 7),
        bad_words_token_ids=((112, 113), (34, 112, 113)),
        logprobs=2,
        constraint=("json", '{"type": "object"}'),
    )
    assert second.constraint == ("json_object", "true")


def test_what_an_engine_refuses_is_400_streamed_or_not() -> None:
    with served() as here:
        for stream in (False, True):
            bad = here.post("/v1/completions", ASK | {"prompt": [REFUSED_TOKEN], "stream": stream})
            assert bad.status_code == 400 and "no such token here" in bad.json()["error"]["message"]
        assert here.metric("fineserve:requests_unfinished_total", model_name="A", reason="rejected") == 2


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"A","prompt":"\\ud800"}',
        b'{"model":"A","messages":[{"role":"\\udfff","content":"x"}]}',
        b'{"model":"\xff","prompt":"x"}',
        b"[" * 100_000,
        b"",
        b"null",
    ],
)
def test_what_is_no_text_is_400_in_openais_shape(body: bytes) -> None:
    with served() as here:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize"):
            response = here.post(path, body)
            assert response.status_code == 400 and response.json()["error"]["type"] == "invalid_request_error"
        assert not [event for event, _ in here.logged if event == "internal error"]


def test_a_body_that_is_too_long_is_refused_before_it_is_read() -> None:
    with served() as here:
        with connected(here) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n{")
            status, error = answer_on(connection)
        assert (status, error["code"]) == (413, "request_too_large")

        def chunks() -> Iterator[bytes]:
            yield from (b"x" * 65536 for _ in range(200))

        assert httpx.post(here.url + "/v1/completions", content=chunks()).status_code == 413
        assert here.metric("fineserve:http_refused_total", reason="body") == 2


@contextmanager
def connected(here: Served) -> Iterator[socket.socket]:
    host, port = here.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANGS_S) as connection:
        yield connection


def answer_on(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and error of one whole answer, however many segments it comes in and whether or not the server closes."""
    with HTTPResponse(connection) as response:
        response.begin()
        return response.status, json.loads(response.read())["error"]


def test_headers_are_bounded() -> None:
    with served() as here, connected(here) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 100_000 + b"\r\n\r\n")
        status, error = answer_on(connection)
        assert status == 400 and "headers" in error["message"]


def test_a_client_may_connect_long_before_it_sends_anything() -> None:
    """As one does that opens a thousand connections at once on a busy machine."""
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with served(limits=HttpLimits(head_s=0.05, silent_s=30)) as here, connected(here) as early, connected(here) as half:
        half.sendall(request[:5])
        assert answer_on(half)[0] == 408
        early.sendall(request)
        assert early.recv(1000).startswith(b"HTTP/1.1 200")
        eventually(lambda: here.metric("fineserve:http_refused_total", reason="slow_head") == 1)


def test_who_connects_and_says_nothing_is_let_go() -> None:
    with served(limits=HttpLimits(silent_s=0.05)) as here, connected(here) as silent:
        assert silent.recv(1000) == b""
        eventually(lambda: here.metric("fineserve:http_refused_total", reason="silent") == 1)


def test_a_connection_is_kept_between_requests_for_as_long_as_one_may_be_silent() -> None:
    with served(limits=HttpLimits(silent_s=0.2)) as here, connected(here) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
        assert connection.recv(4096) == b""
        assert here.server.config.timeout_keep_alive == 1, "uvicorn's own patience is 5"
    assert HttpLimits().silent_s > 5, (
        "clients keep idle connections for 5 s; who is the first to close loses no request"
    )


def test_who_sends_half_a_request_is_closed() -> None:
    limits = HttpLimits(head_s=0.2, body_s=0.2)
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    with served(limits=limits) as here:
        for sent in (b"GET /ver", post, post + b"Content-Length: 100\r\n\r\n{"):
            with connected(here) as connection:
                connection.sendall(sent)
                status, error = answer_on(connection)
                assert status == 408
                assert "0.2 s" in error["message"]
        with httpx.Client() as kept:  # a connection that is kept alive may be silent between two requests
            assert [kept.post(here.url + "/v1/completions", json=ASK).status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("rest", [b"x", b"xxx"])
def test_who_was_refused_and_never_ends_its_body_is_closed(rest: bytes) -> None:
    """It needs no key for it, so it could take all connections."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    limits = HttpLimits(body_s=0.1, silent_s=30)
    with served(limits=limits, keys=(Key("team", "t"),)) as here, connected(here) as connection:
        connection.sendall(post)
        assert answer_on(connection)[0] == 401
        with suppress(ConnectionError):
            for byte in rest:
                connection.sendall(bytes([byte]))
            assert connection.recv(1000) == b""
        eventually(lambda: here.metric("fineserve:http_refused_total", reason="ignored_body") == 1)


def test_who_was_refused_and_goes_on_sending_is_not_cut() -> None:
    """It reads its answer when all is sent, which takes 20 MB a while on a busy machine."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\n\r\n"
    with served() as here, connected(here) as connection:
        connection.sendall(post)
        assert answer_on(connection)[0] == 413
        (protocol,) = here.server.server_state.connections

        def ends_s() -> float:
            timer = protocol._rest_timer
            return timer.when() if timer is not None else 0.0

        eventually(lambda: ends_s() > 0)
        assert protocol.timeout_keep_alive_task is None, (
            "it is not silent: a busy client may need a while to begin its body"
        )
        connection.sendall(b"x")
        first_s = ends_s()
        connection.sendall(b"x" * 2**21)
        eventually(lambda: ends_s() > first_s)
        connection.sendall(b"x" * (20_000_000 - 2**21 - 1))
        eventually(lambda: ends_s() == 0)
        connection.sendall(post)
        assert answer_on(connection)[0] == 413


def test_who_was_refused_may_end_its_body_and_ask_again() -> None:
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n"
    with served(keys=(Key("team", "t"),)) as here, connected(here) as connection:
        connection.sendall(post + b"\r\n")
        assert answer_on(connection)[0] == 401
        for part in (b"x", b"x" * 9):
            connection.sendall(part)
        connection.sendall(post + b"Authorization: Bearer t\r\n\r\n" + b"{" * 10)
        status, error = answer_on(connection)
        assert status == 400 and "no JSON" in error["message"]


def test_a_refused_client_whose_body_has_ended_gets_no_second_answer() -> None:
    """The next request on the connection would take it for its own."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"
    limits = HttpLimits(head_s=0.05, silent_s=0.5)
    with served(limits=limits, keys=(Key("team", "t"),)) as here, connected(here) as connection:
        connection.sendall(post)
        assert answer_on(connection)[0] == 401
        connection.sendall(b"x" * 10)
        assert connection.recv(1000) == b""
        assert here.metric("fineserve:http_refused_total", reason="slow_head") == 0
        eventually(lambda: here.metric("fineserve:http_refused_total", reason="silent") == 1)


def test_clients_with_slow_bodies_hold_nobody_up() -> None:
    post = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"
    with served() as here, ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connected(here)).sendall(post)
        eventually(lambda: len(here.server.server_state.connections) == 40)
        assert here.post("/v1/completions", ASK).status_code == 200


@pytest.mark.slow
def test_a_client_that_reads_nothing_is_cut_and_its_memory_is_back() -> None:
    with served(limits=HttpLimits(unread_s=0.3), step_s=0.0) as here:
        body = json.dumps({"model": "A", "prompt": ["x"] * 60, "max_tokens": 450, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = here.url.removeprefix("http://").split(":")
            connection.connect((host, int(port)))
            connection.sendall(head.encode() + body)
            eventually(lambda: len(here.server.server_state.connections) == 1)
            eventually(lambda: not here.server.server_state.connections)
        eventually(lambda: here.runtime.driver.wait_empty(0))
        eventually(lambda: here.runtime.host.ledger().used_bytes == 0)


def test_connections_are_bounded() -> None:
    with served(limits=HttpLimits(connections=3)) as here:
        with connected(here), connected(here), connected(here), connected(here) as fourth:
            status, error = answer_on(fourth)
            assert status == 503 and error["code"] == "connections"
        eventually(lambda: not here.server.server_state.connections)
        assert httpx.get(here.url + "/health").status_code == 200


def test_health_answers_at_once_while_large_prompts_and_many_requests_come() -> None:
    """Tokenising is on worker threads; here it does not end before health has answered."""
    with served(core_spec(scheduler=FcfsSpec())) as here:
        encode = here.service.models["A"].tokenizer.encode
        begun, answered = threading.Event(), threading.Event()

        def slowly(text: str, *, special: bool = True) -> list[int]:
            begun.set()
            assert answered.wait(10)
            return encode(text, special=special)

        here.service.models["A"].tokenizer.encode = slowly  # type: ignore[method-assign]
        client = threading.Thread(target=lambda: here.post("/v1/completions", ASK))
        client.start()
        assert begun.wait(5)
        assert httpx.get(here.url + "/health").status_code == 200
        answered.set()
        client.join()


def test_full_garbage_collections_wait_until_nobody_is_here() -> None:
    """They hold up the whole process. Here a request makes more garbage than would bring some."""
    with served() as here:
        full: list[int] = []

        def note(phase: str, facts: dict[str, int]) -> None:
            if phase == "start" and facts["generation"] == 2:
                full.append(len(here.server.server_state.tasks))

        encode = here.service.models["A"].tokenizer.encode

        def wasteful(text: str, *, special: bool = True) -> list[int]:
            kept = [[number] for number in range(1_000_000)]
            return encode(text[: len(kept)], special=special)

        here.service.models["A"].tokenizer.encode = wasteful  # type: ignore[method-assign]
        gc.callbacks.append(note)
        try:
            assert here.post("/v1/completions", ASK).status_code == 200
            eventually(lambda: bool(full))
        finally:
            gc.callbacks.remove(note)
        assert full == [0] * len(full)


def test_health_is_503_when_only_a_restart_of_the_process_helps() -> None:
    with served() as here:
        here.runtime.host.sound = False
        assert httpx.get(here.url + "/health").status_code == 503


def test_status_paths_answer_head() -> None:
    with served() as here:
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert httpx.head(here.url + path).status_code == 200, path


def test_an_end_by_stop_string_is_an_end() -> None:
    with served() as here:
        text = here.post("/v1/completions", ASK | {"max_tokens": 60}).json()["choices"][0]["text"]
        stopped = here.post("/v1/completions", ASK | {"max_tokens": 400, "stop": text[20:23]})
        assert stopped.json()["choices"][0]["finish_reason"] == "stop"
        eventually(lambda: here.metric("vllm:request_success_total", model_name="A", finished_reason="stop") == 1)
        assert here.metric("fineserve:requests_unfinished_total", model_name="A", reason="abort") == 0
        kept = here.post(
            "/v1/completions", ASK | {"stop": text[20:23], "include_stop_str_in_output": True, "max_tokens": 400}
        )
        assert kept.json()["choices"][0]["text"].endswith(text[20:23])


# --- keys --------------------------------------------------------------------------------------------------------------


def test_keys_have_limits_of_their_own_and_only_some_may_set_a_priority() -> None:
    keys = (Key("batch", "b", requests=1, priority=False), Key("team", "t"))
    with served(keys=keys, step_s=0.05) as here:  # all tokens of the stream would take 20 s
        batch, team = {"authorization": "Bearer b"}, {"authorization": "Bearer t"}
        with httpx.stream(
            "POST", here.url + "/v1/completions", json=ASK | {"stream": True, "max_tokens": 400}, headers=batch
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            second = here.post("/v1/completions", ASK, **batch)
            assert second.status_code == 429 and second.headers["retry-after"] == "1"
            assert second.json()["error"]["code"] == "rate_limit_exceeded"
            assert here.post("/v1/completions", ASK, **team).status_code == 200
        eventually(lambda: here.post("/v1/completions", ASK, **batch).status_code == 200)
        forbidden = here.post("/v1/completions", ASK | {"priority": -5}, **batch)
        assert forbidden.status_code == 403 and "may not set a priority" in forbidden.json()["error"]["message"]
        assert here.post("/v1/completions", ASK | {"priority": -5}, **team).status_code == 200
        assert here.post("/v1/completions", ASK, authorization="Bearer x").status_code == 401


def test_with_tls_the_server_speaks_https_alone(tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    files = Tls(tmp_path / "certificate.pem", tmp_path / "key.pem")
    command = (
        f"{openssl} req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    )
    command += f" -out {files.certificate} -keyout {files.key}"
    subprocess.run(command.split(), check=True, capture_output=True, timeout=HANGS_S)
    with served(tls=files) as here:
        trusted = ssl.create_default_context(cafile=files.certificate)
        assert httpx.post(here.url + "/v1/completions", json=ASK, verify=trusted).status_code == 200
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            httpx.get(here.url + "/health")
        with pytest.raises(httpx.TransportError):
            httpx.get(here.url.replace("https", "http") + "/health")


# --- the end -----------------------------------------------------------------------------------------------------------


def test_a_draining_server_answers_503_and_streams_end_with_an_error_event() -> None:
    import signal

    with served(core_spec(scheduler=FcfsSpec()), step_s=0.05, drain_s=30) as here:  # all tokens would take 25 s
        body = ASK | {"max_tokens": 500, "ignore_eos": True}
        ends: list[Any] = []

        def whole() -> None:
            response = here.post("/v1/completions", body)
            ends.append((response.status_code, response.headers.get("retry-after"), response.json()["error"]["code"]))

        def streamed() -> None:
            with httpx.stream(
                "POST", here.url + "/v1/completions", json=body | {"stream": True}, timeout=HANGS_S
            ) as stream:
                if stream.status_code == 200:
                    *_, last, done = [line for line in stream.iter_lines() if line]
                    ends.append((json.loads(last.removeprefix("data: "))["error"]["code"], done))
                else:
                    ends.append((stream.status_code, stream.headers["retry-after"], "shutdown"))

        clients = [threading.Thread(target=each) for each in [whole] * 6 + [streamed] * 20]
        for client in clients:
            client.start()
        eventually(lambda: len(here.runtime.host.engines[0].submitted) >= 26)
        here.server.handle_exit(signal.SIGTERM, None)
        late = here.post("/v1/completions", ASK)
        assert (late.status_code, late.headers["retry-after"]) == (503, "30")
        assert late.json()["error"]["code"] == "draining"
        assert httpx.get(here.url + "/ready").status_code == 503 and httpx.get(here.url + "/health").status_code == 200
        here.server.handle_exit(signal.SIGTERM, None)  # whose patience is at an end
        for client in clients:
            client.join(HANGS_S)
        good = {(503, "1", "shutdown"), ("shutdown", "data: [DONE]")}
        assert len(ends) == 26 and set(ends) == good
        assert not [facts for event, facts in here.logged if event in ("internal error", "library")]


@pytest.mark.slow
def test_a_model_that_is_down_is_seen_and_its_clients_are_told_when_to_come_back() -> None:
    with served() as here:
        here.runtime.host.failing_restarts = 2
        assert httpx.get(here.url + "/ready").json() == {"ready": True, "models": {"A": "ready", "B": "ready"}}
        here.runtime.host.kill(0)
        eventually(lambda: here.runtime.driver.health("A").condition == "down")
        eventually(lambda: httpx.get(here.url + "/ready?model=A").status_code == 503)
        assert httpx.get(here.url + "/ready?model=B").status_code == 200 == httpx.get(here.url + "/ready").status_code
        states = {each["id"]: each["state"] for each in httpx.get(here.url + "/v1/models").json()["data"]}
        assert states == {"A": "down", "B": "ready"}
        told = here.post("/v1/completions", ASK)
        assert told.status_code == 503 and told.json()["error"]["code"] == "model_down"
        assert 2 <= int(told.headers["retry-after"]) <= 10
        assert here.metric("fineserve:engine_deaths_total", model_name="A", cause="gone") == 1
        assert here.metric("fineserve:model_ready", model_name="A") == 0
        assert here.metric("fineserve:requests_unfinished_total", model_name="A", reason="model_down") == 1
        eventually(lambda: here.post("/v1/completions", ASK).status_code == 200)
        assert here.metric("fineserve:engine_restarts_total", model_name="A") == 1
        assert here.metric("fineserve:model_down_seconds_total", model_name="A") > 0
