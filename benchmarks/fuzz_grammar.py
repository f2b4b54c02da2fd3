"""The grammar of the fuzzer: requests that every server of the protocol takes, and what is then done to them.

Request ``number`` of ``seed`` is always the same bytes. Three in ten stay as the grammar makes them. The others lose a field,
have a value of a wrong kind or a constraint that cannot be used, or end in the middle of the JSON.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.fuzz_constraints import Body, draw_ebnf, draw_object, draw_regex, draw_schema
from benchmarks.fuzz_spoilers import DEEP, spoil

_WORDS = ["slab", "lease", "queue", "Straße", "東京", "🙂", "e\u0301", "\u202eabc", "a\tb", "", "x" * 40]


class Shot(NamedTuple):
    """A request of the fuzzer. ``valid``: as the grammar made it. ``hang_up``: the client leaves after so many events."""

    method: str
    path: str
    content: bytes
    headers: dict[str, str]
    valid: bool
    hang_up: int | None = None


def draw(seed: int, number: int, model: str) -> Shot:
    """Request ``number`` of ``seed``, for ``model``."""
    rng = random.Random(f"fuzz-{seed}-{number}")
    if rng.random() < 0.07:
        return _stray(rng, model)
    (path,) = rng.choices(list(ENDPOINTS), weights=_WEIGHTS)
    body = ENDPOINTS[path](rng, model)
    valid = rng.random() < 0.3
    if not valid:
        spoil(rng, body)
    text = _written(rng, body)
    if not valid and rng.random() < 0.1:
        text = _torn(rng, text)
    hang_up = rng.randrange(6) if rng.random() < 0.15 else None
    return Shot("POST", path, text, _headers(rng, valid), valid, hang_up)


def _written(rng: random.Random, body: Body) -> bytes:
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    if f'"{DEEP}"' in text:
        depth = rng.choice([20, 70, 300, 3000, 60_000])
        opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('{"items":', "}")])
        text = text.replace(f'"{DEEP}"', opening * depth + "1" + closing * depth, 1)
    return text.encode(errors="surrogatepass")


def _torn(rng: random.Random, text: bytes) -> bytes:
    """Cut, doubled, or with bytes that are no text."""
    at = rng.randrange(len(text) + 1)
    kind = rng.randrange(4)
    if kind == 0:
        return text[:at]
    if kind == 1:
        return text[:at] + rng.choice([b"\xff\xfe", b"\x00", b"\xed\xa0\x80", b"\\ud83d", b"NaN", b"1e999"]) + text[at:]
    return text + text if kind == 2 else text[:at] + rng.randbytes(5) + text[at + 5 :]


def _headers(rng: random.Random, valid: bool) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if not valid and rng.random() < 0.15:
        name = rng.choice(["x-slo-ttft-ms", "x-slo-tpot-ms", "x-request-id", "authorization", "traceparent"])
        headers[name] = rng.choice(["-1", "0", "nan", "1e400", "x" * 900, "00-ab-cd-01", "Bearer x", "5000"])
    if rng.random() < 0.05:
        headers["content-type"] = rng.choice(["text/plain", "application/x-www-form-urlencoded"])
    return headers


def _stray(rng: random.Random, model: str) -> Shot:
    """A path that is not for this client, or not there at all; a method that is not the path's."""
    paths = ["/v1/models", f"/v1/models/{model}", "/v1/models/%00", "/health", "/ready", "/ready?model=nobody"]
    paths += ["/metrics", "/version", "/nowhere", "/v1/score", "/v1/files", "//v1/models", "/v1/responses/resp_1"]
    paths += [f"/admin/models/{model}/sleep", f"/admin/models/{model}", "/admin/models", "/admin/whatif", "/admin/plan"]
    method = rng.choice(["GET", "GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS"])
    content = b"" if method in ("GET", "HEAD") else rng.choice([b"", b"{}", b"[]", b'{"model": "x", "path": "/"}'])
    return Shot(method, rng.choice(paths), content, _headers(rng, False), False)


# --- valid requests ------------------------------------------------------------------------------------------------------


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randrange(1, 12))) or "a"


def _ids(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 200) for _ in range(rng.randrange(1, 20))]


def _sampling(rng: random.Random) -> Body:
    """Some options with values that are right."""
    values: Body = {
        "temperature": rng.choice([0, 0.7, 1, 2]),
        "top_p": rng.choice([0.1, 0.9, 1]),
        "top_k": rng.choice([-1, 0, 1, 40]),
        "min_p": rng.choice([0, 0.1, 1]),
        "seed": rng.randrange(2**40),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "repetition_penalty": rng.uniform(0.5, 2),
        "stop": rng.choice(["x", ["a", "東"], []]),
        "stop_token_ids": rng.choice([[], [5, 6]]),
        "ignore_eos": rng.random() < 0.5,
        "min_tokens": rng.randrange(4),
        "logit_bias": {str(rng.randrange(200)): rng.choice([-100, -1, 5, 100])},
        "allowed_token_ids": _ids(rng),
        "bad_words": ["abc"],
        "skip_special_tokens": rng.random() < 0.5,
        "include_stop_str_in_output": rng.random() < 0.5,
        "priority": rng.randrange(-5, 5),
        "user": "u",
        "n": rng.choice([1, 1, 2, 4]),
    }
    return {name: values[name] for name in rng.sample(list(values), rng.randrange(6))}


def _streaming(rng: random.Random) -> Body:
    if rng.random() < 0.5:
        return {}
    usage = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.5}
    return {"stream": True} | ({"stream_options": usage} if rng.random() < 0.4 else {})


