"""Constraints of the fuzzer: such as every grammar library takes, and such as cannot be used or are costly to follow."""

from __future__ import annotations

import random
from typing import Any

Body = dict[str, Any]


def draw_object(rng: random.Random, depth: int) -> Body:
    """A JSON schema of an object, its values so deep."""
    names = rng.sample(["a", "b", "name", "größe", "$x", "a b"], rng.randrange(1, 4))
    properties = {name: draw_schema(rng, depth - 1) for name in names}
    required = rng.sample(names, rng.randrange(len(names) + 1))
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def draw_schema(rng: random.Random, depth: int) -> Body:
    """A JSON schema so deep."""
    leaves: list[Body] = [
        {"type": "string", "maxLength": rng.randrange(1, 9)},
        {"type": "integer", "minimum": 0, "maximum": rng.randrange(1, 10**6)},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["x", 1, None, "東京"]},
        {"const": "c"},
        {"type": "string", "pattern": draw_regex(rng, 1)},
    ]
    if depth <= 0:
        return rng.choice(leaves)
    inner = draw_schema(rng, depth - 1)
    nested: list[Body] = [
        draw_object(rng, depth),
        {"type": "array", "items": inner, "minItems": rng.randrange(2), "maxItems": rng.randrange(2, 5)},
        {"anyOf": [inner, *rng.sample(leaves, 2)]},
    ]
    return rng.choice(nested)


def draw_regex(rng: random.Random, depth: int) -> str:
    """A regular expression so deep."""
    if depth == 0:
        return rng.choice(["a", "[a-z]", "[^b]", "[0-9]", "\\d", "\\.", "é", "\\w", "."])
    left, right = draw_regex(rng, depth - 1), draw_regex(rng, depth - 1)
    many = rng.choice(["?", "*", "+", "{2}", "{1,3}"])
    return rng.choice([f"{left}{right}", f"({left}|{right})", f"({left}){many}", f"(?:{left}){many}{right}"])


def draw_ebnf(rng: random.Random) -> str:
    """A grammar of three rules."""
    names = ["root", "one", "two"]
    rules = []
    for number, name in enumerate(names):
        after = names[number + 1 :]
        parts = [rng.choice([*after, '"a"', '"b c"', "[0-9]", '("x" | "y")', '"z"+']) for _ in range(3)]
        rules.append(f"{name} ::= {parts[0]} {parts[1]} | {parts[2]}")
    return "\n".join(rules)


def _many_integers(count: int) -> Body:
    numbers = {str(n): {"type": "integer", "minimum": n - 10**15, "maximum": 10**15} for n in range(count)}
    return {"type": "object", "properties": numbers}


BROKEN: list[Body] = [
    {"json": {"$ref": "#"}},
    {"json": {"$ref": "#/$defs/nowhere"}},
    {"json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    {"json": {"allOf": [{"$ref": "#"}, {"type": "string"}]}},
    {"json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"json": {"type": "nothing"}},
    {"json": {"type": "object", "patternProperties": {"(": {}}}},
    {"json": {"type": "string", "pattern": "(?=a)b\\1"}},
    {"json": {"type": "string", "pattern": "(a+)+$", "minLength": 100_000}},
    {"json": {"type": "array", "minItems": 10**9}},
    {"json": {"type": "integer", "minimum": 5, "maximum": 1}},
    {"json": {"type": "integer", "multipleOf": 0}},
    {"json": {"enum": []}},
    {"json": {"anyOf": []}},
    {"json": {"not": {}}},
    {"json": {"type": "string", "format": "no-such-format"}},
    {"json": "{"},
    {"json": "[]"},
    {"json": "true"},
    {"json": "null"},
    {"json": {}},
    {"json": _many_integers(400)},
    {"regex": "\\"},
    {"regex": "(["},
    {"regex": "a{5,1}"},
    {"regex": "(a|a)*" * 40},
    {"regex": "([a-z]{1,900}|[a-y]{2,901}){1,900}"},
    {"regex": "\ud800"},
    {"regex": "(?i)(?<n>a)\\k<n>"},
    {"regex": "[^\\s\\S]"},
    {"regex": ""},
    {"grammar": "root ::= root"},
    {"grammar": "root ::= root root | root"},
    {"grammar": "start: start"},
    {"grammar": "start: <[9999]>"},
    {"grammar": "%llguidance {}\nstart: /a+/"},
    {"grammar": '%llguidance {}\nstart: "a" start start | ""'},
    {"grammar": "root ::= nowhere"},
    {"grammar": 'root ::= "a'},
    {"grammar": ""},
    {"grammar": 'root ::= e\ne ::= e e | e e e | "x" | "y" | ""'},
    {"grammar": 'root ::= (("a"?)*)*'},
    {"grammar": "root ::= [\\U0010FFFF-\\U00110000]"},
    {"grammar": "root ::= " + " | ".join(f'"{n:03}" {{0,{n}}}' for n in range(200))},
    {"grammar": 'root ::= "\x00"'},
    {"choice": []},
    {"choice": [""]},
    {"choice": ["a" * 5_000] * 3},
    {"choice": ['"', "\\", "\n", "\x00"]},
    {"choice": ["a", "a"]},
    {"json_object": False},
    {"json": {}, "regex": "a"},
]
"""Constraints that cannot be used, that mean nothing, or that are costly to follow."""
