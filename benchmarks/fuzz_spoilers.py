"""What the fuzzer does to a request that the grammar made."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from benchmarks.fuzz_constraints import BROKEN, Body

DEEP = "@deep@"
"""A mark for nested lists, which are put into the text: Python's writer of JSON has a limit."""

_MOST_BYTES = 6 * 2**20


def spoil(rng: random.Random, body: Body) -> None:
    """Once or more."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        rng.choice(_SPOILERS)(rng, body)


_ODD: list[Any] = [None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, -(2**63), 10**40, 1e308, -1e-320, float("nan")]
_ODD += [float("inf"), "", "5", "null", "\x00", "\ud800", "x" * 3000, [], {}, [None], [[]], {"": {}}, [1, "a"], DEEP]


def _odd(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(_ODD))


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Each container in ``value`` with each of its keys."""
    pairs = (
        list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
    )
    return [(value, key) for key, _ in pairs] + [place for _, inner in pairs for place in _places(inner)]


def _odd_value(rng: random.Random, body: Body) -> None:
    container, key = rng.choice(_places(body))
    container[key] = _odd(rng)


def _odd_option(rng: random.Random, body: Body) -> None:
    body[rng.choice(sorted(body))] = _odd(rng)


def _lost_field(rng: random.Random, body: Body) -> None:
    container, key = rng.choice(_places(body))
    del container[key]
    body.setdefault("model", "nobody")  # so that there is always something to do more to


def _unknown_field(rng: random.Random, body: Body) -> None:
    container, _ = rng.choice(_places(body))
    if isinstance(container, dict):
        container[rng.choice(["unknown", "", "__proto__", "guided_json", "model_config", "\ud83d"])] = _odd(rng)


def _foreign_option(rng: random.Random, body: Body) -> None:
    """What other servers and other endpoints have."""
    options: Body = {
        "suffix": "x",
        "best_of": 7,
        "echo": True,
        "logprobs": 5,
        "top_logprobs": 5,
        "prompt_logprobs": 3,
        "reasoning_effort": "high",
        "truncate_prompt_tokens": rng.choice([-1, 0, 1, 10**9]),
        "return_token_ids": True,
        "cache_salt": "s",
        "vllm_xargs": {"a": 1},
        "chat_template": "{{ 'a' * 9999999 }}",
        "chat_template_kwargs": {"chat_template": "x", "enable_thinking": True},
        "continue_final_message": True,
        "max_completion_tokens": 3,
        "stream_options": {"include_usage": True},
        "thinking": {"type": "enabled", "budget_tokens": 1},
        "lora_request": {},
        "prompt_embeds": "AAAA",
        "use_beam_search": True,
    }
    name = rng.choice(sorted(options))
    body[name] = options[name]


def _broken_constraint(rng: random.Random, body: Body) -> None:
    """Where the request has one, as a rule; a schema also in place of a tool's parameters."""
    broken = copy.deepcopy(rng.choice(BROKEN))
    tools = body.get("tools")
    if isinstance(tools, list) and tools and isinstance(broken.get("json"), dict):
        tool = tools[0] if isinstance(tools[0], dict) else {}
        key = "input_schema" if "input_schema" in tool else "parameters"
        inner = tool.get("function", tool)
        (inner if isinstance(inner, dict) else tool)[key] = broken["json"]
        return
    if isinstance(body.get("text"), dict) and isinstance(broken.get("json"), dict):
        body["text"] = {"format": {"type": "json_schema", "name": "s", "schema": broken["json"]}}
        return
    body.pop("response_format", None)
    body["structured_outputs"] = broken


def _conflict(rng: random.Random, body: Body) -> None:
    """Options that do not go together."""
    body |= rng.choice(
        [
            {"structured_outputs": {"choice": ["a"]}, "response_format": {"type": "json_object"}},
            {"structured_outputs": {"choice": ["zebra"]}, "allowed_token_ids": [5, 6]},
            {"structured_outputs": {"regex": "[a-z]+"}, "logit_bias": {str(n): -100 for n in range(3, 200)}},
            {"structured_outputs": {"json_object": True}, "min_tokens": 20, "stop_token_ids": [96]},
            {"min_tokens": 50, "max_tokens": 2},
            {"stop": "a", "min_tokens": 500, "max_tokens": 500},
            {"n": 4, "best_of": 2},
            {"tool_choice": "required", "tools": []},
            {"stream": False, "stream_options": {"include_usage": True}},
            {"max_tokens": 100_000},
        ]
    )


def _too_many(rng: random.Random, body: Body) -> None:
    """One entry of a list, or one message, very often; one text very long."""
    lists = [(holder, key) for holder, key in _places(body) if isinstance(holder[key], list | str) and holder[key]]
    times = rng.choice([3, 100, 3000])
    if lists:
        holder, key = rng.choice(lists)
        if len(json.dumps(body)) * times < _MOST_BYTES:
            holder[key] = holder[key] * times


_SPOILERS: list[Callable[[random.Random, Body], None]] = [
    _odd_value,
    _odd_value,
    _odd_option,
    _lost_field,
    _unknown_field,
    _foreign_option,
    _broken_constraint,
    _broken_constraint,
    _conflict,
    _too_many,
]