def _constrained(rng: random.Random) -> Body:
    """A constraint in four of ten requests; with it no list of tokens that leaves it none."""
    if rng.random() < 0.6:
        return {}
    makers: list[Callable[[], Body]] = [
        lambda: {"structured_outputs": {"json": draw_schema(rng, 3)}},
        lambda: {"structured_outputs": {"regex": draw_regex(rng, 3)}},
        lambda: {"structured_outputs": {"choice": rng.sample(["yes", "no", "maybe", "never"], rng.randrange(1, 4))}},
        lambda: {"structured_outputs": {"grammar": draw_ebnf(rng)}},
        lambda: {"response_format": {"type": "json_object"}},
        lambda: {
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": draw_object(rng, 2)}}
        },
    ]
    return rng.choice(makers)()


def _generation(rng: random.Random, model: str) -> Body:
    body = {"model": model, "max_tokens": rng.choice([1, 2, 4, 8, 24])} | _sampling(rng) | _streaming(rng)
    constraint = _constrained(rng)
    if constraint:
        for name in ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens", "stop_token_ids"):
            body.pop(name, None)
    return body | constraint


def _completion(rng: random.Random, model: str) -> Body:
    prompt: Any = rng.choice([_text(rng), _ids(rng), [_text(rng), "b"], [_ids(rng), _ids(rng)]])
    extra: Body = rng.choice([{}, {}, {"echo": True}, {"logprobs": rng.randrange(6)}, {"echo": True, "logprobs": 1}])
    return _generation(rng, model) | {"prompt": prompt} | extra


def _turns(rng: random.Random) -> list[Body]:
    turns: list[Body] = [{"role": "system", "content": _text(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randrange(3)):
        turns += [{"role": "user", "content": _text(rng)}, {"role": "assistant", "content": _text(rng)}]
    content = rng.choice([_text(rng), [{"type": "text", "text": _text(rng)}]])
    return [*turns, {"role": "user", "content": content}]


def _chat(rng: random.Random, model: str) -> Body:
    body = _generation(rng, model) | {"messages": _turns(rng)}
    body |= rng.choice([{}, {}, {"logprobs": True, "top_logprobs": rng.randrange(4)}])
    if rng.random() < 0.3 and not {"structured_outputs", "response_format"} & body.keys():
        tools = [_function(rng, number) for number in range(rng.randrange(1, 4))]
        body["tools"] = [{"type": "function", "function": tool} for tool in tools]
        named = {"type": "function", "function": {"name": "f0"}}
        body |= {"tool_choice": rng.choice(["required", "none", named]), "parallel_tool_calls": rng.random() < 0.5}
        for name in ("allowed_token_ids", "bad_words", "logit_bias", "min_tokens", "stop_token_ids"):
            body.pop(name, None)
    return body


def _function(rng: random.Random, number: int) -> Body:
    parameters = draw_object(rng, 2)
    if rng.random() < 0.5:
        parameters["$defs"] = {"In": draw_object(rng, 1)}
        parameters["properties"]["nested"] = {"$ref": "#/$defs/In"}
    return {"name": f"f{number}", "description": _text(rng), "parameters": parameters}


def _responses(rng: random.Random, model: str) -> Body:
    given = rng.choice([_text(rng), [{"role": "user", "content": [{"type": "input_text", "text": _text(rng)}]}]])
    body: Body = {"model": model, "input": given, "max_output_tokens": rng.choice([1, 4, 16])}
    body |= rng.choice([{}, {"stream": True}, {"instructions": _text(rng)}, {"temperature": 0}])
    if rng.random() < 0.3:
        body["text"] = {"format": {"type": "json_schema", "name": "s", "schema": draw_object(rng, 2)}}
    elif rng.random() < 0.3:
        body |= {"tools": [{"type": "function", **_function(rng, 0)}], "tool_choice": "required"}
    return body


def _messages(rng: random.Random, model: str) -> Body:
    body = _count_tokens(rng, model) | {"max_tokens": rng.choice([1, 4, 16])}
    body |= rng.choice([{}, {"stream": True}, {"temperature": 0.5}, {"stop_sequences": ["x"]}, {"top_k": 5}])
    return body


def _count_tokens(rng: random.Random, model: str) -> Body:
    turns = [turn for turn in _turns(rng) if turn["role"] != "system"]
    body: Body = {"model": model, "messages": turns} | rng.choice([{}, {"system": _text(rng)}])
    if rng.random() < 0.3:
        tool = _function(rng, 0)
        body["tools"] = [{"name": "f0", "input_schema": tool["parameters"]}]
        body["tool_choice"] = rng.choice([{"type": "any"}, {"type": "tool", "name": "f0"}, {"type": "none"}])
    return body


def _embeddings(rng: random.Random, model: str) -> Body:
    given = rng.choice([_text(rng), [_text(rng)], _ids(rng), [_ids(rng)]])
    return {"model": model, "input": given, "encoding_format": rng.choice(["float", "base64"])}


def _tokenize(rng: random.Random, model: str) -> Body:
    return {"model": model} | rng.choice([{"prompt": _text(rng), "return_token_strs": True}, {"messages": _turns(rng)}])


def _detokenize(rng: random.Random, model: str) -> Body:
    return {"model": model, "tokens": _ids(rng)}


ENDPOINTS: dict[str, Callable[[random.Random, str], Body]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/responses": _responses,
    "/v1/messages": _messages,
    "/v1/messages/count_tokens": _count_tokens,
    "/v1/embeddings": _embeddings,
    "/tokenize": _tokenize,
    "/detokenize": _detokenize,
}
_WEIGHTS = [32, 30, 10, 10, 3, 3, 4, 3]
